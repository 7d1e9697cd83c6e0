"""What a store counted, as a value."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class StoreCounters:
    """What one opened store did since it was opened. Other openers count for themselves.

    Attributes:
        put: Pages written.
        already_there: Pages that a `put` found there.
        rejected_full: Pages that found no room: every way was leased, or has used its generations
            up.
        rejected_busy: Pages that found no room because others were writing the ways that had any.
        evicted: Published pages of other keys that were written over.
        read_ok: Layer ranges of pages read right.
        read_missing: Layer ranges asked for of pages that `open` had not found.
        read_stale: Layer ranges of pages that were evicted or emptied since `open`.
        read_corrupt: Layer ranges that did not match their checksum, and headers of pages asked for
            that did not match theirs. The slot was emptied unless somebody was writing it.
    """

    put: int = 0
    already_there: int = 0
    rejected_full: int = 0
    rejected_busy: int = 0
    evicted: int = 0
    read_ok: int = 0
    read_missing: int = 0
    read_stale: int = 0
    read_corrupt: int = 0

    def __add__(self, other: StoreCounters) -> StoreCounters:
        """Each counter's sum."""
        return StoreCounters(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in attrs.fields(StoreCounters)
            }
        )
