from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from radixlink_components import FullComponent
from radixlink_contracts import (
    AdoptedRanges,
    ComponentType,
    ExternalLinkerLoadPhase,
    InsertResult,
    LinkerTransferPhase,
    NodeId,
    OperationId,
    PageKeys,
    PageKeySource,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    SlotAllocator,
    TreeNodeView,
)
from radixlink_contracts.actions import BackupKV, FreeDeviceKV
from radixlink_contracts.errors import ContractError

PAGE_SIZE = 2


def keys(names: str) -> PageKeys:
    return PageKeys.join(name.encode() * 32 for name in names)


def names(source: PageKeySource) -> str:
    return "".join(chr(digest[0]) for digest in source.resolve())


class UnhashedKeys(PageKeySource):
    """Keys that must not be resolved: the scheduler thread never hashes."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages

    @override
    def __len__(self) -> int:
        return self.num_pages

    @override
    def span(self, start: int, stop: int) -> UnhashedKeys:
        return UnhashedKeys(stop - start)

    @override
    def resolve(self) -> PageKeys:
        raise AssertionError("hashed on the scheduler thread")


class CountingAllocator(SlotAllocator):
    """Slots 100, 101, ... as long as there are any."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.freed: list[int] = []

    @property
    @override
    def page_size(self) -> int:
        return PAGE_SIZE

    @property
    @override
    def size(self) -> int:
        return 64

    @property
    @override
    def available_size(self) -> int:
        return self.num_slots

    @override
    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        if num_tokens > self.num_slots:
            return None
        self.num_slots -= num_tokens
        return torch.arange(100, 100 + num_tokens)

    @override
    def free(self, indices: torch.Tensor) -> None:
        self.freed += indices.tolist()


@attrs.frozen(kw_only=True, eq=False)
class Node(TreeNodeView):
    """A node of given pages."""

    node_id: NodeId
    page_keys: PageKeySource
    device_indices: torch.Tensor
    stored: bool = False
    pending_operation: OperationId | None = None

    @property
    @override
    def num_tokens(self) -> int:
        return len(self.device_indices)


def node(page_keys: PageKeySource, *slots: int) -> Node:
    indices = torch.tensor(slots, dtype=torch.int64)
    return Node(node_id=NodeId(7), page_keys=page_keys, device_indices=indices)


class Harness:
    """A component whose owner writes down what it is asked."""

    def __init__(self, num_slots: int = 16, *, num_evictable: int = 0) -> None:
        self.allocator = CountingAllocator(num_slots)
        self.num_evictable = num_evictable
        self.evicted: list[int] = []
        self.released: list[list[int]] = []
        self.full = FullComponent(
            allocator=self.allocator, evict=self._evict, release=self._release
        )

    def _evict(self, num_tokens: int) -> None:
        self.evicted.append(num_tokens)
        self.allocator.num_slots += min(num_tokens, self.num_evictable)

    def _release(self, slots: torch.Tensor) -> None:
        self.released.append(slots.tolist())

    def build(
        self,
        phase: LinkerTransferPhase,
        *,
        node: TreeNodeView | None = None,
        keys: PageKeySource | None = None,
    ) -> PoolTransfer | None:
        return self.full.build_external_linker_transfer(phase, node, keys)

    def update(
        self,
        phase: ExternalLinkerLoadPhase,
        transfer: PoolTransfer,
        prefix_len: int,
        insert_result: InsertResult | None = None,
    ) -> PoolTransfer | None:
        return self.full.update_external_linker_load(
            phase,
            request=None,
            full_transfer=transfer,
            transfer=transfer,
            prefix_len=prefix_len,
            insert_result=insert_result,
        )

    def commit(
        self, transfer: PoolTransfer, prefix_len: int, *adopted: tuple[int, int]
    ) -> PoolTransfer | None:
        ranges = AdoptedRanges()
        # What another component took is not ours.
        ranges.record(ComponentType.SWA, 0, prefix_len)
        for start, end in adopted:
            ranges.record(ComponentType.FULL, start, end)
        result = InsertResult(
            prefix_len=0,
            total_len=prefix_len,
            last_device_node=NodeId(1),
            adopted_ranges=ranges,
        )
        return self.update(ExternalLinkerLoadPhase.COMMIT, transfer, prefix_len, result)


