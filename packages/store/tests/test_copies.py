"""Several who put one page at the same moment leave one copy of it, not one each."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import attrs
import pytest

from radixlink_contracts import PageBits, StoreConfig
from radixlink_store import FileStoreFactory, Segment, _segment
from radixlink_store._places import Place
from radixlink_store._state import published
from radixlink_testing import put_pages, read_right
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from radixlink_contracts import PoolLayout
    from radixlink_store import SegmentPageStore

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


@pytest.mark.parametrize("second_is_lower", [True, False])
@pytest.mark.parametrize("calls", ["one", "many"])
def test_second_copy_goes_that_came_while_the_first_was_written(
    open_store: Callable[[PoolLayout, int], SegmentPageStore],
    layout: PoolLayout,
    monkeypatch: pytest.MonkeyPatch,
    *,
    second_is_lower: bool,
    calls: str,
) -> None:
    first, second = open_store(layout, 4), open_store(layout, 4)
    put_pages(first, page_keys(range(2)))
    (lowest,) = first.open(page_keys([0]), 0).slots
    segment = segment_of(second)

    def publish(word: int) -> int:
        """The first one is about to publish its copy: the second one does all of its own."""
        monkeypatch.setattr(_segment, "published", published)
        if second_is_lower:
            with segment.locks.lend() as lock:
                assert segment.empty(lock, lowest, segment.word(lowest))
        assert put_pages(second, KEY).complete
        return published(word)

    monkeypatch.setattr(_segment, "published", publish)
    asked = KEY if calls == "one" else page_keys([9, 10])
    assert put_pages(first, asked).complete
    place = Place.of(KEY[0], segment.num_buckets)
    assert segment.copies(place) == []
    assert (first.counters.put, second.counters.put) == (2 + len(asked), 1)
    handles = second.open(KEY, 0)
    assert read_right(second, handles).complete
    # The one in the lower slot, so that both choose alike.
    assert (handles.slots[0] == lowest) == second_is_lower


def test_copies_are_seen_only_where_there_are_several(
    open_store: Callable[[PoolLayout, int], SegmentPageStore], layout: PoolLayout
) -> None:
    store = open_store(layout, 256)
    keys = page_keys(range(200))
    put_pages(store, keys)
    segment = segment_of(store)
    for page in store.contains(keys):
        assert segment.copies(Place.of(keys[page], segment.num_buckets)) == []


def test_processes_that_put_the_same_pages_at_once_leave_one_copy_of_each(
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
                    assert mine.put(keys.span(page, page + 1), parts[page]).complete
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * WRITERS
    segment = segment_of(store)
    copies = [segment.copies(Place.of(key, segment.num_buckets)) for key in keys]
    assert copies == [[]] * NUM_PAGES
    assert read_right(store, store.open(keys, 0)) == PageBits.all(NUM_PAGES)
