"""`PageLog`: the pages of one layout in a directory of append-only files, which others share.

Theory of operation. Every process, on any node, adds to files of its own and to no other, so nobody
waits for a lock and no two writers meet. Each keeps an index of all files of its layout in its own
memory; it is made when the log is opened, and made up for what others did since by looking at the
directory again, at most every `rescan_s` seconds, when somebody asks for a page.

Rules of the file:

1. nothing here is believed before it is read: names, lists of keys and headers are hints, and only
   a record whose header and bytes match is a page. All else is a miss and a counter;
2. a file is opened for each batch of reads and closed again: what was evicted then is a miss, and
   no descriptor keeps its room from being free;
3. one thread appends; any read. Closing waits for none that reads;
4. what the operating system says against reading is a miss and a counter; what it says against
   writing is `_log_appender`'s, and reads go on;
5. the directory is where its path leads: one that was removed or replaced is followed.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Final

from radixlink_contracts import PageBits
from radixlink_contracts.errors import StorageError
from radixlink_store._directory import names_in
from radixlink_store._log_appender import LogAppender
from radixlink_store._log_directory import LogDirectory
from radixlink_store._log_file import LOG_SUFFIX, LogFile, LogFormat, name_prefix
from radixlink_store._log_index import LogIndex, Look

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from radixlink_contracts import PageKeys, PoolLayout
    from radixlink_store._log_index import IndexedFile
    from radixlink_store._settings import PersistentSettings
    from radixlink_store._tier_tally import TierTally

_LOGGER: Final = logging.getLogger("radixlink_store")
_USED_EVERY_S: Final = 60.0


class _Found(enum.Enum):
    """What became of reading a record."""

    RIGHT = enum.auto()
    DAMAGED = enum.auto()
    EVICTED = enum.auto()
    UNREADABLE = enum.auto()


class PageLog:
    """Pages in files.

    Thread: any, but for `append` and `close`: one at a time.
    """

    def __init__(
        self,
        layout: PoolLayout,
        settings: PersistentSettings,
        tally: TierTally,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[str], None] = _LOGGER.warning,
    ) -> None:
        """Find the pages that are there.

        Args:
            layout: Whose pages.
            settings: Where, and how much.
            tally: Counts what is done.
            clock: Seconds.
            report: Takes what people should know: that writing ended, and that it goes on.

        Raises:
            BackendUnavailableError: The directory cannot be used.
            CapacityError: Not one page fits.

        Cost: a read of 32 bytes for each record in sealed files, a small read for each in others.
        """
        self._layout: Final = layout
        self._settings: Final = settings
        self._tally: Final = tally
        self._clock: Final = clock
        self._format: Final = LogFormat(layout)
        self._prefix: Final = name_prefix(layout.fingerprint)
        self._index: Final = LogIndex()
        self._directory: Final = LogDirectory(settings.path, tally, report)
        try:
            self._appender: Final = LogAppender(
                self._directory, self._format, settings, self._index, tally, clock, report
            )
        except BaseException:
            self._directory.close()
            raise
        #: Held while the directory is looked at.
        self._scanning: Final = threading.Lock()
        self._scan_at = clock()
        #: Files under our prefix that are none of ours, and how each was when that was seen: one that
        #: was written since had a head that was not whole yet.
        self._strange: Final[dict[str, Look]] = {}
        self.refresh()

    def __len__(self) -> int:
        """How many pages can be found."""
        return len(self._index)

    def __contains__(self, key: bytes) -> bool:
        """True when a page can be found, by what is known now."""
        return key in self._index

    # --- reading ---------------------------------------------------------------------------------

    def find(self, keys: PageKeys) -> PageBits:
        """Which pages can be found; looks at the directory again if it is time to.

        Cost: a look into a dict for each page.
        """
        self._refresh_if_due()
        index = self._index
        mask = 0
        if len(index):
            for page, key in enumerate(keys):
                if key in index:
                    mask |= 1 << page
        return PageBits(mask, len(keys))

    def use(self, keys: PageKeys) -> None:
        """Say that pages are used, so that their files stay."""
        files = {found[0].serial: found[0] for found in map(self._index.find, keys) if found}
        with self._directory.use() as directory:
            if directory is not None:
                for file in files.values():
                    self._use(directory, file)

    def read(self, keys: PageKeys, columns: Sequence[memoryview]) -> PageBits:
        """Read whole pages.

        Args:
            keys: The pages.
            columns: One for each layer range, writable. Shape: (num_pages, range_bytes[r]) bytes.

        Returns:
            Which rows hold the right bytes; the others hold anything. None does after `close`.
        """
        mask = 0
        left: Sequence[int] = range(len(keys))
        with self._directory.use() as directory:
            # A page may have an older record that is sound.
            while left and directory is not None:
                right, left = self._read_found(directory, keys, left, columns)
                mask |= right
        return PageBits(mask, len(keys))

    def _read_found(
        self,
        directory: int,
        keys: PageKeys,
        pages: Sequence[int],
        columns: Sequence[memoryview],
    ) -> tuple[int, list[int]]:
        """Read some pages where the index finds them now.

        Returns:
            The bits of those that are right, and those whose record is found no more since.
        """
        by_file: dict[int, tuple[IndexedFile, list[tuple[int, int]]]] = {}
        for page in pages:
            found = self._index.find(keys[page])
            if found is not None:
                by_file.setdefault(found[0].serial, (found[0], []))[1].append((page, found[1]))
        mask, forgotten = 0, []
        for file, places in by_file.values():
            try:
                path = self._settings.path / file.name
                opened = LogFile.reopen(directory, path, file.file_id, self._format)
            except FileNotFoundError:
                self._index.drop(file)
                forgotten += [page for page, _ in places]
                continue
            except (OSError, StorageError):
                self._tally.add(read_failed=len(places))
                continue
            with contextlib.closing(opened):
                for page, number in places:
                    ranges = [
                        column[page * size : (page + 1) * size]
                        for column, size in zip(columns, self._layout.range_bytes, strict=True)
                    ]
                    match self._read_one(opened, number, keys[page], ranges):
                        case _Found.RIGHT:
                            mask |= 1 << page
                        case _Found.DAMAGED:
                            self._tally.add(corrupt=1)
                            self._index.forget(file, number)
                            forgotten.append(page)
                        case _Found.EVICTED:
                            self._index.drop(file)
                            forgotten.append(page)
                        case _Found.UNREADABLE:
                            self._tally.add(read_failed=1)
            self._use(directory, file)
        return mask, forgotten

    def _read_one(
        self, opened: LogFile, number: int, key: bytes, ranges: Sequence[memoryview]
    ) -> _Found:
        """Read one page."""
        try:
            head = opened.read(number, ranges)
        except OSError:
            return _Found.UNREADABLE
        if head is not None and head.key == key and head.damaged_range(ranges) is None:
            return _Found.RIGHT
        # Whoever evicts a file that somebody writes cuts it off.
        return _Found.DAMAGED if opened.is_linked else _Found.EVICTED

    def _use(self, directory: int, file: IndexedFile) -> None:
        now = self._clock()
        if now - file.used_at >= _USED_EVERY_S:
            file.used_at = now
            with contextlib.suppress(OSError):
                os.utime(file.name, dir_fd=directory)

    # --- what others did -------------------------------------------------------------------------

    def refresh(self) -> None:
        """Know what is in the directory now; done by one thread at a time, others do without.

        Cost: a list of the directory, the status of each file that is not sealed, and a read of what
            is new.
        """
        if not self._scanning.acquire(blocking=False):
            return
        try:
            self._scan_at = self._clock() + self._settings.rescan_s
            with self._directory.use() as directory:
                if directory is not None:
                    self._directory.follow()
                    self._rescan(directory)
        except OSError:
            self._tally.add(read_failed=1)
        finally:
            self._scanning.release()

    def _refresh_if_due(self) -> None:
        if self._clock() >= self._scan_at:
            self.refresh()

    def _rescan(self, directory: int) -> None:
        # Known first, and only what has its name: a file of our own that comes in between is in
        # neither list.
        known = {file.name: file for file in self._index.files if file.named}
        names = {
            name
            for name in names_in(directory)
            if name.startswith(self._prefix) and name.endswith(LOG_SUFFIX)
        }
        for name, file in known.items():
            if name not in names:
                self._index.drop(file)
            elif not file.sealed and not file.ours:
                look = _look_at(directory, name)
                if look is not None and look != file.looked:
                    self._adopt(directory, name, file, look)
        # A file of our own comes into the index before it has its name.
        ours = {file.name for file in self._index.files}
        for name in sorted(names - ours):
            # Asked first: what is read after that is at least as new.
            look = _look_at(directory, name)
            if look is not None and self._strange.get(name) != look:
                self._adopt(directory, name, None, look)
        for name in self._strange.keys() - names:
            del self._strange[name]

    def _adopt(self, directory: int, name: str, file: IndexedFile | None, look: Look) -> None:
        """Know what a file of others has, that was not known.

        Args:
            directory: Where it is.
            name: The file.
            file: What is known of it; None for a new one.
            look: What was seen of it just before.
        """
        path = self._settings.path / name
        try:
            opened = (
                LogFile.open(directory, path)
                if file is None
                else LogFile.reopen(directory, path, file.file_id, self._format)
            )
        except FileNotFoundError:
            return
        except StorageError:
            self._refuse(name, look)
            return
        except OSError as error:
            # A symbolic link stays one; all else may be over the next time.
            if error.errno == errno.ELOOP:
                self._refuse(name, look)
            else:
                self._tally.add(read_failed=1)
            return
        try:
            if opened.format.layout == self._layout:
                file = file or self._index.add_file(name, opened.file_id)
                self._take_in(opened, file)
                file.looked = look
            else:
                self._refuse(name, look)
        except OSError:
            self._tally.add(read_failed=1)
        finally:
            opened.close()

    def _take_in(self, opened: LogFile, file: IndexedFile) -> None:
        """Know what a file has, that was not known.

        Raises:
            OSError: It cannot be read.
        """
        known = len(file.keys)
        # Asked first: what is read after that is all there will be.
        sealed = opened.sealed
        listed = opened.listed_keys() if sealed else None
        if listed is not None:
            self._index.extend(file, listed[known:])
        else:
            scan = opened.scan(known)
            self._index.extend(file, scan.keys)
            # Of one that was evicted meanwhile, what is cut off is not torn.
            if opened.is_linked:
                # The rest of a file that somebody writes is looked at again; it counts once.
                rest = scan.rest if sealed or not known else 0
                self._tally.add(torn=rest + scan.keys.count(None))
        file.sealed = sealed

    def _refuse(self, name: str, look: Look) -> None:
        """Look at a file no more as long as it is as it was: somebody may be writing its head."""
        if look.num_bytes and name not in self._strange:
            self._tally.add(refused=1)
        self._strange[name] = look

    # --- writing ---------------------------------------------------------------------------------

    def pause_s(self) -> float:
        """For how many seconds nothing will be written; 0 if it would be tried now."""
        return self._appender.pause_s()

    def append(self, key: bytes, ranges: Sequence[memoryview]) -> bool:
        """Write a page, unless writing has ended for now; see `LogAppender.append`."""
        return self._appender.append(key, ranges)

    def close(self) -> None:
        """Seal the file that is being written, and close the directory once nobody reads."""
        try:
            self._appender.close()
        finally:
            self._directory.close()


def _look_at(directory: int, name: str) -> Look | None:
    """What is seen of a file, or a link, without opening it; None if that cannot be said."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return None
    return Look(status.st_size, status.st_mtime_ns, status.st_mode)
