from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlink_contracts import AdoptedRanges, ComponentType, EvictResult, InsertResult, NodeId
from radixlink_contracts.actions import FreeMambaSlots

if TYPE_CHECKING:
    from random import Random

FULL, SWA = ComponentType.FULL, ComponentType.SWA

ACTIONS = (FreeMambaSlots(slots=(1,)),)

ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12)


def recorded(*pairs: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    adopted = AdoptedRanges()
    for start, end in pairs:
        adopted.record(FULL, start, end)
    return adopted.ranges(FULL)


@given(ranges)
def test_ranges_are_the_union_of_what_was_recorded(pairs: list[tuple[int, int]]) -> None:
    tokens = {token for start, end in pairs for token in range(start, end)}
    out = recorded(*pairs)
    assert {token for start, end in out for token in range(start, end)} == tokens
    assert all(start < end for start, end in out)
    # Ascending, with at least one token between two: what touches is one range.
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(out))


@given(ranges, st.randoms(use_true_random=False))
def test_the_order_of_recording_changes_nothing(
    pairs: list[tuple[int, int]], random: Random
) -> None:
    shuffled = list(pairs)
    random.shuffle(shuffled)
    assert recorded(*shuffled) == recorded(*pairs)


@pytest.mark.parametrize(
    ("pairs", "out"),
    [
        # G16
        ([(0, 4), (4, 8)], ((0, 8),)),
        ([(0, 2), (6, 8)], ((0, 2), (6, 8))),
        ([(3, 3)], ()),
        ([(5, 3)], ()),
        # spec a.3: the founding system left (0, 2), (1, 8) of these.
        ([(0, 2), (6, 8), (1, 7)], ((0, 8),)),
        ([(6, 8), (0, 2)], ((0, 2), (6, 8))),
        ([(4, 8), (0, 4)], ((0, 8),)),
        ([(2, 3), (0, 8)], ((0, 8),)),
        ([(0, 8), (2, 3)], ((0, 8),)),
        ([(0, 1), (2, 3), (4, 5), (1, 4)], ((0, 5),)),
    ],
)
def test_ranges_by_example(pairs: list[tuple[int, int]], out: tuple[tuple[int, int], ...]) -> None:
    assert recorded(*pairs) == out


def test_components_are_independent() -> None:
    adopted = AdoptedRanges()
    adopted.record(FULL, 0, 4)
    adopted.record(SWA, 4, 8)
    assert adopted.ranges(FULL) == ((0, 4),)
    assert adopted.ranges(SWA) == ((4, 8),)
    assert adopted.ranges(ComponentType.MAMBA) == ()


def insert_result(adopted: AdoptedRanges | None) -> InsertResult:
    return InsertResult(
        prefix_len=0, total_len=8, last_device_node=NodeId(1), adopted_ranges=adopted
    )


def test_a_result_records_only_where_somebody_asked() -> None:
    unasked = insert_result(None)
    unasked.record_adopted_range(FULL, 0, 4)
    assert unasked.adopted_ranges is None
    asked = insert_result(AdoptedRanges())
    asked.record_adopted_range(FULL, 0, 4)
    asked.record_adopted_range(FULL, 4, 8)
    assert asked.adopted_ranges is not None
    assert asked.adopted_ranges.ranges(FULL) == ((0, 8),)


def test_what_was_carried_out_leaves_nothing_else_out() -> None:
    evicted = EvictResult(
        num_tokens_evicted=1, swa_num_tokens_evicted=2, mamba_num_evicted=3, cache_actions=ACTIONS
    )
    assert evicted.carried_out() == EvictResult(
        num_tokens_evicted=1, swa_num_tokens_evicted=2, mamba_num_evicted=3
    )
    adopted = AdoptedRanges()
    inserted = InsertResult(
        prefix_len=1,
        total_len=2,
        last_device_node=NodeId(3),
        cache_actions=ACTIONS,
        adopted_ranges=adopted,
        mamba_exist=True,
        hot_nodes=(NodeId(4),),
    ).carried_out()
    assert inserted.cache_actions == ()
    assert inserted.adopted_ranges is adopted
    assert (inserted.prefix_len, inserted.total_len, inserted.last_device_node) == (1, 2, 3)
    assert (inserted.mamba_exist, inserted.hot_nodes) == (True, (4,))
