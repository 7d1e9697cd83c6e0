"""What a store counted, as a value."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class StoreCounters:
    """What one opened store did since it was opened. Other openers count for themselves.

    Attributes:
        put: Pages written.
        already_there: Pages that a `put` found there.
        rejected_full: Pages that found no room: every way was leased.
        rejected_busy: Pages that found no room because others were writing the ways that had any, or
            those have used their generations up.
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


@attrs.frozen(kw_only=True)
class TierCounters:
    """What one opened tier of files did since it was opened. Other openers count for themselves.

    Attributes:
        written: Pages written to a file.
        dropped: Pages that were not written because too many waited, the store was closed, or there was
            no memory to move them with.
        gone: Pages that were evicted from memory before they were written.
        write_failed: Errors of the operating system against writing.
        promoted: Pages that were read from a file into memory.
        not_promoted: Pages that were read right and found no room in memory.
        put_off: Pages that were in a file and not read, since memory had no room for them a moment
            ago.
        read_failed: Errors of the operating system against reading.
        corrupt: Records that were read and did not match their checksums. They are not found any
            more.
        torn: Records that were passed over when files were opened: not whole, or being written.
        refused: Files that are named like ours and cannot be read as such.
        files_evicted: Files that were removed to make room.
        reopened: How often the directory was gone, or another one was in its place.
    """

    written: int = 0
    dropped: int = 0
    gone: int = 0
    write_failed: int = 0
    promoted: int = 0
    not_promoted: int = 0
    put_off: int = 0
    read_failed: int = 0
    corrupt: int = 0
    torn: int = 0
    refused: int = 0
    files_evicted: int = 0
    reopened: int = 0
