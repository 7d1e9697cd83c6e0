"""`Segment`: a table of slots in shared memory, and the steps that keep it right.

Theory of operation. Readers lock nothing. Everything a reader needs to be sure is in what it
copied: the checksum of a layer range covers the page's key and the generation of the write, so
bytes that match are the bytes of that write, whatever happened meanwhile. The state words make it
cheap to find a page and to tell why one does not match.

A page is found by its tag, one byte for each slot: the tags of a bucket are one line of the cache,
so looking for a page touches three lines and not the state words of 64 slots. A tag, like a stamp,
is a hint: what it leads to is compared with the whole key.

Rules of the file:

1. only the holder of a slot's lock stores its tag, state word, header or payload. A writer may
   hold the locks of several slots, and lets go of all at once;
2. a writer takes the tag away and stores WRITING before it touches anything else of the slot, and
   after everything else the tag, then READY. So wherever it dies, its slot has no tag, or one and a
   word that is not READY: either can be had once nobody has it locked;
3. a word that was read without the lock is a hint: with the lock it is read again;
4. stamps and leases are advice: stored by anyone, races lose nothing but advice;
5. a word is loaded and stored whole (8 aligned bytes), on any 64-bit machine. No more is asked of
   memory, no order of loads or stores in particular, since nothing here can make a barrier but the
   calls of a lock. Between writers the lock is one: who has got it sees all that was stored before
   it was let go. A reader has none, and where loads and stores are reordered (aarch64) it may see a
   tag or READY before the header or the bytes, or read them before the word. Then the key in the
   header differs, or the bytes do not match the checksum of the page that was asked for, in the
   generation of its handle; that is looked at again under the lock, which decides;
6. in a segment without checksums a reader goes by the state word alone, before and after it copies.
   That needs loads and stores in order, which x86-64 alone promises, so `_file` refuses it
   elsewhere. After a boot of the node nothing is in order: such a segment is emptied then.

It knows pages, slots and words; what to evict and what to count is `_store`'s. It never blocks, and
does no I/O but locks (memory of a file on a disk may of course be paged in).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, Self, TypeAlias, TypeVar

import attrs
import numpy as np

from radixlink_contracts import PAGE_KEY_BYTES
from radixlink_contracts.errors import ContractError
from radixlink_store._ages import GENERATION_MASK
from radixlink_store._checksum import header_checksum, range_checksum
from radixlink_store._copies import copy, past_line
from radixlink_store._layout import (
    COUNTER_ROWS,
    COUNTERS_PER_ROW,
    FIRST_CHECKSUM_WORD,
    GENERATION_WORD,
    KEY_WORDS,
    SUPERBLOCK_BYTES,
    WORD_BYTES,
    WRITER_WORD,
)
from radixlink_store._places import (
    NO_TAG,
    candidate_buckets,
    key_words,
    matches_of,
    seed_and_match,
    tags_of,
)
from radixlink_store._state import (
    LAST_GENERATION,
    MATCH_MASK,
    STATE_BITS,
    claimed,
    emptied,
    generation_of,
    published,
)
from radixlink_store._superblock import Superblock, write_boot_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from radixlink_contracts import PageKeys, PoolLayout
    from radixlink_store._locks import LockDescriptor, SlotLocks
    from radixlink_store._places import Lines, Place, Slots, Tags, Words

    Stamps: TypeAlias = npt.NDArray[np.uint32]

_MATCH_MASK: Final = np.uint64(MATCH_MASK)
_STATE_BITS: Final = np.uint64(STATE_BITS)
_LAST_GENERATION: Final = np.uint64(LAST_GENERATION)

_Item = TypeVar("_Item", bound=np.generic)


@attrs.frozen(kw_only=True, eq=False)
class Found:
    """Where pages were, when looked for.

    Attributes:
        present: Which were there. Shape: (num_pages,) bool.
        slots: Where; means nothing for those not there. Shape: (num_pages,).
        words: The state words they were found by. Shape: (num_pages,).
        suspects: Slots whose word says that they hold one of the pages and whose header says
            otherwise, with the word seen: fingerprints of two pages may be equal, or the header is
            damaged.
    """

    present: npt.NDArray[np.bool_]
    slots: Slots
    words: Words
    suspects: tuple[tuple[int, int], ...]


def generations_of(words: Words) -> Words:
    """How often each slot was claimed, from its state word."""
    return words >> _STATE_BITS & _LAST_GENERATION


class Segment:
    """A table of slots in a buffer.

    Thread: any, any number of processes.
    """

    def __init__(self, buffer: memoryview, superblock: Superblock, locks: SlotLocks) -> None:
        """Look at a buffer that holds a segment of this geometry.

        Owns: the buffer stays in use as long as the segment exists; the caller closes the locks.

        Raises:
            ContractError: The buffer is too short or cannot be written.
        """
        geometry = superblock.geometry
        if buffer.readonly or buffer.nbytes < geometry.total_bytes:
            raise ContractError(
                f"segment: expected a writable buffer of {geometry.total_bytes} bytes, got "
                f"{buffer.nbytes} bytes, readonly={buffer.readonly}"
            )
        self.layout: Final[PoolLayout] = superblock.layout
        self.geometry: Final = geometry
        self.checksums: Final = superblock.checksums
        self.locks: Final = locks
        self._joined = False
        self._row: memoryview | None = None
        count, ways = geometry.num_slots, geometry.ways
        # Geometry computes these anew each time, and they are asked for with every page.
        self.ways: Final = ways
        self.num_buckets: Final = geometry.num_buckets
        self._payload_offset: Final = geometry.payload_offset
        self._slot_bytes: Final = geometry.slot_bytes
        self._headers_offset: Final = geometry.headers_offset
        self._header_bytes: Final = geometry.header_bytes
        self._header_words: Final = geometry.header_words
        self._checksum_word: Final = geometry.header_checksum_word
        self._buffer = buffer = buffer.cast("B")
        self._past_line: Final = past_line(buffer)
        # For single items: a memoryview moves 8 bytes at once, and is quicker than numpy.
        self._tags = self._view("B", 1, geometry.tags_offset, count)
        self._word = self._view("Q", WORD_BYTES, geometry.states_offset, count)
        self._age = self._view("Q", WORD_BYTES, geometry.ages_offset, count)
        self._lease = self._view("I", 4, geometry.leases_offset, count)
        words = count * geometry.header_words
        self._header = self._view("Q", WORD_BYTES, geometry.headers_offset, words)
        #: All of a header but its checksum.
        self._head = struct.Struct(f"={PAGE_KEY_BYTES}sQQ{geometry.num_ranges}Q")
        # The same by bucket, for many at once.
        states = self._array(np.uint64, geometry.states_offset, count)
        self.tag_lines: Final[Tags] = self._array(np.uint8, geometry.tags_offset, count).reshape(
            -1, ways
        )
        self.lines: Final[Words] = states.reshape(-1, ways)
        self.slot_lines: Final[Slots] = np.arange(count).reshape(-1, ways)
        self.ages: Final[Words] = self._array(np.uint64, geometry.ages_offset, count)
        self._age_lines: Words = self.ages.reshape(-1, ways)
        self.leases: Final[Stamps] = self._array(np.uint32, geometry.leases_offset, count)
        self._states: Words = states
        self._headers: Words = self._array(np.uint64, geometry.headers_offset, words).reshape(
            count, geometry.header_words
        )
        self._ranges = tuple(
            (start, start + length)
            for start, length in zip(geometry.range_offsets, geometry.range_bytes, strict=True)
        )

    @classmethod
    def format(cls, buffer: memoryview, superblock: Superblock, locks: SlotLocks) -> Self:
        """Make a segment of a buffer that nobody else uses yet: empty, then READY.

        Mutates: everything before the headers; headers and pages of an empty slot mean nothing.
        """
        segment = cls(buffer, superblock, locks)
        end = superblock.geometry.headers_offset
        np.frombuffer(buffer, np.uint8, end - SUPERBLOCK_BYTES, SUPERBLOCK_BYTES)[:] = 0
        superblock.write(buffer)
        return segment

    @property
    def memory(self) -> memoryview:
        """All of its bytes."""
        return self._buffer[: self.geometry.total_bytes]

    def start_stamps_over(self, boot_id: str) -> None:
        """Go on after a boot of the node: the clock of recency and leases is gone.

        So are pages without checksums: nobody knows what of them reached the disk. Nobody else may
        use the segment yet.
        """
        self.ages[:] = 0
        self.leases[:] = 0
        if not self.checksums:
            self.tag_lines[:] = NO_TAG
            self._states[:] = generations_of(self._states) << _STATE_BITS
        write_boot_id(self._buffer, boot_id)

    # --- who has it open -------------------------------------------------------------------------

    @property
    def in_use_byte(self) -> int:
        """The byte of the locks that everybody shares who has the segment open."""
        return self.geometry.num_slots

    def join(self) -> memoryview | None:
        """Say that the segment is in use, until its locks are closed, and take a row of counters.

        Returns:
            The row's words, always the same; None if more openers than there are rows have one.

        Raises:
            OSError: There are no more descriptors.
        """
        if not self._joined:
            rows = range(self.in_use_byte + 1, self.in_use_byte + 1 + COUNTER_ROWS)
            byte = self.locks.hold(self.in_use_byte, rows)
            self._row = None if byte is None else self.counter_rows()[byte - rows.start]
            self._joined = True
        return self._row

    def counter_rows(self) -> list[memoryview]:
        """The words of each row of counters."""
        words = COUNTERS_PER_ROW * COUNTER_ROWS
        view = self._view("Q", WORD_BYTES, self.geometry.counters_offset, words)
        return [view[row : row + COUNTERS_PER_ROW] for row in range(0, words, COUNTERS_PER_ROW)]

    # --- finding pages ---------------------------------------------------------------------------

    def find(self, keys: PageKeys) -> Found:
        """Look for published pages by their full keys.

        Cost: O(num_pages) in a few numpy calls; no lock.
        """
        wanted = key_words(keys)
        ways = self.ways
        buckets = candidate_buckets(wanted, self.num_buckets)
        width = ways * buckets.shape[1]
        lines = self.tag_lines[buckets].reshape(len(wanted), width)
        hits = np.flatnonzero(lines == tags_of(wanted)[:, np.newaxis])
        pages = hits // width
        slots = buckets.ravel()[hits // ways] * ways + hits % ways
        words = self._states[slots]
        published_ = (words & _MATCH_MASK) == matches_of(wanted)[pages]
        pages, slots, words = pages[published_], slots[published_], words[published_]
        differ = self._headers[slots, :KEY_WORDS] ^ wanted[pages]
        same = (differ[:, 0] | differ[:, 1] | differ[:, 2] | differ[:, 3]) == 0
        suspects: tuple[tuple[int, int], ...] = ()
        if not same.all():
            suspects = tuple(zip(slots[~same].tolist(), words[~same].tolist(), strict=True))
            pages, slots, words = pages[same], slots[same], words[same]
        found = Found(
            present=np.zeros(len(keys), np.bool_),
            slots=np.zeros(len(keys), np.intp),
            words=np.zeros(len(keys), np.uint64),
            suspects=suspects,
        )
        # In reverse, so that of several copies of a page the first one stays.
        rows = pages[::-1]
        found.present[rows] = True
        found.slots[rows] = slots[::-1]
        found.words[rows] = words[::-1]
        return found

    def tags_at(self, buckets: tuple[int, ...]) -> Lines:
        """The tags of each of these buckets, now."""
        ways, tags = self.ways, self._tags
        start = buckets[0] * ways
        first = tags[start : start + ways].tobytes()
        if len(buckets) == 1:
            return (first,)
        start = buckets[1] * ways
        return first, tags[start : start + ways].tobytes()

    def find_one(
        self, place: Place, lines: Lines, suspects: list[tuple[int, int]]
    ) -> tuple[int, int] | None:
        """Look for one published page by its full key.

        Args:
            place: Where it may be.
            lines: The tags at its buckets.
            suspects: Takes what `Found.suspects` says.

        Returns:
            Its slot, and the state word that it was found by; None if it is not there.

        Cost: a microsecond.
        """
        key, tag, match, _, buckets = place
        if tag not in lines[0] and tag not in lines[-1]:
            return None
        for choice, line in enumerate(lines):
            way = line.find(tag)
            while way >= 0:
                slot = buckets[choice] * self.ways + way
                word = self._word[slot]
                if word & MATCH_MASK == match:
                    if self.key_of(slot) == key:
                        return slot, word
                    suspects.append((slot, word))
                way = line.find(tag, way + 1)
        return None

    def key_of(self, slot: int) -> bytes:
        """The key in a slot's header."""
        start = self._header_start(slot)
        return bytes(self._buffer[start : start + PAGE_KEY_BYTES])

    def writers(self, slots: Slots) -> Words:
        """Which process wrote each slot."""
        writers: Words = self._headers[slots, WRITER_WORD]
        return writers

    def writer(self, slot: int) -> int:
        """Which process wrote a slot."""
        return self._header[slot * self._header_words + WRITER_WORD]

    # --- slots -----------------------------------------------------------------------------------

    def word(self, slot: int) -> int:
        """The state word of a slot, now."""
        return self._word[slot]

    def tag(self, slot: int) -> int:
        """The tag of a slot, now."""
        return self._tags[slot]

    def lease(self, slot: int) -> int:
        """Until when eviction is asked to keep a slot's page."""
        return self._lease[slot]

    def oldest(self, buckets: tuple[int, ...]) -> int:
        """The slot of the lowest age in these buckets."""
        ways, lines, ages = self.ways, self._age_lines, self._age
        bucket = buckets[0]
        oldest = bucket * ways + int(lines[bucket].argmin())
        if len(buckets) == 1:
            return oldest
        bucket = buckets[1]
        other = bucket * ways + int(lines[bucket].argmin())
        return other if ages[other] < ages[oldest] else oldest

    def use(self, slot: int, age: int, until: int = 0) -> None:
        """Say that a slot's page is used, and ask that it be kept `until` then."""
        self._age[slot] = age
        # No lease is stored that would not be a longer one: another may have asked for more since.
        if until and until > self._lease[slot]:
            self._lease[slot] = until

    # --- reading ---------------------------------------------------------------------------------

    def copy_range(self, slot: int, layer_range: int, out: memoryview, past: int) -> None:
        """Copy one layer range of whatever the slot holds; releases the GIL unless it is small.

        Args:
            slot: Which slot.
            layer_range: Which range of it.
            out: Where to.
            past: How far `out` starts past the start of a line of the cache, as `copy` has it.
        """
        copy(out, self.range_of(slot, layer_range), past)

    def range_of(self, slot: int, layer_range: int) -> memoryview:
        """The bytes of one layer range of a slot."""
        start, stop = self._ranges[layer_range]
        payload = self._payload_offset + slot * self._slot_bytes
        return self._buffer[payload + start : payload + stop]

    def matches(
        self, slot: int, seed: int, generation: int, layer_range: int, data: memoryview
    ) -> bool:
        """True when these bytes are that layer range of that write of the page of that seed."""
        word = slot * self._header_words + FIRST_CHECKSUM_WORD + layer_range
        return self._header[word] == range_checksum(seed, generation, layer_range, data)

    # --- writing ---------------------------------------------------------------------------------

    def claim(
        self, lock: LockDescriptor, slot: int, seen: int, place: Place, age: int
    ) -> int | None:
        """Lock a slot and make it WRITING for a page, whatever it holds.

        Returns:
            Its state word now; the slot stays locked. None if another writer has it locked, or its
            word is no longer the one `seen`, or its generations are used up; then nothing was
            changed. An exception may leave it locked.
        """
        if not lock.try_lock(slot):
            return None
        words = self._word
        word = claimed(seen, place.match) if words[slot] == seen else None
        if word is None:
            lock.unlock(slot)
            return None
        self._tags[slot] = NO_TAG
        words[slot] = word
        self._age[slot] = age | word >> STATE_BITS & GENERATION_MASK
        self._lease[slot] = 0
        return word

    def fill(self, slot: int, word: int, seed: int, parts: Sequence[memoryview]) -> list[int]:
        """Copy the bytes of a page of that seed into a slot that was claimed for it.

        The hash reads the copy, which the caches still have.

        Returns:
            The checksum of each range.
        """
        buffer, hashed, generation = self._buffer, self.checksums, generation_of(word)
        payload = self._payload_offset + slot * self._slot_bytes
        checksums = [0] * len(parts)
        for layer_range, data in enumerate(parts):
            start, stop = self._ranges[layer_range]
            to = payload + start
            out = buffer[to : payload + stop]
            copy(out, data, self._past_line + to)
            if hashed:
                checksums[layer_range] = range_checksum(seed, generation, layer_range, out)
        return checksums

    def publish(
        self, slot: int, word: int, place: Place, checksums: Sequence[int], writer: int
    ) -> int:
        """Write the header of a slot that was filled, and make it READY, unless another is.

        Who writes the same page at the same time may have chosen another slot. So each looks again
        when its own copy is whole, and gives that up if the other one is published: what somebody
        may have opened is never taken away. Two who look in the same microsecond leave two copies,
        of which the second is the first to be forgotten.

        Returns:
            The slot in which the page is now: this one, or that of who was faster; this one is then
            empty.
        """
        head = self._head.pack(place.key, generation_of(word), writer, *checksums)
        start = self._header_start(slot)
        self._buffer[start : start + len(head)] = head
        self._header[slot * self._header_words + self._checksum_word] = header_checksum(slot, head)
        faster = self.find_one(place, self.tags_at(place.buckets), [])
        if faster is not None:
            self._word[slot] = emptied(word)
            return faster[0]
        # The tag first: whoever sees a published word and then no tag has seen an older tag.
        self._tags[slot] = place.tag
        self._word[slot] = published(word)
        return slot

    # --- damage ----------------------------------------------------------------------------------

    def empty_if_range_damaged(
        self, lock: LockDescriptor, slot: int, seen: int, seed: int, layer_range: int
    ) -> bool:
        """Empty a slot whose layer range does not match, looking again while nobody can write it.

        Returns:
            False when the slot holds another write by now, or matches after all. True when it is
            damaged: then it was emptied, unless somebody had it locked.
        """
        if not lock.try_lock(slot):
            return self._word[slot] == seen
        try:
            data = self.range_of(slot, layer_range)
            if self._word[slot] != seen or self.matches(
                slot, seed, generation_of(seen), layer_range, data
            ):
                return False
            self._empty(slot, seen)
            return True
        finally:
            lock.unlock(slot)

    def empty_if_header_damaged(self, lock: LockDescriptor, slot: int, seen: int) -> bool:
        """Empty a published slot whose header is damaged.

        Returns:
            Whether it was emptied.
        """
        if self.header_is_sound(slot, seen) or not lock.try_lock(slot):
            return False
        try:
            if self._word[slot] != seen or self.header_is_sound(slot, seen):
                return False
            self._empty(slot, seen)
            return True
        finally:
            lock.unlock(slot)

    def empty(self, lock: LockDescriptor, slot: int, seen: int) -> bool:
        """Empty a slot, unless it is being written or was since its word was `seen`.

        Returns:
            Whether it was emptied.
        """
        if not lock.try_lock(slot):
            return False
        try:
            if self._word[slot] != seen:
                return False
            self._empty(slot, seen)
            return True
        finally:
            lock.unlock(slot)

    def _empty(self, slot: int, seen: int) -> None:
        self._tags[slot] = NO_TAG
        self._word[slot] = emptied(seen)

    def header_is_sound(self, slot: int, word: int) -> bool:
        """True when a slot's header matches its checksum, its state word and its place."""
        start = self._header_start(slot)
        head = self._buffer[start : start + self._head.size].tobytes()
        first = slot * self._header_words
        _, match = seed_and_match(head[:PAGE_KEY_BYTES])
        return (
            word & MATCH_MASK == match
            and self._header[first + GENERATION_WORD] == generation_of(word)
            and self._header[first + self._checksum_word] == header_checksum(slot, head)
        )

    def _header_start(self, slot: int) -> int:
        """Where a slot's header starts."""
        return self._headers_offset + slot * self._header_bytes

    def _view(self, code: str, size: int, offset: int, count: int) -> memoryview:
        """Single items of part of the buffer."""
        view: memoryview = self._buffer[offset : offset + size * count].cast(code)  # type: ignore[call-overload]
        return view

    def _array(self, dtype: type[_Item], offset: int, count: int) -> npt.NDArray[_Item]:
        """A view of part of the buffer, for many items at once."""
        return np.frombuffer(self._buffer, dtype, count, offset)
