"""`run_demo`: checks, prepares, launches, asks, judges, cleans up."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from radixlink._stores import require_store
from radixlink.demo._messages import Ask, ReplicaSpec
from radixlink.demo._model_shape import read_shape
from radixlink.demo._mooncake import start_mooncake
from radixlink.demo._places import Places, require_store_directory
from radixlink.demo._plan import REPLICAS, Transcript, longest_transcript, turns
from radixlink.demo._processes import Processes
from radixlink.demo._ranks import hold_ranks
from radixlink.demo._replicas import launch_replicas
from radixlink.demo._report import DemoReport, RanksLeftOut, TurnReport, header, require_writable
from radixlink.demo._signals import EndingSignals
from radixlink.demo._terminal import print_result, say
from radixlink.demo.conversations import load_conversations
from radixlink.errors import ArgumentsError
from radixlink.models import default_cache_dir, force_offline, load_tokenizer, prepare_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink.demo._replicas import Replica
    from radixlink.demo._report import Ranks
    from radixlink.demo.conversations import Conversation
    from radixlink.models import PreparedModel, TextCodec

_PAGE_SIZE: Final = 16
#: Pages of both conversations, so many times: room for hash buckets that fill unevenly.
_STORE_SLACK: Final = 2


@attrs.frozen(kw_only=True)
class DemoOptions:
    """What was asked for on the command line.

    Attributes:
        model: A known name or a directory.
        store: Name of an installed store.
        store_dir: Where the store is to be and to stay, in its own terms; None for the store's own choice, which
            for the file store is a new place that is removed, and for the Mooncake store a Mooncake that is ended.
        report: Where the figures go.
        max_turns: Turns of each conversation.
        tokens_per_turn: Tokens of each answer.
        ranks: Hold the part with two tensor-parallel ranks too.
    """

    model: str
    store: str
    store_dir: str | None
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
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP came; everything is cleaned up.
        OSError: The system refused something that has no error of its own.
    """
    force_offline(os.environ)
    require_writable(options.report)
    require_store(options.store)
    if options.store == "file" and options.store_dir is not None:
        require_store_directory(Path(options.store_dir))
    with (
        EndingSignals() as signals,
        Places() as places,
        Processes(places.directory, signals.held_back) as processes,
        signals.interrupting(),
    ):
        report = _hold(options, processes, places)
    faults = report.faults()
    for line in report.summary():
        print_result(line)
    for fault in faults:
        print_result(f"FAILED: {fault}")
    report.write(options.report)
    print_result(f"{report.seconds:.0f} s; all figures are in {options.report}")
    return 1 if faults else 0


def _hold(options: DemoOptions, processes: Processes, places: Places) -> DemoReport:
    """Hold everything that was asked for."""
    started = time.monotonic()
    prepared = prepare_model(options.model, default_cache_dir(os.environ), say)
    codec = load_tokenizer(prepared)
    conversations = load_conversations()
    spec = _spec(options, prepared, conversations, codec, places)
    if spec.store == "mooncake" and not spec.store_dir:
        spec = attrs.evolve(spec, store_dir=start_mooncake(processes, spec.store_bytes))
    replicas = launch_replicas(spec, processes, places)
    survivor, victim = replicas
    turns_held = _converse(options, replicas, conversations, codec)
    survivor_end = survivor.stop(alone=options.store != "mpi")
    ranks: Ranks = RanksLeftOut(why_left_out="--no-ranks")
    if options.ranks:
        ranks = hold_ranks(processes, places)
    return DemoReport(
        model=prepared.name,
        model_digest=prepared.digest,
        store=options.store,
        turns=tuple(turns_held),
        ended_pid=victim.pid,
        survivor_end=survivor_end,
        ranks=ranks,
        seconds=time.monotonic() - started,
    )


def _spec(
    options: DemoOptions,
    prepared: PreparedModel,
    conversations: Sequence[Conversation],
    codec: TextCodec,
    places: Places,
) -> ReplicaSpec:
    """What the replicas are to be: a device pool for one conversation, a store for all.

    Raises:
        ArgumentsError: The model does not take so long a conversation.
    """
    shape = read_shape(prepared)
    longest = longest_transcript(conversations, codec, options.max_turns, options.tokens_per_turn)
    if shape.max_tokens is not None and longest > shape.max_tokens:
        raise ArgumentsError(
            f"--turns {options.max_turns} --tokens {options.tokens_per_turn}: the longest "
            f"conversation would have {longest} tokens, model {prepared.name!r} takes at most "
            f"{shape.max_tokens}; ask for fewer turns or tokens"
        )
    num_pages = -(-longest // _PAGE_SIZE)
    page_bytes = shape.token_bytes * _PAGE_SIZE
    store_bytes = len(conversations) * num_pages * page_bytes * _STORE_SLACK
    store_dir = options.store_dir or ""
    if not store_dir and options.store == "file":
        store_dir = str(places.new_store(store_bytes))
    return ReplicaSpec(
        model_dir=str(prepared.directory),
        model_name=prepared.name,
        model_digest=prepared.digest,
        page_size=_PAGE_SIZE,
        num_pages=num_pages,
        num_threads=1 if prepared.name == "tiny" else (os.cpu_count() or 1),
        store=options.store,
        store_dir=store_dir,
        store_bytes=store_bytes,
    )


def _converse(
    options: DemoOptions,
    replicas: Sequence[Replica],
    conversations: Sequence[Conversation],
    codec: TextCodec,
) -> list[TurnReport]:
    """Hold every turn; before the last ones the second replica is killed."""
    _, victim = replicas
    transcripts = [Transcript(text, codec) for text in conversations]
    print_result(header())
    reports: list[TurnReport] = []
    killed = False
    for turn in turns(len(conversations), options.max_turns):
        if turn.last and not killed:
            victim.kill(alone=options.store != "mpi")
            killed = True
            print_result(f"replica {victim.name}, pid {victim.pid}, is killed; the other goes on")
        prompt = transcripts[turn.conversation].ask(turn.number)
        name = conversations[turn.conversation].name
        replica = replicas[turn.replica]
        ask = Ask(
            request_id=f"{name}-{turn.number}",
            prompt=prompt,
            num_tokens=options.tokens_per_turn,
        )
        where = f"turn {turn.number}, {name}, replica {REPLICAS[turn.replica]}"
        figures = replica.answer(ask, where)
        reports.append(
            TurnReport(
                number=turn.number,
                conversation=name,
                replica=replica.name,
                pid=replica.pid,
                answer=transcripts[turn.conversation].answer(figures.tokens),
                figures=figures,
            )
        )
        print_result(reports[-1].row())
    return reports
