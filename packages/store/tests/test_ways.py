"""Which slot a page is written to: those that hold none come first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from radixlink_store._places import Place
from radixlink_store._state import SlotState, pack
from radixlink_store._ways import ways_for
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from packages.store.tests.conftest import MakeStore

NOW = 1000


@pytest.mark.parametrize(
    ("used", "first"),
    [
        ([1, 2], [1, 2, 5]),
        ([2, 1], [4, 5, 2]),
        ([1, 1], [1, 2, 4, 5]),
        ([3, 1], [4, 5]),
        ([0, 3], [0, 1, 2]),
        ([3, 3], []),
    ],
)
def test_free_ways_of_the_emptier_bucket_come_first(
    make_store: MakeStore, used: list[int], first: list[int]
) -> None:
    """Of two that are alike the first one's."""
    _, segment = make_store(2, 3)
    for bucket, count in enumerate(used):
        segment.tag_lines[bucket, :count] = 9
    buckets = (0, 1)
    ways = [slot for slot, _ in ways_for(segment, buckets, segment.tags_at(buckets), NOW)]
    assert ways[: len(first)] == first
    assert not set(ways[len(first) :]) & set(first)


def test_free_ways_of_a_table_of_one_bucket_come_first(make_store: MakeStore) -> None:
    _, segment = make_store(1, 4)
    segment.tag_lines[0, 1] = 9
    ways = [slot for slot, _ in ways_for(segment, (0,), segment.tags_at((0,)), NOW)]
    assert ways[:3] == [0, 2, 3]


def test_way_that_got_a_page_since_is_not_offered_as_free(make_store: MakeStore) -> None:
    store, segment = make_store(1, 2)
    lines = segment.tags_at((0,))
    keys = page_keys([0])
    assert store.put(keys, page_parts(keys, store.layout)).complete
    taken = store.open(keys, 0).slots[0]
    free, *_ = ways_for(segment, Place.of(keys[0], 1).buckets, lines, NOW)
    assert free == (1 - taken, 0)


@pytest.mark.parametrize("oldest", range(6))
def test_oldest_page_of_both_buckets_goes_first(make_store: MakeStore, oldest: int) -> None:
    _, segment = make_store(2, 3)
    segment.tag_lines[:] = 9
    segment.lines[:] = pack(7, 1, SlotState.READY)
    segment.ages[:] = [5, 6, 7, 5, 6, 7]
    segment.ages[oldest] = 4
    buckets = (1, 0)
    first, *_ = ways_for(segment, buckets, segment.tags_at(buckets), NOW)
    assert first == (oldest, pack(7, 1, SlotState.READY))


def test_page_in_either_bucket_is_found_when_it_comes_alone(make_store: MakeStore) -> None:
    store, segment = make_store(4, 4)
    keys = page_keys(range(12))
    there = store.put(keys, page_parts(keys, store.layout))
    slots = store.open(keys, 0).slots
    choices = [Place.of(keys[page], 4).buckets.index(slots[page] // segment.ways) for page in there]
    assert set(choices) == {0, 1}, "pages are in their first and in their second buckets"
    assert [page for page in range(12) if store.contains(keys.span(page, page + 1)).complete] == [
        *there
    ]
