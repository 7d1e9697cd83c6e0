"""Ctrl-C at any step: what an exception leaves behind keeps no slot from anybody."""

from __future__ import annotations

import functools
import itertools
import os
import sys
from typing import TYPE_CHECKING

import pytest

from radixlink_store.segments import SlotLocks
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    from packages.store.tests.conftest import MakeStore

    from radixlink_store.segments import Segment, SegmentPageStore


def interrupted(step: int, work: Callable[[], object]) -> bool:
    """Do some work, with a KeyboardInterrupt at one of the places where Python looks for signals.

    These are where a function of Python begins and where one of C has returned.

    Returns:
        Whether the work has so many places.
    """
    left = step

    def interrupt(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal left
        if event in {"call", "c_return"}:
            left -= 1
            if not left:
                raise KeyboardInterrupt

    try:
        sys.setprofile(interrupt)
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return left <= 0


def locked_slots(locks: SlotLocks, segment: Segment) -> list[int]:
    """The slots that another process could not lock now."""
    with locks.lend() as lock:
        slots = range(segment.geometry.num_slots)
        return [slot for slot in slots if not lock.try_lock(slot)]


@pytest.fixture
def others(tmp_path: Path, make_store: MakeStore) -> SlotLocks:
    """The locks of another process that has the test's segment open."""
    store, _ = make_store(1, 1)
    store.close()
    return SlotLocks(os.open(tmp_path / "locks", os.O_RDWR))


# Between two pages a generator is thrown away; an exception there is told by Python and passes.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("num_pages", [1, 3])
def test_put_that_is_interrupted_leaves_no_slot_locked(
    make_store: MakeStore, others: SlotLocks, num_pages: int
) -> None:
    store, segment = make_store(2, 4)

    def put(first: int) -> bool:
        keys = page_keys(range(first, first + num_pages))
        parts = page_parts(keys, store.layout)
        return interrupted(1 + first // num_pages, lambda: store.put(keys, parts))

    for first in itertools.count(0, num_pages):
        went_on = put(first)
        assert locked_slots(others, segment) == []
        if not went_on:
            break
    assert first > 50 * num_pages
    # Every slot can be written still: as many pages fit as in a new store.
    assert fits(store) == fits(make_store(2, 4)[0])
    others.close()


def fits(store: SegmentPageStore) -> int:
    """How many pages of a call find room."""
    keys = page_keys(range(1000, 1050))
    return store.put(keys, page_parts(keys, store.layout)).total


def test_read_of_a_damaged_page_that_is_interrupted_leaves_its_slot_to_others(
    make_store: MakeStore, others: SlotLocks
) -> None:
    store, segment = make_store(1, 1)
    keys = page_keys([0])
    out = bytearray(store.layout.range_bytes[0])
    for step in itertools.count(1):
        store.put(keys, page_parts(keys, store.layout))
        handles = store.open(keys, 0)
        segment.range_of(0, 0)[0] ^= 1
        went_on = interrupted(step, functools.partial(store.read, handles, 0, out))
        assert locked_slots(others, segment) == []
        if not went_on:
            break
        # Whatever became of it, it is looked at again.
        assert not store.read(handles, 0, out).total
    assert step > 20
    others.close()