def loaded(source: PageKeySource) -> PoolTransfer:
    """A LOAD of these keys into slots 100, 101, ..."""
    transfer = Harness(64).build(LinkerTransferPhase.LOAD, keys=source)
    assert transfer is not None
    return transfer


def slots_of(transfer: PoolTransfer) -> list[int]:
    assert transfer.device_indices is not None
    assert transfer.device_indices.dtype is torch.int64
    return [int(slot) for slot in transfer.device_indices]


def test_it_is_the_full_component() -> None:
    assert Harness().full.component_type is ComponentType.FULL


def test_offload_moves_every_page_of_the_node() -> None:
    stored = node(UnhashedKeys(2), 4, 5, 0, 1)
    transfer = Harness().build(LinkerTransferPhase.OFFLOAD, node=stored)
    assert transfer is not None
    assert transfer.name is PoolName.KV
    assert transfer.keys is stored.page_keys
    assert transfer.device_indices is stored.device_indices


def test_offload_of_a_node_without_slots_is_nothing() -> None:
    empty = node(UnhashedKeys(0))
    assert Harness().build(LinkerTransferPhase.OFFLOAD, node=empty) is None
    assert Harness().build(LinkerTransferPhase.OFFLOAD) is None


def test_lookup_asks_for_every_page_and_allocates_nothing() -> None:
    harness = Harness(num_slots=0)
    tail = UnhashedKeys(3)
    transfer = harness.build(LinkerTransferPhase.LOOKUP, keys=tail)
    assert transfer is not None
    assert transfer.name is PoolName.KV
    assert transfer.keys is tail
    assert transfer.device_indices is None
    assert transfer.hit_policy is PoolHitPolicy.ALL_PAGES
    assert harness.evicted == []


@pytest.mark.parametrize("phase", [LinkerTransferPhase.LOOKUP, LinkerTransferPhase.LOAD])
def test_no_keys_are_no_transfer(phase: LinkerTransferPhase) -> None:
    harness = Harness(num_slots=0)
    assert harness.build(phase, keys=UnhashedKeys(0)) is None
    assert harness.build(phase) is None
    assert harness.evicted == []


def test_load_takes_slots_for_every_page() -> None:
    harness = Harness(num_slots=6)
    tail = UnhashedKeys(3)
    transfer = harness.build(LinkerTransferPhase.LOAD, keys=tail)
    assert transfer is not None
    assert (transfer.name, transfer.hit_policy) == (PoolName.KV, PoolHitPolicy.ALL_PAGES)
    assert transfer.keys is tail
    assert slots_of(transfer) == [100, 101, 102, 103, 104, 105]
    assert harness.evicted == []


def test_load_evicts_just_what_is_missing() -> None:
    harness = Harness(num_slots=2, num_evictable=100)
    transfer = harness.build(LinkerTransferPhase.LOAD, keys=UnhashedKeys(3))
    assert transfer is not None
    assert len(slots_of(transfer)) == 6
    assert harness.evicted == [4]


def test_load_without_room_is_nothing_and_takes_nothing() -> None:
    harness = Harness(num_slots=2, num_evictable=2)
    assert harness.build(LinkerTransferPhase.LOAD, keys=UnhashedKeys(3)) is None
    assert harness.evicted == [4]
    assert harness.allocator.available_size == 4
    assert harness.released == []


def test_prepare_changes_nothing() -> None:
    harness = Harness()
    transfer = loaded(UnhashedKeys(2))
    assert harness.update(ExternalLinkerLoadPhase.PREPARE, transfer, 4) is transfer
    assert harness.released == []


def test_commit_keeps_the_pages_that_the_tree_took() -> None:
    """Case B3, the half of full attention."""
    harness = Harness()
    transfer = loaded(keys("abcd"))
    assert slots_of(transfer) == [100, 101, 102, 103, 104, 105, 106, 107]
    kept = harness.commit(transfer, 8, (2, 4), (6, 8))
    assert kept is not None
    assert kept.name is PoolName.KV
    assert names(kept.keys) == "bd"
    assert slots_of(kept) == [102, 103, 106, 107]


