"""`SegmentPageStore`: the `PageStore` contract over a `Segment`, with what it counts."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from array import array
from typing import TYPE_CHECKING, Final

import numpy as np

from radixlink_contracts import PAGE_KEY_BYTES, PageBits, PageHandles
from radixlink_contracts.errors import (
    BackendUnavailableError,
    ContractError,
    StaleHandleError,
)
from radixlink_store._ages import age_of_call, age_of_page, ages_of_pages
from radixlink_store._copies import past_line
from radixlink_store._places import Place, seed_and_match
from radixlink_store._segment import generations_of
from radixlink_store._state import STATE_BITS, generation_of
from radixlink_store._tally import Tally
from radixlink_store._writes import (
    BUSY,
    FULL,
    GIVEN_UP,
    GROUP,
    OVER,
    WRITTEN,
    WRITTEN_OVER,
    Page,
    write_group,
    write_one,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import PageKeys, PoolLayout
    from radixlink_store._locks import LockDescriptor
    from radixlink_store._places import Lines
    from radixlink_store._prefault import Prefault
    from radixlink_store._segment import Found, Segment
    from radixlink_store._writes import Outcome
    from radixlink_store.counters import StoreCounters

MAX_LEASE_S: Final = 3600
"""No lease keeps a page longer than that, so that a wrong `ttl_s` cannot fill a store for good."""


_ALL_OF_ONE: Final = PageBits.all(1)
_NONE_OF_ONE: Final = PageBits.none(1)

_FEW: Final = 8
"""Up to so many pages are looked for one by one: below that, numpy's fixed costs are larger."""


