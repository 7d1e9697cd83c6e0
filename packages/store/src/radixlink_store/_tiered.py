"""`TieredStore`: files behind a page store, which a later job finds again.

Theory of operation. The store in front is the *memory tier*; it may be any `PageStore`. Pages that
are put go there, and their keys into a queue; a thread reads them back and appends them to a
`PageLog`. What memory has not, the log is asked for: a page that is opened is read from its file
whole, verified, and put into memory, and from then on it is memory's page like any other. So
handles are memory's handles, all layers of a load come from one write, and nothing is ever read
from a file while an engine waits for a layer.

Rules of the file:

1. a page that is in a file is there: `put` brings it back to memory rather than write another;
2. pages that memory had already are not queued: who put them first has done so. Of several
   processes that share a memory tier, one writes;
3. a forked child sees memory alone, and takes no lock of the tier: the thread and whoever held a lock
   are not there, staging is memory that both share, and the file that is written is its parent's;
4. a page that memory had no room for is a miss, and its file is not read for it again at once;
5. closing waits for the thread alone. A call in progress goes on: what it needs of memory after
   that raises as memory says, and files are misses.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from typing import TYPE_CHECKING, Final, cast

from radixlink_contracts import PAGE_KEY_BYTES, PageBits, PageKeys
from radixlink_store._refusals import Refusals
from radixlink_store._write_behind import WriteBehind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import PageHandles, PageStore, PoolLayout, Touchable
    from radixlink_store._page_log import PageLog
    from radixlink_store._settings import PersistentSettings
    from radixlink_store._tier_tally import TierTally
    from radixlink_store.counters import TierCounters

_STAGING_BYTES: Final = 1 << 23
"""What is moved between the tiers at a time, unless a page is larger."""

_NO_PAGES: Final = PageKeys()


class TieredStore:
    """A page store with files behind it. Also `Touchable`.

    Thread: any, several at once.
    """

    def __init__(
        self,
        memory: PageStore,
        log: PageLog,
        tally: TierTally,
        settings: PersistentSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Put a log behind a store.

        Args:
            memory: The store in front.
            log: Files of the same layout.
            tally: What the log counts to.
            settings: How much may wait, and for how long.
            clock: Seconds.

        Owns: both are closed with this store.
        """
        self._memory: Final = memory
        self._tally: Final = tally
        self._close_s: Final = settings.close_s
        self._process: Final = os.getpid()
        self._mutex: Final = threading.Lock()
        #: None once closed.
        self._log: PageLog | None = log
        #: What memory had no room for.
        self._refusals: Final = Refusals(clock)
        layout = memory.layout
        self._range_bytes: Final = layout.range_bytes
        self._batch: Final = max(1, _STAGING_BYTES // layout.page_bytes)
        #: Staging that nobody uses now: one buffer for each layer range.
        self._staging: Final[list[list[memoryview]]] = []
        self._behind: Final = WriteBehind(
            lambda keys: self._write(log, keys),
            log.pause_s,
            log.close,
            max(1, settings.queue_bytes // layout.page_bytes),
        )

    @property
    def layout(self) -> PoolLayout:
        """What its objects are."""
        return self._memory.layout

    @property
    def memory(self) -> PageStore:
        """The store in front."""
        return self._memory

    @property
    def counters(self) -> TierCounters:
        """What this opener's tier of files did so far; also after `close`."""
        return self._tally.counters

    def contains(self, keys: PageKeys) -> PageBits:
        """Which pages are in memory or in a file. Changes no recency."""
        return self._with_log(keys, self._memory.contains(keys))

    def touch(self, keys: PageKeys) -> PageBits:
        """Raise recency in memory, and that of the files of what is not there."""
        memory = self._memory
        touch = cast("Touchable", memory).touch if hasattr(memory, "touch") else memory.contains
        there = touch(keys)
        found = self._with_log(keys, there)
        log = self._usable_log()
        if log is not None and found != there:
            log.use(_some(keys, (page for page in found if page not in there)))
        return found

    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        """Find pages for a load, bringing to memory what is in files only.

        Raises:
            ContractError: As memory says of `ttl_s`.

        Cost: a read, a checksum and a `put` of memory for each page that was in files only.
        """
        handles = self._memory.open(keys, ttl_s)
        if handles.found.complete or not self._promote(keys, handles.found):
            return handles
        return self._memory.open(keys, ttl_s)

    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        """Read one layer range of each page that was found, from memory."""
        return self._memory.read(handles, layer_range, out)

    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        """Store pages in memory, and have those that are new written to a file later.

        What is too much for the queue is not written, and counted; nobody waits for a disk but for
        pages that are in a file and no longer in memory: those are read from there.

        Raises:
            ContractError: The parts do not fit keys and layout.
        """
        log = self._usable_log()
        if log is None:
            return self._memory.put(keys, parts)
        before = self._memory.contains(keys)
        if not before.complete:
            self._promote(keys, before)
        stored = self._memory.put(keys, parts)
        new = stored.mask & ~before.mask
        if new:
            unwritten = [key for page, key in enumerate(keys) if new >> page & 1 and key not in log]
            dropped = self._behind.offer(PageKeys(b"".join(unwritten)))
            if dropped:
                self._tally.add(dropped=dropped)
        return stored

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was put before is in a file, or was dropped.

        Returns:
            Whether that is so within that time; not while there is no room.
        """
        return self._usable_log() is None or self._behind.flush(timeout_s)

    def close(self) -> None:
        """Write what waits, for `close_s` seconds at most, and close both tiers. Idempotent."""
        if self._usable_log() is not None:
            with self._mutex:
                log, self._log = self._log, None
            if log is not None:
                self._tally.add(dropped=self._behind.close(self._close_s))
        self._memory.close()

    # --- between the tiers -----------------------------------------------------------------------

    def _usable_log(self) -> PageLog | None:
        """The files; None once closed, and in a forked child."""
        return self._log if os.getpid() == self._process else None

    def _with_log(self, keys: PageKeys, there: PageBits) -> PageBits:
        """Add the pages that are in files."""
        log = None if there.complete else self._usable_log()
        return there if log is None else PageBits(there.mask | log.find(keys).mask, len(keys))

    def _promote(self, keys: PageKeys, there: PageBits) -> bool:
        """Bring pages to memory that are in files only.

        Returns:
            Whether any was there, and was tried.
        """
        log = self._usable_log()
        missing = 0 if log is None else log.find(keys).mask & ~there.mask
        if log is None or not missing:
            return False
        # Each once, whatever was asked for.
        found = dict.fromkeys(key for page, key in enumerate(keys) if missing >> page & 1)
        wanted = PageKeys.join(key for key in found if key not in self._refusals)
        self._tally.add(put_off=len(found) - len(wanted))
        if not len(wanted):
            return False
        for first in range(0, len(wanted), self._batch):
            some = wanted.span(first, first + self._batch)
            staging = self._take_staging()
            if staging is None:
                self._tally.add(read_failed=1)
                break
            try:
                columns = self._columns(staging, len(some))
                right = log.read(some, columns)
                if right.mask:
                    parts = [
                        _rows(column, size, right)
                        for column, size in zip(columns, self._range_bytes, strict=True)
                    ]
                    self._keep(_some(some, right), parts)
            finally:
                self._staging.append(staging)
        return True

    def _keep(self, keys: PageKeys, parts: Sequence[Buffer]) -> None:
        """Put pages into memory, and remember which found no room."""
        kept = self._memory.put(keys, parts)
        self._refusals.add(key for page, key in enumerate(keys) if page not in kept)
        self._refusals.discard(keys[page] for page in kept)
        self._tally.add(promoted=kept.total, not_promoted=len(keys) - kept.total)

    def _write(self, log: PageLog, keys: PageKeys) -> PageKeys:
        """Append pages to the log, by the thread of the queue.

        Returns:
            Those that could not be written yet.
        """
        for first in range(0, len(keys), self._batch):
            some = keys.span(first, first + self._batch)
            staging = self._take_staging()
            if staging is None:
                self._tally.add(write_failed=1, dropped=len(keys) - first)
                break
            try:
                columns = self._columns(staging, len(some))
                right = self._read_memory(some, columns)
                done = self._append(log, some, columns, right)
            finally:
                self._staging.append(staging)
            self._tally.add(gone=done - PageBits(right.mask & (1 << done) - 1, done).total)
            if done < len(some):
                return keys.span(first + done, len(keys))
        return _NO_PAGES

    def _read_memory(self, keys: PageKeys, columns: list[memoryview]) -> PageBits:
        """Which pages memory still has, and their bytes; none if it was closed or fails."""
        try:
            handles = self._memory.open(keys, 0.0)
            right = handles.found
            for layer_range, column in enumerate(columns):
                right &= self._memory.read(handles, layer_range, column)
        except Exception:  # noqa: BLE001 -- whatever memory raises, the thread goes on
            return PageBits.none(len(keys))
        return right

    def _append(
        self, log: PageLog, keys: PageKeys, columns: list[memoryview], right: PageBits
    ) -> int:
        """Append the pages that are right and in no file; how many pages are dealt with."""
        for page in right:
            # Another process may have written it meanwhile.
            if keys[page] not in log:
                ranges = [
                    column[page * size : (page + 1) * size]
                    for column, size in zip(columns, self._range_bytes, strict=True)
                ]
                if not log.append(keys[page], ranges):
                    return page
        return len(keys)

    def _take_staging(self) -> list[memoryview] | None:
        """Buffers for a batch, kept for the next one; None if the system has no memory for them."""
        try:
            return self._staging.pop()
        except IndexError:
            try:
                return [memoryview(mmap.mmap(-1, self._batch * size)) for size in self._range_bytes]
            except OSError:
                return None

    def _columns(self, staging: list[memoryview], count: int) -> list[memoryview]:
        """The parts of staging that so many pages take."""
        return [
            buffer[: count * size] for buffer, size in zip(staging, self._range_bytes, strict=True)
        ]


def _some(keys: PageKeys, pages: Iterable[int]) -> PageKeys:
    """The keys of some pages."""
    data = keys.data
    return PageKeys(
        b"".join(data[page * PAGE_KEY_BYTES : (page + 1) * PAGE_KEY_BYTES] for page in pages)
    )


def _rows(column: memoryview, size: int, pages: PageBits) -> Buffer:
    """The rows of some pages; a copy unless they are all."""
    if pages.complete:
        return column
    return b"".join(column[page * size : (page + 1) * size] for page in pages)
