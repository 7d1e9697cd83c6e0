"""Eviction gives up whole unlocked leaves, the least recently used first, each slot once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from radixlink_contracts import EvictParams
from radixlink_contracts.actions import FreeDeviceKV
from radixlink_contracts.errors import ContractError, StaleHandleError

if TYPE_CHECKING:
    from .conftest import MakeRig
    from .rig import Rig


def test_empty_tree_gives_up_nothing(rig: Rig) -> None:
    result = rig.evict(5)
    assert (result.num_tokens_evicted, result.cache_actions) == (0, ())


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_evict_of_nothing_gives_up_nothing(rig: Rig, num_tokens: int) -> None:
    rig.insert(1)
    result = rig.tree.evict(EvictParams(num_tokens=num_tokens))
    assert (result.num_tokens_evicted, result.cache_actions) == (0, ())


def test_evict_of_one_token_gives_up_one_whole_leaf(rig: Rig) -> None:
    pages = rig.path_pages(rig.leaf(1, 2, 3))
    rig.insert(4, 5)
    result = rig.tree.evict(EvictParams(num_tokens=1))
    (free,) = result.cache_actions
    assert isinstance(free, FreeDeviceKV)
    assert rig.pages_of(free.indices) == pages
    assert result.num_tokens_evicted == 3 * rig.page_size
    rig.apply(result.cache_actions)
    assert rig.sizes == (2, 0)


def test_what_was_evicted_does_not_match_and_its_id_is_stale(rig: Rig) -> None:
    end = rig.leaf(1, 2)
    rig.evict(1)
    assert rig.matched_pages(1, 2) == 0
    for ask in (rig.tree.node, rig.tree.path_indices):
        with pytest.raises(StaleHandleError, match=f"got {end}, which was evicted"):
            ask(end)


def test_chain_of_three_is_given_up_from_its_end(rig: Rig) -> None:
    rig.insert(1)
    rig.insert(1, 2)
    rig.insert(1, 2, 3)
    for left in (2, 1, 0):
        assert rig.evict(1).num_tokens_evicted == rig.page_size
        assert rig.matched_pages(1, 2, 3) == left
    assert len(rig.tree._nodes) == 1


def test_one_call_gives_up_a_whole_chain(rig: Rig) -> None:
    rig.insert(1)
    rig.insert(1, 2)
    rig.insert(1, 2, 3)
    assert rig.evict(3).num_tokens_evicted == 3 * rig.page_size
    assert rig.sizes == (0, 0)
    assert len(rig.free_pages) == rig.num_pages


def test_least_recently_matched_goes_first(rig: Rig) -> None:
    rig.insert(1)
    rig.insert(2)
    rig.insert(3)
    rig.match(1)
    rig.evict(1)
    assert [rig.matched_pages(page) for page in (1, 2, 3)] == [1, 0, 1]


def test_new_leaf_is_younger_than_what_was_matched_before(rig: Rig) -> None:
    rig.insert(1)
    rig.match(1)
    rig.insert(2)
    rig.evict(1)
    assert [rig.matched_pages(page) for page in (1, 2)] == [0, 1]


def test_insert_of_what_is_there_is_a_use(rig: Rig) -> None:
    rig.insert(1)
    rig.insert(2)
    rig.insert(1)
    rig.evict(1)
    assert [rig.matched_pages(page) for page in (1, 2)] == [1, 0]


def test_match_of_a_head_is_no_use_of_its_tail(rig: Rig) -> None:
    rig.insert(1, 2)
    rig.insert(3)
    rig.match(1)
    rig.evict(1)
    assert [rig.matched_pages(1, 2), rig.matched_pages(3)] == [1, 1]


def test_parent_left_alone_keeps_its_own_place_in_the_order(rig: Rig) -> None:
    rig.insert(1)
    rig.insert(1, 2)
    rig.insert(3)
    rig.match(1)
    # 1-2 is the oldest leaf; when it is gone, 1 is younger than 3.
    rig.evict(2)
    assert [rig.matched_pages(1, 2), rig.matched_pages(3)] == [1, 0]


def test_release_does_not_make_a_node_young(rig: Rig) -> None:
    receipt = rig.lock(rig.leaf(1))
    rig.insert(2)
    rig.evict(0)
    rig.unlock(receipt)
    rig.evict(1)
    assert [rig.matched_pages(page) for page in (1, 2)] == [0, 1]


def test_node_passed_over_while_locked_is_found_again(rig: Rig) -> None:
    receipt = rig.lock(rig.leaf(1))
    assert rig.evict(1).num_tokens_evicted == 0
    rig.unlock(receipt)
    assert rig.evict(1).num_tokens_evicted == rig.page_size


def test_node_passed_over_while_a_parent_is_found_again(rig: Rig) -> None:
    rig.insert(1)
    receipt = rig.lock(rig.leaf(1, 2))
    assert rig.evict(1).num_tokens_evicted == 0
    rig.unlock(receipt)
    assert rig.evict(2).num_tokens_evicted == 2 * rig.page_size


def test_half_of_four_leaves_is_two(rig: Rig) -> None:
    for first in (1, 3, 5, 7):
        rig.insert(first, first + 1)
    assert rig.evict(4).num_tokens_evicted == 4 * rig.page_size
    assert rig.sizes == (4, 0)
    assert [rig.matched_pages(first) for first in (1, 3, 5, 7)] == [0, 0, 1, 1]


def test_large_eviction_comes_in_pieces_that_are_the_whole(make_rig: MakeRig) -> None:
    rig = make_rig(64, num_pages=300)
    for first in range(0, 300, 10):
        rig.insert(*range(first, first + 10))
    result = rig.evict(300)
    assert result.num_tokens_evicted == 300 * rig.page_size
    assert len(result.cache_actions) == 3
    assert len(rig.free_pages) == 300


def test_leaf_above_what_is_asked_is_not_cut(rig: Rig) -> None:
    rig.insert(1, 2)
    rig.insert(3, 4, 5)
    assert rig.evict(3).num_tokens_evicted == 5 * rig.page_size


@pytest.mark.parametrize("params", [EvictParams(swa_num_tokens=1), EvictParams(mamba_num=1)])
def test_room_for_other_components_cannot_be_asked_for(rig: Rig, params: EvictParams) -> None:
    rig.insert(1)
    with pytest.raises(ContractError, match=r"no more than \['FULL'\]"):
        rig.tree.evict(params)
    assert rig.matched_pages(1) == 1


def test_reset_gives_every_slot_back_once(rig: Rig) -> None:
    rig.insert(1, 2)
    rig.insert(1, 3)
    rig.lock(rig.leaf(4))
    rig.apply(rig.tree.reset())
    assert len(rig.free_pages) == rig.num_pages
    assert rig.sizes == (0, 0)
    assert rig.matched_pages(1, 2) == 0
    assert rig.tree.reset() == ()


def test_ids_are_not_used_again_after_reset(rig: Rig) -> None:
    before = {rig.tree.root, rig.leaf(1), rig.leaf(2)}
    rig.apply(rig.tree.reset())
    after = {rig.tree.root, rig.leaf(1), rig.leaf(2)}
    assert not before & after
    assert rig.evict(100).num_tokens_evicted == 2 * rig.page_size