@pytest.mark.parametrize(
    ("adopted", "kept_names"),
    [
        ([(0, 16)], "abcd"),
        ([(8, 16)], "abcd"),
        ([(8, 10), (10, 12)], "ab"),
        ([(14, 16)], "d"),
        ([(4, 10)], "a"),
        ([(12, 40)], "cd"),
        ([(0, 10), (14, 16)], "ad"),
        # Half a page is not a page.
        ([(9, 15)], "bc"),
        ([(9, 11)], ""),
        ([(0, 8)], ""),
        ([(16, 20)], ""),
        ([], ""),
    ],
)
def test_commit_looks_at_whole_pages_of_the_loaded_range(
    adopted: list[tuple[int, int]], kept_names: str
) -> None:
    """Four pages were loaded behind eight tokens that the device had."""
    kept = Harness().commit(loaded(keys("abcd")), 16, *adopted)
    if not kept_names:
        assert kept is None
        return
    assert kept is not None
    assert names(kept.keys) == kept_names
    starts = [100 + 2 * "abcd".index(name) for name in kept_names]
    assert slots_of(kept) == [slot for start in starts for slot in (start, start + 1)]


@given(
    device_pages=st.integers(0, 5),
    adopted=st.lists(st.tuples(st.integers(0, 24), st.integers(0, 24)), max_size=4),
)
def test_commit_keeps_just_the_pages_whose_tokens_are_all_adopted(
    device_pages: int, adopted: list[tuple[int, int]]
) -> None:
    num_pages = 6
    start = device_pages * PAGE_SIZE
    tokens = {token for low, high in adopted for token in range(low, high)}
    expected = [
        page for page in range(num_pages) if {start + 2 * page, start + 2 * page + 1} <= tokens
    ]
    transfer = loaded(keys("abcdef"))
    kept = Harness().commit(transfer, start + num_pages * PAGE_SIZE, *adopted)
    kept_pages = [] if kept is None else ["abcdef".index(name) for name in names(kept.keys)]
    assert kept_pages == expected
    if kept is not None:
        assert slots_of(kept) == [100 + 2 * page + i for page in expected for i in (0, 1)]


@pytest.mark.parametrize("adopted", [[(0, 8)], [(2, 4)], [(0, 2), (4, 6)]])
def test_commit_hashes_nothing(adopted: list[tuple[int, int]]) -> None:
    kept = Harness().commit(loaded(UnhashedKeys(4)), 8, *adopted)
    assert kept is not None
    assert len(kept.keys) == sum(end - start for start, end in adopted) // PAGE_SIZE


@pytest.mark.parametrize("adopted", [[], [(2, 4)], [(0, 8)]])
def test_commit_gives_no_slot_back(adopted: list[tuple[int, int]]) -> None:
    """The insert's own `FreeDeviceKV` names what the tree did not take."""
    harness = Harness()
    harness.commit(loaded(keys("abcd")), 8, *adopted)
    assert harness.released == []
    assert harness.allocator.freed == []


def test_commit_needs_ranges() -> None:
    result = InsertResult(prefix_len=0, total_len=4, last_device_node=NodeId(1))
    for insert_result in (None, result):
        with pytest.raises(ContractError, match="track_adopted_ranges"):
            Harness().update(ExternalLinkerLoadPhase.COMMIT, loaded(keys("ab")), 4, insert_result)


def test_commit_refuses_a_load_that_begins_before_the_sequence() -> None:
    with pytest.raises(ContractError, match="at least the 4 tokens"):
        Harness().commit(loaded(keys("ab")), 2, (0, 2))


def test_abort_hands_every_slot_to_release_and_frees_none() -> None:
    harness = Harness()
    assert harness.update(ExternalLinkerLoadPhase.ABORT, loaded(UnhashedKeys(2)), 4) is None
    assert harness.released == [[100, 101, 102, 103]]
    assert harness.allocator.freed == []


@pytest.mark.parametrize("phase", ExternalLinkerLoadPhase)
def test_a_load_without_slots_is_refused(phase: ExternalLinkerLoadPhase) -> None:
    transfer = PoolTransfer(name=PoolName.KV, keys=keys("a"))
    with pytest.raises(ContractError, match="transfer with slots"):
        Harness().update(phase, transfer, 2)


@pytest.mark.parametrize(
    "action",
    [FreeDeviceKV(indices=torch.tensor([0, 1])), BackupKV(node_ids=(NodeId(7),))],
    ids=lambda action: type(action).__name__,
)
def test_no_action_is_routed_here(action: FreeDeviceKV | BackupKV) -> None:
    with pytest.raises(ContractError, match=type(action).__name__):
        Harness().full.apply_action(action)
