"""`run_demo`: prepares, launches, asks, judges, cleans up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from radixlink.demo._messages import Ask, Ready, ReplicaSpec, Stop, Switchboard, TurnFigures
from radixlink.demo._plan import REPLICAS, Transcript, longest_transcript, turns
from radixlink.demo._processes import (
    Processes,
    mpi_environment,
    mpirun,
    replica_environment,
)
from radixlink.demo._report import DemoReport, TurnReport, header, ranks_report
from radixlink.demo.conversations import load_conversations
from radixlink.errors import CommandError, LaunchError, ReplicaError
from radixlink.models import default_cache_dir, force_offline, load_tokenizer, prepare_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from radixlink.demo._messages import Channel, Hello
    from radixlink.demo._report import RanksReport
    from radixlink.models import PreparedModel, TextCodec

_PAGE_SIZE: Final = 16
_START_TIMEOUT_S: Final = 120.0
_SILENCE_TIMEOUT_S: Final = 180.0
_END_TIMEOUT_S: Final = 20.0
_RANKS_TIMEOUT_S: Final = 180.0
#: Pages of both conversations, so many times: room for hash buckets that fill unevenly.
_STORE_SLACK: Final = 2
_PREFIX: Final = "radixlink-demo-"


@attrs.frozen(kw_only=True)
class DemoOptions:
    """What was asked for on the command line.

    Attributes:
        model: A known name or a directory.
        store: Name of an installed store.
        store_dir: Where the file store is to be and to stay; None for a new place that is removed.
        report: Where the figures go.
        max_turns: Turns of each conversation.
        tokens_per_turn: Tokens of each answer.
        ranks: Hold the part with two tensor-parallel ranks too.
    """

    model: str
    store: str
    store_dir: Path | None
    report: Path
    max_turns: int
    tokens_per_turn: int
    ranks: bool


def run_demo(options: DemoOptions) -> int:
    """Hold the conversations and judge them.

    Returns:
        0 when everything was right, 1 when a check failed.

    Raises:
        CommandError: It could not be held; the message says why.
    """
    started = time.monotonic()
    force_offline(os.environ)
    with _ended_by_sigterm(), _working_directory() as directory:
        prepared = prepare_model(options.model, default_cache_dir(os.environ), _say)
        codec = load_tokenizer(prepared)
        with Processes() as processes:
            demo = _Demo(options, prepared, codec, processes, directory)
            reports, ended_pid = demo.converse()
        ranks, skipped = _hold_ranks(options, directory)
    report = DemoReport(
        model=prepared.name,
        model_digest=prepared.digest,
        store=options.store,
        turns=tuple(reports),
        ended_pid=ended_pid,
        ranks=ranks,
        ranks_skipped=skipped,
        seconds=time.monotonic() - started,
    )
    try:
        report.write(options.report)
    except OSError as error:
        msg = f"--report {options.report}: cannot be written: {error}"
        raise CommandError(msg) from error
    for line in report.summary():
        _print(line)
    for fault in report.faults():
        _print(f"FAILED: {fault}")
    _print(f"{report.seconds:.0f} s; all figures are in {options.report}")
    return 1 if report.faults() else 0


class _Demo:
    """The two replicas and what is asked of them."""

    def __init__(
        self,
        options: DemoOptions,
        prepared: PreparedModel,
        codec: TextCodec,
        processes: Processes,
        directory: Path,
    ) -> None:
        self._options = options
        self._prepared = prepared
        self._codec = codec
        self._processes = processes
        self._directory = directory
        self._conversations = load_conversations()
        #: By replica: who it is, its socket, and the place of its process.
        self._replicas: list[tuple[Hello, Channel, int]] = []

    def converse(self) -> tuple[list[TurnReport], int]:
        """Hold every turn.

        Returns:
            The turns, and the process that was killed before the last ones.
        """
        num_turns = self._options.max_turns
        longest = longest_transcript(
            self._conversations, self._codec, num_turns, self._options.tokens_per_turn
        )
        num_pages = -(-longest // _PAGE_SIZE)
        self._launch(num_pages)
        transcripts = [Transcript(text, self._codec) for text in self._conversations]
        _print(header())
        reports: list[TurnReport] = []
        ended_pid = 0
        for turn in turns(len(transcripts), num_turns):
            if turn.last and not ended_pid:
                ended_pid = self._end_replica(1)
            prompt = transcripts[turn.conversation].ask(turn.number)
            name = self._conversations[turn.conversation].name
            hello, channel, place = self._replicas[turn.replica]
            where = f"turn {turn.number}, {name}, replica {REPLICAS[turn.replica]}"
            channel.send(
                Ask(
                    request_id=f"{name}-{turn.number}",
                    prompt=prompt,
                    num_tokens=self._options.tokens_per_turn,
                )
            )
            figures = channel.expect(
                TurnFigures,
                timeout_s=_SILENCE_TIMEOUT_S,
                alive=lambda place=place: self._processes.ended(place),  # type: ignore[misc]  # bound now
                on_note=lambda text, where=where: _say(f"{where}: {text}"),  # type: ignore[misc]  # bound now
                waiting_for=where,
            )
            reports.append(
                TurnReport(
                    number=turn.number,
                    conversation=name,
                    replica=REPLICAS[turn.replica],
                    pid=hello.pid,
                    answer=transcripts[turn.conversation].answer(figures.tokens),
                    figures=figures,
                )
            )
            _clear_progress()
            _print(reports[-1].row())
        self._replicas[0][1].send(Stop())
        self._processes.wait(self._replicas[0][2], _END_TIMEOUT_S)
        return reports, ended_pid

    def _launch(self, num_pages: int) -> None:
        """Start both replicas and wait until they are ready."""
        spec = self._spec(num_pages)
        switchboard = Switchboard(self._directory / "replicas.sock")
        program = "radixlink.demo._replica"
        if self._options.store == "mpi":
            command = [mpirun(), "--with-ft", "ulfm", "-n", str(len(REPLICAS)), sys.executable]
            command += ["-m", "mpi4py", "-m", program, str(switchboard.path), "mpi"]
            environment = mpi_environment(spec.num_threads, self._processes.backing)
            places = [self._processes.start("mpirun", command, environment)] * len(REPLICAS)
        else:
            environment = replica_environment(spec.num_threads)
            places = [
                self._processes.start(
                    f"replica {name}",
                    [sys.executable, "-m", program, str(switchboard.path), str(index)],
                    environment,
                )
                for index, name in enumerate(REPLICAS)
            ]
        try:
            found = sorted(
                (switchboard.accept(_START_TIMEOUT_S, self._any_ended(places)) for _ in REPLICAS),
                key=lambda pair: pair[0].index,
            )
        except ReplicaError as error:
            if self._options.store == "mpi":
                msg = f"mpirun could not start {len(REPLICAS)} replicas: {error}"
                raise LaunchError(msg) from error
            raise
        finally:
            switchboard.close()
        self._replicas = [(hello, channel, places[hello.index]) for hello, channel in found]
        for _, channel, _ in self._replicas:
            channel.send(spec)
        for hello, channel, place in self._replicas:
            name = REPLICAS[hello.index]
            channel.expect(
                Ready,
                timeout_s=_START_TIMEOUT_S,
                alive=self._any_ended([place]),
                on_note=lambda text, name=name: _say(f"replica {name}: {text}"),  # type: ignore[misc]  # bound now
                waiting_for=f"replica {name}",
            )
            _clear_progress()
            _print(f"replica {name} is pid {hello.pid}")

    def _any_ended(self, places: list[int]) -> Callable[[], str | None]:
        """Says why one of these processes has ended, or None."""

        def ended() -> str | None:
            return next((why for place in places if (why := self._processes.ended(place))), None)

        return ended

    def _end_replica(self, index: int) -> int:
        """Kill a replica, as a crash would.

        Returns:
            Its process id.
        """
        hello, channel, place = self._replicas[index]
        os.kill(hello.pid, signal.SIGKILL)
        if self._options.store != "mpi":
            self._processes.wait(place, _END_TIMEOUT_S)
        channel.close()
        _clear_progress()
        _print(f"replica {REPLICAS[index]}, pid {hello.pid}, is killed; the other goes on")
        return hello.pid

    def _spec(self, num_pages: int) -> ReplicaSpec:
        """What both replicas are to be: a device pool for one conversation, a store for both."""
        small = self._prepared.name == "tiny"
        page_bytes = _page_bytes(self._prepared.directory)
        store_bytes = len(self._conversations) * num_pages * page_bytes * _STORE_SLACK
        return ReplicaSpec(
            model_dir=str(self._prepared.directory),
            model_name=self._prepared.name,
            model_digest=self._prepared.digest,
            page_size=_PAGE_SIZE,
            num_pages=num_pages,
            num_threads=1 if small else (os.cpu_count() or 1),
            store=self._options.store,
            store_dir="" if self._options.store != "file" else str(self._store_dir(store_bytes)),
            store_bytes=store_bytes,
        )

    def _store_dir(self, store_bytes: int) -> Path:
        """Where the file store goes."""
        return self._options.store_dir or _new_store_dir(self._directory, store_bytes)


def _new_store_dir(directory: Path, num_bytes: int) -> Path:
    """A new place for a store: in memory where that is large enough, else in the working directory.

    What lies in memory is linked from the working directory, which knows then what to remove.
    """
    memory = Path("/dev/shm")  # noqa: S108 -- checked, and a new directory of our own is made in it
    try:
        if shutil.disk_usage(memory).free > 2 * num_bytes:
            made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=memory))
            (directory / "store").symlink_to(made)
            return made
    except OSError:
        pass
    (directory / "store").mkdir(mode=0o700)
    return directory / "store"


def _page_bytes(model_dir: Path) -> int:
    """Bytes of a page of a model in fp32."""
    config = json.loads((model_dir / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_token: int = config["num_hidden_layers"] * heads * dim * 2 * 4
    return per_token * _PAGE_SIZE


def _hold_ranks(options: DemoOptions, directory: Path) -> tuple[RanksReport | None, str]:
    """The part with two tensor-parallel ranks, on the tiny model.

    Returns:
        Its report, or None and why it was left out.
    """
    if not options.ranks:
        return None, "--no-ranks"
    try:
        launcher = mpirun()
    except LaunchError as error:
        return None, str(error)
    prepared = prepare_model("tiny", default_cache_dir(os.environ), _say)
    _say("two tensor-parallel ranks: a tiny model, one shard of the heads each")
    report, store = directory / "ranks.json", directory / "ranks-store"
    store.mkdir(mode=0o700)
    command = [launcher, "-n", "2", sys.executable, "-m", "mpi4py", "-m", "radixlink.demo._rank"]
    command += [str(prepared.directory), prepared.digest, str(store), str(report)]
    with Processes() as processes:
        environment = mpi_environment(num_threads=1, backing=processes.backing)
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        place = processes.start("mpirun", command, environment)
        failure = processes.wait(place, _RANKS_TIMEOUT_S)
    _clear_progress()
    if failure is not None:
        msg = f"the part with two ranks failed: {failure}"
        raise LaunchError(msg)
    return ranks_report(json.loads(report.read_text())), ""


def _free_port() -> int:
    """A port of the loopback device that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _working_directory() -> Iterator[Path]:
    """A new directory that is gone afterwards, with what its links point to."""
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        yield directory
    finally:
        store = directory / "store"
        if store.is_symlink():
            shutil.rmtree(store.readlink(), ignore_errors=True)
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does: everything is cleaned up."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print(line: str) -> None:
    """One line of the result."""
    print(line, flush=True)


def _say(text: str) -> None:
    """Progress: one line that replaces the last on a terminal, a line each elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)
    else:
        print(f"  {text}", file=sys.stderr, flush=True)


def _clear_progress() -> None:
    """Take the progress line away."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
