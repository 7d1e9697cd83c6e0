"""What an opener counts: for itself, and in its segment for whoever asks about all of them.

A segment has rows of counters. An opener takes one for itself, by a lock that the kernel releases
when it ends, and adds to what earlier openers counted there; so the sum over all rows is what was
counted since the segment was made, and no addition needs to be atomic. Where all rows are taken, an
opener counts for itself alone. A forked child shares its parent's row: what both count while both
live may be lost in part.
"""

from __future__ import annotations

from typing import Final

import attrs

from radixlink_store._layout import COUNTERS_PER_ROW
from radixlink_store._process_mutex import ProcessMutex
from radixlink_store.counters import StoreCounters

_WORD: Final = (1 << 64) - 1
_PLACES: Final = {field.name: place for place, field in enumerate(attrs.fields(StoreCounters))}


class Tally:
    """The counters of one opener.

    Thread: any.
    """

    def __init__(self, row: memoryview | None) -> None:
        """Start at nothing.

        Args:
            row: The words of the row that this opener alone adds to; None counts for itself alone.
        """
        self._mutex: Final = ProcessMutex()
        self._row = row
        self._earlier: Final = tuple(row) if row is not None else (0,) * COUNTERS_PER_ROW
        #: Where the row stands by what this opener counted; a forked child may write the row, too.
        self._totals: Final = list(self._earlier)

    def add(self, **counts: int) -> None:
        """Add to counters by the names that `StoreCounters` gives them."""
        with self._mutex.lock:
            totals, row = self._totals, self._row
            for name, count in counts.items():
                if count:
                    place = _PLACES[name]
                    totals[place] = total = totals[place] + count & _WORD
                    if row is not None:
                        row[place] = total

    def add_one(self, *names: str) -> None:
        """Add 1 to each of these counters: what `add` does, in less time."""
        with self._mutex.lock:
            totals, row = self._totals, self._row
            for name in names:
                place = _PLACES[name]
                totals[place] = total = totals[place] + 1 & _WORD
                if row is not None:
                    row[place] = total

    def leave(self) -> None:
        """Give the row up; what is counted from now on is for itself alone."""
        with self._mutex.lock:
            self._row = None

    @property
    def counters(self) -> StoreCounters:
        """What this opener counted."""
        with self._mutex.lock:
            return StoreCounters(
                **{
                    name: self._totals[place] - self._earlier[place] & _WORD
                    for name, place in _PLACES.items()
                }
            )


def sum_of(rows: list[memoryview]) -> StoreCounters:
    """What all openers counted, now."""
    return StoreCounters(
        **{name: sum(row[place] for row in rows) for name, place in _PLACES.items()}
    )
