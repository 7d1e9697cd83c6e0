"""Cases I16, I17 and I19, and what an abort gives back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packages.components.tests.parts import PAGE_SIZE, Node, UnhashedKeys, pages_of, slots_of

from radixlink_components import SWAComponent
from radixlink_contracts import (
    ComponentType,
    ExternalLinkerLoadPhase,
    LinkerTransferPhase,
    PageKeySource,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    TreeNodeView,
)
from radixlink_contracts.errors import ContractError
from radixlink_pools import FullSwaAllocator

#: Two pages of two tokens.
WINDOW = 3


class World:
    """The component, over a real pair of pools; what is evicted is noted."""

    def __init__(self, num_swa_pages: int = 8, *, window: int = WINDOW, evictable: int = 0) -> None:
        self.pair = FullSwaAllocator(16, num_swa_pages, PAGE_SIZE)
        self.evictable = torch.zeros(0, dtype=torch.int64)
        if evictable:
            taken = self.pair.alloc(evictable * PAGE_SIZE)
            assert taken is not None
            self.evictable = taken
        self.evicted: list[int] = []
        self.swa = SWAComponent(
            pair=self.pair, sliding_window=window, evict=self._evict, release=self.pair.swa.free
        )

    def _evict(self, num_tokens: int) -> None:
        self.evicted.append(num_tokens)
        gone, self.evictable = self.evictable[:num_tokens], self.evictable[num_tokens:]
        self.pair.free_swa(gone)

    def build(
        self,
        phase: LinkerTransferPhase,
        *,
        node: TreeNodeView | None = None,
        keys: PageKeySource | None = None,
    ) -> PoolTransfer | None:
        return self.swa.build_external_linker_transfer(phase, node, keys)

    def load(self, num_pages: int) -> PoolTransfer:
        transfer = self.build(LinkerTransferPhase.LOAD, keys=UnhashedKeys(num_pages))
        assert transfer is not None
        return transfer

    def full_load(self, num_pages: int) -> PoolTransfer:
        """What the full component brings in the same load."""
        slots = self.pair.full.alloc(num_pages * PAGE_SIZE)
        assert slots is not None
        return PoolTransfer(name=PoolName.KV, keys=UnhashedKeys(num_pages), device_indices=slots)

    def update(
        self, phase: ExternalLinkerLoadPhase, full: PoolTransfer | None, transfer: PoolTransfer
    ) -> None:
        self.swa.update_external_linker_load(
            phase, request=None, full_transfer=full, transfer=transfer, prefix_len=10
        )


def test_it_is_the_swa_component() -> None:
    assert World().swa.component_type is ComponentType.SWA


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_of_no_token_is_refused(window: int) -> None:
    with pytest.raises(ContractError, match=f"at least 1, got {window}"):
        World(window=window)


def test_offload_moves_every_page_of_a_live_node() -> None:
    """I16: all of them, not just the last window."""
    world = World()
    full = world.pair.alloc(8)
    assert full is not None
    # Partners need not have the numbers of their full slots.
    partners = world.pair.swa_indices(full).roll(PAGE_SIZE)
    world.pair.map_full_to_swa(full, partners)
    node = Node(page_keys=UnhashedKeys(4), device_indices=full, has_swa=True)
    transfer = world.build(LinkerTransferPhase.OFFLOAD, node=node)
    assert transfer is not None
    assert (transfer.name, transfer.hit_policy) == (PoolName.SWA, PoolHitPolicy.TRAILING_PAGES)
    assert transfer.keys is node.page_keys
    assert slots_of(transfer) == partners.tolist()


def test_offload_of_a_tombstone_is_nothing() -> None:
    world = World()
    full = world.pair.full.alloc(8)
    assert full is not None
    tombstone = Node(page_keys=UnhashedKeys(4), device_indices=full)
    assert world.build(LinkerTransferPhase.OFFLOAD, node=tombstone) is None
    assert world.build(LinkerTransferPhase.OFFLOAD) is None


@pytest.mark.parametrize(
    ("num_pages", "last"), [(5, [3, 4]), (2, [0, 1]), (1, [0])], ids=["5 pages", "2", "1"]
)
def test_lookup_asks_for_the_last_window(num_pages: int, last: list[int]) -> None:
    """I17."""
    world = World(num_swa_pages=1)
    transfer = world.build(LinkerTransferPhase.LOOKUP, keys=UnhashedKeys(num_pages))
    assert transfer is not None
    assert (transfer.name, transfer.hit_policy) == (PoolName.SWA, PoolHitPolicy.TRAILING_PAGES)
    assert pages_of(transfer) == last
    assert transfer.device_indices is None
    assert world.pair.swa.available_size == PAGE_SIZE


@pytest.mark.parametrize("phase", [LinkerTransferPhase.LOOKUP, LinkerTransferPhase.LOAD])
def test_no_keys_are_no_transfer(phase: LinkerTransferPhase) -> None:
    world = World()
    assert world.build(phase, keys=UnhashedKeys(0)) is None
    assert world.build(phase) is None
    assert world.pair.swa.available_size == world.pair.swa.size


@given(window=st.integers(1, 9), num_pages=st.integers(1, 9))
def test_load_takes_as_many_window_slots_as_it_has_keys_for(window: int, num_pages: int) -> None:
    """Field report 10: keys and slots always fit each other."""
    world = World(window=window)
    transfer = world.load(num_pages)
    expected = min(num_pages, -(-window // PAGE_SIZE))
    assert pages_of(transfer) == list(range(num_pages - expected, num_pages))
    assert len(set(slots_of(transfer))) == expected * PAGE_SIZE
    assert world.pair.swa.available_size == world.pair.swa.size - expected * PAGE_SIZE
    # The full pool is the other component's.
    assert world.pair.full.available_size == world.pair.full.size
    assert world.evicted == []


def test_load_evicts_just_what_is_missing() -> None:
    world = World(num_swa_pages=3, evictable=2)
    assert len(slots_of(world.load(5))) == 4
    assert world.evicted == [2]
    assert len(world.evictable) == 2


def test_load_without_room_is_nothing_and_takes_nothing() -> None:
    world = World(num_swa_pages=3, evictable=2)
    world.evictable = world.evictable[:0]
    assert world.build(LinkerTransferPhase.LOAD, keys=UnhashedKeys(5)) is None
    assert world.evicted == [2]
    assert world.pair.swa.available_size == PAGE_SIZE


def test_prepare_pairs_the_window_with_the_last_full_slots() -> None:
    """I19: the last four of the full slots, page for page."""
    world = World()
    full, transfer = world.full_load(5), world.load(5)
    world.update(ExternalLinkerLoadPhase.PREPARE, full, transfer)
    assert full.device_indices is not None
    assert world.pair.swa_indices(full.device_indices).tolist() == [-1] * 6 + slots_of(transfer)


@pytest.mark.parametrize("num_full", [0, 1])
def test_prepare_leaves_what_comes_late_beside_nothing(num_full: int) -> None:
    """The first window slots are for full slots of the tree, which nobody may name before COMMIT."""
    world = World()
    transfer = world.load(2)
    full = world.full_load(1) if num_full else None
    world.update(ExternalLinkerLoadPhase.PREPARE, full, transfer)
    partners = world.pair.swa_indices(torch.arange(world.pair.full.size)).tolist()
    paired = [slot for slot in partners if slot >= 0]
    assert paired == slots_of(transfer)[4 - num_full * PAGE_SIZE :]
    world.update(ExternalLinkerLoadPhase.ABORT, full, transfer)
    assert world.pair.swa.available_size == world.pair.swa.size


def test_commit_changes_nothing() -> None:
    world = World()
    full, transfer = world.full_load(5), world.load(5)
    world.update(ExternalLinkerLoadPhase.PREPARE, full, transfer)
    before = (world.pair.full.available_size, world.pair.swa.available_size)
    world.update(ExternalLinkerLoadPhase.COMMIT, full, transfer)
    assert (world.pair.full.available_size, world.pair.swa.available_size) == before


@pytest.mark.parametrize("prepared", [True, False])
def test_abort_gives_window_slots_back_and_no_others(*, prepared: bool) -> None:
    world = World()
    full, transfer = world.full_load(5), world.load(5)
    if prepared:
        world.update(ExternalLinkerLoadPhase.PREPARE, full, transfer)
    world.update(ExternalLinkerLoadPhase.ABORT, full, transfer)
    assert world.pair.swa.available_size == world.pair.swa.size
    assert full.device_indices is not None
    assert world.pair.full.available_size == world.pair.full.size - 10
    # In reverse order of what was built: now the full slots can go alone.
    world.pair.full.free(full.device_indices)
