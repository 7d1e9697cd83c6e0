"""Case J10, as the copy is made at admission and not here."""

from __future__ import annotations

import pytest
import torch
from packages.components.tests.parts import Node, UnhashedKeys, pages_of, slots_of

from radixlink_components import MambaComponent
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
from radixlink_pools import StateSlotAllocator


class World:
    """The component, over a real pool of states; what is evicted is noted."""

    def __init__(self, num_states: int = 3, *, in_use: int = 0, evictable: int = 0) -> None:
        self.states = StateSlotAllocator(num_states)
        self.taken = [self.states.alloc() for _ in range(in_use)]
        self.evictable = evictable
        self.evicted: list[int] = []
        self.mamba = MambaComponent(states=self.states, evict=self._evict, release=self.states.free)

    def _evict(self, num_states: int) -> None:
        self.evicted.append(num_states)
        for slot in self.taken[: min(num_states, self.evictable)]:
            assert slot is not None
            self.states.free(slot)

    def build(
        self,
        phase: LinkerTransferPhase,
        *,
        node: TreeNodeView | None = None,
        keys: PageKeySource | None = None,
    ) -> PoolTransfer | None:
        return self.mamba.build_external_linker_transfer(phase, node, keys)

    def load(self) -> PoolTransfer:
        transfer = self.build(LinkerTransferPhase.LOAD, keys=UnhashedKeys(5))
        assert transfer is not None
        return transfer

    def update(self, phase: ExternalLinkerLoadPhase, transfer: PoolTransfer) -> None:
        self.mamba.update_external_linker_load(
            phase, request=None, full_transfer=None, transfer=transfer, prefix_len=10
        )


def node(mamba_slot: int | None) -> Node:
    return Node(
        page_keys=UnhashedKeys(4),
        device_indices=torch.arange(8),
        has_swa=True,
        mamba_slot=mamba_slot,
    )


def test_it_is_the_mamba_component() -> None:
    assert World().mamba.component_type is ComponentType.MAMBA


def test_offload_moves_the_state_under_the_last_key() -> None:
    # The first slot of all is a slot like others.
    transfer = World().build(LinkerTransferPhase.OFFLOAD, node=node(mamba_slot=0))
    assert transfer is not None
    assert (transfer.name, transfer.hit_policy) == (PoolName.MAMBA, PoolHitPolicy.TRAILING_PAGES)
    assert (pages_of(transfer), slots_of(transfer)) == ([3], [0])


def test_offload_of_a_node_without_a_state_is_nothing() -> None:
    assert World().build(LinkerTransferPhase.OFFLOAD, node=node(mamba_slot=None)) is None
    assert World().build(LinkerTransferPhase.OFFLOAD) is None


@pytest.mark.parametrize("num_pages", [1, 5])
def test_lookup_asks_for_the_last_state(num_pages: int) -> None:
    world = World(num_states=1, in_use=1)
    transfer = world.build(LinkerTransferPhase.LOOKUP, keys=UnhashedKeys(num_pages))
    assert transfer is not None
    assert (transfer.name, transfer.hit_policy) == (PoolName.MAMBA, PoolHitPolicy.TRAILING_PAGES)
    assert pages_of(transfer) == [num_pages - 1]
    assert transfer.device_indices is None
    assert world.evicted == []


@pytest.mark.parametrize("phase", [LinkerTransferPhase.LOOKUP, LinkerTransferPhase.LOAD])
def test_no_keys_are_no_transfer(phase: LinkerTransferPhase) -> None:
    world = World()
    assert world.build(phase, keys=UnhashedKeys(0)) is None
    assert world.build(phase) is None
    assert world.states.available_size == 3


def test_load_takes_one_slot() -> None:
    world = World(in_use=2)
    transfer = world.load()
    assert pages_of(transfer) == [4]
    assert slots_of(transfer) == [({0, 1, 2} - set(world.taken)).pop()]
    assert world.states.available_size == 0
    assert world.evicted == []


def test_load_evicts_where_there_is_no_slot() -> None:
    world = World(in_use=3, evictable=3)
    assert slots_of(world.load()) == [world.taken[0]]
    assert world.evicted == [1]


def test_load_without_room_is_nothing() -> None:
    world = World(in_use=3)
    assert world.build(LinkerTransferPhase.LOAD, keys=UnhashedKeys(5)) is None
    assert world.evicted == [1]


@pytest.mark.parametrize("phase", [ExternalLinkerLoadPhase.PREPARE, ExternalLinkerLoadPhase.COMMIT])
def test_prepare_and_commit_give_nothing_back(phase: ExternalLinkerLoadPhase) -> None:
    """COMMIT: where the tree has a state already, `mamba_exist` says so to whoever inserted."""
    world = World()
    world.update(phase, world.load())
    assert world.states.available_size == 2


def test_abort_gives_the_slot_back() -> None:
    world = World()
    world.update(ExternalLinkerLoadPhase.ABORT, world.load())
    assert world.states.available_size == 3
