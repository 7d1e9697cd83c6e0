"""The bytes of an object: where they are, and that nothing passes for what it is not."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st

from radixlink_contracts import PoolName
from radixlink_store_mooncake._object import (
    HEADER_BYTES,
    TAG_BYTES,
    Header,
    PageFormat,
)
from radixlink_testing import SUITE_LAYOUT
from radixlink_testing.pages import page_key, range_bytes

FORM = PageFormat.of(SUITE_LAYOUT)
KEY = page_key(1)
HEADER = Header(generation=7, writer=42)


def header_bytes() -> memoryview:
    data = memoryview(bytearray(HEADER_BYTES))
    FORM.write_header(KEY, HEADER, data)
    return data


def test_ranges_follow_their_tags_without_overlap() -> None:
    # 96, 33 and 160 bytes, each after a tag of 64, rounded up to 64.
    assert FORM.tag_offsets == (64, 64 + 192, 64 + 192 + 128)
    assert FORM.object_bytes == 64 + 192 + 128 + 256


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20))
def test_any_layout_has_room_for_everything(sizes: list[int]) -> None:
    form = PageFormat.of(attrs.evolve(SUITE_LAYOUT, range_bytes=tuple(sizes)))
    ends = [*form.tag_offsets[1:], form.object_bytes]
    for start, size, end in zip(form.tag_offsets, sizes, ends, strict=True):
        assert start % 64 == 0
        assert start + TAG_BYTES + size <= end < start + TAG_BYTES + size + 64


def test_header_is_read_as_it_was_written() -> None:
    assert FORM.read_header(KEY, header_bytes()) == HEADER


@given(st.integers(0, 39), st.integers(0, 7))
def test_header_with_any_bit_flipped_is_none(byte: int, bit: int) -> None:
    data = header_bytes()
    data[byte] ^= 1 << bit
    assert FORM.read_header(KEY, data) is None


def test_header_of_another_page_or_layout_is_none() -> None:
    data = header_bytes()
    assert FORM.read_header(page_key(2), data) is None
    other = PageFormat.of(attrs.evolve(SUITE_LAYOUT, pool=PoolName.SWA))
    assert other.object_bytes == FORM.object_bytes
    assert other.read_header(KEY, data) is None


def test_tag_names_its_generation_and_differs_in_all_that_it_covers() -> None:
    data = bytes(range(96))
    tag = FORM.tag(KEY, 7, 0, data)
    assert tag[:8] == (7).to_bytes(8, "little")
    other_layout = PageFormat.of(attrs.evolve(SUITE_LAYOUT, pool=PoolName.SWA))
    others = [
        FORM.tag(page_key(2), 7, 0, data),
        FORM.tag(KEY, 8, 0, data),
        FORM.tag(KEY, 7, 1, data),
        FORM.tag(KEY, 7, 0, bytes(96)),
        other_layout.tag(KEY, 7, 0, data),
    ]
    # Of the checksum alone: the generation is beside it.
    assert len({each[8:] for each in (tag, *others)}) == 6


def test_tag_and_bytes_are_of_one_write_or_of_another_or_of_none() -> None:
    data = bytes(range(96))
    tag = memoryview(FORM.tag(KEY, 7, 0, data))
    of_none = memoryview(FORM.tag(KEY, 7, 0, data)[:8] + FORM.tag(KEY, 8, 0, data)[8:])
    assert FORM.is_right(KEY, 7, 0, tag, data)
    assert not FORM.is_renewed(KEY, 7, 0, tag, data)
    assert not FORM.is_right(KEY, 6, 0, tag, data)
    assert FORM.is_renewed(KEY, 6, 0, tag, data)
    for generation in (6, 7, 8):
        assert not FORM.is_right(KEY, generation, 0, of_none, data)
        assert not FORM.is_renewed(KEY, generation, 0, of_none, data)


def test_sealed_page_has_the_header_and_the_tags_of_what_lay_there() -> None:
    frame = memoryview(bytearray(b"\xee" * FORM.object_bytes))
    ranges = [range_bytes(KEY, nth, size) for nth, size in enumerate(FORM.range_bytes)]
    for start, data in zip(FORM.tag_offsets, ranges, strict=True):
        frame[start + TAG_BYTES : start + TAG_BYTES + len(data)] = data
    FORM.seal(KEY, HEADER, frame)
    assert FORM.read_header(KEY, frame) == HEADER
    for layer_range, (start, data) in enumerate(zip(FORM.tag_offsets, ranges, strict=True)):
        tagged = bytes(frame[start : start + TAG_BYTES + len(data)])
        assert tagged == FORM.tag(KEY, HEADER.generation, layer_range, data) + data
