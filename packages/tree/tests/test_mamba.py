"""States: of one moment each, at the end of a node; matches end there, requests copy them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from radixlink_contracts import ComponentType
from radixlink_contracts.actions import FreeDeviceKV, FreeMambaSlots
from radixlink_contracts.errors import ContractError
from radixlink_tree import StateRules, UnifiedTreeCore

if TYPE_CHECKING:
    from .conftest import MakeRig
    from .rig import Rig

MAMBA = ComponentType.MAMBA


def slot_of(rig: Rig, *pages: int) -> int | None:
    """The slot of the state where a match of these pages ends."""
    return rig.tree.node(rig.match(*pages).last_device_node).mamba_slot


def with_cap(make_rig: MakeRig, cap: int) -> Rig:
    return make_rig(4, states=StateRules(max_per_path=cap))


@pytest.mark.parametrize("rules", [{"chunk_tokens": 0}, {"max_per_path": 0}])
def test_rules_of_no_tokens_or_states_are_refused(rules: dict[str, int]) -> None:
    with pytest.raises(ContractError, match="numbers of at least 1"):
        StateRules(**rules)


def test_tree_with_states_says_so() -> None:
    both = UnifiedTreeCore(page_size=4, sliding_window=4, states=StateRules())
    assert both.components == tuple(ComponentType)
    assert UnifiedTreeCore(page_size=4, states=StateRules()).components == (
        ComponentType.FULL,
        MAMBA,
    )


# -- where a match ends ----------------------------------------------------------------------------


def test_match_ends_at_the_deepest_state(mamba_rig: Rig) -> None:
    rig = mamba_rig
    rig.insert(1)
    rig.insert(1, 2, 3, matched=1)
    rig.insert(1, 2, 3, 4, 5, matched=3, state=False)
    found = rig.match(1, 2, 3, 4, 5, 6)
    assert found.full_kv_hit_length == 5 * rig.page_size
    assert found.device_prefix_len == 3 * rig.page_size
    assert rig.matched_pages(1, 2) == 1


def test_state_beyond_what_full_attention_has_of_a_sequence_is_no_match(mamba_rig: Rig) -> None:
    rig = mamba_rig
    rig.insert(1, 2, 3, 4, 5)
    found = rig.match(1, 2, 3, 9, 9)
    assert (found.full_kv_hit_length, found.device_prefix_len) == (3 * rig.page_size, 0)


def test_split_leaves_the_state_with_the_lower_half(mamba_rig: Rig) -> None:
    rig = mamba_rig
    end = rig.leaf(1, 2, 3)
    slot = rig.tree.node(end).mamba_slot
    receipt = rig.lock(end)
    upper = rig.path(end)[0].node_id if rig.match(1, 9).full_kv_hit_length else None
    assert upper is not None
    assert rig.tree.node(upper).mamba_slot is None
    assert rig.tree.node(end).mamba_slot == slot
    assert rig.matched_pages(1, 2, 3) == 3
    assert rig.sizes_of(MAMBA) == (0, 1)
    rig.unlock(receipt)
    assert rig.sizes_of(MAMBA) == (1, 0)


def test_state_at_the_split_makes_a_boundary_of_it(mamba_rig: Rig) -> None:
    rig = mamba_rig
    rig.insert(1, 2, 3)
    found = rig.match(1, 2, 9)
    assert found.branching_len == 2 * rig.page_size
    # The engine takes a state there when it next computes past it.
    result = rig.insert(1, 2, track=True)
    assert not result.mamba_exist
    assert result.adopted_ranges is not None
    end = 2 * rig.page_size
    assert result.adopted_ranges.ranges(MAMBA) == ((end - 1, end),)
    found = rig.match(1, 2, 9)
    assert (found.device_prefix_len, found.branching_len) == (2 * rig.page_size, 0)
    assert rig.matched_pages(1, 2, 3) == 3


@pytest.mark.parametrize(
    ("page_size", "chunk", "full", "expected"),
    [(96, 64, 288, 192), (32, 64, 160, 128), (32, 64, 32, 0), (1, 1, 5, 5), (4, 6, 12, 12)],
)
def test_branching_point_is_on_the_grid_of_chunks_and_pages(
    make_rig: MakeRig, page_size: int, chunk: int, full: int, expected: int
) -> None:
    rig = make_rig(page_size, states=StateRules(chunk_tokens=chunk))
    rig.insert(*range(full // page_size), state=False)
    found = rig.match(*range(full // page_size))
    assert (found.full_kv_hit_length, found.device_prefix_len) == (full, 0)
    assert found.branching_len == expected


def test_branching_point_is_beyond_the_state_that_is_there(make_rig: MakeRig) -> None:
    rig = make_rig(4, states=StateRules(chunk_tokens=8))
    rig.insert(1, 2)
    rig.insert(1, 2, 3, matched=2, state=False)
    found = rig.match(1, 2, 3)
    assert (found.device_prefix_len, found.branching_len) == (8, 0)
    rig.insert(1, 2, 3, 4, matched=2, state=False)
    assert rig.match(1, 2, 3, 4).branching_len == 16


# -- what is inserted ------------------------------------------------------------------------------


def test_second_state_of_a_prefix_stays_the_callers(mamba_rig: Rig) -> None:
    rig = mamba_rig
    first = rig.insert(1, 2)
    slot = slot_of(rig, 1, 2)
    second = rig.insert(1, 2, track=True)
    assert [first.mamba_exist, second.mamba_exist] == [False, True]
    assert second.adopted_ranges is not None
    assert second.adopted_ranges.ranges(MAMBA) == ()
    assert slot_of(rig, 1, 2) == slot
    assert rig.sizes_of(MAMBA) == (1, 0)


def test_insert_without_a_state_says_whether_one_is_there(mamba_rig: Rig) -> None:
    rig = mamba_rig
    assert not rig.insert(1, 2, state=False).mamba_exist
    rig.insert(1, 2)
    assert rig.insert(1, 2, state=False).mamba_exist


def test_state_of_nothing_stays_the_callers(mamba_rig: Rig) -> None:
    assert mamba_rig.insert(state=True).mamba_exist
    assert mamba_rig.sizes_of(MAMBA) == (0, 0)


# -- locks -----------------------------------------------------------------------------------------


def test_lock_takes_the_state_of_its_own_node_alone(mamba_rig: Rig) -> None:
    rig = mamba_rig
    rig.insert(1)
    rig.insert(1, 2, matched=1)
    receipt = rig.lock(rig.match(1, 2).last_device_node)
    assert receipt.mamba_locked
    assert rig.sizes_of(MAMBA) == (1, 1)
    rig.evict(100, states=100)
    assert [rig.matched_pages(1), rig.matched_pages(1, 2)] == [0, 2]
    rig.unlock(receipt)
    assert rig.sizes_of(MAMBA) == (1, 0)


def test_state_that_comes_to_a_locked_node_is_not_locked(mamba_rig: Rig) -> None:
    rig = mamba_rig
    end = rig.insert(1, 2, state=False).last_device_node
    before = rig.lock(end)
    assert not before.mamba_locked
    rig.insert(1, 2)
    assert rig.sizes_of(MAMBA) == (1, 0)
    after = rig.lock(end)
    assert rig.sizes_of(MAMBA) == (0, 1)
    rig.unlock(before)
    assert rig.sizes_of(MAMBA) == (0, 1)
    rig.unlock(after)
    assert rig.sizes_of(MAMBA) == (1, 0)


def test_state_is_locked_until_each_of_its_receipts_is_back(mamba_rig: Rig) -> None:
    rig = mamba_rig
    end = rig.leaf(1)
    first, second = rig.lock(end), rig.lock(end)
    third = rig.lock(end, MAMBA)
    assert not third.mamba_locked
    first = rig.move_on(first)
    assert not first.mamba_locked
    assert rig.sizes_of(MAMBA) == (0, 1)
    rig.unlock(first)
    rig.unlock(third)
    assert rig.sizes_of(MAMBA) == (0, 1)
    second = rig.move_on(second)
    assert rig.sizes_of(MAMBA) == (1, 0)
    assert rig.sizes == (0, 1)
    rig.unlock(second)


# -- eviction --------------------------------------------------------------------------------------


def test_state_of_an_inner_node_goes_alone(mamba_rig: Rig) -> None:
    rig = mamba_rig
    inner = rig.leaf(1)
    slot = rig.tree.node(inner).mamba_slot
    rig.insert(1, 2, matched=1)
    result = rig.evict(states=1)
    assert (result.num_tokens_evicted, result.mamba_num_evicted) == (0, 1)
    (free,) = result.cache_actions
    assert isinstance(free, FreeMambaSlots)
    assert free.slots == (slot,)
    assert [rig.matched_pages(1), rig.matched_pages(1, 2)] == [0, 2]


def test_state_of_an_unlocked_leaf_goes_with_the_leaf(mamba_rig: Rig) -> None:
    rig = mamba_rig
    rig.insert(1)
    rig.insert(2)
    result = rig.evict(states=1)
    assert (result.num_tokens_evicted, result.mamba_num_evicted) == (rig.page_size, 1)
    assert [type(action) for action in result.cache_actions] == [FreeDeviceKV, FreeMambaSlots]
    assert [rig.full_pages(1), rig.matched_pages(2)] == [0, 1]


def test_state_of_a_locked_leaf_that_skips_it_goes_alone(mamba_rig: Rig) -> None:
    rig = mamba_rig
    receipt = rig.lock(rig.leaf(1), MAMBA)
    assert rig.evict(states=1).num_tokens_evicted == 0
    assert [rig.full_pages(1), rig.matched_pages(1)] == [1, 0]
    rig.unlock(receipt)


def test_without_states_nothing_matches_although_full_attention_is_there(mamba_rig: Rig) -> None:
    rig = mamba_rig
    rig.insert(1)
    receipt = rig.lock(rig.leaf(1, 2), MAMBA)
    assert rig.evict(states=100).mamba_num_evicted == 2
    found = rig.match(1, 2)
    assert (found.device_prefix_len, found.last_device_node) == (0, rig.tree.root)
    assert found.full_kv_hit_length == found.branching_len == 2 * rig.page_size
    rig.unlock(receipt)


def test_eviction_of_full_attention_counts_the_states_that_go_with_it(mamba_rig: Rig) -> None:
    rig = mamba_rig
    rig.insert(1)
    rig.insert(2)
    rig.insert(3)
    result = rig.evict(2, states=2)
    assert (result.num_tokens_evicted, result.mamba_num_evicted) == (2 * rig.page_size, 2)
    assert rig.sizes_of(MAMBA) == (1, 0)


def test_state_used_longest_ago_goes_first(mamba_rig: Rig) -> None:
    rig = mamba_rig
    for first in (1, 2, 3, 4):
        rig.insert(first)
    rig.match(1)
    rig.insert(2)
    rig.unlock(rig.lock(rig.match(3).last_device_node))
    gone: list[int] = []
    while len(gone) < 4:
        rig.evict(states=1)
        left = {node.tokens[0] for node in rig.tree._nodes.values() if node.tokens}
        gone += [first for first in (1, 2, 3, 4) if first not in left and first not in gone]
    assert gone == [4, 1, 2, 3]


def test_match_that_ends_above_uses_the_state_it_ends_at_alone(mamba_rig: Rig) -> None:
    rig = mamba_rig
    rig.insert(1)
    rig.insert(1, 2, matched=1)
    rig.insert(3)
    rig.match(1, 9)
    # 1-2 was used before 3, and 1 after it.
    assert rig.evict(states=1).num_tokens_evicted == rig.page_size
    assert [rig.full_pages(1, 2), rig.full_pages(3)] == [1, 1]
    assert rig.sizes_of(MAMBA) == (2, 0)


# -- the cap of a path -----------------------------------------------------------------------------


def test_path_keeps_so_many_states_and_gives_up_the_shallowest(make_rig: MakeRig) -> None:
    rig = with_cap(make_rig, 2)
    freed: list[tuple[int, ...]] = []
    slots = []
    for length in range(1, 6):
        result = rig.insert(*range(length), matched=max(0, length - 1))
        slots.append(rig.tree.node(result.last_device_node).mamba_slot)
        freed += [
            action.slots for action in result.cache_actions if isinstance(action, FreeMambaSlots)
        ]
    assert rig.picture(rig.match(*range(5)).last_device_node) == "1|1|1|1*|1*"
    assert freed == [(slots[0],), (slots[1],), (slots[2],)]


def test_fork_and_locked_state_are_kept_over_the_cap(make_rig: MakeRig) -> None:
    rig = with_cap(make_rig, 1)
    fork = rig.leaf(0)
    rig.insert(0, 9, state=False)
    locked = rig.lock(rig.leaf(0, 1, matched=1))
    rig.insert(0, 1, 2, matched=2)
    end = rig.leaf(0, 1, 2, 3, matched=3)
    assert rig.picture(end) == "1*|1*|1|1*"
    assert rig.path(end)[0].node_id == fork
    rig.unlock(locked)
    # Only a new state looks at the cap again.
    end = rig.leaf(0, 1, 2, 3, 4, matched=4)
    assert rig.picture(end) == "1*|1|1|1|1*"


def test_new_state_is_never_the_one_that_goes(make_rig: MakeRig) -> None:
    rig = with_cap(make_rig, 1)
    end = rig.leaf(0, 1, 2)
    result = rig.insert(0, 1)
    assert not result.mamba_exist
    assert rig.picture(end) == "2*|1*"
    assert rig.matched_pages(0, 1) == 2
