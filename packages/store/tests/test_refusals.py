"""For how long a page that was refused is not tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from radixlink_store._refusals import FIRST_S, LONGEST_S, MOST_PAGES, Refusals
from radixlink_testing.pages import page_key

if TYPE_CHECKING:
    from packages.store.tests.conftest import StillClock

KEY = page_key(0)


@pytest.fixture
def refusals(clock: StillClock) -> Refusals:
    """None yet."""
    return Refusals(clock)


def lasted(refusals: Refusals, clock: StillClock) -> float:
    """For how long a page is refused from now on; the clock stands at the end of it."""
    start = clock.now
    while KEY in refusals:
        clock.now += FIRST_S / 4
    return clock.now - start


def test_time_doubles_as_long_as_it_is_refused_each_time(
    refusals: Refusals, clock: StillClock
) -> None:
    assert KEY not in refusals
    times = []
    for _ in range(8):
        refusals.add([KEY])
        times.append(lasted(refusals, clock))
    expected = [min(FIRST_S * 2**again, LONGEST_S) for again in range(8)]
    assert times == pytest.approx(expected, abs=FIRST_S / 3)


def test_what_was_not_refused_for_as_long_again_starts_anew(
    refusals: Refusals, clock: StillClock
) -> None:
    for _ in range(4):
        refusals.add([KEY])
        clock.now += lasted(refusals, clock) / 2
    clock.now += LONGEST_S
    refusals.add([KEY])
    assert lasted(refusals, clock) == pytest.approx(FIRST_S, abs=FIRST_S / 3)


def test_what_was_taken_is_forgotten(refusals: Refusals) -> None:
    refusals.add([KEY, page_key(1)])
    refusals.discard([KEY, page_key(2)])
    assert KEY not in refusals
    assert page_key(1) in refusals


def test_only_the_last_ones_are_remembered(refusals: Refusals) -> None:
    keys = [page_key(page) for page in range(MOST_PAGES + 10)]
    refusals.add(keys)
    refusals.add(keys[10:11])
    refusals.add([page_key(-1)])
    assert len(refusals) == MOST_PAGES
    assert [key in refusals for key in keys[9:13]] == [False, True, False, True]
