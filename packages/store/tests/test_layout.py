from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlink_contracts.errors import CapacityError, ContractError
from radixlink_store._layout import (
    COUNTER_ROWS,
    COUNTERS_PER_ROW,
    MAX_WAYS,
    SUPERBLOCK_BYTES,
)
from radixlink_store.segments import Geometry

RANGES = st.lists(st.integers(1, 5000), min_size=1, max_size=8).map(tuple)


@given(RANGES, st.integers(0, 1 << 40))
def test_sections_follow_each_other_without_overlap(
    range_bytes: tuple[int, ...], more: int
) -> None:
    geometry = Geometry.within(sum(range_bytes) + 64 + more, range_bytes)
    count = geometry.num_slots
    assert geometry.counters_offset >= SUPERBLOCK_BYTES
    assert geometry.tags_offset >= geometry.counters_offset + 8 * COUNTERS_PER_ROW * COUNTER_ROWS
    assert geometry.states_offset >= geometry.tags_offset + count
    assert geometry.ages_offset >= geometry.states_offset + 8 * count
    assert geometry.leases_offset >= geometry.ages_offset + 8 * count
    assert geometry.headers_offset >= geometry.leases_offset + 4 * count
    assert geometry.payload_offset >= geometry.headers_offset + 8 * geometry.header_words * count
    assert geometry.total_bytes >= geometry.payload_offset + geometry.slot_bytes * count
    assert geometry.slot_bytes >= geometry.range_offsets[-1] + range_bytes[-1]
    assert geometry.header_words > geometry.header_checksum_word


@given(RANGES, st.integers(0, 1 << 40))
def test_table_uses_nearly_all_of_the_capacity(range_bytes: tuple[int, ...], more: int) -> None:
    capacity = sum(range_bytes) + 64 + more
    geometry = Geometry.within(capacity, range_bytes)
    used = geometry.num_slots * geometry.slot_bytes
    assert used <= capacity
    # What is left over is less than one way of all buckets and one slot, and buckets are wide.
    assert capacity - used < (geometry.num_buckets + 1) * geometry.slot_bytes
    assert geometry.num_buckets == 1 or geometry.ways >= MAX_WAYS // 2


@pytest.mark.parametrize(
    ("slots", "buckets", "ways"), [(1, 1, 1), (32, 1, 32), (33, 2, 16), (63, 2, 31), (1024, 32, 32)]
)
def test_buckets_are_few_and_wide(slots: int, buckets: int, ways: int) -> None:
    geometry = Geometry.within(slots * 64, (60,))
    assert (geometry.num_buckets, geometry.ways) == (buckets, ways)


def test_capacity_below_one_page_is_refused() -> None:
    with pytest.raises(CapacityError, match="capacity_bytes=100") as caught:
        Geometry.within(100, (64, 64))
    assert (caught.value.needed, caught.value.available) == (128, 100)


@pytest.mark.parametrize(("buckets", "ways"), [(0, 4), (4, 0), (4, 33)])
def test_table_without_slots_is_refused(buckets: int, ways: int) -> None:
    with pytest.raises(ContractError):
        Geometry(num_buckets=buckets, ways=ways, range_bytes=(64,))
