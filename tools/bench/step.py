"""How long the linker keeps the scheduler thread, beside the limits that it is held to.

    python tools/bench/step.py [--json build/bench-linker.json]
    mpirun -n 2 python -m mpi4py tools/bench/step.py

The first prints the figures of one rank, then of two MPI ranks, which it starts by itself where there
is an mpiexec (`MPIEXEC` names another); the second those of its own ranks alone.

Each rank has a real tree, a store in memory and a linker that completes nothing by itself, so that
what is outstanding stays so. Under mpirun all ranks step in lockstep, each step with one collective
of the default frame; rank 0 prints. What is compared takes turns, and a figure is a median unless it
says otherwise. A figure over its limit is marked, and no error: other users of a machine move them all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from array import array
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import torch
from typing_extensions import override

from radixlink_comm import SingleRank
from radixlink_components import FullComponent
from radixlink_contracts import (
    CacheIdentity,
    EvictParams,
    ExternalMatch,
    InsertParams,
    MatchPrefixParams,
    PoolLayout,
    PoolName,
    RadixKey,
    RequestId,
)
from radixlink_linker import DeviceSlots, LinkerSettings, MonotonicClock, UnifiedRadixCache
from radixlink_linker._runtime import give_way
from radixlink_pools import CpuCopier, DevicePoolEntry, PagedAllocator
from radixlink_testing import InMemoryStoreFactory
from radixlink_testing.linkers import InlineExecutor, SyncLinker
from radixlink_tree import UnifiedTreeCore, hash_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from radixlink_contracts import RankGroup

PAGE_SIZE: Final = 16
SHORT_TOKENS: Final = 8 << 10
LONG_TOKENS: Final = 128 << 10
ROUNDS: Final = 3000
#: Steps beside a thread that hashes: it has the interpreter half of the time.
HASHING_ROUNDS: Final = 3000
TIMEOUT_S: Final = 600.0
REQUEST: Final = RequestId("a")

#: The most that each may be, by what it is and of how many ranks; microseconds, or a ratio.
LIMITS: Final[Mapping[tuple[str, int], float]] = {
    ("step, attached and idle", 1): 5.0,
    ("step, one operation outstanding", 2): 25.0,
    ("match with an external hit, beyond a match", 1): 20.0,
    ("match beyond the tree's walk, 128k tokens to 8k", 1): 1.5,
    ("step, a lookup of the key open, 128k tokens to 8k", 1): 1.5,
    ("step, an offload of the key under way, 128k tokens to 8k", 1): 1.5,
    ("step while 128k tokens are hashed, p99", 1): 1000.0,
    ("match with an external hit, beyond a match", 2): 20.0,
    ("match beyond the tree's walk, 128k tokens to 8k", 2): 1.5,
    ("step, a lookup of the key open, 128k tokens to 8k", 2): 1.5,
    ("step, an offload of the key under way, 128k tokens to 8k", 2): 1.5,
    ("step while 128k tokens are hashed, p99", 2): 1000.0,
}


@attrs.frozen(kw_only=True)
class Row:
    """A figure.

    Attributes:
        what: Of what.
        ranks: How many ranks there were.
        value: Microseconds, or a ratio.
        tail: The 90th percentile of the same; None for what was computed from others.
    """

    what: str
    ranks: int
    value: float
    tail: float | None = None

    @property
    def limit(self) -> float | None:
        """The most that it may be; None where nothing was promised."""
        return LIMITS.get((self.what, self.ranks))

    @property
    def over(self) -> bool:
        """It is more than it may be."""
        return self.limit is not None and self.value > self.limit

    @override
    def __str__(self) -> str:
        """A line of the table."""
        tail = "" if self.tail is None else f"{self.tail:.2f}"
        limit = "" if self.limit is None else f"{self.limit:g}"
        mark = "  over" if self.over else ""
        return f"{self.ranks:5}  {self.what:58}{self.value:10.2f}{tail:>10}{limit:>8}{mark}"


class Rank:
    """One rank of an engine, with a key of which the device has one half and the store all."""

    def __init__(self, group: RankGroup, num_tokens: int) -> None:
        num_pages = 2 * num_tokens // PAGE_SIZE + 64
        self.tree = UnifiedTreeCore(page_size=PAGE_SIZE)
        self.allocator = PagedAllocator(num_pages, PAGE_SIZE)
        slots = DeviceSlots(tree=self.tree, allocator=self.allocator)
        layout = PoolLayout(
            identity=CacheIdentity(
                model="bench",
                revision="1",
                dtype="uint8",
                page_size=PAGE_SIZE,
                num_layers=1,
                layout="bytes",
            ),
            pool=PoolName.KV,
            range_bytes=(8,),
        )
        rows = [torch.zeros(num_pages, 8, dtype=torch.uint8)]
        self.linker = SyncLinker(
            pools={PoolName.KV: DevicePoolEntry(PoolName.KV, rows, PAGE_SIZE)},
            stores={PoolName.KV: InMemoryStoreFactory().open(layout)},
            copier=CpuCopier(),
        )
        self.executor = InlineExecutor()
        self.cache = UnifiedRadixCache(
            tree=self.tree,
            slots=slots,
            components=[
                FullComponent(allocator=self.allocator, evict=slots.make_room, release=slots.retire)
            ],
            group=group,
            executor=self.executor,
            clock=MonotonicClock(),
            # Nothing times out while it is measured.
            settings=LinkerSettings(
                step_timeout_s=60.0, transfer_timeout_s=1e6, lookup_timeout_s=1e6
            ),
        )
        self.cache.init_cache_linker(self.linker)
        self.key = self._insert(0, num_tokens)
        self.settle()
        self.cache.evict(EvictParams(num_tokens=num_tokens))
        self._insert(0, num_tokens // 2)
        self.settle()

    def _insert(self, first: int, num_tokens: int) -> RadixKey:
        """A computed sequence, whose offload is then outstanding."""
        key = RadixKey(array("q", range(first, first + num_tokens)))
        slots = self.allocator.alloc(num_tokens)
        assert slots is not None, "the pool is large enough"
        self.cache.insert(InsertParams(key=key, value=slots))
        return key

    def settle(self) -> None:
        """Let everything that was begun end."""
        while self.cache.num_outstanding:
            self.linker.run_all()
            self.cache.step()

    def match_device(self) -> None:
        """A match that says nothing of a store."""
        self.cache.match_prefix(MatchPrefixParams(key=self.key))

    def match(self) -> ExternalMatch:
        """A match of the request."""
        asking = MatchPrefixParams(key=self.key, request_id=REQUEST)
        return self.cache.match_prefix(asking).external

    @contextmanager
    def open_lookup(self) -> Iterator[None]:
        """A lookup of the whole key is open meanwhile."""
        self.executor.held = True
        self.match()
        assert self.cache.num_outstanding == 1
        yield
        self.executor.held = False
        self.executor.release()
        self.settle()
        self.cache.release_aborted_request(REQUEST)

    @contextmanager
    def offload_under_way(self) -> Iterator[None]:
        """An offload of as many tokens as the key has is under way meanwhile."""
        num_tokens = len(self.key)
        self._insert(1 << 30, num_tokens)
        assert self.cache.num_outstanding == 1
        yield
        self.settle()
        self.cache.evict(EvictParams(num_tokens=num_tokens))


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    before: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """The microseconds of some calls, which take turns; `before` each goes what is not timed."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if before is not None:
                before()
            started = time.perf_counter_ns()
            call()
            times[name].append((time.perf_counter_ns() - started) / 1000)
    return times


