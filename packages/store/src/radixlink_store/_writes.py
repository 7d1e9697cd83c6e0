"""How pages that are not there are written: claimed, copied, published, and what became of each.

A page that comes alone goes by `write_one`, which takes the steps of `write_group` without its
lists. They end alike; `test_one_and_group.py` compares them.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, NamedTuple

from radixlink_store._state import STATE_MASK, SlotState
from radixlink_store._ways import ways_for

if TYPE_CHECKING:
    from collections.abc import Collection

    from radixlink_store._places import Lines, Place
    from radixlink_store._segment import Segment

GROUP: Final = 8
"""So many pages of a call are written at a time. More would gain nothing, and a writer that dies
leaves so many slots without a page, one that was stopped keeps as many."""


class Outcome(enum.Enum):
    """What became of one page."""

    #: Written into a slot that held none.
    WRITTEN = enum.auto()
    #: Written over another page.
    WRITTEN_OVER = enum.auto()
    #: Given up, as somebody else had stored it meanwhile.
    GIVEN_UP = enum.auto()
    #: The same, where another page had been.
    GIVEN_UP_OVER = enum.auto()
    #: No slot may be written: all are leased.
    FULL = enum.auto()
    #: Others were faster at every slot that may be written, or it has used its generations up.
    BUSY = enum.auto()


# Members of an enum are slow to come by (Python 3.11), and these are asked for with every page.
WRITTEN: Final = Outcome.WRITTEN
WRITTEN_OVER: Final = Outcome.WRITTEN_OVER
FULL: Final = Outcome.FULL
BUSY: Final = Outcome.BUSY
_GIVEN_UP: Final = Outcome.GIVEN_UP
_GIVEN_UP_OVER: Final = Outcome.GIVEN_UP_OVER
_READY: Final = int(SlotState.READY)

GIVEN_UP: Final = frozenset({_GIVEN_UP, _GIVEN_UP_OVER})
"""Outcomes of pages that somebody else had stored."""
OVER: Final = frozenset({WRITTEN_OVER, _GIVEN_UP_OVER})
"""Outcomes for which another page went."""


class Page(NamedTuple):
    """A page that is to be written.

    Attributes:
        place: Where it may be.
        lines: The tags there.
        age: What its slot's age will be.
        parts: Its layer ranges.
    """

    place: Place
    lines: Lines
    age: int
    parts: list[memoryview]


def write_group(
    segment: Segment, pages: Collection[Page], now: int, mine: set[int], writer: int
) -> list[Outcome]:
    """Write pages that are not there, `GROUP` at most.

    First all are claimed, then all are copied, then all are published: a copy drives the code
    of Python and its data from the caches, so what is not a copy goes in one piece.

    Args:
        segment: Where to.
        pages: Different ones.
        now: Whole seconds.
        mine: Slots that are not to be written; those of the pages are added.
        writer: Whose pages they are.

    Raises:
        OSError: A slot could not be locked, for another reason than that somebody has it.
        StaleHandleError: The locks were closed, or this is a forked child.
    """
    outcomes = [FULL] * len(pages)
    claims: list[tuple[int, Page, int, int, bool]] = []
    lock = segment.locks.take()
    try:
        for number, page in enumerate(pages):
            for slot, seen in ways_for(segment, page.place.buckets, page.lines, now):
                if slot in mine:
                    continue
                word = segment.claim(lock, slot, seen, page.place, page.age)
                if word is not None:
                    mine.add(slot)
                    claims.append((number, page, slot, word, seen & STATE_MASK == _READY))
                    break
                outcomes[number] = BUSY
        checksums = [
            segment.fill(slot, word, page.place.seed, page.parts)
            for _, page, slot, word, _ in claims
        ]
        for (number, page, slot, word, over), sums in zip(claims, checksums, strict=True):
            at = segment.publish(slot, word, page.place, sums, writer)
            if at == slot:
                outcomes[number] = WRITTEN_OVER if over else WRITTEN
            else:
                mine.discard(slot)
                mine.add(at)
                outcomes[number] = _GIVEN_UP_OVER if over else _GIVEN_UP
    finally:
        # After an exception what is not published is not locked: a dead writer's.
        lock.unlock_all()
        segment.locks.give_back(lock)
    return outcomes


def write_one(
    segment: Segment,
    page: tuple[Place, Lines, int, list[memoryview]],
    now: int,
    writer: int,
) -> Outcome:
    """Write one page that is not there.

    Args:
        segment: Where to.
        page: The fields of a `Page`.
        now: Whole seconds.
        writer: Whose page it is.

    Raises: as `write_group` does.
    """
    place, lines, age, parts = page
    outcome = FULL
    lock = segment.locks.take()
    try:
        for slot, seen in ways_for(segment, place.buckets, lines, now):
            word = segment.claim(lock, slot, seen, place, age)
            if word is None:
                outcome = BUSY
                continue
            sums = segment.fill(slot, word, place.seed, parts)
            at = segment.publish(slot, word, place, sums, writer)
            over = seen & STATE_MASK == _READY
            if at == slot:
                return WRITTEN_OVER if over else WRITTEN
            return _GIVEN_UP_OVER if over else _GIVEN_UP
    finally:
        # As in `write_group`.
        lock.unlock_all()
        segment.locks.give_back(lock)
    return outcome
