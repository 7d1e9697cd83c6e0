"""`SegmentPageStore`: the `PageStore` contract over a `Segment`, with what it counts."""

from __future__ import annotations

import contextlib
import enum
import errno
import math
import os
import threading
import time
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Final

import numpy as np

from radixlink_contracts import PageBits, PageHandles
from radixlink_contracts.errors import (
    BackendUnavailableError,
    ContractError,
    StaleHandleError,
)
from radixlink_store._errors import map_exceptions
from radixlink_store._segment import fingerprint_of, generations_of
from radixlink_store._state import STATE_MASK, SlotState, pack
from radixlink_store._ways import ways_for
from radixlink_store.counters import StoreCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import PageKeys, PoolLayout
    from radixlink_store._locks import LockDescriptor
    from radixlink_store._segment import Bytes, Found, Segment

MAX_LEASE_S: Final = 3600
"""No lease keeps a page longer than that, so that a wrong `ttl_s` cannot fill a store for good."""


class _Outcome(enum.Enum):
    """What became of one page of a `put`."""

    #: Written into a slot that held none.
    WRITTEN = enum.auto()
    #: Written over another page.
    WRITTEN_OVER = enum.auto()
    #: The same call had written it before.
    THERE = enum.auto()
    #: No slot may be written: all are leased, or have used their generations up.
    FULL = enum.auto()
    #: Others were faster at every slot that may be written.
    BUSY = enum.auto()


_READY: Final = SlotState.READY
_STORED: Final = {_Outcome.WRITTEN, _Outcome.WRITTEN_OVER, _Outcome.THERE}


