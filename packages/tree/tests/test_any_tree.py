"""What holds of every tree, whatever its nodes hold beside full attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from radixlink_contracts import ComponentType
from radixlink_contracts.errors import StaleHandleError

if TYPE_CHECKING:
    from .rig import Rig

# -- match and insert ------------------------------------------------------------------------------


def test_longer_insert_reports_what_was_there(any_rig: Rig) -> None:
    rig = any_rig
    assert rig.insert(1, 2).prefix_len == 0
    longer = rig.insert(1, 2, 3)
    assert (longer.prefix_len, longer.total_len) == (2 * rig.page_size, 3 * rig.page_size)
    found = rig.match(1, 2, 3)
    assert found.device_prefix_len == found.full_kv_hit_length == 3 * rig.page_size
    assert found.last_device_node == longer.last_device_node
    assert found.branching_len == 0
    assert [rig.matched_pages(1, 2, 9), rig.matched_pages(8, 9)] == [2, 0]


def test_branches_share_their_base(any_rig: Rig) -> None:
    rig = any_rig
    base = rig.leaf(1, 2)
    first, second = rig.insert(1, 2, 3, 4), rig.insert(1, 2, 5, 6)
    assert first.prefix_len == second.prefix_len == 2 * rig.page_size
    assert [rig.matched_pages(1, 2, *rest) for rest in ((3, 4), (5, 6), (9,))] == [4, 4, 2]
    shared = rig.path_pages(base)
    assert rig.path_pages(first.last_device_node)[:2] == shared
    assert rig.path_pages(second.last_device_node)[:2] == shared


@pytest.mark.parametrize("short_by", [0, 1])
def test_key_shorter_than_a_page_matches_nothing_and_inserts_nothing(
    any_rig: Rig, short_by: int
) -> None:
    rig, tail = any_rig, any_rig.page_size - 1 if short_by else 0
    rig.insert(1, 2)
    sizes = [rig.sizes_of(kind) for kind in ComponentType]
    found = rig.match(tail=tail)
    assert (found.device_prefix_len, found.last_device_node) == (0, rig.tree.root)
    inserted = rig.insert(tail=tail)
    assert (inserted.prefix_len, inserted.total_len) == (0, 0)
    assert (inserted.last_device_node, inserted.cache_actions) == (rig.tree.root, ())
    assert inserted.mamba_exist == rig.has_states
    assert [rig.sizes_of(kind) for kind in ComponentType] == sizes


def test_tail_of_a_page_does_not_match(any_rig: Rig) -> None:
    any_rig.insert(1, 2)
    any_rig.insert(1, 2, 3)
    found = any_rig.match(1, 2, tail=any_rig.page_size - 1)
    assert found.device_prefix_len == found.full_kv_hit_length == 2 * any_rig.page_size


@pytest.mark.parametrize(("pages", "shared"), [((1, 9, 9), 1), ((9, 2, 3), 0)])
def test_match_ends_before_the_page_that_differs(
    any_rig: Rig, pages: tuple[int, ...], shared: int
) -> None:
    rig = any_rig
    rig.insert(1, 2, 3)
    found = rig.match(*pages)
    assert found.full_kv_hit_length == shared * rig.page_size
    # The state is at the end of the third page.
    expected = 0 if rig.has_states else shared * rig.page_size
    assert found.device_prefix_len == expected


def test_hundred_matches_allocate_nothing_and_change_nothing(any_rig: Rig) -> None:
    rig = any_rig
    rig.insert(1, 2, 3)
    rig.insert(1, 5)
    first = rig.match(1, 2, 9)
    pools = rig.pools
    before = [list(pools.free_pages), list(pools.free_windows), list(pools.free_states)]
    nodes = list(rig.tree._nodes)
    for _ in range(100):
        assert rig.match(1, 2, 9) == first
    assert [list(pools.free_pages), list(pools.free_windows), list(pools.free_states)] == before
    assert list(rig.tree._nodes) == nodes


def test_same_pages_from_two_requests_are_one_set_of_slots(any_rig: Rig) -> None:
    rig = any_rig
    canonical = rig.path_pages(rig.leaf(1, 2, 3))
    assert rig.path_pages(rig.leaf(1, 2, 3)) == canonical
    # The pools' check says that all other slots are free, each once.
    assert len(rig.free_pages) == rig.num_pages - 3


def test_output_behind_a_prompt_goes_alone(any_rig: Rig) -> None:
    rig = any_rig
    end = rig.insert(1, 2, 3, 4, prompt=3).last_device_node
    assert rig.tree.node(end).num_tokens == rig.page_size
    assert rig.evict(1).num_tokens_evicted == rig.page_size
    assert rig.full_pages(1, 2, 3, 4) == 3


def test_prompt_that_ends_inside_a_page_is_cut_before_it(any_rig: Rig) -> None:
    rig = any_rig
    rig.insert(1, 2, 3, prompt=3)
    rig.evict(100)
    tokens = 2 * rig.page_size + (rig.page_size > 1)
    key = rig.key(1, 2, 3)
    rig.tree.insert(params := rig.params(key, prompt_len=tokens))
    assert params.prompt_len == tokens
    assert rig.picture(rig.match(1, 2, 3).last_device_node).split("|")[-1].startswith("1")


# -- eviction and locks ----------------------------------------------------------------------------


def test_evict_of_an_empty_tree_gives_up_nothing(any_rig: Rig) -> None:
    rig = any_rig
    result = rig.evict(5, windows=5 * bool(rig.window_pages), states=5 * rig.has_states)
    assert result.num_tokens_evicted == 0
    assert (result.swa_num_tokens_evicted, result.mamba_num_evicted) == (0, 0)
    assert result.cache_actions == ()


def test_evict_takes_the_unlocked_sequence_alone(any_rig: Rig) -> None:
    rig = any_rig
    receipt, other = rig.lock(rig.leaf(1, 2)), rig.leaf(3, 4)
    assert rig.evict(100).num_tokens_evicted == 2 * rig.page_size
    assert [rig.matched_pages(1, 2), rig.matched_pages(3, 4)] == [2, 0]
    with pytest.raises(StaleHandleError):
        rig.lock(other)
    rig.unlock(receipt)
    assert rig.evict(100).num_tokens_evicted == 2 * rig.page_size


def test_leaf_goes_with_all_that_it_holds(any_rig: Rig) -> None:
    rig = any_rig
    rig.insert(1)
    result = rig.evict(1)
    assert result.num_tokens_evicted == rig.page_size
    assert result.swa_num_tokens_evicted == rig.page_size * bool(rig.window_pages)
    assert result.mamba_num_evicted == rig.has_states
    assert [rig.sizes_of(kind) for kind in ComponentType] == [(0, 0)] * 3
    assert len(rig.free_pages) == rig.num_pages


def test_chain_goes_from_its_end(any_rig: Rig) -> None:
    rig = any_rig
    for length in (1, 2, 3):
        rig.insert(*range(length))
    for left in (2, 1, 0):
        assert rig.evict(1).num_tokens_evicted == rig.page_size
        assert rig.matched_pages(0, 1, 2) == left
    assert len(rig.tree._nodes) == 1


def test_what_was_matched_outlives_what_was_not(any_rig: Rig) -> None:
    rig = any_rig
    for first in (1, 2, 3):
        rig.insert(first)
    rig.match(1)
    rig.evict(1)
    assert [rig.matched_pages(first) for first in (1, 2, 3)] == [1, 0, 1]


def test_half_of_four_leaves_is_two_of_them(any_rig: Rig) -> None:
    rig = any_rig
    for first in (1, 3, 5, 7):
        rig.insert(first, first + 1)
    assert rig.evict(4).num_tokens_evicted == 4 * rig.page_size
    assert rig.sizes == (4, 0)
    assert [rig.matched_pages(first, first + 1) for first in (1, 3, 5, 7)] == [0, 0, 2, 2]


def test_lock_of_one_branch_leaves_the_other_to_eviction(any_rig: Rig) -> None:
    rig = any_rig
    rig.insert(1, 2)
    rig.insert(1, 2, 3)
    receipt = rig.lock(rig.leaf(1, 2, 4))
    assert rig.evict(100).num_tokens_evicted == rig.page_size
    assert [rig.full_pages(1, 2, 3), rig.matched_pages(1, 2, 4)] == [2, 3]
    rig.unlock(receipt)


def test_locked_parent_stays_when_its_children_go(any_rig: Rig) -> None:
    rig = any_rig
    receipt = rig.lock(rig.leaf(1, 2))
    rig.insert(1, 2, 3)
    rig.evict(100)
    assert rig.matched_pages(1, 2, 3) == 2
    rig.unlock(receipt)
    rig.evict(100)
    assert rig.sizes == (0, 0)


def test_locked_leaf_survives_eviction_of_all_it_could_give(any_rig: Rig) -> None:
    rig = any_rig
    receipt = rig.lock(rig.leaf(1, 2))
    held = [(0, rig.sizes_of(kind)[1]) for kind in ComponentType]
    rig.evict(100, windows=100 * bool(rig.window_pages), states=100 * rig.has_states)
    assert [rig.sizes_of(kind) for kind in ComponentType] == held
    assert rig.matched_pages(1, 2) == 2
    rig.unlock(receipt)


def test_reset_gives_every_slot_back_once(any_rig: Rig) -> None:
    rig = any_rig
    rig.insert(1, 2)
    rig.insert(1, 3)
    if rig.window_pages:
        rig.insert(5, 6, floor=2)
    rig.lock(rig.leaf(4))
    rig.apply(rig.tree.reset())
    assert [rig.sizes_of(kind) for kind in ComponentType] == [(0, 0)] * 3
    assert len(rig.free_pages) == rig.num_pages
    assert rig.tree.reset() == ()
    assert rig.insert(1, 2).prefix_len == 0
