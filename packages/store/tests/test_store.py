"""What the file and the MPI store have in common: which slot a page goes to, and what is counted."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlink_contracts import PageBits, PageHandles, PageKeys
from radixlink_contracts.errors import ContractError, StaleHandleError
from radixlink_store._places import (
    NO_TAG,
    Place,
    candidate_buckets,
    key_words,
    matches_of,
    seed_and_match,
    tags_of,
)
from radixlink_store._state import LAST_GENERATION, SlotState, pack
from radixlink_store.counters import StoreCounters
from radixlink_testing import read_right
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from packages.store.tests.conftest import MakeStore, StillClock

    from radixlink_contracts import PoolLayout
    from radixlink_store.segments import SegmentPageStore


def put(store: SegmentPageStore, pages: Iterable[int]) -> PageBits:
    keys = page_keys(pages)
    return store.put(keys, page_parts(keys, store.layout))


def held(store: SegmentPageStore, pages: Iterable[int]) -> list[int]:
    """Which pages are there."""
    numbers = list(pages)
    return [numbers[i] for i in store.contains(page_keys(numbers))]


def test_least_recently_used_page_is_evicted(make_store: MakeStore, clock: StillClock) -> None:
    store, _ = make_store(1, 4)
    for page in range(4):
        clock.now += 1
        put(store, [page])
    clock.now += 1
    store.open(page_keys([0]), 0)
    store.touch(page_keys([1]))
    store.contains(page_keys([2]))
    put(store, [4])
    assert held(store, range(5)) == [0, 1, 3, 4]
    assert store.counters == StoreCounters(put=5, evicted=1)


def test_reading_alone_and_asking_raise_no_recency(
    make_store: MakeStore, clock: StillClock
) -> None:
    store, _ = make_store(1, 2)
    put(store, [0])
    handles = store.open(page_keys([0]), 0)
    clock.now += 1
    put(store, [1])
    assert read_right(store, handles).complete
    assert held(store, [0, 1]) == [0, 1]
    put(store, [2])
    assert held(store, range(3)) == [1, 2]


def test_putting_a_page_again_makes_it_recent(make_store: MakeStore, clock: StillClock) -> None:
    store, _ = make_store(1, 2)
    put(store, [0, 1])
    clock.now += 1
    put(store, [0])
    put(store, [2])
    assert held(store, range(3)) == [0, 2]


def test_burst_within_a_second_does_not_evict_itself(make_store: MakeStore) -> None:
    store, _ = make_store(1, 8)
    for page in range(30):
        assert put(store, [page]).complete
    assert held(store, range(30)) == list(range(22, 30))


def test_put_of_more_than_fits_keeps_the_first_pages(make_store: MakeStore) -> None:
    store, _ = make_store(1, 4)
    put(store, [2])
    assert put(store, range(6)) == PageBits.of([0, 1, 2, 3], 6)
    assert held(store, range(6)) == [0, 1, 2, 3]
    assert store.counters == StoreCounters(put=4, already_there=1, rejected_full=2)


def test_lease_keeps_a_page_until_it_ends(make_store: MakeStore, clock: StillClock) -> None:
    store, _ = make_store(1, 2)
    put(store, [0, 1])
    store.open(page_keys([0]), 10)
    clock.now += 5
    store.touch(page_keys([1]))
    put(store, [2])
    assert held(store, range(3)) == [0, 2]
    clock.now += 5
    put(store, [3])
    assert held(store, range(4)) == [2, 3]


def test_lease_only_rises(make_store: MakeStore, clock: StillClock) -> None:
    store, _ = make_store(1, 1)
    put(store, [0])
    store.open(page_keys([0]), 10)
    store.open(page_keys([0]), 0)
    clock.now += 9
    assert put(store, [1]) == PageBits.none(1)
    assert held(store, [0, 1]) == [0]
    assert store.counters == StoreCounters(put=1, rejected_full=1)


def test_no_lease_is_longer_than_an_hour(make_store: MakeStore, clock: StillClock) -> None:
    store, _ = make_store(1, 1)
    put(store, [0])
    store.open(page_keys([0]), float("inf"))
    clock.now += 3600
    assert put(store, [1]) == PageBits.all(1)


@pytest.mark.parametrize("ttl_s", [-1.0, float("nan")])
def test_time_to_live_that_is_none_is_refused(make_store: MakeStore, ttl_s: float) -> None:
    store, _ = make_store(1, 1)
    with pytest.raises(ContractError, match="ttl_s"):
        store.open(page_keys([0]), ttl_s)


def test_lease_ends_with_its_page(make_store: MakeStore, clock: StillClock) -> None:
    store, segment = make_store(1, 1)
    put(store, [0])
    store.open(page_keys([0]), 10)
    clock.now += 10
    put(store, [1])
    assert segment.leases[0] == 0


def test_new_page_goes_to_the_emptier_bucket(make_store: MakeStore) -> None:
    store, segment = make_store(2, 2)
    firsts = candidate_buckets(key_words(page_keys(range(64))), 2)[:, 0]
    in_first = [page for page in range(64) if firsts[page] == 0][:3]
    put(store, in_first)
    used = np.count_nonzero(segment.lines, axis=1)
    assert sorted(used.tolist()) == [1, 2]


@given(st.integers(1, 5000))
def test_one_key_and_many_have_the_same_places(num_buckets: int) -> None:
    keys = page_keys(range(50))
    words = key_words(keys)
    places = [Place.of(key, num_buckets) for key in keys]
    assert [list(place.buckets) for place in places] == candidate_buckets(
        words, num_buckets
    ).tolist()
    assert [place.tag for place in places] == tags_of(words).tolist()
    assert [place.match for place in places] == matches_of(words).tolist()
    assert [(place.seed, place.match) for place in places] == list(map(seed_and_match, keys))


def test_no_key_has_the_tag_of_an_empty_slot() -> None:
    keys = PageKeys.join(bytes(16) + bytes(5) + bytes([tag]) + bytes(10) for tag in range(256))
    assert NO_TAG not in tags_of(key_words(keys))
    assert NO_TAG not in [Place.of(key, 1).tag for key in keys]


@given(st.integers(2, 5000))
def test_two_candidates_are_two_buckets_of_the_table(num_buckets: int) -> None:
    buckets = candidate_buckets(key_words(page_keys(range(50))), num_buckets)
    assert buckets.shape == (50, 2)
    assert (buckets[:, 0] != buckets[:, 1]).all()
    assert buckets.min() >= 0
    assert buckets.max() < num_buckets


def test_full_table_keeps_nearly_all_that_fits(make_store: MakeStore) -> None:
    store, _ = make_store(16, 32)
    put(store, range(512))
    # One choice of a bucket would keep about 93 %.
    assert len(held(store, range(512))) > 500


def test_pages_with_equal_fingerprints_are_told_apart(make_store: MakeStore) -> None:
    store, _ = make_store(1, 4)
    one = bytes(32)
    others = [one[:24] + bytes([i]) * 8 for i in (1, 2)]
    assert len({(at.tag, at.match) for at in (Place.of(key, 1) for key in (one, *others))}) == 1
    keys = PageKeys.join([one, others[0]])
    store.put(keys, page_parts(keys, store.layout))
    asked = PageKeys.join([others[1], others[0], one])
    handles = store.open(asked, 0)
    assert handles.found == PageBits.of([1, 2], 3)
    assert read_right(store, handles) == PageBits.of([1, 2], 3)
    assert store.counters.read_corrupt == 0


def test_slot_that_a_dead_writer_left_is_used_before_any_page_is_evicted(
    make_store: MakeStore,
) -> None:
    store, segment = make_store(1, 3)
    put(store, [0, 1, 2])
    slot = store.open(page_keys([1]), 0).slots[0]
    segment.tag_lines.reshape(-1)[slot] = NO_TAG
    segment.lines.reshape(-1)[slot] = pack(77, 5, SlotState.WRITING)
    assert held(store, [0, 1, 2]) == [0, 2]
    assert put(store, [3]).complete
    assert held(store, range(4)) == [0, 2, 3]
    assert store.open(page_keys([3]), 0).generations[0] == 6


def test_state_without_a_meaning_is_a_free_slot(make_store: MakeStore) -> None:
    store, segment = make_store(1, 1)
    segment.lines[0, 0] = pack(0, 5, SlotState.EMPTY) | 3
    assert put(store, [0]).complete
    assert store.open(page_keys([0]), 0).generations[0] == 6


def test_locked_slot_is_passed_over(make_store: MakeStore) -> None:
    store, segment = make_store(1, 2)
    put(store, [0])
    slot = store.open(page_keys([0]), 0).slots[0]
    with segment.locks.lend() as lock:
        assert lock.try_lock(slot)
        put(store, [1])
        assert put(store, [2]).complete
        assert held(store, range(3)) == [0, 2]
        assert lock.try_lock(1 - slot)
        assert put(store, [3]) == PageBits.none(1)
        assert held(store, range(4)) == [0, 2]
    assert store.counters.rejected_busy == 1
    with segment.locks.lend() as lock:
        lock.unlock(slot)
        lock.unlock(1 - slot)
    assert put(store, [3]).complete


def test_slot_is_not_written_if_its_word_changed_before_it_was_locked(
    make_store: MakeStore,
) -> None:
    store, segment = make_store(1, 1)
    put(store, [0])
    place = Place.of(page_keys([1])[0], 1)
    with segment.locks.lend() as lock:
        assert segment.claim(lock, 0, 0, place, 1) is None
    with segment.locks.lend() as lock, segment.locks.lend() as other:
        assert other.try_lock(0), "the lock was given back"
        other.unlock_all()
        assert lock.try_lock(0)
        lock.unlock_all()
    assert held(store, [0, 1]) == [0]


def test_slot_that_used_its_generations_up_is_never_written_again(make_store: MakeStore) -> None:
    store, segment = make_store(1, 1)
    segment.lines[0, 0] = pack(0, LAST_GENERATION - 1, SlotState.EMPTY)
    assert put(store, [0]).complete
    assert store.open(page_keys([0]), 0).generations[0] == LAST_GENERATION
    assert put(store, [1]) == PageBits.none(1)
    assert held(store, [0, 1]) == [0]


def test_generation_grows_with_every_write_of_a_slot(make_store: MakeStore) -> None:
    store, _ = make_store(1, 1)
    for page in range(4):
        put(store, [page])
        assert store.open(page_keys([page]), 0).generations[0] == page + 1


def test_write_that_raised_leaves_the_slot_free_and_the_page_a_miss(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = make_store(1, 1)
    put(store, [0])
    handles = store.open(page_keys([0]), 0)
    with monkeypatch.context() as patch:
        patch.setattr("radixlink_store._segment.published", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            put(store, [1])
    assert held(store, [0, 1]) == []
    assert read_right(store, handles) == PageBits.none(1)
    assert put(store, [2]).complete


def test_read_ends_as_a_miss_when_the_page_is_replaced_under_it(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, segment = make_store(1, 1)
    put(store, [0])
    handles = store.open(page_keys([0]), 0)
    copy = segment.copy_range

    def replaced(slot: int, layer_range: int, out: memoryview, past: int) -> None:
        put(store, [1])
        copy(slot, layer_range, out, past)

    monkeypatch.setattr(segment, "copy_range", replaced)
    assert read_right(store, handles) == PageBits.none(1)
    assert store.counters.read_stale == 2
    assert store.counters.read_corrupt == 0
    assert held(store, [1]) == [1]


def test_read_ends_as_a_miss_when_the_page_is_replaced_after_the_copy(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, segment = make_store(1, 1)
    put(store, [0])
    handles = store.open(page_keys([0]), 0)
    matches = segment.matches

    def replaced(*args: object, **kwargs: object) -> bool:
        right = matches(*args, **kwargs)  # type: ignore[arg-type]
        put(store, [1])
        return right

    monkeypatch.setattr(segment, "matches", replaced)
    assert read_right(store, handles) == PageBits.none(1)
    assert store.counters.read_stale == 2


def test_closing_does_not_disturb_a_read_in_progress(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, segment = make_store(1, 1)
    put(store, [0])
    handles = store.open(page_keys([0]), 0)
    copy = segment.copy_range

    def close_first(slot: int, layer_range: int, out: memoryview, past: int) -> None:
        store.close()
        copy(slot, layer_range, out, past)

    monkeypatch.setattr(segment, "copy_range", close_first)
    assert store.read(handles, 0, bytearray(40)) == PageBits.all(1)
    with pytest.raises(StaleHandleError):
        store.read(handles, 0, bytearray(40))


def test_counters_tell_each_outcome(make_store: MakeStore) -> None:
    store, _ = make_store(1, 4)
    put(store, [0, 1, 1])
    put(store, [0, 2])
    handles = store.open(page_keys([0, 9]), 0)
    store.read(handles, 0, bytearray(80))
    assert store.counters == StoreCounters(put=3, already_there=2, read_ok=1, read_missing=1)


def test_counters_add_up() -> None:
    one = StoreCounters(put=1, read_stale=5)
    assert one + StoreCounters(put=2, evicted=3) == StoreCounters(put=3, evicted=3, read_stale=5)


def test_handles_of_a_larger_store_are_refused(make_store: MakeStore) -> None:
    store, _ = make_store(1, 2)
    put(store, [0])
    handles = store.open(page_keys([0]), 0)
    handles.slots[0] = 2
    with pytest.raises(ContractError, match="slot 2 of 2"):
        store.read(handles, 0, bytearray(40))


def test_handles_without_a_place_are_a_miss(make_store: MakeStore) -> None:
    store, _ = make_store(1, 1)
    put(store, [0])
    handles = PageHandles.without_places(page_keys([0]), PageBits.all(1))
    assert store.read(handles, 0, bytearray(40)) == PageBits.none(1)


def test_buffers_of_any_type_and_shape_fit_by_their_bytes(
    make_store: MakeStore, layout: PoolLayout
) -> None:
    store, _ = make_store(1, 4)
    first = np.arange(20, dtype=np.float32).reshape(2, 2, 5)
    second = np.arange(24, dtype=np.int16).reshape(2, 12)
    keys = page_keys([0, 1])
    assert store.put(keys, [first.data, second.data]).complete
    handles = store.open(keys, 0)
    out = np.empty((2, 2, 5), np.float32)
    assert store.read(handles, 0, out.data).complete
    assert (out == first).all()
    assert layout.range_bytes == (40, 24)


def test_strided_buffers_are_refused(make_store: MakeStore) -> None:
    store, _ = make_store(1, 1)
    keys = page_keys([0])
    strided = np.zeros((2, 40), np.uint8)[:, ::2]
    with pytest.raises(ContractError, match="contiguous=False"):
        store.put(keys, [strided.data, bytes(24)])
    with pytest.raises(ContractError, match="contiguous=False"):
        store.read(store.open(keys, 0), 0, strided.data)


def test_writer_of_a_page_is_known(make_store: MakeStore) -> None:
    store, _ = make_store(1, 2)
    put(store, [0])
    assert store.open(page_keys([0]), 0).writers.tolist() == [os.getpid()]


def test_tables_of_equal_geometry_put_a_key_in_equal_buckets(make_store: MakeStore) -> None:
    # Two shards of a page: nothing of the shard is in the choice.
    one, first = make_store(8, 4)
    two, second = make_store(8, 4)
    put(one, range(16))
    put(two, range(16))
    keys = page_keys(range(16))
    buckets = [
        [slot // segment.geometry.ways for slot in store.open(keys, 0).slots]
        for store, segment in ((one, first), (two, second))
    ]
    assert buckets[0] == buckets[1]
    assert len(set(itertools.chain(*buckets))) > 1
