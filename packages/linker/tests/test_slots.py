from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
import torch

from radixlink_contracts import ComponentType, EvictParams, EvictResult, NodeId, TreeCore
from radixlink_contracts.actions import (
    BackupKV,
    CacheAction,
    FreeDeviceKV,
    FreeDeviceKVFullOnly,
    FreeMambaSlots,
    FreeSWA,
    MoveSWA,
)
from radixlink_contracts.errors import ContractError
from radixlink_linker import DeviceSlots
from radixlink_pools import FullSwaAllocator, PagedAllocator, StateSlotAllocator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import SlotAllocator

PAGE_SIZE = 2
FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA


class Tree:
    """Evicts what it was told."""

    page_size = PAGE_SIZE

    def __init__(self, *components: ComponentType) -> None:
        self.components = components or (FULL,)
        self.actions: tuple[CacheAction, ...] = ()
        self.asked: list[EvictParams] = []

    def evict(self, params: EvictParams) -> EvictResult:
        self.asked.append(params)
        return EvictResult(num_tokens_evicted=2, cache_actions=self.actions)


class World:
    """The slots of a tree, over real allocators."""

    def __init__(self, *components: ComponentType) -> None:
        self.tree = Tree(*components)
        self.pool = PagedAllocator(8, PAGE_SIZE)
        self.pair = FullSwaAllocator(8, 6, PAGE_SIZE)
        self.states = StateSlotAllocator(3)
        self.copies: list[tuple[int, int]] = []
        with_states = MAMBA in components
        self.slots = DeviceSlots(
            tree=cast("TreeCore", self.tree),
            allocator=self.pair if SWA in components else self.pool,
            states=self.states if with_states else None,
            copy_state=self._copy if with_states else None,
        )

    def _copy(self, source: int, target: int) -> None:
        self.copies.append((source, target))

    def take(self, num_pages: int) -> torch.Tensor:
        """Slots that an engine would fill: pairs, where there are windows."""
        taken = self.slots.allocator.alloc(num_pages * PAGE_SIZE)
        assert taken is not None
        return taken

    def take_full(self, num_pages: int) -> torch.Tensor:
        """Full slots without a partner."""
        taken = self.pair.full.alloc(num_pages * PAGE_SIZE)
        assert taken is not None
        return taken

    def take_swa(self, num_pages: int) -> torch.Tensor:
        taken = self.pair.swa.alloc(num_pages * PAGE_SIZE)
        assert taken is not None
        return taken

    def take_state(self) -> int:
        slot = self.states.alloc()
        assert slot is not None
        return slot

    @property
    def in_use(self) -> tuple[int, ...]:
        """Slots in use of each pool."""
        sizes = zip(self.slots.sizes, self.slots.available_sizes, strict=True)
        return tuple(size - available for size, available in sizes)


# -- what fits together ----------------------------------------------------------------------------


def make(
    components: Sequence[ComponentType], allocator: SlotAllocator, *, states: bool, copies: bool
) -> DeviceSlots:
    return DeviceSlots(
        tree=cast("TreeCore", Tree(*components)),
        allocator=allocator,
        states=StateSlotAllocator(2) if states else None,
        copy_state=(lambda source, target: None) if copies else None,
    )


def test_unlike_page_sizes_are_refused() -> None:
    with pytest.raises(ContractError, match="2 of the tree and 4 of the allocator"):
        make((FULL,), PagedAllocator(2, 4), states=False, copies=False)


@pytest.mark.parametrize("components", [(FULL,), (FULL, SWA)])
def test_windows_need_a_pair_and_nothing_else_has_one(
    components: tuple[ComponentType, ...],
) -> None:
    pool, pair = PagedAllocator(2, PAGE_SIZE), FullSwaAllocator(2, 2, PAGE_SIZE)
    right, wrong = (pair, pool) if SWA in components else (pool, pair)
    make(components, right, states=False, copies=False)
    with pytest.raises(ContractError, match=f"got {type(wrong).__name__} for"):
        make(components, wrong, states=False, copies=False)


