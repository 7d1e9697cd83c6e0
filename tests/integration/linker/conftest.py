"""A replica of one or more ranks around the real parts, and what must hold of it at any time.

Each rank has its own device pool, tree, store shard and linker. Tests say what the engine does; the
fixture `make_replica` checks everything again at the end of each test, with nothing outstanding.
"""

from __future__ import annotations

import itertools
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import attrs
import pytest
import torch
from typing_extensions import override

from radixlink_comm import SingleRank, ThreadGroup
from radixlink_components import FullComponent
from radixlink_contracts import (
    CacheIdentity,
    EvictParams,
    ExternalMatch,
    IncLockRefParams,
    InsertParams,
    LoadBack,
    LoadWaiting,
    MatchPrefixParams,
    MatchResult,
    NodeId,
    PageKeys,
    PoolLayout,
    PoolName,
    RadixKey,
    RankGroup,
    RequestId,
    Shard,
    SlotAllocator,
    StepReport,
)
from radixlink_contracts.actions import FreeDeviceKV
from radixlink_linker import DeviceSlots, LinkerSettings, StoreLinker, UnifiedRadixCache
from radixlink_linker._operation import LoadOperation, Verdict
from radixlink_pools import CpuCopier, DevicePoolEntry, PagedAllocator
from radixlink_testing import InMemoryStoreFactory
from radixlink_testing.linkers import FaultyPageStore, InlineExecutor, ManualClock, SyncLinker
from radixlink_testing.pages import range_bytes
from radixlink_tree import UnifiedTreeCore, check_invariants, hash_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from radixlink_contracts import (
        IncLockRefResult,
        InsertResult,
        TreeNodeView,
    )

_T = TypeVar("_T")

PAGE_SIZE = 2
RANGE_BYTES = (3, 5)
#: What is in a slot that nobody has: no page has a row of these.
SENTINEL = 0xEE

SETTINGS = LinkerSettings(step_timeout_s=20.0)
IDENTITY = CacheIdentity(
    model="test", revision="1", dtype="uint8", page_size=PAGE_SIZE, num_layers=2, layout="bytes"
)


def key_of(tokens: Sequence[int]) -> RadixKey:
    return RadixKey(array("q", tokens))


def page_keys_of(tokens: Sequence[int]) -> PageKeys:
    """The keys of the whole pages of a sequence."""
    whole = len(tokens) // PAGE_SIZE * PAGE_SIZE
    return PageKeys(hash_pages(None, array("q", tokens[:whole]).tobytes(), PAGE_SIZE))


@attrs.frozen(kw_only=True)
class Request:
    """A request of the engine. A `RequestKV`."""

    request_id: RequestId
    key: RadixKey

    def repoint(self, start: int, indices: torch.Tensor) -> None:
        pass


class CountingGroup(RankGroup):
    """Another rank group, with a count of what is called."""

    def __init__(self, inner: RankGroup, calls: list[str]) -> None:
        self.inner = inner
        self.calls = calls

    @property
    @override
    def rank(self) -> int:
        return self.inner.rank

    @property
    @override
    def size(self) -> int:
        return self.inner.size

    @override
    def all_and(self, words: bytearray, timeout_s: float) -> None:
        self.calls.append("all_and")
        self.inner.all_and(words, timeout_s)

    @override
    def broadcast(self, value: bytes, root: int, timeout_s: float) -> bytes:
        self.calls.append("broadcast")
        return self.inner.broadcast(value, root, timeout_s)

    @override
    def all_gather(self, value: bytes, timeout_s: float) -> tuple[bytes, ...]:
        self.calls.append("all_gather")
        return self.inner.all_gather(value, timeout_s)

    @override
    def split(self, color: int, timeout_s: float) -> RankGroup:
        self.calls.append("split")
        return self.inner.split(color, timeout_s)

    @override
    def renew(self, timeout_s: float) -> RankGroup:
        self.calls.append("renew")
        return CountingGroup(self.inner.renew(timeout_s), self.calls)

    @override
    def roll_call(self, mark: str, timeout_s: float) -> Mapping[int, str]:
        return self.inner.roll_call(mark, timeout_s)

    @override
    def close(self) -> None:
        self.inner.close()


