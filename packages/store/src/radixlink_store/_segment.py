"""`Segment`: a table of slots in shared memory, and the steps that keep it right.

Theory of operation. Readers lock nothing. Everything a reader needs to be sure is in what it
copied: the checksum of a layer range covers the page's key and the generation of the write, so
bytes that match are the bytes of that write, whatever happened meanwhile. The state words make it
cheap to find a page and to tell why one does not match.

Rules of the file:

1. only the holder of a slot's lock stores its state word, header or payload;
2. a writer stores WRITING before it touches anything else of the slot, and READY after everything;
3. a word that was read without the lock is a hint: with the lock it is read again;
4. stamps and leases are advice: stored by anyone, races lose nothing but advice;
5. a word is loaded and stored whole (8 aligned bytes). On machines that reorder stores, a reader
   may see READY before the bytes; the checksum then does not match, and the look under the lock
   decides.

It knows pages, slots and words; what to evict and what to count is `_store`'s. It never blocks, and
does no I/O but locks (memory of a file on a disk may of course be paged in).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final, Self, TypeAlias, TypeVar

import attrs
import numpy as np

from radixlink_contracts.errors import ContractError
from radixlink_store._checksum import header_checksum, range_checksum
from radixlink_store._layout import (
    FIRST_CHECKSUM_WORD,
    GENERATION_WORD,
    KEY_WORDS,
    SUPERBLOCK_BYTES,
    WORD_BYTES,
    WRITER_WORD,
)
from radixlink_store._state import (
    FINGERPRINT_SHIFT,
    LAST_GENERATION,
    MATCH_MASK,
    STATE_BITS,
    SlotState,
    claimed,
    emptied,
    generation_of,
    match_of,
    published,
)
from radixlink_store._superblock import Superblock, write_boot_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from radixlink_contracts import PageKeys, PoolLayout
    from radixlink_store._locks import LockDescriptor, SlotLocks

    Words: TypeAlias = npt.NDArray[np.uint64]
    Stamps: TypeAlias = npt.NDArray[np.uint32]
    Bytes: TypeAlias = npt.NDArray[np.uint8]
    Slots: TypeAlias = npt.NDArray[np.intp]

_FINGERPRINT_SHIFT: Final = np.uint64(FINGERPRINT_SHIFT)
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


def key_words(keys: PageKeys) -> Words:
    """Keys as words. Shape: (num_pages, 4)."""
    return np.frombuffer(keys.data, np.uint64).reshape(-1, KEY_WORDS)


def fingerprint_of(key: bytes) -> int:
    """The bits of a key that its state word carries: others than those that choose its buckets."""
    return int.from_bytes(key[16:24], sys.byteorder) >> FINGERPRINT_SHIFT


def generations_of(words: Words) -> Words:
    """How often each slot was claimed, from its state word."""
    return words >> _STATE_BITS & _LAST_GENERATION


def candidate_buckets(words: Words, num_buckets: int) -> Slots:
    """The buckets in which each page may be, best first; the second is another one than the first.

    They follow from the key alone, which says nothing of shards: in tables of equal geometry the
    shards of a page are in equal buckets.

    Shape: words (num_pages, 4); the result (num_pages, 2), or (num_pages, 1) for a table of one
    bucket.
    """
    first = words[:, 0] % np.uint64(num_buckets)
    if num_buckets == 1:
        return first.astype(np.intp)[:, np.newaxis]
    step = words[:, 1] % np.uint64(num_buckets - 1) + np.uint64(1)
    second = (first + step) % np.uint64(num_buckets)
    return np.stack([first, second], axis=1).astype(np.intp)


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
        self.locks: Final = locks
        self._buffer = buffer
        count, ways = geometry.num_slots, geometry.ways
        states = slice(geometry.states_offset, geometry.states_offset + WORD_BYTES * count)
        #: For single words: a memoryview moves 8 bytes at once, and is quicker than numpy.
        self._word = buffer[states].cast("Q")
        #: The same words by bucket, for many at once.
        lines = self._array(np.uint64, geometry.states_offset, count)
        self.lines: Final[Words] = lines.reshape(-1, ways)
        self.slot_lines: Final[Slots] = np.arange(count).reshape(-1, ways)
        self.recency: Final[Stamps] = self._array(np.uint32, geometry.recency_offset, count)
        self.leases: Final[Stamps] = self._array(np.uint32, geometry.leases_offset, count)
        header_words = geometry.header_words
        self._header: Words = self._array(
            np.uint64, geometry.headers_offset, count * header_words
        ).reshape(count, header_words)
        slot_bytes = geometry.slot_bytes
        self._payload: Bytes = self._array(
            np.uint8, geometry.payload_offset, count * slot_bytes
        ).reshape(count, slot_bytes)
        self._ranges = tuple(
            slice(start, start + length)
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

    def start_stamps_over(self, boot_id: str) -> None:
        """Forget recency and leases: the clock they were of is gone."""
        self.recency[:] = 0
        self.leases[:] = 0
        write_boot_id(self._buffer, boot_id)

    # --- finding pages ---------------------------------------------------------------------------

    def find(self, keys: PageKeys) -> Found:
        """Look for published pages by their full keys.

        Cost: O(num_pages) in a few numpy calls; no lock.
        """
        wanted = key_words(keys)
        ways = self.geometry.ways
        buckets = candidate_buckets(wanted, self.geometry.num_buckets)
        lines = self.lines[buckets]
        prints = wanted[:, 2] >> _FINGERPRINT_SHIFT
        matches = prints << _FINGERPRINT_SHIFT | np.uint64(SlotState.READY)
        pages, choices, way = np.nonzero(
            (lines & _MATCH_MASK) == matches[:, np.newaxis, np.newaxis]
        )
        slots = buckets[pages, choices] * ways + way
        words = lines[pages, choices, way]
        same = (self._header[slots, :KEY_WORDS] == wanted[pages]).all(axis=1)
        found = Found(
            present=np.zeros(len(keys), np.bool_),
            slots=np.zeros(len(keys), np.intp),
            words=np.zeros(len(keys), np.uint64),
            suspects=tuple(zip(slots[~same].tolist(), words[~same].tolist(), strict=True)),
        )
        # In reverse, so that of several copies of a page the first one stays.
        rows = pages[same][::-1]
        found.present[rows] = True
        found.slots[rows] = slots[same][::-1]
        found.words[rows] = words[same][::-1]
        return found

    def writers(self, slots: Slots) -> Words:
        """Which process wrote each slot."""
        writers: Words = self._header[slots, WRITER_WORD]
        return writers

    def candidate_buckets(self, keys: PageKeys) -> Slots:
        """In which buckets pages may be. Shape: (num_pages, 2), or (num_pages, 1) of one bucket."""
        return candidate_buckets(key_words(keys), self.geometry.num_buckets)

    # --- reading ---------------------------------------------------------------------------------

    def word(self, slot: int) -> int:
        """The state word of a slot, now."""
        return self._word[slot]

    def copy_range(self, slot: int, layer_range: int, out: Bytes) -> None:
        """Copy one layer range of whatever the slot holds; releases the GIL unless it is small."""
        np.copyto(out, self._payload[slot, self._ranges[layer_range]])

    def matches(
        self, slot: int, key: bytes, generation: int, layer_range: int, data: Bytes
    ) -> bool:
        """True when these bytes are that layer range of that write of that page."""
        expected = int(self._header[slot, FIRST_CHECKSUM_WORD + layer_range])
        return range_checksum(key, generation, layer_range, data.data) == expected

    # --- writing ---------------------------------------------------------------------------------

    def write(
        self,
        lock: LockDescriptor,
        slot: int,
        seen: int,
        key: bytes,
        parts: Sequence[Bytes],
        *,
        writer: int,
        now: int,
    ) -> bool:
        """Put a page into a slot, whatever it holds, unless somebody else is faster.

        Returns:
            Whether the page is there now. If not: the slot is locked by another writer, or its word
            is no longer the one `seen`, or its generations are used up; nothing was changed.
        """
        if not lock.try_lock(slot):
            return False
        try:
            word = claimed(seen, fingerprint_of(key))
            if word is None or self._word[slot] != seen:
                return False
            self._word[slot] = word
            self.recency[slot] = now
            self.leases[slot] = 0
            self._fill(slot, generation_of(word), key, parts, writer)
            self._word[slot] = published(word)
        finally:
            # After an exception the slot is WRITING and not locked: free, like a dead writer's.
            lock.unlock(slot)
        return True

    def _fill(
        self, slot: int, generation: int, key: bytes, parts: Sequence[Bytes], writer: int
    ) -> None:
        """Write payload and header of a slot that is locked and WRITING."""
        checksums = [
            range_checksum(key, generation, layer_range, data.data)
            for layer_range, data in enumerate(parts)
        ]
        row = self._payload[slot]
        for where, data in zip(self._ranges, parts, strict=True):
            np.copyto(row[where], data)
        header = self._header[slot]
        header[:KEY_WORDS] = np.frombuffer(key, np.uint64)
        header[GENERATION_WORD] = generation
        header[WRITER_WORD] = writer
        end = self.geometry.header_checksum_word
        header[FIRST_CHECKSUM_WORD:end] = checksums
        header[end] = header_checksum(slot, header[:end].data)

    # --- damage ----------------------------------------------------------------------------------

    def empty_if_range_damaged(
        self, lock: LockDescriptor, slot: int, seen: int, key: bytes, layer_range: int
    ) -> bool:
        """Empty a slot whose layer range does not match, looking again while nobody can write it.

        Returns:
            False when the slot holds another write by now, or matches after all. True when it is
            damaged: then it was emptied, unless somebody had it locked.
        """
        if not lock.try_lock(slot):
            return self._word[slot] == seen
        try:
            data = self._payload[slot, self._ranges[layer_range]]
            if self._word[slot] != seen or self.matches(
                slot, key, generation_of(seen), layer_range, data
            ):
                return False
            self._word[slot] = emptied(seen)
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
            self._word[slot] = emptied(seen)
            return True
        finally:
            lock.unlock(slot)

    def header_is_sound(self, slot: int, word: int) -> bool:
        """True when a slot's header matches its checksum, its state word and its place."""
        end = self.geometry.header_checksum_word
        header = self._header[slot].copy()
        key = header[:KEY_WORDS].tobytes()
        return (
            int(header[end]) == header_checksum(slot, header[:end].data)
            and int(header[GENERATION_WORD]) == generation_of(word)
            and (word & MATCH_MASK) == match_of(fingerprint_of(key))
        )

    def _array(self, dtype: type[_Item], offset: int, count: int) -> npt.NDArray[_Item]:
        """A view of part of the buffer."""
        return np.frombuffer(self._buffer, dtype, count, offset)
