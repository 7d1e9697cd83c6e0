"""What an opener counts, and what it adds to its row."""

from __future__ import annotations

import pytest

from radixlink_store._layout import COUNTERS_PER_ROW
from radixlink_store._tally import Tally
from radixlink_store.counters import StoreCounters

LAST = (1 << 64) - 1


def a_row() -> memoryview:
    """A row in which earlier openers have counted as far as a word goes."""
    row = memoryview(bytearray(8 * COUNTERS_PER_ROW)).cast("Q")
    row[0] = LAST
    return row


def test_counters_go_on_over_the_end_of_a_word() -> None:
    row = a_row()
    tally = Tally(row)
    tally.add_one("put")
    tally.add(put=2, evicted=0)
    tally.add_one("put", "evicted")
    assert tally.counters == StoreCounters(put=4, evicted=1)
    assert row[0] == 3


def test_row_that_was_left_is_another_opener_s() -> None:
    row = a_row()
    tally = Tally(row)
    tally.add_one("put")
    tally.leave()
    row[0] = 70
    tally.add_one("put")
    tally.add(put=1)
    assert tally.counters.put == 3
    assert row[0] == 70


@pytest.mark.parametrize("row", [None, a_row()])
def test_counters_are_those_of_this_opener_alone(row: memoryview | None) -> None:
    tally = Tally(row)
    assert tally.counters == StoreCounters()
    tally.add_one("read_ok")
    assert tally.counters == StoreCounters(read_ok=1)
