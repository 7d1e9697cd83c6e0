from __future__ import annotations

import pytest
import torch
from packages.components.tests.parts import PAGE_SIZE, Node, UnhashedKeys, pages_of, slots_of

from radixlink_components import FullComponent
from radixlink_contracts import (
    ComponentType,
    ExternalLinkerLoadPhase,
    InsertResult,
    LinkerTransferPhase,
    NodeId,
    PageKeySource,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    TreeNodeView,
)
from radixlink_pools import FullSwaAllocator, PagedAllocator


class World:
    """The component, over a real pool; what is asked of its owner is noted."""

    def __init__(self, num_pages: int = 8, *, in_use: int = 0, evictable: int = 0) -> None:
        self.allocator = PagedAllocator(num_pages, PAGE_SIZE)
        self.taken = self.allocator.alloc(in_use * PAGE_SIZE)
        self.evictable = evictable * PAGE_SIZE
        self.evicted: list[int] = []
        self.released: list[list[int]] = []
        self.full = FullComponent(
            allocator=self.allocator, evict=self._evict, release=self._release
        )

    def _evict(self, num_tokens: int) -> None:
        self.evicted.append(num_tokens)
        assert self.taken is not None
        self.allocator.free(self.taken[: min(num_tokens, self.evictable)])

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

    def load(self, num_pages: int) -> PoolTransfer:
        transfer = self.build(LinkerTransferPhase.LOAD, keys=UnhashedKeys(num_pages))
        assert transfer is not None
        return transfer

    def update(self, phase: ExternalLinkerLoadPhase, transfer: PoolTransfer) -> None:
        self.full.update_external_linker_load(
            phase,
            request=None,
            full_transfer=transfer,
            transfer=transfer,
            prefix_len=len(transfer.keys) * PAGE_SIZE,
            insert_result=InsertResult(prefix_len=0, total_len=4, last_device_node=NodeId(1)),
        )


def test_it_is_the_full_component() -> None:
    assert World().full.component_type is ComponentType.FULL


def test_offload_moves_every_page_of_the_node() -> None:
    node = Node(page_keys=UnhashedKeys(2), device_indices=torch.tensor([4, 5, 0, 1]))
    transfer = World().build(LinkerTransferPhase.OFFLOAD, node=node)
    assert transfer is not None
    assert transfer.name is PoolName.KV
    assert transfer.keys is node.page_keys
    assert transfer.device_indices is node.device_indices


def test_offload_of_a_node_without_slots_is_nothing() -> None:
    empty = Node(page_keys=UnhashedKeys(0), device_indices=torch.tensor([], dtype=torch.int64))
    assert World().build(LinkerTransferPhase.OFFLOAD, node=empty) is None
    assert World().build(LinkerTransferPhase.OFFLOAD) is None


def test_lookup_asks_for_every_page_and_allocates_nothing() -> None:
    world = World(num_pages=1, in_use=1)
    transfer = world.build(LinkerTransferPhase.LOOKUP, keys=UnhashedKeys(3))
    assert transfer is not None
    assert (transfer.name, transfer.hit_policy) == (PoolName.KV, PoolHitPolicy.ALL_PAGES)
    assert pages_of(transfer) == [0, 1, 2]
    assert transfer.device_indices is None
    assert world.evicted == []


@pytest.mark.parametrize("phase", [LinkerTransferPhase.LOOKUP, LinkerTransferPhase.LOAD])
def test_no_keys_are_no_transfer(phase: LinkerTransferPhase) -> None:
    world = World(num_pages=1, in_use=1)
    assert world.build(phase, keys=UnhashedKeys(0)) is None
    assert world.build(phase) is None
    assert world.evicted == []


def test_load_takes_slots_for_every_page() -> None:
    world = World(num_pages=3)
    transfer = world.load(3)
    assert (transfer.name, transfer.hit_policy) == (PoolName.KV, PoolHitPolicy.ALL_PAGES)
    assert pages_of(transfer) == [0, 1, 2]
    assert sorted(slots_of(transfer)) == [0, 1, 2, 3, 4, 5]
    assert world.allocator.available_size == 0
    assert world.evicted == []


def test_load_evicts_just_what_is_missing() -> None:
    world = World(num_pages=8, in_use=7, evictable=7)
    assert len(slots_of(world.load(3))) == 6
    assert world.evicted == [4]


def test_load_without_room_is_nothing_and_takes_nothing() -> None:
    world = World(num_pages=8, in_use=7, evictable=1)
    assert world.build(LinkerTransferPhase.LOAD, keys=UnhashedKeys(3)) is None
    assert world.evicted == [4]
    assert world.allocator.available_size == 4
    assert world.released == []


def test_beside_windows_a_load_takes_full_slots_alone() -> None:
    """A pair's own `alloc` would take window slots with them."""
    pair = FullSwaAllocator(num_full_pages=4, num_swa_pages=1, page_size=PAGE_SIZE)
    world = World()
    full = FullComponent(allocator=pair.full, evict=world._evict, release=world._release)
    transfer = full.build_external_linker_transfer(LinkerTransferPhase.LOAD, None, UnhashedKeys(4))
    assert transfer is not None
    assert (pair.full.available_size, pair.swa.available_size) == (0, 2)
    assert world.evicted == []


@pytest.mark.parametrize("phase", [ExternalLinkerLoadPhase.PREPARE, ExternalLinkerLoadPhase.COMMIT])
def test_prepare_and_commit_give_no_slot_back(phase: ExternalLinkerLoadPhase) -> None:
    """The insert's own actions name what the tree did not take."""
    world = World()
    transfer = world.load(2)
    world.update(phase, transfer)
    assert world.released == []
    assert world.allocator.available_size == world.allocator.size - 4


def test_abort_hands_every_slot_to_release_and_frees_none() -> None:
    world = World()
    transfer = world.load(2)
    world.update(ExternalLinkerLoadPhase.ABORT, transfer)
    assert world.released == [slots_of(transfer)]
    assert world.allocator.available_size == world.allocator.size - 4