class WatchedAllocator(SlotAllocator):
    """Another allocator; knows who has what, and wipes what comes back."""

    def __init__(self, inner: PagedAllocator, rows: Sequence[torch.Tensor]) -> None:
        self._inner = inner
        self._rows = rows
        self.in_use: set[int] = set()

    @property
    @override
    def page_size(self) -> int:
        return self._inner.page_size

    @property
    @override
    def size(self) -> int:
        return self._inner.size

    @property
    @override
    def available_size(self) -> int:
        return self._inner.available_size

    @override
    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        slots = self._inner.alloc(num_tokens)
        if slots is not None:
            self.in_use.update(slots.tolist())
        return slots

    @override
    def free(self, indices: torch.Tensor) -> None:
        self._inner.free(indices)
        self.in_use.difference_update(indices.tolist())
        for rows in self._rows:
            rows[indices[::PAGE_SIZE] // PAGE_SIZE] = SENTINEL


@attrs.frozen(kw_only=True, eq=False)
class Computation:
    """A forward that runs: a locked prefix and slots that nobody else knows."""

    key: RadixKey
    prefix_len: int
    receipt: IncLockRefResult
    value: torch.Tensor
    slots: torch.Tensor


class Rank:
    """One rank: the engine's side of it."""

    def __init__(
        self,
        group: RankGroup,
        *,
        settings: LinkerSettings,
        num_pages: int,
        by_hand: bool,
        clock: ManualClock,
    ) -> None:
        self.rank = group.rank
        self.calls: list[str] = []
        self.group = CountingGroup(group, self.calls)
        self.rows = [
            torch.full((num_pages, size), SENTINEL, dtype=torch.uint8) for size in RANGE_BYTES
        ]
        self.allocator = WatchedAllocator(PagedAllocator(num_pages, PAGE_SIZE), self.rows)
        self.tree = UnifiedTreeCore(page_size=PAGE_SIZE)
        self.slots = DeviceSlots(tree=self.tree, allocator=self.allocator)
        self.executor = InlineExecutor()
        self.clock = clock
        self.cache = UnifiedRadixCache(
            tree=self.tree,
            slots=self.slots,
            components=[
                FullComponent(
                    allocator=self.allocator,
                    evict=self.slots.make_room,
                    release=self.slots.retire,
                )
            ],
            group=self.group,
            executor=self.executor,
            clock=clock,
            settings=settings,
        )
        layout = PoolLayout(
            identity=IDENTITY,
            pool=PoolName.KV,
            shard=Shard(index=group.rank, count=group.size),
            range_bytes=RANGE_BYTES,
        )
        self.store = FaultyPageStore(InMemoryStoreFactory().open(layout))
        pools = {PoolName.KV: DevicePoolEntry(PoolName.KV, self.rows, PAGE_SIZE)}
        stores = {PoolName.KV: self.store}
        self.linker: StoreLinker | SyncLinker = (
            SyncLinker(pools=pools, stores=stores, copier=CpuCopier())
            if by_hand
            else StoreLinker(pools=pools, stores=stores, copier=CpuCopier())
        )
        self.computing: list[Computation] = []

    @property
    def by_hand(self) -> SyncLinker:
        """The linker, in a replica that was made with `by_hand`."""
        assert isinstance(self.linker, SyncLinker)
        return self.linker

    # -- what the engine does ----------------------------------------------------------------------

    def match(self, request_id: str, tokens: Sequence[int]) -> MatchResult:
        """A match; its node is counted from the root, whose id differs where ranks once differed."""
        result = self.cache.match_prefix(
            MatchPrefixParams(key=key_of(tokens), request_id=RequestId(request_id))
        )
        node = NodeId(result.last_device_node - self.tree.root)
        return attrs.evolve(result, last_device_node=node)

    def load_back(self, request_id: str, tokens: Sequence[int]) -> LoadBack:
        request = Request(request_id=RequestId(request_id), key=key_of(tokens))
        return self.cache.init_load_back(request)

    def begin(self, tokens: Sequence[int]) -> Computation | None:
        """Lock what is there and compute the pages that are not; None where there is no room."""
        key = key_of(tokens)
        device = self.cache.match_prefix(MatchPrefixParams(key=key))
        start = device.device_prefix_len
        receipt = self.cache.inc_lock_ref(IncLockRefParams(node_id=device.last_device_node))
        needed = len(tokens) // PAGE_SIZE * PAGE_SIZE - start
        if needed > self.allocator.available_size:
            self.cache.evict(EvictParams(num_tokens=needed - self.allocator.available_size))
        slots = self.allocator.alloc(needed)
        if slots is None:
            self.cache.dec_lock_ref(receipt.to_dec_params())
            return None
        for page, page_key in enumerate(page_keys_of(tokens).span(start // PAGE_SIZE, 1 << 20)):
            self._fill(int(slots[page * PAGE_SIZE]) // PAGE_SIZE, page_key)
        prefix = self.tree.path_indices(device.last_device_node)
        computation = Computation(
            key=key,
            prefix_len=start,
            receipt=receipt,
            value=torch.cat([prefix, slots]),
            slots=slots,
        )
        self.computing.append(computation)
        return computation

    def end(self, computation: Computation, *, insert: bool = True) -> InsertResult | None:
        """Insert what was computed, or give it back."""
        result = None
        if insert:
            result = self.cache.insert(
                InsertParams(
                    key=computation.key,
                    value=computation.value,
                    prev_prefix_len=computation.prefix_len,
                )
            )
        elif len(computation.slots):
            self.slots.free(computation.slots)
        # Where the insert raised, the slots and the lock are still the engine's.
        self.computing.remove(computation)
        self.cache.dec_lock_ref(computation.receipt.to_dec_params())
        return result

    def compute(self, tokens: Sequence[int]) -> bool:
        """A whole forward. False where there is no room for it."""
        computation = self.begin(tokens)
        if computation is not None:
            self.end(computation)
        return computation is not None

    def evict(self, num_tokens: int = 1 << 20) -> int:
        return self.cache.evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted

    def device_pages(self, tokens: Sequence[int]) -> int:
        """How many pages of a sequence the device has."""
        device = self.cache.match_prefix(MatchPrefixParams(key=key_of(tokens)))
        return device.device_prefix_len // PAGE_SIZE

    def page_keys(self, tokens: Sequence[int]) -> PageKeys:
        """What the pages of a sequence are called in the store."""
        return page_keys_of(tokens)

    def stored_pages(self, tokens: Sequence[int]) -> int:
        """How many pages of a sequence, from its first, this rank's store has."""
        return self.store.contains(page_keys_of(tokens)).leading

    def lose(self, tokens: Sequence[int], *pages: int) -> None:
        """The store forgets some pages of a sequence."""
        keys = page_keys_of(tokens)
        self.store.lost.update(keys[page] for page in pages)

    def transfer(self) -> None:
        """Return when every transfer that was started has ended."""
        if isinstance(self.linker, SyncLinker):
            self.linker.run_all()
            return
        linker = self.linker
        with linker._changed:
            ended = linker._changed.wait_for(
                lambda: not linker._running and not linker._loads and not linker._offloads, 10
            )
        assert ended, "a transfer hangs"

    # -- what must hold ----------------------------------------------------------------------------

    def check(self) -> None:
        """Everything that must hold at any time."""
        check_invariants(self.tree)
        nodes = self.nodes()
        live = [slot for node in nodes for slot in node.device_indices.tolist()]
        held = [slot for computation in self.computing for slot in computation.slots.tolist()]
        staged = [slot for slots in self._staged() for slot in slots.tolist()]
        everything = live + held + staged
        assert len(everything) == len(set(everything)), "a slot has two owners"
        assert set(everything) == self.allocator.in_use, "slots leaked, or freed in use"
        out = {receipt.receipt_id for receipt in self.tree._receipts.out()}
        assert self._receipts() == out, "a lock leaked, or was given up"
        for node in nodes:
            pages = node.device_indices[::PAGE_SIZE] // PAGE_SIZE
            keys = node.page_keys.resolve()
            for page, page_key in zip(pages.tolist(), keys, strict=True):
                self._check_bytes(page, page_key)
            if node.stored:
                assert self.store.inner.contains(keys).complete, "stored, but not in the store"

    def check_idle(self) -> None:
        """`check`, and nothing of any request is left."""
        self.check()
        assert not self.computing
        assert self.cache.num_outstanding == 0
        assert not self.tree._receipts.out()
        assert self.tree.protected_size == 0
        assert self.allocator.in_use == self._live()

    def nodes(self) -> list[TreeNodeView]:
        """The nodes of the tree that have tokens, oldest first."""
        return [self.tree.node(node.node_id) for node in self.tree._nodes.values() if node.tokens]

    def _live(self) -> set[int]:
        return {slot for node in self.tree._nodes.values() for slot in node.device_indices.tolist()}

    def _staged(self) -> Iterator[torch.Tensor]:
        """The slots that are neither free nor in the tree."""
        for _, _, free in self.slots._retired:
            assert isinstance(free, partial)
            (what,) = free.args
            yield what if isinstance(what, torch.Tensor) else what.indices
        wrapper = self.cache._wrapper
        if wrapper is None:
            return
        for operation in (*wrapper._operations.values(), *wrapper._written_off):
            if not isinstance(operation, LoadOperation):
                continue
            if operation.verdict is Verdict.DONE:
                for action in operation.surplus:
                    assert isinstance(action, FreeDeviceKV), (
                        "all that a tree of full attention frees"
                    )
                    yield action.indices
            else:
                for transfer in operation.transfers:
                    assert transfer.device_indices is not None
                    yield transfer.device_indices

    def _receipts(self) -> set[int]:
        """The locks that somebody can account for."""
        receipts = [computation.receipt for computation in self.computing]
        wrapper = self.cache._wrapper
        if wrapper is not None:
            operations = (*wrapper._operations.values(), *wrapper._written_off)
            receipts += [operation.receipt for operation in operations]
            published = (request.published for request in wrapper._requests._requests.values())
            receipts += [receipt for receipt in published if receipt is not None]
        assert len({receipt.receipt_id for receipt in receipts}) == len(receipts)
        return {receipt.receipt_id for receipt in receipts}

    def _fill(self, page: int, page_key: bytes) -> None:
        for layer_range, (rows, size) in enumerate(zip(self.rows, RANGE_BYTES, strict=True)):
            rows[page] = torch.tensor(list(self._bytes(page_key, layer_range, size)))

    def _check_bytes(self, page: int, page_key: bytes) -> None:
        for layer_range, (rows, size) in enumerate(zip(self.rows, RANGE_BYTES, strict=True)):
            expected = list(self._bytes(page_key, layer_range, size))
            assert rows[page].tolist() == expected, f"rank {self.rank}: page {page} holds others"

    def _bytes(self, page_key: bytes, layer_range: int, size: int) -> bytes:
        return range_bytes(page_key, layer_range, size, variant=f"rank {self.rank}")


class Replica:
    """All ranks, in lockstep. What is asked of all must have one answer."""

    def __init__(
        self,
        num_ranks: int = 1,
        *,
        settings: LinkerSettings = SETTINGS,
        num_pages: int = 32,
        by_hand: bool = False,
        attach: bool = True,
    ) -> None:
        groups: Sequence[RankGroup] = (
            [SingleRank()] if num_ranks == 1 else ThreadGroup.create(num_ranks)
        )
        self.clock = ManualClock()
        self.ranks = [
            Rank(group, settings=settings, num_pages=num_pages, by_hand=by_hand, clock=self.clock)
            for group in groups
        ]
        self._threads = ThreadPoolExecutor(max_workers=num_ranks)
        if attach:
            self.attach()

    def attach(self) -> None:
        self.together(lambda rank: rank.cache.init_cache_linker(rank.linker))

    # -- ways to ask -------------------------------------------------------------------------------

    def together(self, call: Callable[[Rank], _T]) -> list[_T]:
        """Call on all ranks at once, as a collective needs it."""
        if len(self.ranks) == 1:
            return [call(self.ranks[0])]
        return [future.result(30) for future in [self._threads.submit(call, r) for r in self.ranks]]

    def outcomes(self, call: Callable[[Rank], object]) -> list[object]:
        """What each rank returned or raised, when all are called at once."""

        def attempt(rank: Rank) -> object:
            try:
                return call(rank)
            except Exception as error:  # noqa: BLE001 -- it is the answer
                return error

        return self.together(attempt)

    def alike(self, call: Callable[[Rank], _T]) -> _T:
        """The answer of all ranks, which is the same, one after the other."""
        first, *others = [call(rank) for rank in self.ranks]
        assert all(other == first for other in others), [first, *others]
        return first

    # -- what the engine does ----------------------------------------------------------------------

    def compute(self, tokens: Sequence[int]) -> bool:
        return self.alike(lambda rank: rank.compute(tokens))

    def evict(self, num_tokens: int = 1 << 20) -> int:
        return self.alike(lambda rank: rank.evict(num_tokens))

    def match(self, request_id: str, tokens: Sequence[int]) -> MatchResult:
        return self.alike(lambda rank: rank.match(request_id, tokens))

    def load_back(self, request_id: str, tokens: Sequence[int]) -> LoadBack:
        return self.alike(lambda rank: rank.load_back(request_id, tokens))

    def start(self) -> None:
        """Start the queued loads, with a batch that ends at once."""
        self.launch()
        self.retire()

    def launch(self) -> None:
        self.alike(lambda rank: rank.cache.ready_to_load_host_cache())

    def retire(self) -> None:
        self.alike(lambda rank: rank.cache.batch_retired(1))

    def release(self, request_id: str) -> None:
        self.alike(lambda rank: rank.cache.release_aborted_request(RequestId(request_id)))

    def step(self) -> StepReport:
        """A scheduler step of all ranks; everything is checked behind it."""
        first, *others = self.together(lambda rank: rank.cache.step())
        assert all(other == first for other in others), [first, *others]
        self.check()
        return first

    def transfer(self) -> None:
        for rank in self.ranks:
            rank.transfer()

    def settle(self) -> StepReport:
        """Let every transfer end and step until nothing is outstanding; all that was reported."""
        reports: list[StepReport] = []
        while self.alike(lambda rank: rank.cache.num_outstanding):
            self.transfer()
            reports.append(self.step())
            assert len(reports) < 50, "something never ends"
        return StepReport(
            landed=tuple(itertools.chain.from_iterable(report.landed for report in reports)),
            failed=tuple(itertools.chain.from_iterable(report.failed for report in reports)),
            ready=tuple(itertools.chain.from_iterable(report.ready for report in reports)),
            num_offloads_stored=sum(report.num_offloads_stored for report in reports),
            num_offloads_failed=sum(report.num_offloads_failed for report in reports),
        )

    def reset(self) -> None:
        for rank in self.ranks:
            while rank.computing:
                rank.end(rank.computing[0], insert=False)
        self.together(lambda rank: rank.cache.reset())
        self.check()

    # -- ways that tests begin with ----------------------------------------------------------------

    def store(self, tokens: Sequence[int]) -> None:
        """Compute a sequence, store it, and drop it from the device."""
        self.compute(tokens)
        report = self.settle()
        assert report.num_offloads_failed == 0
        self.evict()
        assert self.alike(lambda rank: rank.device_pages(tokens)) == 0

    def ask(self, request_id: str, tokens: Sequence[int]) -> MatchResult:
        """Match until the lookup is answered."""
        if self.match(request_id, tokens).external is ExternalMatch.UNKNOWN:
            for _ in range(10):
                if request_id in self.step().ready:
                    break
            else:
                pytest.fail(f"the lookup of {request_id} was never answered")
        return self.match(request_id, tokens)

    def queue(self, request_id: str, tokens: Sequence[int]) -> LoadWaiting:
        """Match, and queue the load of the hit."""
        assert self.ask(request_id, tokens).external is ExternalMatch.HIT
        waiting = self.load_back(request_id, tokens)
        assert isinstance(waiting, LoadWaiting), waiting
        return waiting

    def restore(self, request_id: str, tokens: Sequence[int]) -> StepReport:
        """Bring back what the store has, for a request that goes on to use it."""
        self.queue(request_id, tokens)
        self.start()
        return self.settle()

    # -- what must hold ----------------------------------------------------------------------------

    def check(self) -> None:
        for rank in self.ranks:
            rank.check()

    def finish(self) -> None:
        """End everything, and check that nothing is left."""
        for rank in self.ranks:
            rank.store.gate.set()
            while rank.computing:
                rank.end(rank.computing[0], insert=False)
            wrapper = rank.cache._wrapper
            for request_id in list(wrapper._requests._requests) if wrapper is not None else ():
                rank.cache.release_aborted_request(request_id)
        if self.ranks[0].slots._launched > self.ranks[0].slots._processed:
            self.retire()
        self.settle()
        for rank in self.ranks:
            rank.check_idle()

    def close(self) -> None:
        for rank in self.ranks:
            rank.store.gate.set()
            rank.cache.release_host_resources()
            rank.linker.close()
            rank.executor.close()
        self._threads.shutdown()


class MakeReplica(Protocol):
    """The type of the fixture `make_replica`."""

    def __call__(
        self,
        num_ranks: int = 1,
        *,
        settings: LinkerSettings = SETTINGS,
        num_pages: int = 32,
        by_hand: bool = False,
        attach: bool = True,
    ) -> Replica: ...


@pytest.fixture
def replica_type() -> type[Replica]:
    """For a machine, which makes and ends its replicas itself."""
    return Replica


@pytest.fixture
def make_replica() -> Iterator[MakeReplica]:
    """Makes replicas, and checks at the end of the test that nothing of it is left in them."""
    made: list[Replica] = []

    def make(
        num_ranks: int = 1,
        *,
        settings: LinkerSettings = SETTINGS,
        num_pages: int = 32,
        by_hand: bool = False,
        attach: bool = True,
    ) -> Replica:
        replica = Replica(
            num_ranks,
            settings=settings,
            num_pages=num_pages,
            by_hand=by_hand,
            attach=attach,
        )
        made.append(replica)
        return replica

    yield make
    try:
        for replica in made:
            replica.finish()
    finally:
        for replica in made:
            replica.close()