@pytest.mark.parametrize(
    ("components", "states", "copies"),
    [
        ((FULL,), True, True),
        ((FULL, MAMBA), False, False),
        ((FULL, MAMBA), True, False),
        ((FULL, MAMBA), False, True),
    ],
)
def test_states_need_an_allocator_and_a_copy(
    components: tuple[ComponentType, ...], *, states: bool, copies: bool
) -> None:
    with pytest.raises(ContractError, match="expected states and copy_state"):
        make(components, PagedAllocator(2, PAGE_SIZE), states=states, copies=copies)


def test_sizes_are_those_of_each_pool_in_order() -> None:
    assert World().slots.sizes == (16,)
    assert World(FULL, MAMBA).slots.sizes == (16, 3)
    world = World(FULL, SWA, MAMBA)
    assert world.slots.sizes == (16, 12, 3)
    world.take(2)
    world.take_full(1)
    world.take_state()
    assert world.slots.available_sizes == (10, 8, 2)


# -- actions ---------------------------------------------------------------------------------------


def test_each_action_frees_what_it_says() -> None:
    world = World(FULL, SWA, MAMBA)
    pairs, alone, kept = world.take(2), world.take_full(1), world.take(1)
    states = (world.take_state(), world.take_state())
    assert world.in_use == (8, 6, 2)
    due = world.slots.apply(
        (
            FreeDeviceKV(indices=pairs),
            FreeDeviceKVFullOnly(indices=alone),
            FreeSWA(full_indices=kept),
            FreeMambaSlots(slots=states),
            BackupKV(node_ids=(NodeId(3), NodeId(4))),
            BackupKV(node_ids=(NodeId(9),)),
        )
    )
    assert due == [3, 4, 9]
    # Full slots whose window goes are still in use.
    assert world.in_use == (2, 0, 0)
    assert world.pair.swa_indices(kept).tolist() == [-1, -1]


def test_a_window_moves_to_the_full_slots_that_stay() -> None:
    world = World(FULL, SWA)
    kept, incoming = world.take_full(2), world.take(2)
    windows = world.pair.swa_indices(incoming)
    world.slots.apply(
        (MoveSWA(from_full=incoming, to_full=kept), FreeDeviceKVFullOnly(indices=incoming))
    )
    assert world.pair.swa_indices(kept).tolist() == windows.tolist()
    assert world.in_use == (4, 4)


def test_actions_are_carried_out_in_their_order() -> None:
    """The full slots can go alone only when their window has moved on."""
    world = World(FULL, SWA)
    kept, incoming = world.take_full(1), world.take(1)
    move = MoveSWA(from_full=incoming, to_full=kept)
    free = FreeDeviceKVFullOnly(indices=incoming)
    with pytest.raises(ContractError, match="without a window slot"):
        world.slots.apply((free, move))
    assert world.in_use == (4, 2)
    world.slots.apply((move, free))
    assert world.in_use == (2, 2)


@pytest.mark.parametrize(
    "action",
    [
        FreeSWA(full_indices=torch.tensor([0, 1])),
        MoveSWA(from_full=torch.tensor([0, 1]), to_full=torch.tensor([2, 3])),
        FreeMambaSlots(slots=(0,)),
    ],
    ids=lambda action: type(action).__name__,
)
def test_an_action_of_a_component_that_is_not_here_is_refused(action: CacheAction) -> None:
    world = World()
    world.take(2)
    with pytest.raises(ContractError, match="in a tree without"):
        world.slots.apply((action,))
    assert world.in_use == (4,)


# -- room ------------------------------------------------------------------------------------------


def test_what_is_evicted_is_freed() -> None:
    world = World(FULL, SWA, MAMBA)
    world.tree.actions = (FreeDeviceKV(indices=world.take(1)),)
    evicted = world.slots.evict(EvictParams(num_tokens=3))
    assert (evicted.num_tokens_evicted, evicted.cache_actions) == (2, ())
    assert world.in_use == (0, 0, 0)
    world.tree.actions = ()
    world.slots.make_room(6)
    world.slots.make_room_swa(4)
    world.slots.make_room_states(1)
    assert world.tree.asked == [
        EvictParams(num_tokens=3),
        EvictParams(num_tokens=6),
        EvictParams(swa_num_tokens=4),
        EvictParams(mamba_num=1),
    ]


