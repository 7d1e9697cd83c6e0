"""A page that comes alone takes another way than those of a group, and ends alike."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packages.store.tests.conftest import IDENTITY, StillClock, store_in_memory

from radixlink_contracts import PageBits, PageKeys, PoolLayout, PoolName
from radixlink_contracts.errors import BackendUnavailableError
from radixlink_store._ages import age_of_call, age_of_page
from radixlink_store._places import NO_TAG, Place
from radixlink_store._state import LAST_GENERATION, SlotState, pack
from radixlink_store.counters import StoreCounters
from radixlink_store.segments import SlotLocks
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from packages.store.tests.conftest import MakeStore

    from radixlink_store.segments import Segment, SegmentPageStore

LAYOUT = PoolLayout(identity=IDENTITY, pool=PoolName.KV, range_bytes=(40, 24))
NOW = 1000
PAGE = page_keys([1])


@attrs.frozen
class Slot:
    """What a slot holds before the page comes."""

    tag: int
    word: int
    age: int
    lease: int
    locked: bool


def slots() -> st.SearchStrategy[Slot]:
    """Any state that a slot can be found in, damage too. No page in it is the one that comes."""
    other = Place.of(PAGE[0], 1).tag ^ 1
    generations = st.sampled_from([0, 5, LAST_GENERATION - 1, LAST_GENERATION])
    words = st.builds(pack, st.just(7), generations, st.sampled_from(SlotState))
    return st.builds(
        Slot,
        tag=st.sampled_from([NO_TAG, other]),
        word=words,
        age=st.integers(0, 20),
        lease=st.sampled_from([0, NOW, NOW + 1]),
        locked=st.booleans(),
    )


def arrange(segment: Segment, slots: list[Slot]) -> None:
    segment.tag_lines.reshape(-1)[:] = [slot.tag for slot in slots]
    segment.lines.reshape(-1)[:] = [slot.word for slot in slots]
    segment.ages[:] = [slot.age for slot in slots]
    segment.leases[:] = [slot.lease for slot in slots]


def outcome(segment: Segment) -> tuple[bytes, ...]:
    """All that a write may change."""
    return (
        segment.tag_lines.tobytes(),
        segment.lines.tobytes(),
        segment.ages.tobytes(),
        segment.leases.tobytes(),
        bytes(segment.memory[segment.geometry.headers_offset :]),
    )


@given(num_buckets=st.sampled_from([1, 2, 3]), data=st.data())
def test_page_that_comes_alone_is_written_like_one_of_a_group(
    num_buckets: int, data: st.DataObject
) -> None:
    """The same page twice in one call is a group of one page."""
    before = data.draw(st.lists(slots(), min_size=2 * num_buckets, max_size=2 * num_buckets))
    clock = StillClock()
    clock.now = NOW
    locks = [SlotLocks(os.memfd_create("locks")) for _ in range(2)]
    alone, in_alone = store_in_memory(LAYOUT, clock, locks[0], num_buckets, 2)
    grouped, in_grouped = store_in_memory(LAYOUT, clock, locks[1], num_buckets, 2)
    with contextlib.closing(alone), contextlib.closing(grouped), contextlib.ExitStack() as held:
        for segment in (in_alone, in_grouped):
            arrange(segment, before)
            lock = held.enter_context(segment.locks.lend())
            for number, slot in enumerate(before):
                assert not slot.locked or lock.try_lock(number)
        twice = PageKeys(PAGE.data * 2)
        stored = alone.put(PAGE, page_parts(PAGE, LAYOUT))
        assert stored.mask * 3 == grouped.put(twice, page_parts(twice, LAYOUT)).mask
        assert outcome(in_alone) == outcome(in_grouped)
        one, two = alone.counters, grouped.counters
        assert (one.put, one.evicted) == (two.put, two.evicted)
        assert 2 * one.rejected_full == two.rejected_full
        assert 2 * one.rejected_busy == two.rejected_busy
        assert one.already_there == 0
        assert two.already_there == two.put
        assert one.put + one.rejected_full + one.rejected_busy == 1


def some_pages(store: SegmentPageStore, count: int) -> PageKeys:
    """So many keys, of which one comes twice and one is not there."""
    present = page_keys(range(count - 2))
    assert store.put(present, page_parts(present, LAYOUT)).complete
    return PageKeys(present.data + page_keys([0, 99]).data)


@pytest.mark.parametrize("count", [3, 8, 9, 12])
def test_touch_of_few_and_of_many_raises_recency_alike(
    make_store: MakeStore, clock: StillClock, count: int
) -> None:
    store, segment = make_store(1, 16)
    keys = some_pages(store, count)
    slots = store.open(keys, 50).slots
    leases = segment.leases.copy()
    clock.now += 1
    assert store.touch(keys) == PageBits.of(range(count - 1), count)
    age = age_of_call(clock.now)
    # Page 0 comes again as the last but one.
    indices = [count - 2, *range(1, count - 2)]
    ages = [age_of_page(age, index) for index in indices]
    assert segment.ages[slots[: count - 2]].tolist() == ages
    assert np.count_nonzero(segment.ages) == count - 2
    assert (segment.leases == leases).all()


@pytest.mark.parametrize("count", [1, 3, 9])
def test_use_that_asks_for_no_longer_lease_stores_none(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """What another asked for meanwhile would go with it."""
    store, segment = make_store(1, 16)
    keys = page_keys(range(count))
    assert store.put(keys, page_parts(keys, LAYOUT)).complete
    store.open(keys, 50)
    # To store one is a TypeError from here on.
    monkeypatch.setattr(segment, "_lease", segment._lease.toreadonly())
    assert store.touch(keys).complete
    assert store.put(keys, page_parts(keys, LAYOUT)).complete
    assert store.open(keys, 0).found.complete


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("number", "transient"), [(errno.EMFILE, True), (errno.EINVAL, False)])
def test_locks_that_fail_are_an_error_and_no_page_is_half_there(
    make_store: MakeStore,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    number: int,
    *,
    transient: bool,
) -> None:
    store, segment = make_store(1, 4)
    keys = page_keys(range(count))

    def take() -> None:
        raise OSError(number, "no")

    with monkeypatch.context() as patch:
        patch.setattr(segment.locks, "take", take)
        with pytest.raises(BackendUnavailableError, match="expected to lock a slot") as told:
            store.put(keys, page_parts(keys, LAYOUT))
    assert told.value.transient is transient
    assert store.counters == StoreCounters()
    assert store.contains(keys) == PageBits.none(count)
    assert store.put(keys, page_parts(keys, LAYOUT)).complete
