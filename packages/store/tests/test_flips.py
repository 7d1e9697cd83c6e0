"""Every single bit of a page, flipped: a miss, a counter, a slot emptied that can be written again."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

import attrs
import pytest
from packages.store.tests.conftest import STRESS

from radixlink_contracts import PageBits, StoreConfig
from radixlink_store import FileStoreFactory
from radixlink_store._places import NO_TAG
from radixlink_store._state import STATE_MASK, SlotState, generation_of
from radixlink_store.segments import Geometry, Segment, SegmentPageStore
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from packages.store.tests.conftest import MakeStore

    from radixlink_contracts import PoolLayout

PAGES = page_keys(range(100 if STRESS else 1))
RANGES = (1000, 24)
#: A header of 9 words: the key's four, generation, writer, two checksums and its own.
PAGE_AND_HEADER_BYTES = 1024 + 72


@pytest.fixture
def layout(layout: PoolLayout) -> PoolLayout:
    """Pages of 1 KiB in two layer ranges."""
    return attrs.evolve(layout, range_bytes=RANGES)


@pytest.fixture(params=["memory", "disk"])
def filled(
    request: pytest.FixtureRequest, make_store: MakeStore, tmp_path: Path, layout: PoolLayout
) -> Iterator[SegmentPageStore]:
    """A store that holds the pages, in plain memory or in a file on a disk."""
    config = StoreConfig(location=str(tmp_path), capacity_bytes=2 * len(PAGES) * 1024)
    factory = FileStoreFactory(config)
    store = make_store(8, 32)[0] if request.param == "memory" else factory.open(layout)
    assert store.put(PAGES, page_parts(PAGES, layout)).complete
    yield store
    factory.close()


def bytes_of(geometry: Geometry, slot: int) -> Iterator[int]:
    """Where each byte of a slot's header and payload is in the segment."""
    header = geometry.headers_offset + slot * geometry.header_bytes
    yield from range(header, header + 8 * (geometry.header_checksum_word + 1))
    payload = geometry.payload_offset + slot * geometry.slot_bytes
    yield from range(payload, payload + sum(RANGES))


def right_ranges(store: SegmentPageStore, page: int, parts: list[bytes]) -> list[bool]:
    """Which layer ranges of a page can be read; wrong bytes fail the test."""
    key = PAGES.span(page, page + 1)
    handles = store.open(key, 0)
    right = []
    for layer_range, part in enumerate(parts):
        out = bytearray(len(part))
        right.append(store.read(handles, layer_range, out).complete)
        assert not right[-1] or out == part
    return right


@pytest.mark.timeout(1800 if STRESS else 60)
def test_every_bit(filled: SegmentPageStore) -> None:
    segment = filled._segment
    assert isinstance(segment, Segment)
    places = [list(bytes_of(segment.geometry, slot)) for slot in range(filled.num_slots)]
    flips = 0
    for page in range(len(PAGES)):
        key = PAGES.span(page, page + 1)
        parts = page_parts(key, filled.layout)
        for place, bit in itertools.product(range(PAGE_AND_HEADER_BYTES), range(8)):
            # It may be written to another slot each time.
            slot = filled.open(key, 0).slots[0]
            segment.memory[places[slot][place]] ^= 1 << bit
            before = segment.word(slot)
            flips += 1
            assert right_ranges(filled, page, parts) != [True, True], (place, bit)
            assert filled.counters.read_corrupt == flips
            assert segment.word(slot) & STATE_MASK == SlotState.EMPTY
            assert segment.tag(slot) == NO_TAG
            assert generation_of(segment.word(slot)) == generation_of(before)
            assert filled.contains(key) == PageBits.none(1)
            assert filled.put(key, parts) == PageBits.all(1)
        assert right_ranges(filled, page, parts) == [True, True]
    assert flips == len(PAGES) * 8 * PAGE_AND_HEADER_BYTES
    assert filled.contains(PAGES).complete
    sys.stdout.write(f"{flips:,} bits of {len(PAGES)} pages flipped, none read\n")