class SegmentPageStore:
    """Pages in a segment of shared memory. Also `Touchable`.

    Thread: any, several at once; no lock is held while bytes are copied, but those of the slots
    that are written.
    """

    def __init__(
        self,
        segment: Segment,
        where: str,
        clock: Callable[[], float] = time.monotonic,
        prefault: Prefault | None = None,
    ) -> None:
        """Serve the pages of a segment.

        Args:
            segment: The pages. Its locks are closed with the store; what is behind its buffer is
                released when the last call that uses it has returned.
            where: Names the segment in messages.
            clock: Seconds, the same for every process that shares the segment.
            prefault: At work on the segment's memory; it is stopped with the store.
        """
        #: None once closed. Each call takes its own reference, so that close never waits for one.
        self._segment: Segment | None = segment
        self._layout: Final = segment.layout
        self._where: Final = where
        self._clock: Final = clock
        self._prefault: Final = prefault
        self._writer: Final = os.getpid()
        self._tally: Final = Tally(segment.join())

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
        return self._tally.counters

    def wait_prefault(self, timeout_s: float) -> bool:
        """Wait until no first touch of the segment costs this process anything any more.

        Returns:
            Whether that is so; also true where nothing is done about it.
        """
        return self._prefault is None or self._prefault.wait(timeout_s)

    def contains(self, keys: PageKeys) -> PageBits:
        """Which pages are there. Changes no recency."""
        segment = self._opened()
        if len(keys) <= _FEW:
            mask = 0
            for page, _, _ in self._there_of_few(segment, _places(segment, keys)):
                mask |= 1 << page
            return PageBits(mask, len(keys))
        return _bits(self._find(segment, keys))

    def touch(self, keys: PageKeys) -> PageBits:
        """Raise recency; say which pages are there."""
        segment = self._opened()
        age = age_of_call(self._clock())
        if len(keys) <= _FEW:
            mask = 0
            for page, slot, _ in self._there_of_few(segment, _places(segment, keys)):
                segment.use(slot, age_of_page(age, page))
                mask |= 1 << page
            return PageBits(mask, len(keys))
        found = self._find(segment, keys)
        pages = np.flatnonzero(found.present)
        segment.ages[found.slots[pages]] = ages_of_pages(age, pages)
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
        now = self._clock()
        age, until = age_of_call(now), int(now) + math.ceil(min(ttl_s, MAX_LEASE_S))
        if len(keys) <= _FEW:
            return self._open_few(segment, keys, age, until)
        found = self._find(segment, keys)
        for page in np.flatnonzero(found.present).tolist():
            if not self._is_sound(segment, int(found.slots[page]), int(found.words[page])):
                found.present[page] = False
        pages = np.flatnonzero(found.present)
        slots = found.slots[pages]
        segment.ages[slots] = ages_of_pages(age, pages)
        segment.leases[slots] = np.maximum(segment.leases[slots], until)
        return PageHandles(
            keys=keys,
            found=_bits(found),
            slots=array("Q", found.slots.astype(np.uint64).tobytes()),
            generations=array("Q", generations_of(found.words).tobytes()),
            writers=array("Q", segment.writers(found.slots).tobytes()),
        )

    def _open_few(self, segment: Segment, keys: PageKeys, age: int, until: int) -> PageHandles:
        """Open pages one by one."""
        count = len(keys)
        slots, generations, writers = [0] * count, [0] * count, [0] * count
        mask = 0
        for page, slot, word in self._there_of_few(segment, _places(segment, keys)):
            if not self._is_sound(segment, slot, word):
                continue
            segment.use(slot, age_of_page(age, page), until)
            mask |= 1 << page
            slots[page] = slot
            generations[page] = generation_of(word)
            writers[page] = segment.writer(slot)
        return PageHandles(
            keys=keys,
            found=PageBits(mask, count),
            slots=array("Q", slots),
            generations=array("Q", generations),
            writers=array("Q", writers),
        )

    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        """Read one layer range of each page that was found, verified on what was copied.

        In a segment without checksums nothing is verified but that no writer came in between.

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
        size = sizes[layer_range]
        rows = _flat(out, count, size, what="out", writable=True)
        if count and max(handles.slots) >= segment.geometry.num_slots:
            raise ContractError(
                f"store: expected handles of {self._where}, got slot {max(handles.slots)} of "
                f"{segment.geometry.num_slots}"
            )
        if not count:
            return PageBits.none(0)
        mask = stale = corrupt = 0
        data, slots, generations = handles.keys.data, handles.slots, handles.generations
        verify, past = segment.checksums, past_line(rows)
        for page in handles.found:
            slot, generation = slots[page], generations[page]
            seed, match = seed_and_match(data[page * PAGE_KEY_BYTES : (page + 1) * PAGE_KEY_BYTES])
            word = match | generation << STATE_BITS
            if segment.word(slot) != word:
                stale += 1
                continue
            row = rows[page * size : (page + 1) * size]
            segment.copy_range(slot, layer_range, row, past + page * size)
            if verify and not segment.matches(slot, seed, generation, layer_range, row):
                if self._is_damaged(segment, slot, word, seed, layer_range):
                    corrupt += 1
                else:
                    stale += 1
            elif segment.word(slot) != word:
                stale += 1
            else:
                mask |= 1 << page
        self._tally.add(
            read_ok=mask.bit_count(),
            read_missing=count - handles.found.total,
            read_stale=stale,
            read_corrupt=corrupt,
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
        count = len(keys.data) // PAGE_KEY_BYTES
        columns = [
            _flat(part, count, sizes[layer_range], what="each part", writable=False)
            for layer_range, part in enumerate(parts)
        ]
        now = self._clock()
        if count == 1:
            return self._put_one(segment, keys.data, columns, now)
        return self._put_many(segment, keys, columns, now)

    def _put_many(
        self, segment: Segment, keys: PageKeys, columns: list[memoryview], now: float
    ) -> PageBits:
        """Store any number of pages, equal ones too."""
        places = _places(segment, keys)
        there = self._look_up(segment, keys, places)
        age = age_of_call(now)
        for page, (slot, _) in there.items():
            segment.use(slot, age_of_page(age, page))
        #: Of each page that is not there, where it comes first in this call.
        firsts: dict[bytes, int] = {}
        for page, place in enumerate(places):
            if page not in there:
                firsts.setdefault(place.key, page)
        new = list(firsts.values())
        #: The slots of this call's pages: it must not evict for its last pages its first ones.
        mine = {slot for slot, _ in there.values()}
        sizes = self._layout.range_bytes
        outcomes: dict[int, Outcome] = {}
        for start in range(0, len(new), GROUP):
            pages = {
                page: Page(
                    places[page],
                    segment.tags_at(places[page].buckets),
                    age_of_page(age, page),
                    [
                        column[page * size : (page + 1) * size]
                        for column, size in zip(columns, sizes, strict=True)
                    ],
                )
                for page in new[start : start + GROUP]
            }
            try:
                written = write_group(segment, pages.values(), int(now), mine, self._writer)
            except OSError as error:
                raise self._locks_failed(error) from error
            outcomes.update(zip(pages, written, strict=True))
        return self._stored(places, there.keys(), firsts, outcomes)

    def _stored(
        self,
        places: list[Place],
        there: Collection[int],
        firsts: dict[bytes, int],
        outcomes: dict[int, Outcome],
    ) -> PageBits:
        """Which pages of a call are stored; counts what became of each."""
        mask = put = again = over = full = busy = 0
        for page, place in enumerate(places):
            if page in there:
                mask |= 1 << page
                continue
            first = firsts[place.key]
            outcome = outcomes[first]
            if outcome is FULL:
                full += 1
            elif outcome is BUSY:
                busy += 1
            else:
                mask |= 1 << page
                if page != first or outcome in GIVEN_UP:
                    again += 1
                else:
                    put += 1
                over += page == first and outcome in OVER
        self._tally.add(
            put=put,
            already_there=len(there) + again,
            evicted=over,
            rejected_full=full,
            rejected_busy=busy,
        )
        return PageBits(mask, len(places))

    def _put_one(
        self, segment: Segment, key: bytes, parts: list[memoryview], now: float
    ) -> PageBits:
        """Store one page: what `put` does for many, without a step that one does not need."""
        place = Place.of(key, segment.num_buckets)
        age = age_of_page(age_of_call(now), 0)
        lines = segment.tags_at(place.buckets)
        at = self._find_one(segment, place, lines)
        if at is not None:
            segment.use(at[0], age)
            self._tally.add_one("already_there")
            return _ALL_OF_ONE
        page = (place, lines, age, parts)
        try:
            outcome = write_one(segment, page, int(now), self._writer)
        except OSError as error:
            raise self._locks_failed(error) from error
        if outcome is WRITTEN_OVER:
            self._tally.add_one("put", "evicted")
        elif outcome is WRITTEN:
            self._tally.add_one("put")
        elif outcome in GIVEN_UP:
            self._tally.add(already_there=1, evicted=outcome in OVER)
        else:
            full = outcome is FULL
            self._tally.add(rejected_full=full, rejected_busy=not full)
            return _NONE_OF_ONE
        return _ALL_OF_ONE

    def close(self) -> None:
        """Let go of the segment; the pages stay. Idempotent; waits for no call in progress."""
        segment, self._segment = self._segment, None
        if segment is not None:
            # In this order: whoever gets the row next goes on from what is there.
            self._tally.leave()
            segment.locks.close()
            if self._prefault is not None:
                self._prefault.stop()

    def _opened(self) -> Segment:
        segment = self._segment
        if segment is None:
            raise StaleHandleError(
                f"store: expected {self._where} to be open, got a call after close"
            )
        return segment

    def _find(self, segment: Segment, keys: PageKeys) -> Found:
        """Find many pages, and empty slots met on the way whose header is damaged."""
        found = segment.find(keys)
        # Nearly always the fingerprints of two pages are equal, and both headers are sound.
        for slot, word in found.suspects:
            self._is_sound(segment, slot, word)
        return found

    def _find_one(self, segment: Segment, place: Place, lines: Lines) -> tuple[int, int] | None:
        """The same for one page: its slot and state word, if it is there."""
        suspects: list[tuple[int, int]] = []
        at = segment.find_one(place, lines, suspects)
        for slot, word in suspects:
            self._is_sound(segment, slot, word)
        return at

    def _look_up(
        self, segment: Segment, keys: PageKeys, places: list[Place]
    ) -> dict[int, tuple[int, int]]:
        """Slot and state word of each page that is there; quick for few."""
        if len(places) <= _FEW:
            there = self._there_of_few(segment, places)
            return {page: (slot, word) for page, slot, word in there}
        found = self._find(segment, keys)
        pages = np.flatnonzero(found.present)
        ats = zip(found.slots[pages].tolist(), found.words[pages].tolist(), strict=True)
        return dict(zip(pages.tolist(), ats, strict=True))

    def _there_of_few(
        self, segment: Segment, places: Iterable[Place]
    ) -> Iterator[tuple[int, int, int]]:
        """Page, slot and state word of each page that is there, looked for one by one."""
        for page, place in enumerate(places):
            at = self._find_one(segment, place, segment.tags_at(place.buckets))
            if at is not None:
                yield page, *at

    def _is_sound(self, segment: Segment, slot: int, word: int) -> bool:
        """True when a slot's header is as it should be; else it is emptied, but by a forked child."""
        if segment.header_is_sound(slot, word):
            return True
        if not segment.locks.are_ours:
            return False
        with self._lend(segment) as lock:
            emptied = segment.empty_if_header_damaged(lock, slot, word)
        self._tally.add(read_corrupt=emptied)
        return False

    def _is_damaged(
        self, segment: Segment, slot: int, word: int, seed: int, layer_range: int
    ) -> bool:
        """Look again at bytes that did not match; empty the slot unless it was written since.

        A forked child empties nothing: it may not lock.
        """
        if not segment.locks.are_ours:
            return segment.word(slot) == word
        with self._lend(segment) as lock:
            return segment.empty_if_range_damaged(lock, slot, word, seed, layer_range)

    @contextlib.contextmanager
    def _lend(self, segment: Segment) -> Iterator[LockDescriptor]:
        """A descriptor for locking slots."""
        try:
            with segment.locks.lend() as lock:
                yield lock
        except OSError as error:
            raise self._locks_failed(error) from error

    def _locks_failed(self, error: OSError) -> BackendUnavailableError:
        return BackendUnavailableError(
            f"{self._where}: expected to lock a slot, got {error.strerror} ({error.errno}); raise "
            f"the limit of open files, or use a local file system",
            transient=error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOLCK},
        )


def _places(segment: Segment, keys: PageKeys) -> list[Place]:
    """Where each page may be."""
    num_buckets = segment.num_buckets
    return [Place.of(key, num_buckets) for key in keys]


def _bits(found: Found) -> PageBits:
    """Which pages were there."""
    packed = np.packbits(found.present, bitorder="little").tobytes()
    return PageBits(int.from_bytes(packed, "little"), len(found.present))


def _flat(buffer: Buffer, count: int, size: int, *, what: str, writable: bool) -> memoryview:
    """A buffer as one row of bytes for each page. Shape: (count * size,).

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
    # A view of no bytes may have a shape that cannot be cast.
    return view.cast("B") if count else memoryview(b"")
