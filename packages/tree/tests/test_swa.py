"""Windows: tombstones, what brings them back, how far a lock reaches, and what goes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from radixlink_contracts import ComponentType, InsertResult
from radixlink_contracts.actions import FreeDeviceKV, FreeDeviceKVFullOnly, FreeSWA, MoveSWA
from radixlink_contracts.errors import ContractError, StaleHandleError
from radixlink_tree import UnifiedTreeCore

if TYPE_CHECKING:
    from radixlink_contracts import NodeId

    from .conftest import MakeRig
    from .rig import Rig

SWA = ComponentType.SWA


def ranges(result: InsertResult) -> list[tuple[tuple[int, int], ...]]:
    """What the tree took of full slots and of windows, in tokens."""
    assert result.adopted_ranges is not None
    return [result.adopted_ranges.ranges(kind) for kind in (ComponentType.FULL, SWA)]


def picture(rig: Rig, node_id: NodeId) -> str:
    """`Rig.picture` without states."""
    return rig.picture(node_id).replace("*", "")


@pytest.mark.parametrize(
    ("page_size", "window", "rounded"), [(1, 4, 4), (4, 2, 4), (4, 5, 8), (128, 4, 128)]
)
def test_window_is_whole_pages(page_size: int, window: int, rounded: int) -> None:
    tree = UnifiedTreeCore(page_size=page_size, sliding_window=window)
    assert tree.sliding_window == rounded
    assert tree.components == (ComponentType.FULL, SWA)


def test_negative_window_is_refused() -> None:
    with pytest.raises(ContractError, match="at least 0, got -1"):
        UnifiedTreeCore(page_size=4, sliding_window=-1)


# -- what is inserted ------------------------------------------------------------------------------


def test_floor_makes_a_tombstone_above_what_is_live(make_rig: MakeRig) -> None:
    rig = make_rig(1, window=4)
    end = rig.insert(*range(8), floor=4).last_device_node
    assert rig.picture(end) == "4-|4"
    assert rig.matched_pages(*range(8)) == 8
    assert rig.sizes_of(SWA) == (4, 0)


def test_span_below_the_floor_is_a_full_leaf_without_a_window(swa_rig: Rig) -> None:
    rig = swa_rig
    result = rig.insert(1, 2, floor=2, track=True)
    assert ranges(result) == [((0, 2 * rig.page_size),), ()]
    assert [type(action) for action in result.cache_actions] == []
    assert picture(rig, result.last_device_node) == "2-"
    assert [rig.full_pages(1, 2), rig.matched_pages(1, 2)] == [2, 0]
    assert rig.sizes_of(SWA) == (0, 0)


def test_floor_beyond_the_key_leaves_all_of_it_without_a_window(swa_rig: Rig) -> None:
    rig = swa_rig
    end = rig.insert(1, 2, floor=5).last_device_node
    assert picture(rig, end) == "2-"


@pytest.mark.parametrize("extra", [0, 2])
def test_leaf_is_cut_one_window_before_its_end(swa_rig: Rig, extra: int) -> None:
    rig, window = swa_rig, swa_rig.window_pages
    end = rig.insert(*range(window + extra)).last_device_node
    assert picture(rig, end) == (f"{extra}|{window}" if extra else f"{window}")
    receipt = rig.lock(end)
    assert receipt.swa_locked_len == rig.tree.sliding_window
    assert rig.sizes_of(SWA) == (extra, window)
    assert rig.sizes == (0, window + extra)
    rig.unlock(receipt)
    assert rig.sizes_of(SWA) == (window + extra, 0)


def test_floor_inside_the_last_window_is_the_only_cut(make_rig: MakeRig) -> None:
    rig = make_rig(4, window=16)
    end = rig.insert(*range(8), floor=6).last_device_node
    assert rig.picture(end) == "6-|2"


def test_prompt_floor_and_window_each_make_a_cut(make_rig: MakeRig) -> None:
    rig = make_rig(1, window=3)
    end = rig.insert(*range(10), floor=2, prompt=8).last_device_node
    assert rig.picture(end) == "2-|5|1|2"


# -- where a match ends ----------------------------------------------------------------------------


def live_tomb_live(rig: Rig, live: int, tomb: int, again: int) -> list[int]:
    """A path of so many pages of each."""
    pages = list(range(live + tomb + again))
    rig.insert(*pages[:live])
    rig.insert(*pages[: live + tomb], matched=live, floor=live + tomb)
    rig.insert(*pages, floor=live + tomb, state=False)
    return pages


def test_match_ends_before_a_tombstone_that_no_window_has_passed(make_rig: MakeRig) -> None:
    rig = make_rig(4, window=16)
    pages = live_tomb_live(rig, 2, 3, 3)
    found = rig.match(*pages)
    assert found.full_kv_hit_length == 8 * rig.page_size
    assert found.device_prefix_len == 2 * rig.page_size
    assert found.branching_len == 8 * rig.page_size
    assert rig.matched_pages(*pages[:4]) == 2
    assert rig.matched_pages(*pages[:2]) == 2


def test_match_goes_on_when_a_whole_window_is_behind_the_tombstone(make_rig: MakeRig) -> None:
    rig = make_rig(4, window=16)
    pages = live_tomb_live(rig, 2, 3, 4)
    assert rig.matched_pages(*pages) == 9
    assert rig.matched_pages(*pages, 77) == 9
    # A page less, and its window reaches into the tombstone.
    assert rig.matched_pages(*pages[:8]) == 2
    assert rig.matched_pages(*pages) == 9


def test_tombstone_at_the_root_ends_every_match_shorter_than_a_window(make_rig: MakeRig) -> None:
    rig = make_rig(1, window=4)
    rig.insert(*range(10), floor=2)
    assert [rig.matched_pages(*range(length)) for length in range(3, 11)] == [
        *(0, 0, 0),
        *range(6, 11),
    ]


def test_path_that_is_live_from_the_root_may_be_shorter_than_a_window(swa_rig: Rig) -> None:
    rig = swa_rig
    rig.insert(1)
    rig.insert(1, 2)
    assert [rig.matched_pages(1), rig.matched_pages(1, 2)] == [1, 2]


# -- what comes back -------------------------------------------------------------------------------


def test_tombstone_that_nobody_reads_takes_the_new_slots(make_rig: MakeRig) -> None:
    rig = make_rig(1, window=8)
    end = rig.insert(*range(8), floor=8).last_device_node
    old = rig.path_pages(end)
    result = rig.insert(*range(8), track=True)
    (free,) = result.cache_actions
    assert isinstance(free, FreeDeviceKVFullOnly)
    assert free.indices.tolist() == old
    assert ranges(result) == [((0, 8),), ((0, 8),)]
    assert result.prefix_len == 8
    assert not set(rig.path_pages(end)) & set(old)
    assert rig.matched_pages(*range(8)) == 8


def test_tombstone_that_somebody_reads_keeps_its_full_slots(make_rig: MakeRig) -> None:
    rig = make_rig(1, window=8)
    end = rig.insert(*range(8), floor=8).last_device_node
    old, receipt = rig.path_pages(end), rig.lock(end)
    new = list(rig.free_pages)[:8]
    windows = list(rig.pools.free_windows)[:8]
    result = rig.insert(*range(8), track=True)
    move, free = result.cache_actions
    assert isinstance(move, MoveSWA)
    assert (move.from_full.tolist(), move.to_full.tolist()) == (new, old)
    assert isinstance(free, FreeDeviceKVFullOnly)
    assert free.indices.tolist() == new
    assert ranges(result) == [(), ((0, 8),)]
    assert rig.path_pages(end) == old
    assert [rig.pools.pairs[page] for page in old] == windows
    # The lock had the tombstone in its window, so what came back is protected.
    assert rig.sizes_of(SWA) == (0, 8)
    rig.unlock(receipt)
    assert rig.sizes_of(SWA) == (8, 0)


def test_tombstone_locked_without_its_window_gets_one_that_can_be_given_up(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(1, window=4)
    end = rig.insert(*range(4), floor=4).last_device_node
    receipt = rig.lock(end, SWA)
    rig.insert(*range(4))
    assert rig.sizes_of(SWA) == (4, 0)
    assert rig.evict(windows=1).swa_num_tokens_evicted == 4
    rig.unlock(receipt)


def test_part_of_a_tombstone_above_the_floor_comes_back(make_rig: MakeRig) -> None:
    rig = make_rig(4, window=16)
    end = rig.insert(*range(6), floor=6).last_device_node
    result = rig.insert(*range(6), floor=4, track=True)
    assert rig.picture(end) == "4-|2"
    assert ranges(result) == [((16, 24),), ((16, 24),)]
    assert result.last_device_node == end


def test_what_was_matched_is_not_brought_back(make_rig: MakeRig) -> None:
    rig = make_rig(1, window=2)
    rig.insert(*range(4), floor=2)
    end = rig.insert(*range(5), matched=4).last_device_node
    assert rig.picture(end) == "2-|2|1"


def test_duplicates_go_with_their_windows_and_below_the_floor_without(make_rig: MakeRig) -> None:
    rig = make_rig(1, window=4)
    rig.insert(*range(4))
    rig.insert(*range(8), matched=4)
    fresh = list(rig.free_pages)[:8]
    first, second = rig.insert(*range(8), floor=3, track=True).cache_actions
    assert isinstance(first, FreeDeviceKVFullOnly)
    assert isinstance(second, FreeDeviceKV)
    assert [first.indices.tolist(), second.indices.tolist()] == [fresh[:3], fresh[3:]]


def test_one_insert_frees_recovers_and_adds_in_the_order_of_its_tokens(make_rig: MakeRig) -> None:
    rig = make_rig(1, window=3)
    pages = live_tomb_live(rig, 2, 3, 3)
    old = rig.path_pages(rig.match(*pages).last_device_node)
    fresh = list(rig.free_pages)[:10]
    result = rig.insert(*pages, 20, 21, track=True)
    actions = [
        (type(action), action.indices.tolist())
        for action in result.cache_actions
        if isinstance(action, FreeDeviceKV | FreeDeviceKVFullOnly)
    ]
    assert actions == [
        (FreeDeviceKV, fresh[:2]),
        (FreeDeviceKVFullOnly, old[2:5]),
        (FreeDeviceKV, fresh[5:8]),
    ]
    assert ranges(result) == [((2, 5), (8, 10)), ((2, 5), (8, 10))]
    assert rig.matched_pages(*pages, 20, 21) == 10


# -- locks -----------------------------------------------------------------------------------------


def test_window_lock_takes_whole_nodes_up_to_one_window(make_rig: MakeRig) -> None:
    rig = make_rig(1, window=4)
    for length in (3, 6, 8):
        rig.insert(*range(length), matched=max(0, length - 3) and (3 if length == 6 else 6))
    end = rig.match(*range(8)).last_device_node
    assert rig.picture(end) == "3|3|2"
    receipt = rig.lock(end)
    assert receipt.swa_locked_len == 5
    assert rig.sizes_of(SWA) == (3, 5)
    rig.unlock(receipt)


def test_holders_of_a_shared_window_do_not_release_each_other(make_rig: MakeRig) -> None:
    rig = make_rig(1, window=4)
    base = rig.leaf(0, 1)
    receipts = [rig.lock(rig.leaf(0, 1, page)) for page in (2, 3, 4)]
    # A fourth matches and leaves again, and so does one whose window ends below the base.
    rig.unlock(rig.lock(rig.match(0, 1, 9).last_device_node))
    rig.unlock(rig.lock(rig.leaf(0, 1, 5, 6, 7, 8, matched=2)))
    assert rig.tree._nodes[base].swa_lock_ref == 3
    for left in (2, 1, 0):
        rig.unlock(receipts.pop())
        assert rig.tree._nodes[base].swa_lock_ref == left


def test_split_inside_a_locked_window_moves_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(1, window=6)
    end = rig.leaf(*range(6))
    receipts = [rig.lock(end)]
    rig.match(0, 1, 2, 9)
    receipts.append(rig.lock(end))
    rig.match(0, 1, 2, 3, 9)
    assert rig.picture(end) == "3|1|2"
    assert [node.swa_lock_ref for node in rig.path(end)] == [2, 2, 2]
    assert rig.evict(100, windows=100).cache_actions == ()
    for receipt in receipts:
        assert receipt.swa_locked_len == 6
        rig.unlock(receipt)
    assert rig.sizes_of(SWA) == (6, 0)


def test_early_release_gives_the_window_and_keeps_full_attention(swa_rig: Rig) -> None:
    rig = swa_rig
    end = rig.leaf(1, 2)
    early = rig.lock(end)
    receipt = rig.move_on(early)
    assert (receipt.node_id, receipt.swa_locked_len) == (end, 0)
    assert rig.sizes_of(SWA)[1] == 0
    assert rig.sizes == (0, 2)
    with pytest.raises(StaleHandleError, match=f"got {early.receipt_id} "):
        rig.unlock(early)
    rig.unlock(receipt)
    assert rig.sizes == (2, 0)


def test_early_release_leaves_the_window_of_others_locked(swa_rig: Rig) -> None:
    rig = swa_rig
    end = rig.leaf(1)
    first, second = rig.lock(end), rig.lock(end)
    first = rig.move_on(first)
    assert rig.sizes_of(SWA) == (0, 1)
    first = rig.move_on(first)
    assert rig.sizes_of(SWA) == (0, 1)
    rig.unlock(first)
    assert rig.sizes_of(SWA) == (0, 1)
    rig.unlock(second)
    assert rig.sizes_of(SWA) == (1, 0)


def test_lock_that_skips_the_window_leaves_it_to_eviction(make_rig: MakeRig) -> None:
    rig = make_rig(4, window=8)
    end = rig.leaf(1, 2)
    receipt = rig.lock(end, SWA)
    assert (receipt.swa_locked_len, receipt.skipped_lock_components) == (0, (SWA,))
    assert rig.evict(2, windows=2).num_tokens_evicted == 0
    assert rig.picture(end) == "2-"
    rig.unlock(receipt)


# -- eviction --------------------------------------------------------------------------------------


def test_window_of_an_inner_node_goes_alone(make_rig: MakeRig) -> None:
    rig = make_rig(4, window=4)
    inner = rig.leaf(1, 2)
    end = rig.leaf(1, 2, 3, matched=2)
    pages = rig.path_pages(inner)
    # The upper part of the first insert was used longest ago.
    result = rig.evict(windows=1)
    (free,) = result.cache_actions
    assert isinstance(free, FreeSWA)
    assert rig.pages_of(free.full_indices) == pages[:1]
    assert (result.num_tokens_evicted, result.swa_num_tokens_evicted) == (0, 4)
    assert rig.picture(end) == "1-|1|1"
    assert rig.path_pages(inner) == pages
    assert rig.matched_pages(1, 2, 3) == 3


def test_window_of_an_unlocked_leaf_goes_with_the_leaf(make_rig: MakeRig) -> None:
    rig = make_rig(4, window=8)
    rig.insert(1, 2)
    rig.insert(3)
    result = rig.evict(windows=1)
    assert (result.num_tokens_evicted, result.swa_num_tokens_evicted) == (8, 8)
    assert [rig.full_pages(1, 2), rig.matched_pages(3)] == [0, 1]


def test_eviction_of_twice_what_there_is_leaves_no_window(swa_rig: Rig) -> None:
    rig = swa_rig
    rig.insert(1, 2)
    for page in (3, 4):
        rig.insert(1, 2, page)
    receipt = rig.move_on(rig.lock(rig.match(1, 2, 3).last_device_node))
    held = sum(rig.sizes_of(SWA))
    result = rig.evict(windows=2 * held)
    assert result.swa_num_tokens_evicted == held * rig.page_size
    assert rig.sizes_of(SWA) == (0, 0)
    # Of the leaves the unlocked one is gone; the other and what is above it stay.
    assert [rig.full_pages(1, 2, 3), rig.full_pages(1, 2, 4)] == [3, 2]
    rig.unlock(receipt)


def test_tombstone_that_became_a_leaf_goes_by_full_attention_alone(make_rig: MakeRig) -> None:
    rig = make_rig(1, window=1)
    inner = rig.leaf(0, 1)
    rig.insert(0, 1, 2, matched=2)
    rig.evict(windows=2)
    assert rig.picture(inner) == "1-|1-"
    rig.evict(1)
    assert rig.evict(windows=5).cache_actions == ()
    result = rig.evict(5)
    (free,) = result.cache_actions
    assert isinstance(free, FreeDeviceKVFullOnly)
    assert (result.num_tokens_evicted, result.swa_num_tokens_evicted) == (2, 0)


def test_window_used_longest_ago_goes_first(make_rig: MakeRig) -> None:
    rig = make_rig(1, window=2)
    heads = {first: rig.leaf(first) for first in (1, 2, 3)}
    ends = {first: rig.leaf(first, 9, matched=1) for first in heads}
    # No leaf can go whole, and all windows are free to go.
    receipts = [rig.lock(end, SWA) for end in ends.values()]
    rig.match(2, 9)
    rig.unlock(rig.lock(heads[1]))
    gone: list[tuple[str, int]] = []
    while len(gone) < 6:
        rig.evict(windows=1)
        for name, nodes in (("head", heads), ("end", ends)):
            for first, node_id in nodes.items():
                if not rig.tree.node(node_id).has_swa and (name, first) not in gone:
                    gone.append((name, first))
    assert gone == [
        *(("end", 1), ("head", 3), ("end", 3), ("head", 2), ("end", 2)),
        ("head", 1),
    ]
    for receipt in receipts:
        rig.unlock(receipt)


def test_release_of_a_window_is_a_use_of_it_and_of_its_end_last(make_rig: MakeRig) -> None:
    rig = make_rig(1, window=4)
    head = rig.leaf(1)
    end = rig.leaf(1, 2, matched=1)
    rig.insert(1, 2, 3, matched=2)
    other = rig.leaf(5)
    # Locked on the way out, so that windows go alone.
    held = [rig.lock(rig.match(1, 2, 3).last_device_node, SWA), rig.lock(other, SWA)]
    rig.unlock(rig.lock(end))
    rig.evict(windows=2)
    # What was not in the released window is gone; of the window the upper end goes first.
    assert [rig.picture(node) for node in (end, other)] == ["1|1", "1-"]
    rig.evict(windows=1)
    assert rig.picture(end) == "1-|1"
    assert rig.path(end)[0].node_id == head
    for receipt in held:
        rig.unlock(receipt)


def test_use_of_a_prefix_uses_one_window_of_it(make_rig: MakeRig) -> None:
    rig = make_rig(1, window=2)
    end = rig.insert(*range(6)).last_device_node
    rig.insert(10)
    rig.match(*range(6))
    # Four tokens before the window are as old as they were.
    assert rig.picture(end) == "4|2"
    rig.evict(windows=1)
    assert rig.picture(end) == "4-|2"
    assert rig.matched_pages(*range(6)) == 6


def test_request_that_inserts_behind_an_evicted_window_brings_it_back(make_rig: MakeRig) -> None:
    rig = make_rig(4, window=8)
    end = rig.leaf(1, 2, 3, 4)
    receipt = rig.lock(end, SWA)
    rig.evict(windows=4)
    assert rig.picture(end) == "2-|2-"
    assert rig.matched_pages(1, 2, 3, 4) == 0
    kept = rig.path_pages(end)
    rig.insert(1, 2, 3, 4)
    assert rig.picture(end) == "2|2"
    assert rig.path_pages(end) == kept
    rig.unlock(receipt)


def test_slots_of_a_recovery_are_the_trees_own_copy(make_rig: MakeRig) -> None:
    rig = make_rig(4, window=8)
    end = rig.insert(1, 2, floor=2).last_device_node
    value = rig.alloc(2)
    rig.apply(rig.tree.insert(rig.params(rig.key(1, 2), value=value)).cache_actions)
    kept = rig.path_pages(end)
    value.fill_(0)
    assert rig.path_pages(end) == kept
    assert rig.tree.node(end).device_indices.dtype is torch.int64
