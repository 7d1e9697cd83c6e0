"""Several who put one page at the same time: a copy that comes second is given up, and none is taken back."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import attrs
import pytest

from radixlink_contracts import PageBits, StoreConfig
from radixlink_store import FileStoreFactory, _segment
from radixlink_store._checksum import header_checksum
from radixlink_store._places import Place
from radixlink_store._state import MATCH_MASK
from radixlink_store.counters import StoreCounters
from radixlink_testing import put_pages, read_right
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from typing_extensions import Buffer

    from radixlink_contracts import PoolLayout
    from radixlink_store.segments import Segment, SegmentPageStore

KEY = page_keys([9])
NUM_PAGES = 300
WRITERS = 2


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[[PoolLayout, int], SegmentPageStore]]:
    """Opens stores of so many pages, each by a factory of its own."""
    factories: list[FileStoreFactory] = []

    def open_(layout: PoolLayout, num_pages: int) -> SegmentPageStore:
        capacity = num_pages * layout.page_bytes
        config = StoreConfig(location=str(tmp_path), capacity_bytes=capacity)
        factories.append(FileStoreFactory(config, prefault=False))
        return factories[-1].open(layout)

    yield open_
    for factory in factories:
        factory.close()


def segment_of(store: SegmentPageStore) -> Segment:
    segment = store._segment
    assert segment is not None
    return segment


def copies_of(segment: Segment, key: bytes) -> list[int]:
    """The slots in which a page is published."""
    place = Place.of(key, segment.num_buckets)
    return [
        slot
        for bucket in place.buckets
        for slot in range(bucket * segment.ways, (bucket + 1) * segment.ways)
        if segment.word(slot) & MATCH_MASK == place.match and segment.key_of(slot) == key
    ]


@pytest.mark.parametrize("calls", ["one", "many"])
def test_copy_is_given_up_where_another_came_while_it_was_written(
    open_store: Callable[[PoolLayout, int], SegmentPageStore],
    layout: PoolLayout,
    monkeypatch: pytest.MonkeyPatch,
    calls: str,
) -> None:
    first, second = open_store(layout, 4), open_store(layout, 4)
    opened = []

    def checksum(slot: int, words: Buffer) -> int:
        """The first one's copy is about to be whole: the second one does all of its own."""
        monkeypatch.setattr(_segment, "header_checksum", header_checksum)
        assert put_pages(second, KEY).complete
        opened.append(second.open(KEY, 0))
        return header_checksum(slot, words)

    monkeypatch.setattr(_segment, "header_checksum", checksum)
    asked = KEY if calls == "one" else page_keys([9, 10])
    assert put_pages(first, asked).complete
    (handles,) = opened
    assert copies_of(segment_of(second), KEY[0]) == list(handles.slots)
    # What was opened is still there, and there is room for as many pages as before.
    assert read_right(second, handles).complete
    assert put_pages(first, page_keys(range(4 - len(asked)))).complete
    assert first.counters.evicted == second.counters.evicted == 0
    # The first one wrote all the others.
    assert (first.counters.put, second.counters.put) == (3, 1)
    assert (first.counters.already_there, second.counters.already_there) == (1, 0)


@pytest.mark.parametrize("calls", ["one", "many"])
def test_page_that_went_for_a_copy_that_was_given_up_counts_as_evicted(
    open_store: Callable[[PoolLayout, int], SegmentPageStore],
    layout: PoolLayout,
    monkeypatch: pytest.MonkeyPatch,
    calls: str,
) -> None:
    first, second = open_store(layout, 4), open_store(layout, 4)
    assert put_pages(first, page_keys(range(4))).complete

    def checksum(slot: int, words: Buffer) -> int:
        monkeypatch.setattr(_segment, "header_checksum", header_checksum)
        assert put_pages(second, KEY).complete
        return header_checksum(slot, words)

    monkeypatch.setattr(_segment, "header_checksum", checksum)
    asked = KEY if calls == "one" else page_keys([9, 10])
    assert put_pages(first, asked).complete
    assert second.counters == StoreCounters(put=1, evicted=1)
    # Page 10 had its slot before the copy was given up: pages of one call are claimed together.
    evicted = len(asked)
    assert first.counters == StoreCounters(put=3 + len(asked), already_there=1, evicted=evicted)
    # No page of the call went for another.
    assert first.contains(asked).complete


def test_processes_that_put_the_same_pages_at_once_read_what_they_have_put(
    open_store: Callable[[PoolLayout, int], SegmentPageStore], layout: PoolLayout
) -> None:
    layout = attrs.evolve(layout, range_bytes=(1 << 14, 1 << 14))
    store = open_store(layout, 4 * NUM_PAGES)
    keys = page_keys(range(NUM_PAGES))
    # Made before, so that the writers do nothing but write.
    parts = [page_parts(keys.span(page, page + 1), layout) for page in range(NUM_PAGES)]
    #: How far each writer is.
    turns = memoryview(mmap.mmap(-1, 8 * WRITERS)).cast("Q")
    children = []
    for writer in range(WRITERS):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                mine = open_store(layout, 4 * NUM_PAGES)
                for page in range(NUM_PAGES):
                    turns[writer] = page + 1
                    while min(turns) < page + 1:
                        os.sched_yield()
                    key = keys.span(page, page + 1)
                    assert mine.put(key, parts[page]).complete
                    assert read_right(mine, mine.open(key, 0)).complete
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * WRITERS
    assert read_right(store, store.open(keys, 0)) == PageBits.all(NUM_PAGES)
