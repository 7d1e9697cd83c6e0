"""What is hot: stored, used again long after the store used it; a touch follows splits and evictions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from radixlink_contracts import ComponentType, InsertOrigin, OperationId
from radixlink_contracts.errors import ContractError, InvalidTransitionError, StaleHandleError
from radixlink_tree import StateRules, check_invariants

from .rig import Rig

if TYPE_CHECKING:
    from radixlink_contracts import NodeId

TOUCH = OperationId(7)
AFTER = 4


@pytest.fixture
def rig() -> Rig:
    """A tree of full pages, whose linker touches what was not used in the store for four uses."""
    rig = Rig(2)
    rig.tree.attach_linker(backup_threshold=1, touch_after=AFTER)
    return rig


def store(rig: Rig, node_id: NodeId, op: int = 1000) -> None:
    """Offload a node, with success."""
    rig.tree.mark_offload_pending(node_id, OperationId(op))
    rig.tree.finish_offload(OperationId(op), stored=True)


def use(rig: Rig, times: int) -> None:
    """Use the tree, and nothing in it."""
    for _ in range(times):
        rig.match(99)


def held_stored(rig: Rig, node_id: NodeId) -> tuple[ComponentType, ...]:
    """What a node holds that is stored."""
    node = rig.tree.node(node_id)
    held = {ComponentType.FULL: True, ComponentType.SWA: node.has_swa}
    held[ComponentType.MAMBA] = node.mamba_slot is not None
    return tuple(kind for kind, there in held.items() if there and kind not in node.unstored)


def hot(rig: Rig, *pages: int) -> tuple[NodeId, ...]:
    """What another insert of these names."""
    return rig.insert(*pages).hot_nodes


def test_what_was_stored_lately_is_not_hot(rig: Rig) -> None:
    end = rig.leaf(1, 2)
    store(rig, end)
    # The insert is the third use since.
    use(rig, AFTER - 2)
    assert hot(rig, 1, 2) == ()
    assert hot(rig, 1, 2) == (end,)


def test_what_is_hot_is_named_root_first_and_only_where_it_is_stored(rig: Rig) -> None:
    head = rig.leaf(1)
    middle = rig.leaf(1, 2)
    rig.leaf(1, 2, 3)
    store(rig, head, 1000)
    store(rig, middle, 1001)
    use(rig, AFTER)
    assert hot(rig, 1, 2, 3) == (head, middle)
    assert hot(rig, 5) == ()


def test_a_match_makes_nothing_hot_and_an_insert_does_until_it_is_touched(rig: Rig) -> None:
    end = rig.leaf(1)
    store(rig, end)
    for _ in range(2 * AFTER):
        rig.match(1)
    assert hot(rig, 1) == (end,)
    rig.tree.mark_touch_pending(end, TOUCH)
    assert hot(rig, 1) == ()
    rig.tree.finish_touch(TOUCH, present=True)
    assert hot(rig, 1) == ()
    use(rig, AFTER)
    assert hot(rig, 1) == (end,)


def test_restored_pages_count_as_used_and_a_restore_names_nothing(rig: Rig) -> None:
    head = rig.leaf(1)
    store(rig, head)
    use(rig, AFTER)
    result = rig.insert(1, 2, matched=1, origin=InsertOrigin.RESTORED)
    assert result.hot_nodes == ()
    assert hot(rig, 1, 2) == (head,)
    use(rig, AFTER)
    assert hot(rig, 1, 2) == (head, result.last_device_node)


@pytest.mark.parametrize("restored", [False, True])
def test_a_part_that_is_stored_alone_makes_nothing_else_of_its_node_used(*, restored: bool) -> None:
    """A state that comes late; a load that brings the pages without the state that is stored too."""
    rig = Rig(2, states=StateRules())
    rig.tree.attach_linker(backup_threshold=1, touch_after=AFTER)
    end = rig.insert(1, 2, state=restored).last_device_node
    store(rig, end)
    use(rig, AFTER)
    if restored:
        rig.insert(1, 2, state=False, origin=InsertOrigin.RESTORED)
        assert held_stored(rig, end) == (ComponentType.FULL, ComponentType.MAMBA)
    else:
        rig.insert(1, 2)
        assert rig.tree.node(end).unstored == (ComponentType.MAMBA,)
        store(rig, end)
    assert hot(rig, 1, 2) == (end,)


def test_a_failed_touch_leaves_the_node_unstored_so_that_it_is_offered_again(rig: Rig) -> None:
    end = rig.leaf(1, 2)
    store(rig, end)
    rig.offered.clear()
    rig.tree.mark_touch_pending(end, TOUCH)
    rig.tree.finish_touch(TOUCH, present=False)
    assert not rig.tree.node(end).stored
    rig.insert(1, 2)
    assert list(rig.offered) == [end]


@pytest.mark.parametrize("present", [False, True])
def test_both_halves_of_a_split_follow_their_touch(rig: Rig, *, present: bool) -> None:
    lower = rig.leaf(1, 2)
    store(rig, lower)
    rig.tree.mark_touch_pending(lower, TOUCH)
    upper = rig.match(1).last_device_node
    assert upper != lower
    check_invariants(rig.tree)
    use(rig, AFTER)
    assert hot(rig, 1, 2) == ()
    rig.tree.finish_touch(TOUCH, present=present)
    check_invariants(rig.tree)
    assert [rig.tree.node(node).stored for node in (upper, lower)] == [present, present]


def test_a_touch_of_what_was_evicted_since_says_nothing(rig: Rig) -> None:
    end = rig.leaf(1, 2)
    store(rig, end)
    rig.tree.mark_touch_pending(end, TOUCH)
    # A touch locks nothing.
    rig.evict(2)
    with pytest.raises(StaleHandleError):
        rig.tree.node(end)
    again = rig.leaf(1, 2)
    store(rig, again)
    rig.tree.finish_touch(TOUCH, present=False)
    check_invariants(rig.tree)
    assert rig.tree.node(again).stored


def test_what_is_offloaded_meanwhile_is_not_what_is_touched() -> None:
    rig = Rig(2, window=4)
    rig.tree.attach_linker(backup_threshold=1, touch_after=AFTER)
    end = rig.insert(1, 2, floor=2).last_device_node
    store(rig, end)
    assert held_stored(rig, end) == (ComponentType.FULL,)
    rig.tree.mark_touch_pending(end, TOUCH)
    # A window came to it, and is stored for itself.
    rig.insert(1, 2)
    assert rig.tree.node(end).unstored == (ComponentType.SWA,)
    store(rig, end)
    check_invariants(rig.tree)
    rig.tree.finish_touch(TOUCH, present=False)
    check_invariants(rig.tree)
    assert held_stored(rig, end) == (ComponentType.SWA,)


def test_a_state_stays_with_the_lower_half_of_a_touch() -> None:
    rig = Rig(2, states=StateRules())
    rig.tree.attach_linker(backup_threshold=1, touch_after=AFTER)
    lower = rig.leaf(1, 2)
    store(rig, lower)
    kinds = (ComponentType.FULL, ComponentType.MAMBA)
    assert held_stored(rig, lower) == kinds
    rig.tree.mark_touch_pending(lower, TOUCH)
    # Another sequence leaves in the middle, where there is no state.
    rig.leaf(1, 3)
    assert rig.tree.node(lower).num_tokens == 2
    check_invariants(rig.tree)
    rig.tree.finish_touch(TOUCH, present=False)
    check_invariants(rig.tree)
    assert held_stored(rig, lower) == ()
    assert rig.tree.node(lower).unstored == kinds


def test_without_a_linker_that_touches_nothing_is_hot() -> None:
    rig = Rig(2)
    rig.tree.attach_linker(backup_threshold=1)
    end = rig.leaf(1)
    store(rig, end)
    use(rig, 100)
    assert hot(rig, 1) == ()


def test_detach_and_reset_drop_touches(rig: Rig) -> None:
    end = rig.leaf(1)
    store(rig, end)
    rig.tree.mark_touch_pending(end, TOUCH)
    rig.tree.detach_linker()
    check_invariants(rig.tree)
    rig.tree.attach_linker(backup_threshold=1, touch_after=AFTER)
    assert not rig.tree.node(end).stored
    store(rig, end)
    rig.tree.mark_touch_pending(end, TOUCH)
    rig.apply(rig.tree.reset())
    with pytest.raises(InvalidTransitionError):
        rig.tree.finish_touch(TOUCH, present=True)


def test_what_cannot_be_touched_is_refused(rig: Rig) -> None:
    end = rig.leaf(1)
    with pytest.raises(InvalidTransitionError, match="got it unstored"):
        rig.tree.mark_touch_pending(end, TOUCH)
    store(rig, end)
    rig.tree.mark_touch_pending(end, TOUCH)
    with pytest.raises(InvalidTransitionError, match=f"touched by {TOUCH}"):
        rig.tree.mark_touch_pending(end, OperationId(8))
    with pytest.raises(InvalidTransitionError, match="operation 8"):
        rig.tree.finish_touch(OperationId(8), present=True)
    with pytest.raises(ContractError, match="touch_after of at least 1, or None, got 0"):
        Rig(2).tree.attach_linker(backup_threshold=1, touch_after=0)
