"""Where everything is in a segment, computed from its geometry alone. Format version 2.

Numbers are in the byte order of the machine that made it (the superblock says which, others are
refused); offsets are bytes from the start of the buffer:

```
section     bytes                       what
superblock  16,384                      identity and geometry, see `_superblock`
counters    8 * 16 * 64                 what each opener counted, see `_tally`
tags        1 * num_slots               8 bits of the key of the page that can be found there, 0 for
                                        none: a bucket's tags are one line of the cache
states      8 * num_slots               the state words, see `_state`
ages        8 * num_slots               what eviction goes by, see `_ages`
leases      4 * num_slots               whole seconds until when eviction is asked to keep the page
headers     8 * header_words * num_slots
                                        one header for each slot:
                                          word 0-3  the page's key
                                          word 4    the generation it was written as
                                          word 5    the process that wrote it
                                          word 6..  one checksum for each layer range, zeros in a
                                                    segment without checksums
                                          last used word: checksum over all words before it
                                        padded to a multiple of 8 words
payload     slot_bytes * num_slots      the pages, layer ranges one after the other,
                                        padded to a multiple of 64 bytes
```

Each section but the first starts at a multiple of 4,096. Slot i is way i % ways of bucket i //
ways: the index entry is the slot, so that there is no allocator.
"""

from __future__ import annotations

import itertools
from typing import Final, Self

import attrs

from radixlink_contracts import PAGE_KEY_BYTES
from radixlink_contracts.errors import CapacityError, ContractError

FORMAT_VERSION: Final = 2
"""Counts up whenever bytes move or change their meaning; other versions are refused."""

SUPERBLOCK_BYTES: Final = 16_384
"""Room for the identity in JSON, with a list of a thousand layer ranges."""

MAX_WAYS: Final = 32
"""Slots of a bucket, where there are enough.

Simulated: with 16 ways and one choice a full store keeps 53 % of pages before the first hole of
their chain, with 32 ways and two choices about 95 %.
"""

WORD_BYTES: Final = 8

COUNTER_ROWS: Final = 64
"""Openers that can count at the same time; what more of them count is not kept."""

COUNTERS_PER_ROW: Final = 16

KEY_WORDS: Final = PAGE_KEY_BYTES // WORD_BYTES
GENERATION_WORD: Final = KEY_WORDS
WRITER_WORD: Final = KEY_WORDS + 1
FIRST_CHECKSUM_WORD: Final = KEY_WORDS + 2

_LEASE_BYTES: Final = 4
_CACHE_LINE: Final = 64
_SECTION_ALIGNMENT: Final = 4096


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


@attrs.frozen(kw_only=True)
class Geometry:
    """The numbers that say where everything is.

    Attributes:
        num_buckets: Buckets of the table.
        ways: Slots of a bucket.
        range_bytes: Bytes of a page in each layer range.
    """

    num_buckets: int
    ways: int
    range_bytes: tuple[int, ...]

    def __attrs_post_init__(self) -> None:
        """Refuse a table without slots."""
        if self.num_buckets < 1 or not 1 <= self.ways <= MAX_WAYS or not self.range_bytes:
            raise ContractError(
                f"Geometry: expected at least 1 bucket, 1..{MAX_WAYS} ways and a layer range, "
                f"got {self.num_buckets}, {self.ways} and {self.range_bytes}"
            )

    @classmethod
    def within(cls, capacity_bytes: int, range_bytes: tuple[int, ...]) -> Self:
        """As many slots as fit in `capacity_bytes`, in as few buckets as possible.

        The room is for pages: index and headers come on top. Equal arguments give equal tables, so
        that those of all shards of a page are congruent.

        Raises:
            CapacityError: Not one page fits.
        """
        slot_bytes = round_up(sum(range_bytes), _CACHE_LINE)
        num_slots = capacity_bytes // slot_bytes
        if num_slots < 1:
            raise CapacityError(
                f"segment: expected room for at least one page of {slot_bytes} bytes, got "
                f"capacity_bytes={capacity_bytes}",
                needed=slot_bytes,
                available=capacity_bytes,
            )
        num_buckets = round_up(num_slots, MAX_WAYS) // MAX_WAYS
        return cls(num_buckets=num_buckets, ways=num_slots // num_buckets, range_bytes=range_bytes)

    @property
    def num_slots(self) -> int:
        """Pages that the segment holds when full."""
        return self.num_buckets * self.ways

    @property
    def num_ranges(self) -> int:
        """Layer ranges of a page."""
        return len(self.range_bytes)

    @property
    def range_offsets(self) -> tuple[int, ...]:
        """Where each layer range starts in its slot."""
        return tuple(itertools.accumulate(self.range_bytes[:-1], initial=0))

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot's payload to the next."""
        return round_up(sum(self.range_bytes), _CACHE_LINE)

    @property
    def header_checksum_word(self) -> int:
        """Which word of a header is the checksum of those before it."""
        return FIRST_CHECKSUM_WORD + self.num_ranges

    @property
    def header_words(self) -> int:
        """Words from one slot's header to the next."""
        return round_up(self.header_checksum_word + 1, _CACHE_LINE // WORD_BYTES)

    @property
    def header_bytes(self) -> int:
        """Bytes from one slot's header to the next."""
        return WORD_BYTES * self.header_words

    @property
    def counters_offset(self) -> int:
        """Start of the counters."""
        return SUPERBLOCK_BYTES

    @property
    def tags_offset(self) -> int:
        """Start of the tags."""
        return self.counters_offset + WORD_BYTES * COUNTERS_PER_ROW * COUNTER_ROWS

    @property
    def states_offset(self) -> int:
        """Start of the state words."""
        return self._after(self.tags_offset, 1)

    @property
    def ages_offset(self) -> int:
        """Start of the ages."""
        return self._after(self.states_offset, WORD_BYTES)

    @property
    def leases_offset(self) -> int:
        """Start of the leases."""
        return self._after(self.ages_offset, WORD_BYTES)

    @property
    def headers_offset(self) -> int:
        """Start of the headers."""
        return self._after(self.leases_offset, _LEASE_BYTES)

    @property
    def payload_offset(self) -> int:
        """Start of the pages."""
        return self._after(self.headers_offset, self.header_bytes)

    @property
    def total_bytes(self) -> int:
        """Length of the segment."""
        return self._after(self.payload_offset, self.slot_bytes)

    def _after(self, offset: int, bytes_each: int) -> int:
        """Where the section after one of `bytes_each` for each slot starts."""
        return round_up(offset + bytes_each * self.num_slots, _SECTION_ALIGNMENT)