def median_difference(times: list[float], others: list[float]) -> float:
    """The median of what each took longer than the other beside it."""
    return statistics.median([one - other for one, other in zip(times, others, strict=True)])


def percentile(times: list[float], percent: int) -> float:
    """A percentile."""
    return statistics.quantiles(times, n=100)[percent - 1]


class Bench:
    """All figures of one number of ranks."""

    def __init__(self, new_group: Callable[[], RankGroup]) -> None:
        self.short = Rank(new_group(), SHORT_TOKENS)
        self.long = Rank(new_group(), LONG_TOKENS)
        group = new_group()
        self.rank = group.rank
        self._ranks = group.size
        self.rows: list[Row] = []

    def run(self) -> None:
        """Take all figures. Ranks: all."""
        self._steps()
        self._matches()
        for what, short, long in (
            ("a lookup of the key open", self.short.open_lookup, self.long.open_lookup),
            (
                "an offload of the key under way",
                self.short.offload_under_way,
                self.long.offload_under_way,
            ),
        ):
            with short(), long():
                self._compare_steps(what)
        self._hashing()

    def _add(self, what: str, times: list[float]) -> None:
        median = statistics.median(times)
        tail = percentile(times, 90)
        self.rows.append(Row(what=what, ranks=self._ranks, value=median, tail=tail))

    def _compute(self, what: str, value: float) -> None:
        self.rows.append(Row(what=what, ranks=self._ranks, value=value))

    def _steps(self) -> None:
        step = self.short.cache.step
        self._add("step, attached and idle", take_turns({"": step}, ROUNDS)[""])
        with self.short.offload_under_way():
            self._add("step, one operation outstanding", take_turns({"": step}, ROUNDS)[""])

    def _matches(self) -> None:
        """Of each key one half is on the device, the other in the store.

        A long walk leaves the caches cold for what follows it: some processors take four times as
        long then for each Python call. So keys are compared as both follow one.
        """
        beyond, beyond_when_cold = [], []
        for name, rank in (("8k", self.short), ("128k", self.long)):
            while rank.match() is not ExternalMatch.HIT:
                rank.cache.step()
            times = take_turns({"device": rank.match_device, "hit": rank.match}, ROUNDS)
            self._add(f"match of {name} tokens, device only", times["device"])
            self._add(f"match of {name} tokens, with an external hit", times["hit"])
            beyond.append(median_difference(times["hit"], times["device"]))
            cold = take_turns(
                {"device": rank.match_device, "hit": rank.match}, ROUNDS, self.long.match_device
            )
            beyond_when_cold.append(median_difference(cold["hit"], cold["device"]))
            rank.cache.release_aborted_request(REQUEST)
        self._compute("match with an external hit, beyond a match", max(beyond))
        ratio = beyond_when_cold[1] / beyond_when_cold[0]
        self._compute("match beyond the tree's walk, 128k tokens to 8k", ratio)

    def _compare_steps(self, what: str) -> None:
        steps = {"8k": self.short.cache.step, "128k": self.long.cache.step}
        times = take_turns(steps, ROUNDS)
        for name, some in times.items():
            self._add(f"step, {what}, {name} tokens", some)
        ratio = statistics.median(times["128k"]) / statistics.median(times["8k"])
        self._compute(f"step, {what}, 128k tokens to 8k", ratio)

    def _hashing(self) -> None:
        """Steps beside a thread that hashes, right after each other and after a pause."""
        step = self.short.cache.step
        tokens, over = self.long.key.token_ids.tobytes(), threading.Event()

        def hash_on() -> None:
            while not over.is_set():
                hash_pages(None, tokens, PAGE_SIZE, give_way)

        def pause_and_step() -> None:
            # Whoever lets the interpreter go has to get it back from the other thread.
            time.sleep(0)
            step()

        hashing = threading.Thread(target=hash_on)
        with self.short.offload_under_way():
            hashing.start()
            try:
                calls = {"step": step, "pause": pause_and_step}
                times = take_turns(calls, HASHING_ROUNDS // 10)
                alone = take_turns({"step": step}, HASHING_ROUNDS)["step"]
            finally:
                over.set()
                hashing.join()
        what = "step while 128k tokens are hashed"
        self._add(f"{what}", alone)
        self._compute(f"{what}, p99", percentile(alone, 99))
        self._compute(
            f"{what}, with the way back to the interpreter, p99", percentile(times["pause"], 99)
        )


def under_mpirun() -> bool:
    """This process is a rank of a job."""
    return "OMPI_COMM_WORLD_SIZE" in os.environ or "PMI_SIZE" in os.environ


def new_group() -> RankGroup:
    """A group of the ranks of mpirun, or this process alone."""
    if not under_mpirun():
        return SingleRank()
    from mpi4py import MPI  # noqa: PLC0415 -- only where there is MPI

    from radixlink_comm.mpi import MpiGroup  # noqa: PLC0415 -- likewise

    return MpiGroup.create(MPI.COMM_WORLD, 60.0)


def rows_of_two_ranks() -> list[Row]:
    """The same figures of two MPI ranks; none where MPI cannot be started here."""
    launcher = shutil.which(os.environ.get("MPIEXEC", "mpiexec"))
    if launcher is None:
        return []
    program = [sys.executable, "-m", "mpi4py", str(Path(__file__)), "--lines"]
    job = subprocess.run(
        [launcher, "-n", "2", *program],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    lines = [line for line in job.stdout.splitlines() if line.startswith("{")]
    return [Row(**json.loads(line)) for line in lines]


def main() -> None:
    """Print a line for each figure, and write them down where asked to."""
    parser = argparse.ArgumentParser(description="what the linker costs the scheduler thread")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--lines", action="store_true", help="print a JSON line for each figure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(new_group)
    bench.run()
    rows = bench.rows
    if bench.rank:
        return
    if arguments.lines:
        for row in rows:
            print(json.dumps(attrs.asdict(row)), flush=True)
        return
    if not under_mpirun():
        rows = [*rows, *rows_of_two_ranks()]
    print(
        f"ranks  {'microseconds, median, and of ratios the ratio':58}{'':>10}{'90th':>10}{'limit':>8}"
    )
    for row in rows:
        print(row)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        figures = [{**attrs.asdict(row), "limit": row.limit, "over": row.over} for row in rows]
        written = {"python": platform.python_version(), "rounds": ROUNDS, "figures": figures}
        arguments.json.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
