"""How long the linker keeps the scheduler thread: steps and matches, median and 90th percentile.

    python tools/bench/step.py
    mpirun -n 2 python -m mpi4py tools/bench/step.py

Each rank has a real tree, a store in memory and a linker that completes nothing by itself, so that
what is outstanding stays so. Under mpirun all ranks step in lockstep, each step with one collective
of the default frame; rank 0 prints.
"""

from __future__ import annotations

import os
import statistics
import time
from array import array
from typing import TYPE_CHECKING, Final

import torch

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
from radixlink_pools import CpuCopier, DevicePoolEntry, PagedAllocator
from radixlink_testing import InMemoryStoreFactory
from radixlink_testing.linkers import InlineExecutor, SyncLinker
from radixlink_tree import UnifiedTreeCore

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import RankGroup

PAGE_SIZE: Final = 16
NUM_PAGES: Final = 1024
#: Half of a prompt is on the device, half in the store.
PROMPT_TOKENS: Final = 2048
ROUNDS: Final = 5000


class Rank:
    """One rank of an engine that has just begun."""

    def __init__(self, group: RankGroup) -> None:
        self.tree = UnifiedTreeCore(page_size=PAGE_SIZE)
        self.allocator = PagedAllocator(NUM_PAGES, PAGE_SIZE)
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
        rows = [torch.zeros(NUM_PAGES, 8, dtype=torch.uint8)]
        self.linker = SyncLinker(
            pools={PoolName.KV: DevicePoolEntry(PoolName.KV, rows, PAGE_SIZE)},
            stores={PoolName.KV: InMemoryStoreFactory().open(layout)},
            copier=CpuCopier(),
        )
        self.cache = UnifiedRadixCache(
            tree=self.tree,
            slots=slots,
            components=[
                FullComponent(allocator=self.allocator, evict=slots.make_room, release=slots.retire)
            ],
            group=group,
            executor=InlineExecutor(),
            clock=MonotonicClock(),
            # Nothing times out while it is measured.
            settings=LinkerSettings(step_timeout_s=60.0, transfer_timeout_s=1e6),
        )

    def insert(self, first: int, num_tokens: int) -> RadixKey:
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


def cell(call: Callable[[], object]) -> str:
    """The microseconds of a call."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - started) / 1000)
    return f"{statistics.median(times):8.2f} ({statistics.quantiles(times, n=10)[8]:8.2f})"


def steps(rank: Rank) -> dict[str, str]:
    """Idle, and with one offload that nobody completes."""
    rank.cache.init_cache_linker(rank.linker)
    rows = {"step, idle": cell(rank.cache.step)}
    rank.insert(1, PAGE_SIZE)
    rows["step, one operation outstanding"] = cell(rank.cache.step)
    rank.settle()
    return rows


def matches(rank: Rank) -> dict[str, str]:
    """Half a prompt on the device, the other half in the store."""
    key = rank.insert(10_000, PROMPT_TOKENS)
    rank.settle()
    rank.cache.evict(EvictParams(num_tokens=PROMPT_TOKENS))
    rank.insert(10_000, PROMPT_TOKENS // 2)
    rank.settle()
    asking = MatchPrefixParams(key=key, request_id=RequestId("a"))
    while rank.cache.match_prefix(asking).external is not ExternalMatch.HIT:
        rank.cache.step()
    return {
        "match, device only": cell(
            lambda: rank.cache.match_prefix(MatchPrefixParams(key=key)),
        ),
        "match, with an external hit": cell(lambda: rank.cache.match_prefix(asking)),
    }


def group_of_this_job() -> RankGroup:
    """The ranks of mpirun, or this process alone."""
    if "OMPI_COMM_WORLD_SIZE" not in os.environ and "PMI_SIZE" not in os.environ:
        return SingleRank()
    from mpi4py import MPI  # noqa: PLC0415 -- only where there is MPI

    from radixlink_comm.mpi import MpiGroup  # noqa: PLC0415 -- likewise

    return MpiGroup.create(MPI.COMM_WORLD, 60.0)


def main() -> None:
    """Print one line for each call."""
    torch.set_num_threads(1)
    group = group_of_this_job()
    rank = Rank(group)
    rows = {**steps(rank), **matches(rank)}
    if group.rank == 0:
        print(f"{group.size} ranks, us, median (90th percentile) of {ROUNDS}, one CPU a rank")
        for name, row in rows.items():
            print(f"{name:34}{row}")


if __name__ == "__main__":
    main()
