"""Layer-wise loads of one rank among several, each with a store of its own; the case is the argument.

All ranks land, or one rank has lost a page and all fail; a step may come before the finish; a rank
that never lets go is named on all.
"""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING

import attrs
import torch
from mpi4py import MPI

from radixlink_comm.mpi import MpiGroup
from radixlink_components import FullComponent
from radixlink_contracts import (
    CacheIdentity,
    EvictParams,
    ExternalMatch,
    InsertParams,
    LoadAdmitted,
    LoadMode,
    MatchPrefixParams,
    Outcome,
    PoolLayout,
    PoolName,
    RadixKey,
    RequestId,
    StepReport,
)
from radixlink_linker import (
    DeviceSlots,
    LinkerSettings,
    MonotonicClock,
    StoreLinker,
    UnifiedRadixCache,
)
from radixlink_pools import CpuCopier, DevicePoolEntry, PagedAllocator
from radixlink_testing import InMemoryStoreFactory
from radixlink_testing.linkers import FaultyPageStore, InlineExecutor, SyncLinker
from radixlink_tree import UnifiedTreeCore, hash_pages

if TYPE_CHECKING:
    from radixlink_contracts import LoadBack

WORLD = MPI.COMM_WORLD
PAGE_SIZE = 2
NUM_LAYERS = 3
PROMPT = RadixKey(array("q", range(1, 9)))
KEYS = hash_pages(None, array("q", range(1, 9)).tobytes(), PAGE_SIZE)
A = RequestId("a")


@attrs.define(eq=False)
class Request:
    """Notes what it is told. A `RequestKV`."""

    request_id: RequestId
    key: RadixKey
    told: list[tuple[int, list[int]]] = attrs.field(factory=list)

    def repoint(self, start: int, indices: torch.Tensor) -> None:
        self.told.append((start, indices.tolist()))


