"""Which slot a page is written to, best first: the only place that decides what is evicted.

1. A slot without a tag: no page can be found there. First those of the candidate bucket that has
   more of them (that is what makes two choices fill evenly). If a writer is at work there its lock
   is busy, and the next one is tried; if one died there, it can be had at once.
2. A slot with a tag whose state word is not that of a published page: damage, or a writer died
   between its last two stores.
3. A published page that no lease keeps: the least recently used, by what `_ages` says.

In a full table the oldest slot of the two buckets nearly always is the answer, so it is looked at
before all ways are put in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from radixlink_store._places import NO_TAG
from radixlink_store._state import STATE_MASK, SlotState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radixlink_store._places import Lines
    from radixlink_store._segment import Segment

_STATE_MASK: Final = np.uint64(STATE_MASK)
_READY: Final = int(SlotState.READY)


def ways_for(
    segment: Segment, buckets: tuple[int, ...], lines: Lines, now: int
) -> Iterator[tuple[int, int]]:
    """Where a page with these candidate buckets may be written, with the state words seen.

    A slot may come twice: it may be another's at the first time.

    Args:
        segment: The table.
        buckets: One or two.
        lines: Their tags.
        now: Whole seconds.

    Mutates: nothing.
    Cost: a few microseconds for the first answer, tens once that one could not be had.
    """
    if NO_TAG in lines[0] or NO_TAG in lines[-1]:
        # In one loop and not by another generator, which takes a microsecond to ask.
        second_first = lines[-1].count(NO_TAG) > lines[0].count(NO_TAG)
        for choice in range(len(lines)):
            at = choice ^ second_first
            line, start = lines[at], buckets[at] * segment.ways
            way = line.find(NO_TAG)
            while way >= 0:
                # The line may be older than the word: a page that was published since has its tag.
                slot = start + way
                word = segment.word(slot)
                if segment.tag(slot) == NO_TAG:
                    yield slot, word
                way = line.find(NO_TAG, way + 1)
    slot = segment.oldest(buckets)
    word = segment.word(slot)
    if word & STATE_MASK == _READY and segment.lease(slot) <= now:
        yield slot, word
    yield from _all_in_order(segment, buckets, now)


def _all_in_order(
    segment: Segment, buckets: tuple[int, ...], now: int
) -> Iterator[tuple[int, int]]:
    """Ways with a tag: the damaged ones, then the pages that no lease keeps, oldest first."""
    lines = np.array(buckets)
    slots = segment.slot_lines[lines].ravel()
    words = segment.lines[lines].ravel()
    tagged = segment.tag_lines[lines].ravel() != NO_TAG
    ready = (words & _STATE_MASK) == np.uint64(_READY)
    damaged = tagged & ~ready
    yield from zip(slots[damaged].tolist(), words[damaged].tolist(), strict=True)
    ready &= tagged & (segment.leases[slots] <= now)
    victims, seen = slots[ready], words[ready]
    order = segment.ages[victims].argsort(kind="stable")
    yield from zip(victims[order].tolist(), seen[order].tolist(), strict=True)
