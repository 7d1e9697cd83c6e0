"""Which slot a page is written to, best first: the only place that decides what is evicted.

1. A slot that holds nothing, in the candidate bucket that has more of them (that is what makes two
   choices fill evenly).
2. A slot whose state says that it is being written. It can be had if its writer died; if not, its
   lock is busy.
3. A published page that no lease keeps: the least recently used. Stamps are whole seconds, so that
   the shards of a page are chosen alike in their tables; among equal stamps the slot that was
   claimed least often, which makes a burst of pages go round the ways instead of evicting its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from radixlink_store._segment import generations_of
from radixlink_store._state import STATE_MASK, SlotState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radixlink_store._segment import Segment, Slots

_STATE_MASK: Final = np.uint64(STATE_MASK)
_EMPTY: Final = np.uint64(SlotState.EMPTY)
_READY: Final = np.uint64(SlotState.READY)
_STAMP_SHIFT: Final = np.uint64(32)
_LOW_BITS: Final = np.uint64((1 << 32) - 1)


def ways_for(segment: Segment, buckets: Slots, now: int) -> Iterator[tuple[int, int]]:
    """Where a page with these candidate buckets may be written, with the state words seen.

    Shape: buckets (1,) or (2,).
    Mutates: nothing.
    Cost: one look at the first answer, two if that one could not be had or no slot is empty.
    """
    words = segment.lines[buckets]
    slots = segment.slot_lines[buckets]
    states = words & _STATE_MASK
    empty = states == _EMPTY
    if empty.any():
        bucket = int(empty.sum(axis=1).argmax())
        way = int(empty[bucket].argmax())
        yield int(slots[bucket, way]), int(words[bucket, way])
    yield from zip(slots[empty].tolist(), words[empty].tolist(), strict=True)
    ready = states == _READY
    others = ~(empty | ready)
    yield from zip(slots[others].tolist(), words[others].tolist(), strict=True)
    ready &= segment.leases[slots] <= now
    victims, seen = slots[ready], words[ready]
    stamps = segment.recency[victims].astype(np.uint64)
    order = (stamps << _STAMP_SHIFT | generations_of(seen) & _LOW_BITS).argsort(kind="stable")
    yield from zip(victims[order].tolist(), seen[order].tolist(), strict=True)