class Engine:
    """The parts of one rank."""

    def __init__(self, *, by_hand: bool) -> None:
        self.rows = [torch.zeros(32, 4 + layer, dtype=torch.uint8) for layer in range(NUM_LAYERS)]
        tree = UnifiedTreeCore(page_size=PAGE_SIZE)
        self.allocator = PagedAllocator(num_pages=32, page_size=PAGE_SIZE)
        self.slots = DeviceSlots(tree=tree, allocator=self.allocator)
        self.cache = UnifiedRadixCache(
            tree=tree,
            slots=self.slots,
            components=[
                FullComponent(
                    allocator=self.allocator, evict=self.slots.make_room, release=self.slots.retire
                )
            ],
            group=MpiGroup.create(WORLD, 20.0),
            executor=InlineExecutor(),
            clock=MonotonicClock(),
            settings=LinkerSettings(
                step_timeout_s=20.0, write_off_steps=3, written_off_percent=100
            ),
        )
        identity = CacheIdentity(
            model="m",
            revision="1",
            dtype="uint8",
            page_size=PAGE_SIZE,
            num_layers=NUM_LAYERS,
            layout="bytes",
        )
        entry = DevicePoolEntry(PoolName.KV, self.rows, PAGE_SIZE)
        layout = PoolLayout(identity=identity, pool=PoolName.KV, range_bytes=entry.range_bytes)
        self.store = FaultyPageStore(InMemoryStoreFactory().open(layout))
        pools, stores = {PoolName.KV: entry}, {PoolName.KV: self.store}
        self.linker: StoreLinker | SyncLinker = (
            SyncLinker(pools=pools, stores=stores, copier=CpuCopier())
            if by_hand
            else StoreLinker(pools=pools, stores=stores, copier=CpuCopier())
        )
        self.cache.init_cache_linker(self.linker)
        self.request = Request(A, PROMPT)

    @property
    def in_use(self) -> int:
        """Slots that are not free."""
        return self.allocator.size - self.allocator.available_size

    def settle(self) -> None:
        """Step until nothing is outstanding."""
        while self.cache.num_outstanding:
            if isinstance(self.linker, SyncLinker):
                self.linker.run_all()
            self.cache.step()

    def store_prompt(self) -> None:
        """Compute the prompt, each byte a function of rank and layer, store it, and forget it."""
        computed = self.allocator.alloc(len(PROMPT))
        assert computed is not None
        self.fill(computed)
        self.cache.insert(InsertParams(key=PROMPT, value=computed))
        self.settle()
        assert self.cache.evict(EvictParams(num_tokens=8)).num_tokens_evicted == 8
        for rows in self.rows:
            rows.zero_()

    def fill(self, slots: torch.Tensor) -> None:
        for layer, rows in enumerate(self.rows):
            for page in range(len(slots) // PAGE_SIZE):
                rows[int(slots[page * PAGE_SIZE]) // PAGE_SIZE] = self.byte(layer, page)

    @staticmethod
    def byte(layer: int, page: int) -> int:
        return 1 + WORLD.rank * 50 + layer * 10 + page

    def ask(self, mode: LoadMode) -> LoadBack:
        """Match until the hit is agreed, and ask for it."""
        ask = MatchPrefixParams(key=PROMPT, request_id=A)
        self.cache.match_prefix(ask)
        self.settle()
        assert self.cache.match_prefix(ask).external is ExternalMatch.HIT
        return self.cache.init_load_back(self.request, mode)

    def check_bytes(self) -> None:
        (told,) = self.request.told
        for page, slot in enumerate(told[1][::PAGE_SIZE]):
            for layer, rows in enumerate(self.rows):
                assert set(rows[slot // PAGE_SIZE].tolist()) == {self.byte(layer, page)}

    def close(self) -> None:
        self.cache.release_aborted_request(A)
        self.settle()
        self.cache.release_host_resources()


def lands(*, step_first: bool) -> None:
    """Both ranks bring their own bytes, and agree behind the launch or in a step before."""
    engine = Engine(by_hand=False)
    engine.store_prompt()
    assert isinstance(engine.ask(LoadMode.LAYER_WISE), LoadAdmitted)
    batch = engine.cache.ready_to_load_host_cache()
    told: list[StepReport] = []
    if step_first:
        # Whatever this rank has by now; the verdict comes with some step or with the finish.
        told.append(engine.cache.step())
    told.append(engine.cache.finish_loads(batch))
    assert [report.landed for report in told if report.landed] == [("a",)]
    assert not any(report.failed for report in told)
    engine.check_bytes()
    engine.cache.batch_retired(1)
    assert engine.in_use == 8
    engine.close()


def fails() -> None:
    """The last rank has lost a page since the lookup: the load fails on all, and nothing is left."""
    engine = Engine(by_hand=False)
    engine.store_prompt()
    assert isinstance(engine.ask(LoadMode.LAYER_WISE), LoadAdmitted)
    last = WORLD.rank == WORLD.size - 1
    if last:
        engine.store.lost.add(KEYS[2 * 32 : 3 * 32])
    batch = engine.cache.ready_to_load_host_cache()
    assert engine.cache.finish_loads(batch) == StepReport(failed=(A,))
    engine.settle()
    assert engine.in_use == 8
    engine.cache.batch_retired(1)
    assert engine.in_use == 0
    explanation = engine.cache.explain(A)
    assert explanation is not None
    (failure,) = explanation.failures
    assert failure.here == last
    assert ("1 of 4 pages of kv are gone" in failure.why) == last
    engine.close()


def names_who_never_lets_go() -> None:
    """The last rank says failed and never quiesced: all ranks learn which it was."""
    engine = Engine(by_hand=True)
    assert isinstance(engine.linker, SyncLinker)
    engine.store_prompt()
    engine.ask(LoadMode.STAGED)
    engine.cache.ready_to_load_host_cache()
    engine.cache.batch_retired(1)
    (operation,) = engine.linker.started
    last = WORLD.size - 1
    engine.linker.complete(operation, Outcome.FAILED, quiesced=WORLD.rank != last)
    assert engine.cache.step().failed == ("a",)
    for _ in range(3):
        engine.cache.step()
    (lost,) = engine.cache.holders().written_off
    assert (lost.operation.op, lost.ranks) == (operation, (last,))
    assert engine.in_use == 8
    engine.cache.reset()
    assert engine.in_use == 0
    engine.close()


match sys.argv[1]:
    case "lands":
        lands(step_first=False)
    case "step first":
        lands(step_first=True)
    case "fails":
        fails()
    case "written off":
        names_who_never_lets_go()
    case unknown:
        sys.exit(f"no case {unknown}")
sys.stdout.write(f"ok {WORLD.rank}\n")
sys.stdout.flush()
