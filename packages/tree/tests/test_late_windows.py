"""What the device holds piece by piece, and windows and states that come to nodes that are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from radixlink_contracts import ComponentType, InsertOrigin, InsertParams, InsertResult
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from radixlink_contracts import NodeId

    from .conftest import MakeRig
    from .rig import Rig

SWA = ComponentType.SWA
WINDOW = 4


def come_late(rig: Rig, end: NodeId, *ranges: tuple[int, int]) -> InsertResult:
    """Give the tree's own full slots of eight pages windows; ranges in tokens, of pages of one."""
    value = rig.tree.path_indices(end)
    for first, last in ranges:
        for page in value[first:last].tolist():
            rig.pools.pairs.setdefault(page, rig.pools.free_windows.popleft())
    return rig.tree.insert(
        InsertParams(
            key=rig.key(*range(len(value))),
            value=value,
            prev_prefix_len=len(value),
            origin=InsertOrigin.RESTORED,
            track_adopted_ranges=True,
            component_evicted_seqlens={SWA: len(value)},
            late_windows=ranges,
        )
    )


def test_holdings_tell_of_parts_where_no_match_may_end(make_rig: MakeRig) -> None:
    rig = make_rig(1, window=WINDOW)
    end = rig.insert(*range(6), floor=6).last_device_node
    held = rig.tree.holdings(rig.key(*range(8)))
    assert (held.full_len, held.last_node, held.windows, held.states) == (6, end, (), ())
    assert rig.matched_pages(*range(8)) == 0


def test_holdings_of_windows_that_touch_are_one_range(make_rig: MakeRig) -> None:
    rig = make_rig(1, window=WINDOW)
    rig.insert(*range(8), floor=2)
    assert rig.picture(rig.match(*range(8)).last_device_node) == "2-|2|4"
    assert rig.tree.holdings(rig.key(*range(8))).windows == ((2, 8),)


def test_holdings_of_nothing_end_at_the_root(make_rig: MakeRig) -> None:
    rig = make_rig(2, window=WINDOW)
    rig.insert(1, 2)
    held = rig.tree.holdings(rig.key(3, 4))
    assert (held.full_len, held.windows, held.states) == (0, (), ())
    assert held.last_node == rig.match(3).last_device_node


def test_late_window_ends_what_a_tombstone_lacked(make_rig: MakeRig) -> None:
    rig = make_rig(1, window=WINDOW)
    end = rig.insert(*range(8), floor=8).last_device_node
    assert rig.matched_pages(*range(8)) == 0
    result = come_late(rig, end, (4, 8))
    assert rig.picture(result.last_device_node) == "4-|4"
    assert rig.matched_pages(*range(8)) == 8
    assert result.adopted_ranges is not None
    assert result.adopted_ranges.ranges(SWA) == ((4, 8),)
    assert result.adopted_ranges.ranges(ComponentType.FULL) == ()
    assert result.cache_actions == ()


def test_late_window_leaves_the_upper_part_of_a_tombstone_without(make_rig: MakeRig) -> None:
    rig = make_rig(1, window=WINDOW)
    end = rig.insert(*range(8), floor=4).last_device_node
    assert rig.picture(end) == "4-|4"
    result = come_late(rig, end, (2, 4))
    assert rig.picture(result.last_device_node) == "2-|2|4"
    assert rig.tree.holdings(rig.key(*range(8))).windows == ((2, 8),)


@pytest.mark.parametrize(
    ("ranges", "told"),
    [
        (((4, 6),), "tombstones for the late window of tokens 4 to 6"),
        (((1, 3),), "up to the end of one, got none that ends at 3"),
        (((2, 9),), "within the first 8 tokens"),
        (((2, 3), (1, 4)), "ascending"),
        (((3, 3),), "ascending"),
    ],
)
def test_late_window_that_fits_no_tombstone_is_refused(
    make_rig: MakeRig, ranges: tuple[tuple[int, int], ...], told: str
) -> None:
    rig = make_rig(1, window=WINDOW)
    end = rig.insert(*range(8), floor=4).last_device_node
    value = rig.tree.path_indices(end)
    with pytest.raises(ContractError, match=told):
        rig.tree.insert(
            InsertParams(
                key=rig.key(*range(8)), value=value, prev_prefix_len=8, late_windows=ranges
            )
        )
    assert rig.picture(end) == "4-|4"


def test_late_window_in_a_tree_without_windows_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig(1)
    end = rig.leaf(1, 2)
    with pytest.raises(ContractError, match="in a tree without windows"):
        rig.tree.insert(
            InsertParams(
                key=rig.key(1, 2),
                value=rig.tree.path_indices(end),
                prev_prefix_len=2,
                late_windows=((0, 2),),
            )
        )
    assert torch.equal(rig.tree.path_indices(end), rig.tree.path_indices(rig.leaf(1, 2)))
