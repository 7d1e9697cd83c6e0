"""What of a node is stored, on its way or neither: each component for itself, and after splits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from radixlink_contracts import ComponentType, InsertOrigin, OperationId
from radixlink_tree import StateRules

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import NodeId

    from .conftest import MakeRig
    from .rig import Rig

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA


@pytest.fixture
def both(make_rig: MakeRig) -> Rig:
    """Windows of two pages and states, and a linker that wants everything."""
    return linked(make_rig(4, window=8, states=StateRules()))


def linked(rig: Rig) -> Rig:
    rig.tree.attach_linker(backup_threshold=1)
    return rig


def offers(rig: Rig) -> list[NodeId]:
    """What was offered since the last question."""
    offered = list(rig.offered)
    rig.offered.clear()
    return offered


def store(rig: Rig, node_id: NodeId, operation: int = 1000) -> None:
    rig.tree.mark_offload_pending(node_id, OperationId(operation))
    rig.tree.finish_offload(OperationId(operation), stored=True)


def unstored(rig: Rig, *node_ids: NodeId) -> list[tuple[ComponentType, ...]]:
    return [rig.tree.node(node_id).unstored for node_id in node_ids]


def pending(rig: Rig, *node_ids: NodeId) -> list[OperationId | None]:
    return [rig.tree.node(node_id).pending_operation for node_id in node_ids]


# -- what is offered -------------------------------------------------------------------------------


def test_path_is_offered_from_the_top(any_rig: Rig) -> None:
    rig = any_rig
    nodes = [rig.leaf(1), rig.leaf(1, 2), rig.leaf(1, 2, 3)]
    linked(rig).insert(1, 2, 3)
    assert offers(rig) == nodes


def test_what_is_stored_or_on_its_way_is_not_offered_again(any_rig: Rig) -> None:
    rig = linked(any_rig)
    top, mid, leaf = rig.leaf(1), rig.leaf(1, 2), rig.leaf(1, 2, 3)
    store(rig, top)
    rig.tree.mark_offload_pending(mid, OperationId(1))
    offers(rig)
    rig.insert(1, 2, 3)
    assert offers(rig) == [leaf]


def test_both_sides_of_a_floor_are_offered_the_upper_first(swa_rig: Rig) -> None:
    rig = linked(swa_rig)
    end = rig.insert(1, 2, 3, floor=2).last_device_node
    upper, lower = (node.node_id for node in rig.path(end))
    assert offers(rig) == [upper, lower]
    assert SWA not in rig.tree.node(upper).unstored
    assert SWA in rig.tree.node(lower).unstored


def test_state_that_appears_on_a_stored_node_is_offered_for_itself(mamba_rig: Rig) -> None:
    rig = linked(mamba_rig)
    end = rig.insert(1, state=False).last_device_node
    store(rig, end)
    offers(rig)
    rig.insert(1)
    assert offers(rig) == [end]
    assert unstored(rig, end) == [(MAMBA,)]
    store(rig, end)
    rig.insert(1)
    assert offers(rig) == []


def test_state_at_the_split_of_a_stored_node_is_offered_for_itself(mamba_rig: Rig) -> None:
    rig = linked(mamba_rig)
    end = rig.leaf(1, 2, 3)
    for number, node in enumerate(rig.path(end)):
        store(rig, node.node_id, number)
    offers(rig)
    upper = rig.insert(1).last_device_node
    assert offers(rig) == [upper]
    assert unstored(rig, upper, end) == [(MAMBA,), ()]


def test_window_that_comes_back_to_a_stored_node_is_offered_for_itself(swa_rig: Rig) -> None:
    rig = linked(swa_rig)
    end = rig.insert(1, floor=1).last_device_node
    store(rig, end)
    offers(rig)
    rig.insert(1)
    assert offers(rig) == [end]
    assert unstored(rig, end) == [(SWA,)]


def test_window_and_state_that_were_stored_come_back_stored(both: Rig) -> None:
    end = both.leaf(1, 2)
    store(both, end)
    receipt = both.move_on(both.lock(end))
    both.evict(windows=2)
    assert both.picture(end) == "2-"
    offers(both)
    both.insert(1, 2)
    assert both.picture(end) == "2*"
    assert offers(both) == []
    assert unstored(both, end) == [()]
    both.unlock(receipt)


# -- offloads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [True, False])
def test_split_does_not_lose_a_part_of_an_offload(any_rig: Rig, stored: bool) -> None:  # noqa: FBT001
    rig = linked(any_rig)
    end = rig.leaf(*range(6))
    offload = OperationId(1)
    receipt = rig.lock(end)
    node = rig.path(end)[-1]
    pages = node.num_tokens // rig.page_size
    rig.tree.mark_offload_pending(end, offload)
    cuts = range(6 - pages + 1, 6)
    parts = [rig.insert(*range(cut), 50 + cut, matched=0, state=False) for cut in cuts]
    halves = [node.node_id for node in rig.path(end)[-1 - len(parts) :]]
    assert pending(rig, *halves) == [offload] * len(halves)
    # Each half is locked as the whole was.
    rig.evict(100)
    assert rig.full_pages(*range(6)) == 6
    rig.tree.finish_offload(offload, stored=stored)
    assert pending(rig, *halves) == [None] * len(halves)
    lacks = [rig.tree.node(half).stored for half in halves]
    assert lacks == [stored] * len(halves)
    rig.unlock(receipt)
    assert rig.sizes[1] == 0


def test_offload_of_a_state_alone_stays_with_the_lower_half(mamba_rig: Rig) -> None:
    rig = linked(mamba_rig)
    end = rig.insert(1, 2, 3, state=False).last_device_node
    for number, node in enumerate(rig.path(end)):
        store(rig, node.node_id, number)
    rig.insert(1, 2, 3)
    rig.tree.mark_offload_pending(end, OperationId(50))
    rig.match(1)
    rig.match(1, 2)
    *above, last = (node.node_id for node in rig.path(end))
    assert last == end
    assert pending(rig, *above) == [None] * len(above)
    assert pending(rig, end) == [OperationId(50)]
    # So what comes to the upper half meanwhile can be offloaded at once.
    upper = rig.insert(1).last_device_node
    rig.tree.mark_offload_pending(upper, OperationId(51))
    rig.tree.finish_offload(OperationId(50), stored=True)
    assert pending(rig, upper, end) == [OperationId(51), None]
    rig.tree.finish_offload(OperationId(51), stored=False)
    assert unstored(rig, upper, end) == [(MAMBA,), ()]


def test_what_comes_to_a_node_during_its_offload_is_not_part_of_it(both: Rig) -> None:
    end = both.insert(1, 2, floor=2, state=False).last_device_node
    both.tree.mark_offload_pending(end, OperationId(1))
    both.insert(1, 2)
    assert both.picture(end) == "2*"
    both.tree.finish_offload(OperationId(1), stored=True)
    assert unstored(both, end) == [(SWA, MAMBA)]
    offers(both)
    both.insert(1, 2)
    assert offers(both) == [end]


def test_failure_leaves_what_was_stored_before(both: Rig) -> None:
    end = both.insert(1, 2, state=False).last_device_node
    store(both, end)
    both.insert(1, 2)
    both.tree.mark_offload_pending(end, OperationId(1))
    both.tree.finish_offload(OperationId(1), stored=False)
    assert unstored(both, end) == [(MAMBA,)]


def test_offload_that_failed_is_never_stored_by_eviction(both: Rig) -> None:
    end = both.leaf(1)
    both.tree.mark_offload_pending(end, OperationId(1))
    both.tree.finish_offload(OperationId(1), stored=False)
    both.evict(1)
    again = both.leaf(1)
    assert unstored(both, again) == [(FULL, SWA, MAMBA)]


# -- what a load restored --------------------------------------------------------------------------


def test_restored_windows_and_state_are_stored(both: Rig) -> None:
    end = both.insert(1, 2, 3, floor=1, origin=InsertOrigin.RESTORED).last_device_node
    assert both.picture(end) == "1-|2*"
    assert offers(both) == []
    upper, lower = (node.node_id for node in both.path(end))
    assert unstored(both, upper, lower) == [(), ()]
    # The load brought no window of the first page: one that is computed later is offered.
    both.insert(1)
    assert offers(both) == [upper]
    assert unstored(both, upper) == [(SWA, MAMBA)]


def test_restore_says_nothing_of_a_window_that_it_did_not_bring(both: Rig) -> None:
    end = both.insert(1, 2, state=False).last_device_node
    both.insert(1, 2, floor=2, origin=InsertOrigin.RESTORED, state=False)
    assert unstored(both, end) == [(SWA,)]


def test_restore_says_nothing_of_a_state_that_it_did_not_bring(both: Rig) -> None:
    end = both.leaf(1, 2)
    both.insert(1, 2, origin=InsertOrigin.RESTORED, state=False)
    assert unstored(both, end) == [(MAMBA,)]


def test_restored_state_that_was_there_is_stored(both: Rig) -> None:
    end = both.leaf(1, 2)
    assert both.insert(1, 2, origin=InsertOrigin.RESTORED).mamba_exist
    assert unstored(both, end) == [()]


# -- the digest ------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Rig], object]] = {
    "leaf with a window": lambda rig: rig.insert(7, state=False),
    "leaf without": lambda rig: rig.insert(7, floor=1, state=False),
    "leaf with a state": lambda rig: rig.insert(7),
    "leaf with a state and no window": lambda rig: rig.insert(7, floor=1),
    "window gone": lambda rig: rig.evict(windows=1),
    "state gone": lambda rig: rig.evict(states=1),
    "window back": lambda rig: rig.insert(5, state=False),
    "state back": lambda rig: rig.insert(5, floor=1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_digest_moves_with_windows_and_states_and_alike_on_replicas(
    make_rig: MakeRig, change: Callable[[Rig], object]
) -> None:
    first, second = replicas(make_rig)
    before = first.tree.mutation_digest
    assert before == second.tree.mutation_digest
    change(first)
    assert first.tree.mutation_digest != before
    change(second)
    assert first.tree.mutation_digest == second.tree.mutation_digest


def test_any_two_changes_make_different_digests(make_rig: MakeRig) -> None:
    digests = set()
    for change in CHANGES.values():
        rig, _ = replicas(make_rig)
        change(rig)
        digests.add(rig.tree.mutation_digest)
    assert len(digests) == len(CHANGES)


def replicas(make_rig: MakeRig) -> tuple[Rig, Rig]:
    """Two trees that made the same calls: an inner node, a leaf, and a tombstone."""
    first, second = (linked(make_rig(4, window=8, states=StateRules())) for _ in range(2))
    for rig in (first, second):
        rig.insert(1, 2)
        rig.insert(1, 2, 3, matched=2)
        rig.insert(5, floor=1, state=False)
    return first, second
