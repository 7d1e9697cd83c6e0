"""Flipped bits, wherever they are: a miss, a counter, and a slot that can be written again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from radixlink_contracts import PageBits
from radixlink_store._state import SlotState, generation_of
from radixlink_testing import read_page_range, read_right
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from packages.store.tests.conftest import MakeStore

    from radixlink_contracts import PageHandles
    from radixlink_store.segments import Segment, SegmentPageStore

KEYS = page_keys(range(3))
ALL = PageBits.all(3)
OTHERS = PageBits.of([0, 2], 3)


@pytest.fixture
def filled(make_store: MakeStore) -> tuple[SegmentPageStore, Segment, PageHandles]:
    """A store with room for one page more than the three that are in it."""
    store, segment = make_store(1, 4)
    store.put(KEYS, page_parts(KEYS, store.layout))
    return store, segment, store.open(KEYS, 0)


def flip(segment: Segment, offset: int) -> None:
    """Flip a bit of the segment's memory."""
    segment._buffer[offset] ^= 0x10


def header_offset(segment: Segment, slot: int, word: int) -> int:
    geometry = segment.geometry
    return geometry.headers_offset + 8 * (slot * geometry.header_words + word)


@pytest.mark.parametrize(("layer_range", "byte"), [(0, 0), (0, 39), (1, 40), (1, 63)])
def test_flip_in_the_payload(
    filled: tuple[SegmentPageStore, Segment, PageHandles], layer_range: int, byte: int
) -> None:
    store, segment, handles = filled
    geometry, slot = segment.geometry, handles.slots[1]
    flip(segment, geometry.payload_offset + slot * geometry.slot_bytes + byte)
    assert read_page_range(store, handles, 1 - layer_range)[0] == ALL
    assert store.counters.read_corrupt == 0
    assert read_page_range(store, handles, layer_range)[0] == OTHERS
    assert store.counters.read_corrupt == 1
    assert store.contains(KEYS) == OTHERS
    assert segment.word(slot) & 3 == SlotState.EMPTY
    assert generation_of(segment.word(slot)) == handles.generations[1]
    assert store.put(KEYS, page_parts(KEYS, store.layout)) == ALL
    assert read_right(store, store.open(KEYS, 0)) == ALL


def test_flip_in_a_layer_ranges_checksum(
    filled: tuple[SegmentPageStore, Segment, PageHandles],
) -> None:
    store, segment, handles = filled
    flip(segment, header_offset(segment, handles.slots[1], 7))
    assert read_page_range(store, handles, 0)[0] == ALL
    assert read_page_range(store, handles, 1)[0] == OTHERS
    assert store.counters.read_corrupt == 1
    assert store.put(KEYS, page_parts(KEYS, store.layout)) == ALL
    assert read_right(store, store.open(KEYS, 0)) == ALL


def test_flip_in_the_key(filled: tuple[SegmentPageStore, Segment, PageHandles]) -> None:
    store, segment, handles = filled
    slot = handles.slots[1]
    flip(segment, header_offset(segment, slot, 3))
    # The bytes are still those of the write that the handle names.
    assert read_right(store, handles) == ALL
    assert store.contains(KEYS) == OTHERS
    assert store.counters.read_corrupt == 1
    assert segment.word(slot) & 3 == SlotState.EMPTY
    assert store.put(KEYS, page_parts(KEYS, store.layout)) == ALL
    assert read_right(store, store.open(KEYS, 0)) == ALL


@pytest.mark.parametrize("shift", [0, 1, 5, 20, 50, 63])
def test_flip_in_the_state_word(
    filled: tuple[SegmentPageStore, Segment, PageHandles], shift: int
) -> None:
    store, segment, handles = filled
    slot = handles.slots[1]
    segment.lines.reshape(-1)[slot] = segment.word(slot) ^ 1 << shift
    assert read_right(store, handles) == OTHERS
    fresh = store.open(KEYS, 0)
    assert read_right(store, fresh) == OTHERS
    assert store.put(KEYS, page_parts(KEYS, store.layout)) == ALL
    assert read_right(store, store.open(KEYS, 0)) == ALL


def test_damage_is_left_to_whoever_writes_the_slot(
    filled: tuple[SegmentPageStore, Segment, PageHandles],
) -> None:
    store, segment, handles = filled
    geometry, slot = segment.geometry, handles.slots[1]
    flip(segment, geometry.payload_offset + slot * geometry.slot_bytes)
    word = segment.word(slot)
    with segment.locks.lend() as lock:
        assert lock.try_lock(slot)
        assert read_page_range(store, handles, 0)[0] == OTHERS
        assert segment.word(slot) == word
        lock.unlock(slot)
    assert read_page_range(store, handles, 0)[0] == OTHERS
    assert segment.word(slot) != word
    assert store.counters.read_corrupt == 2


def test_bytes_that_match_at_the_second_look_are_not_emptied(
    filled: tuple[SegmentPageStore, Segment, PageHandles], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine that reorders stores may show READY before the bytes.
    store, segment, handles = filled
    geometry, slot = segment.geometry, handles.slots[1]
    offset = geometry.payload_offset + slot * geometry.slot_bytes
    flip(segment, offset)
    take = segment.locks.take

    def late() -> object:
        flip(segment, offset)
        return take()

    monkeypatch.setattr(segment.locks, "take", late)
    assert read_page_range(store, handles, 0)[0] == OTHERS
    monkeypatch.undo()
    assert store.counters.read_corrupt == 0
    assert store.counters.read_stale == 1
    assert read_right(store, handles) == ALL


@pytest.mark.parametrize("count", [3, 12])
def test_forked_child_misses_what_is_damaged_and_leaves_it_to_others(
    make_store: MakeStore, count: int
) -> None:
    store, segment = make_store(1, 16)
    keys = page_keys(range(count))
    store.put(keys, page_parts(keys, store.layout))
    handles = store.open(keys, 0)
    geometry = segment.geometry
    flip(segment, geometry.payload_offset + handles.slots[1] * geometry.slot_bytes)
    flip(segment, header_offset(segment, handles.slots[2], 5))
    others = [page for page in range(count) if page not in {1, 2}]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            found = store.open(keys, 0)
            right, _ = read_page_range(store, found, 0)
            code = 0 if found.found == PageBits.of([1, *others], count) else 2
            code = code if right == PageBits.of(others, count) else 3
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
