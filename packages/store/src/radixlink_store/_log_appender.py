"""The file that this process adds pages to: begun, filled, sealed, and what the disk says against it.

What the operating system says against writing is told once, and ends it until `retry_s` seconds
later. A try that goes through is told too, and all is as before. A directory that is gone is made
anew at once. No file stays that got no page; what a writer that died left of one, the next writer
removes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from typing import TYPE_CHECKING, Final

from radixlink_contracts.errors import CapacityError
from radixlink_store._errors import NO_ROOM
from radixlink_store._log_file import LogWriter, file_name
from radixlink_store._log_room import as_seen_by, remove, remove_empty, sizes_in, to_evict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from radixlink_store._log_directory import LogDirectory
    from radixlink_store._log_file import LogFormat
    from radixlink_store._log_index import IndexedFile, LogIndex
    from radixlink_store._settings import PersistentSettings
    from radixlink_store._tier_tally import TierTally

_FILE_PART: Final = 64
_MOST_FILE_BYTES: Final = 1 << 28
_GONE: Final = {errno.ENOENT, errno.ESTALE}
_TRIES: Final = 16
"""How often a writer begins a file again that others removed, or that gave way to theirs, for one
page: only where more of them write at once than there is room for files does it come to that."""


class LogAppender:
    """Adds pages to files of its own in a directory.

    Thread: one at a time, but for `pause_s`: any.
    """

    def __init__(
        self,
        directory: LogDirectory,
        format_: LogFormat,
        settings: PersistentSettings,
        index: LogIndex,
        tally: TierTally,
        clock: Callable[[], float],
        report: Callable[[str], None],
    ) -> None:
        """Begins no file yet.

        Args:
            directory: Where the files are; it stays the caller's, and open until `close`.
            format_: What the files look like.
            settings: How much of what.
            index: Is told of every page that was written, and of files that were evicted for it.
            tally: Counts what is done.
            clock: Seconds.
            report: Takes what people should know.

        Raises:
            CapacityError: Not one page fits.
        """
        self._directory: Final = directory
        self._format: Final = format_
        self._settings: Final = settings
        self._index: Final = index
        self._tally: Final = tally
        self._clock: Final = clock
        self._report: Final = report
        self._file_bytes: Final = file_bytes(format_, settings)
        self._name: Final = os.urandom(8).hex()
        self._turn = 0
        self._writer: tuple[LogWriter, IndexedFile] | None = None
        #: The directory's turn in which that was begun.
        self._began_in = 0
        #: Until when nothing is written; None while all is well.
        self._paused_until: float | None = None

    def pause_s(self) -> float:
        """For how many seconds nothing will be written; 0 if it would be tried now."""
        return max(0.0, (self._paused_until or 0.0) - self._clock())

    def append(self, key: bytes, ranges: Sequence[memoryview]) -> bool:
        """Write a page, unless writing has ended for now.

        Args:
            key: The page.
            ranges: Its layer ranges. Shape: each of its own length.

        Returns:
            Whether it is in a file.

        Cost: a checksum and a copy of the page; at times a new file and a look at the directory.
        """
        if self.pause_s():
            return False
        try:
            file = self._write(key, ranges)
        except OSError as error:
            self._pause(error)
            return False
        self._index.extend(file, [key])
        self._tally.add(written=1)
        if self._paused_until is not None:
            self._paused_until = None
            self._report(f"{self._settings.path}: pages are written again")
        return True

    def close(self) -> None:
        """Seal the file that is being written; one without a page is removed."""
        try:
            if self._writer is not None:
                if self._writer[0].is_empty:
                    self._leave()
                else:
                    self._seal()
        except OSError as error:
            self._pause(error)

    def _write(self, key: bytes, ranges: Sequence[memoryview]) -> IndexedFile:
        """Write a page; returns the file that it is in, which had its name after that.

        Raises:
            OSError: There is no room, or the disk fails.
        """
        for _ in range(_TRIES):
            writer, file = self._writer or self._begin()
            if self._is_there(writer) and writer.num_bytes_with_one_more > self._file_bytes:
                self._seal()
                writer, file = self._begin()
            if self._is_there(writer):
                writer.append(key, ranges)
                # What was removed meanwhile took the page with it.
                if self._is_there(writer):
                    return file
            self._leave()
            self._index.drop(file)
        raise _no_room()

    def _is_there(self, writer: LogWriter) -> bool:
        """Whether a file that this process writes can be found by others."""
        return self._began_in == self._directory.turn and writer.is_linked

    def _begin(self) -> tuple[LogWriter, IndexedFile]:
        """Begin a file, in a directory that is made anew if it is gone.

        Raises:
            OSError: There is no room, or the disk fails.
        """
        self._began_in = self._directory.turn
        try:
            self._writer = self._begin_there()
        except OSError as error:
            if error.errno not in _GONE or not self._directory.renew():
                raise
            self._began_in = self._directory.turn
            self._writer = self._begin_there()
        return self._writer

    def _begin_there(self) -> tuple[LogWriter, IndexedFile]:
        """Begin a file, by the rules of `_log_room`.

        Raises:
            OSError: There is no room, or the disk fails.
        """
        directory = self._directory.descriptor
        fingerprint = self._format.layout.fingerprint
        for _ in range(_TRIES):
            self._turn += 1
            name = file_name(fingerprint, self._name, self._turn, self._file_bytes)
            file_id = int.from_bytes(os.urandom(8), "little")
            # Before it has its name, so that no scan takes it for another's.
            file = self._index.add_file(name, file_id, ours=True)
            try:
                writer = LogWriter(directory, name, file_id, self._format)
            except OSError:
                self._index.drop(file)
                raise
            file.named = True
            begun = False
            try:
                if writer.is_held and self._make_room(name):
                    writer.begin()
                    begun = True
                    return writer, file
            finally:
                if not begun:
                    self._index.drop(file)
                    writer.discard(directory, name)
        raise _no_room()

    def _seal(self) -> None:
        """End the file that is being written.

        Raises:
            OSError: There is no room, or the disk fails; the file is ended all the same.
        """
        assert self._writer is not None
        (writer, _), self._writer = self._writer, None
        try:
            writer.seal()
        finally:
            writer.close()

    def _leave(self) -> None:
        """Let go of the file that is being written as it is; one without a page is removed."""
        assert self._writer is not None
        (writer, file), self._writer = self._writer, None
        file.ours = False
        # A file system may say only now what became of earlier writes; checksums say so as well.
        with contextlib.suppress(OSError):
            if writer.is_empty:
                self._index.drop(file)
                writer.discard(self._directory.descriptor, file.name)
            else:
                writer.close()

    def _make_room(self, name: str) -> bool:
        """Remove what is in the way of a file that was made.

        Returns:
            Whether the file may be written; else it has to give way, or is gone.

        Raises:
            OSError: The directory cannot be listed, or a file not be removed.
        """
        directory = self._directory.descriptor
        sizes = sizes_in(directory)
        own = next((size for size in sizes if size.name == name), None)
        if own is None:
            return False
        remove_empty(directory, sizes)
        going = to_evict(as_seen_by(own, sizes), self._settings.capacity_bytes)
        if own in going:
            return False
        for size in going:
            if remove(directory, size.name, final=size.final):
                self._tally.add(files_evicted=1)
            for file in self._index.files:
                if file.name == size.name:
                    self._index.drop(file)
        return True

    def _pause(self, error: OSError) -> None:
        """Write nothing for a while, and say so if it is news."""
        self._tally.add(write_failed=1)
        if self._paused_until is None:
            if error.errno in NO_ROOM:
                what = "there is no room"
            elif error.errno == errno.EIO:
                what = "the disk fails"
            else:
                what = "the directory is gone or may not be written"
            self._report(
                f"{self._settings.path}: expected to write pages, got {error.strerror} (errno "
                f"{error.errno}): {what}. Pages that are there are read as before, no others are "
                f"written; that is tried again every {self._settings.retry_s} s"
            )
        if self._writer is not None and error.errno not in NO_ROOM:
            # Perhaps another part of the disk is sound.
            self._leave()
        self._paused_until = self._clock() + self._settings.retry_s


def _no_room() -> OSError:
    """What is raised where too many write at once for the capacity."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def file_bytes(format_: LogFormat, settings: PersistentSettings) -> int:
    """How long a file may get: one record at least, and no more than this process may write.

    Raises:
        CapacityError: That does not fit.
    """
    least = format_.sealed_bytes(1)
    if least > settings.capacity_bytes:
        raise CapacityError(
            f"{settings.path}: expected room for a file of one page, {least} bytes with its "
            f"headers, got a capacity of {settings.capacity_bytes}",
            needed=least,
            available=settings.capacity_bytes,
        )
    wanted = settings.file_bytes
    if wanted is None:
        wanted = min(settings.capacity_bytes // _FILE_PART, _MOST_FILE_BYTES)
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY:
        # Beyond it a file would stay as it is, and look like a full disk for ever.
        wanted = min(wanted, limit)
    return max(least, wanted)