class SegmentPageStore:
    """Pages in a segment of shared memory. Also `Touchable`.

    Thread: any, several at once; no lock is held while bytes are copied, but those of the slots
    that are written.
    """

    def __init__(
        self, segment: Segment, where: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Serve the pages of a segment.

        Args:
            segment: The pages. Its locks are closed with the store; what is behind its buffer is
                released when the last call that uses it has returned.
            where: Names the segment in messages.
            clock: Seconds, the same for every process that shares the segment.
        """
        #: None once closed. Each call takes its own reference, so that close never waits for one.
        self._segment: Segment | None = segment
        self._layout: Final = segment.layout
        self._where: Final = where
        self._clock: Final = clock
        self._writer: Final = os.getpid()
        self._mutex: Final = threading.Lock()
        self._counters = StoreCounters()

    @property
    def layout(self) -> PoolLayout:
        """What its objects are."""
        return self._layout

    @property
    def num_slots(self) -> int:
        """Pages that fit.

        Raises:
            StaleHandleError: The store was closed.
        """
        return self._opened().geometry.num_slots

    @property
    def counters(self) -> StoreCounters:
        """What this opener did so far; also after `close`."""
        return self._counters

    def contains(self, keys: PageKeys) -> PageBits:
        """Which pages are there. Changes no recency."""
        segment = self._opened()
        return _bits(self._find(segment, keys))

    def touch(self, keys: PageKeys) -> PageBits:
        """Raise recency; say which pages are there."""
        segment = self._opened()
        found = self._find(segment, keys)
        segment.recency[found.slots[found.present]] = int(self._clock())
        return _bits(found)

    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        """Find pages for a load, raise their recency, and ask that they be kept for a while.

        Args:
            keys: The pages.
            ttl_s: For how many seconds, an hour at most.

        Raises:
            ContractError: `ttl_s` is not a number of at least 0.
        """
        if not ttl_s >= 0:
            raise ContractError(f"store: expected a ttl_s of at least 0, got {ttl_s}")
        segment = self._opened()
        found = self._find(segment, keys)
        now = int(self._clock())
        slots = found.slots[found.present]
        segment.recency[slots] = now
        until = now + math.ceil(min(ttl_s, MAX_LEASE_S))
        segment.leases[slots] = np.maximum(segment.leases[slots], until)
        return PageHandles(
            keys=keys,
            found=_bits(found),
            slots=array("Q", found.slots.astype(np.uint64).tobytes()),
            generations=array("Q", generations_of(found.words).tobytes()),
            writers=array("Q", segment.writers(found.slots).tobytes()),
        )

    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        """Read one layer range of each page that was found, verified on what was copied.

        Raises:
            ContractError: `out` does not fit, there is no such range, or the handles are of another
            store.

        Cost: a copy and a checksum for each page.
        """
        segment = self._opened()
        sizes = self._layout.range_bytes
        if not 0 <= layer_range < len(sizes):
            raise ContractError(
                f"store: expected a layer range in 0..{len(sizes) - 1}, got {layer_range}"
            )
        count = len(handles.keys)
        rows = _rows(out, count, sizes[layer_range], what="out", writable=True)
        if count and max(handles.slots) >= segment.geometry.num_slots:
            raise ContractError(
                f"store: expected handles of {self._where}, got slot {max(handles.slots)} of "
                f"{segment.geometry.num_slots}"
            )
        mask = stale = corrupt = 0
        for page in handles.found:
            key, slot = handles.keys[page], handles.slots[page]
            generation = handles.generations[page]
            word = pack(fingerprint_of(key), generation, _READY)
            if segment.word(slot) != word:
                stale += 1
                continue
            segment.copy_range(slot, layer_range, rows[page])
            if not segment.matches(slot, key, generation, layer_range, rows[page]):
                if self._is_damaged(segment, slot, word, key, layer_range):
                    corrupt += 1
                else:
                    stale += 1
            elif segment.word(slot) != word:
                stale += 1
            else:
                mask |= 1 << page
        self._count(
            StoreCounters(
                read_ok=mask.bit_count(),
                read_missing=count - handles.found.total,
                read_stale=stale,
                read_corrupt=corrupt,
            )
        )
        return PageBits(mask, count)

    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        """Store pages; those that are there only become recent.

        Each page is written into an unused slot of its two buckets, else over the least recently
        used page there that no lease keeps, but never over one of the same call: of pages that do
        not fit together the first ones stay.

        Raises:
            ContractError: The parts do not fit keys and layout.
            StaleHandleError: The store was closed, or this is a forked child of who opened it.
        """
        segment = self._opened()
        sizes = self._layout.range_bytes
        if len(parts) != len(sizes):
            raise ContractError(f"store: expected {len(sizes)} parts, got {len(parts)}")
        columns = [
            _rows(part, len(keys), size, what=f"part {layer_range}", writable=False)
            for layer_range, (part, size) in enumerate(zip(parts, sizes, strict=True))
        ]
        found = self._find(segment, keys)
        now = int(self._clock())
        segment.recency[found.slots[found.present]] = now
        there = _bits(found)
        mask, outcomes = there.mask, Counter[_Outcome]()
        missing = PageBits(~mask & (1 << len(keys)) - 1, len(keys))
        if missing.mask:
            written: set[bytes] = set()
            #: The slots of this call's pages: it must not evict for its last pages its first ones.
            mine = set(found.slots[found.present].tolist())
            buckets = segment.candidate_buckets(keys)
            with self._lend(segment) as lock:
                for page in missing:
                    key = keys[page]
                    if key in written:
                        outcome = _Outcome.THERE
                    else:
                        ranges = [column[page] for column in columns]
                        ways = ways_for(segment, buckets[page], now)
                        outcome = self._write(segment, lock, key, ranges, ways, mine, now)
                    outcomes[outcome] += 1
                    if outcome in _STORED:
                        written.add(key)
                        mask |= 1 << page
        self._count(
            StoreCounters(
                put=outcomes[_Outcome.WRITTEN] + outcomes[_Outcome.WRITTEN_OVER],
                already_there=there.total + outcomes[_Outcome.THERE],
                evicted=outcomes[_Outcome.WRITTEN_OVER],
                rejected_full=outcomes[_Outcome.FULL],
                rejected_busy=outcomes[_Outcome.BUSY],
            )
        )
        return PageBits(mask, len(keys))

    def close(self) -> None:
        """Let go of the segment; the pages stay. Idempotent; waits for no call in progress."""
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.locks.close()

    def _opened(self) -> Segment:
        segment = self._segment
        if segment is None:
            raise StaleHandleError(
                f"store: expected {self._where} to be open, got a call after close"
            )
        return segment

    def _find(self, segment: Segment, keys: PageKeys) -> Found:
        """Find pages, and empty slots met on the way whose header is damaged."""
        found = segment.find(keys)
        corrupt = 0
        for slot, word in found.suspects:
            # Nearly always the fingerprints of two pages are equal, and the header is as it should
            # be.
            if not segment.header_is_sound(slot, word):
                with self._lend(segment) as lock:
                    corrupt += segment.empty_if_header_damaged(lock, slot, word)
        if corrupt:
            self._count(StoreCounters(read_corrupt=corrupt))
        return found

    def _is_damaged(
        self, segment: Segment, slot: int, word: int, key: bytes, layer_range: int
    ) -> bool:
        """Look again at bytes that did not match; empty the slot unless it was written since."""
        with self._lend(segment) as lock:
            return segment.empty_if_range_damaged(lock, slot, word, key, layer_range)

    def _write(
        self,
        segment: Segment,
        lock: LockDescriptor,
        key: bytes,
        parts: list[Bytes],
        ways: Iterator[tuple[int, int]],
        mine: set[int],
        now: int,
    ) -> _Outcome:
        """Write one page into the first way that can be had; add it to `mine`."""
        outcome = _Outcome.FULL
        for slot, word in ways:
            if slot in mine:
                continue
            if segment.write(lock, slot, word, key, parts, writer=self._writer, now=now):
                mine.add(slot)
                over = word & STATE_MASK == _READY
                return _Outcome.WRITTEN_OVER if over else _Outcome.WRITTEN
            outcome = _Outcome.BUSY
        return outcome

    @contextlib.contextmanager
    def _lend(self, segment: Segment) -> Iterator[LockDescriptor]:
        """A descriptor for locking slots."""
        with map_exceptions({OSError: self._locks_failed}), segment.locks.lend() as lock:
            yield lock

    def _locks_failed(self, error: OSError) -> BackendUnavailableError:
        return BackendUnavailableError(
            f"{self._where}: expected to lock a slot, got {error.strerror} ({error.errno}); raise "
            f"the limit of open files, or use a local file system",
            transient=error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOLCK},
        )

    def _count(self, counts: StoreCounters) -> None:
        with self._mutex:
            self._counters += counts


def _bits(found: Found) -> PageBits:
    """Which pages were there."""
    packed = np.packbits(found.present, bitorder="little").tobytes()
    return PageBits(int.from_bytes(packed, "little"), len(found.present))


def _rows(buffer: Buffer, count: int, size: int, *, what: str, writable: bool) -> Bytes:
    """A buffer as one row of bytes for each page. Shape: (count, size).

    Raises:
        ContractError: It is of another size, not contiguous, or cannot be written.
    """
    view = memoryview(buffer)
    if view.nbytes != count * size or not view.c_contiguous or (writable and view.readonly):
        raise ContractError(
            f"store: expected {what} as {count} pages x {size} contiguous"
            f"{' writable' if writable else ''} bytes, got {view.nbytes} bytes, "
            f"contiguous={view.c_contiguous}, readonly={view.readonly}"
        )
    if not count:
        return np.empty((0, size), np.uint8)
    return np.frombuffer(view, np.uint8).reshape(count, size)