def test_a_fork_is_a_copy_in_a_slot_of_its_own() -> None:
    world = World(FULL, MAMBA)
    checkpoint = world.take_state()
    fork = world.slots.fork_state(checkpoint)
    assert fork not in {None, checkpoint}
    assert world.copies == [(checkpoint, fork)]
    assert world.tree.asked == []
    assert world.in_use == (0, 2)


def test_a_fork_whose_copy_raises_keeps_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(FULL, MAMBA)
    checkpoint = world.take_state()

    def fail(source: int, target: int) -> None:
        message = f"no copy of {source} to {target}"
        raise RuntimeError(message)

    monkeypatch.setattr(world.slots, "_copy_state", fail)
    with pytest.raises(RuntimeError, match="no copy"):
        world.slots.fork_state(checkpoint)
    assert world.in_use == (0, 1)


def test_a_fork_evicts_a_state_where_no_slot_is_free() -> None:
    world = World(FULL, MAMBA)
    checkpoint, other, _ = (world.take_state() for _ in range(3))
    world.tree.actions = (FreeMambaSlots(slots=(other,)),)
    assert world.slots.fork_state(checkpoint) == other
    assert world.tree.asked == [EvictParams(mamba_num=1)]
    assert world.copies == [(checkpoint, other)]


def test_without_room_there_is_no_fork_and_no_copy() -> None:
    world = World(FULL, MAMBA)
    checkpoint, _, _ = (world.take_state() for _ in range(3))
    assert world.slots.fork_state(checkpoint) is None
    assert world.copies == []


# -- retirement ------------------------------------------------------------------------------------


def test_slots_are_free_at_once_when_no_batch_runs() -> None:
    world = World()
    world.slots.retire(world.take(1))
    assert (world.in_use, world.slots.num_retired) == ((0,), 0)
    world.slots.batch_launched()
    world.slots.batch_retired(1)
    world.slots.retire(world.take(1))
    assert (world.in_use, world.slots.num_retired) == ((0,), 0)


def test_retired_slots_wait_for_the_batches_launched_before() -> None:
    world = World()
    first, second = world.take(1), world.take(2)
    world.slots.batch_launched()
    world.slots.batch_launched()
    world.slots.retire(first)
    world.slots.batch_launched()
    world.slots.retire(second)
    assert (world.in_use, world.slots.num_retired) == ((6,), 6)
    world.slots.batch_retired(1)
    assert world.in_use == (6,)
    world.slots.batch_retired(1)
    assert (world.in_use, world.slots.num_retired) == ((4,), 4)
    world.slots.batch_retired(1)
    assert (world.in_use, world.slots.num_retired) == ((0,), 0)


def test_what_an_insert_frees_waits_for_the_batches_launched_before() -> None:
    world = World()
    taken = world.take(2)
    world.slots.batch_launched()
    due = world.slots.apply_retiring(
        (FreeDeviceKV(indices=taken), BackupKV(node_ids=(NodeId(4), NodeId(5))))
    )
    assert due == [4, 5]
    assert world.slots.available_sizes == (6 * PAGE_SIZE,)
    world.slots.batch_retired(1)
    assert world.slots.available_sizes == (8 * PAGE_SIZE,)


def test_free_does_not_wait() -> None:
    world = World()
    world.slots.batch_launched()
    world.slots.free(world.take(1))
    assert world.in_use == (0,)


def test_every_kind_of_slot_can_be_retired() -> None:
    world = World(FULL, SWA, MAMBA)
    # As an abort has them: the state, the window slots, then the full slots beside them.
    full, swa, state = world.take_full(2), world.take_swa(1), world.take_state()
    world.pair.map_full_to_swa(full[PAGE_SIZE:], swa)
    world.slots.batch_launched()
    world.slots.retire_state(state)
    world.slots.retire_swa(swa)
    world.slots.retire(full)
    assert (world.in_use, world.slots.num_retired) == ((4, 2, 1), 7)
    # What a running batch may read still has its partner.
    assert world.pair.swa_indices(full[PAGE_SIZE:]).tolist() == swa.tolist()
    world.slots.batch_retired(1)
    assert (world.in_use, world.slots.num_retired) == ((0, 0, 0), 0)


def test_every_action_that_frees_can_be_retired() -> None:
    world = World(FULL, SWA, MAMBA)
    actions = (
        FreeDeviceKV(indices=world.take(2)),
        FreeDeviceKVFullOnly(indices=world.take_full(1)),
        FreeSWA(full_indices=world.take(1)),
        FreeMambaSlots(slots=(world.take_state(), world.take_state())),
    )
    world.slots.batch_launched()
    for action in actions:
        world.slots.retire_action(action)
    assert (world.in_use, world.slots.num_retired) == ((8, 6, 2), 4 + 2 + 2 + 2)
    world.slots.batch_retired(1)
    assert (world.in_use, world.slots.num_retired) == ((2, 0, 0), 0)
    # With no batch running it is at once.
    world.slots.retire_action(FreeDeviceKVFullOnly(indices=actions[2].full_indices))
    assert world.in_use == (0, 0, 0)


@pytest.mark.parametrize(
    "action",
    [
        BackupKV(node_ids=(NodeId(1),)),
        MoveSWA(from_full=torch.tensor([0, 1]), to_full=torch.tensor([2, 3])),
    ],
    ids=lambda action: type(action).__name__,
)
def test_what_frees_nothing_cannot_be_retired(action: CacheAction) -> None:
    with pytest.raises(ContractError, match="an action that frees slots"):
        World(FULL, SWA).slots.retire_action(action)


@pytest.mark.parametrize("num_batches", [-1, 2])
def test_batches_that_were_not_launched_cannot_end(num_batches: int) -> None:
    world = World()
    world.slots.batch_launched()
    with pytest.raises(ContractError, match=f"at most 1 batches.*got {num_batches}"):
        world.slots.batch_retired(num_batches)
    world.slots.batch_retired(1)


def test_release_all_ends_every_batch() -> None:
    world = World()
    world.slots.batch_launched()
    world.slots.retire(world.take(1))
    for _ in range(2):
        world.slots.release_all()
        assert (world.in_use, world.slots.num_retired) == ((0,), 0)
    world.slots.retire(world.take(1))
    assert world.in_use == (0,)


# -- left in the middle ----------------------------------------------------------------------------


def interrupted(_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("retiring", [False, True])
def test_what_a_call_was_left_before_is_carried_out_by_the_next(
    monkeypatch: pytest.MonkeyPatch, *, retiring: bool
) -> None:
    world = World(FULL, SWA, MAMBA)
    kept, incoming, other = world.take_full(1), world.take(1), world.take(1)
    actions = (
        FreeMambaSlots(slots=(world.take_state(), world.take_state())),
        MoveSWA(from_full=incoming, to_full=kept),
        FreeDeviceKVFullOnly(indices=incoming),
        FreeDeviceKV(indices=other),
    )
    with monkeypatch.context() as patched:
        patched.setattr(world.pair.full, "free", interrupted)
        with pytest.raises(KeyboardInterrupt):
            (world.slots.apply_retiring if retiring else world.slots.apply)(actions)
    assert world.in_use == (6, 4, 0)
    world.slots.release_all()
    assert world.in_use == (2, 2, 0)
    world.slots.release_all()
    assert world.in_use == (2, 2, 0)


def test_what_is_retired_is_so_until_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    first, second = world.take(1), world.take(2)
    free = world.pool.free
    left: list[torch.Tensor] = []

    def interrupted_once(indices: torch.Tensor) -> None:
        if len(indices) == 2 * PAGE_SIZE and not left:
            left.append(indices)
            raise KeyboardInterrupt
        free(indices)

    monkeypatch.setattr(world.pool, "free", interrupted_once)
    world.slots.batch_launched()
    world.slots.retire(first)
    world.slots.retire(second)
    with pytest.raises(KeyboardInterrupt):
        world.slots.batch_retired(1)
    assert (world.in_use, world.slots.num_retired) == ((4,), 4)
    world.slots.release_all()
    assert (world.in_use, world.slots.num_retired) == ((0,), 0)


def test_what_an_allocator_refuses_is_not_tried_again() -> None:
    world = World()
    slots = world.take(1)
    world.slots.batch_launched()
    world.slots.retire(slots)
    world.slots.retire(slots)
    with pytest.raises(ContractError):
        world.slots.batch_retired(1)
    assert (world.in_use, world.slots.num_retired) == ((0,), 0)
    with pytest.raises(ContractError):
        world.slots.apply((FreeDeviceKV(indices=slots),))
    world.slots.release_all()
    assert world.in_use == (0,)
