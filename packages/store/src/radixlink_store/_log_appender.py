"""The file that this process adds pages to: begun, filled, sealed, and what the disk says against it.

What the operating system says against writing is told once, and ends it until `retry_s` seconds
later. A try that goes through is told too, and all is as before.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, Final

from radixlink_contracts.errors import CapacityError
from radixlink_store._errors import NO_ROOM
from radixlink_store._log_file import LOG_SUFFIX, LogWriter, name_prefix
from radixlink_store._log_room import sizes_in, to_evict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from radixlink_store._log_file import LogFormat
    from radixlink_store._log_index import IndexedFile, LogIndex
    from radixlink_store._settings import PersistentSettings
    from radixlink_store._tier_tally import TierTally

_FILE_PART: Final = 16
_MOST_FILE_BYTES: Final = 1 << 28


class LogAppender:
    """Adds pages to files of its own in a directory.

    Thread: one at a time, but for `pause_s`: any.
    """

    def __init__(
        self,
        directory: int,
        format_: LogFormat,
        settings: PersistentSettings,
        index: LogIndex,
        tally: TierTally,
        clock: Callable[[], float],
        report: Callable[[str], None],
    ) -> None:
        """Begins no file yet.

        Args:
            directory: A descriptor of where the files are; it stays the caller's.
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
        self._names: Final = name_prefix(format_.layout.fingerprint) + os.urandom(8).hex()
        self._turn = 0
        self._writer: tuple[LogWriter, IndexedFile] | None = None
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
            writer, file = self._file_with_room()
            writer.append(key, ranges)
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
        """Seal the file that is being written."""
        try:
            if self._writer is not None:
                self._seal()
        except OSError as error:
            self._pause(error)

    def _file_with_room(self) -> tuple[LogWriter, IndexedFile]:
        """The file to write to.

        Raises:
            OSError: There is no room, or the disk fails.
        """
        if self._writer is not None:
            writer, file = self._writer
            if not writer.is_linked:
                self._writer = None
                writer.close()
                self._index.drop(file)
            elif writer.num_bytes_with_one_more > self._file_bytes:
                self._seal()
        if self._writer is None:
            self._make_room()
            self._turn += 1
            name = f"{self._names}-{self._turn:08x}{LOG_SUFFIX}"
            file_id = int.from_bytes(os.urandom(8), "little")
            # Before it has its name, so that no scan takes it for another's.
            file = self._index.add_file(name, file_id, ours=True)
            try:
                writer = LogWriter(self._directory, name, file_id, self._format)
            except OSError:
                self._index.drop(file)
                raise
            file.named = True
            self._writer = writer, file
        return self._writer

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

    def _make_room(self) -> None:
        """Evict what is in the way of one more file.

        Raises:
            OSError: The directory cannot be listed, or a file not be removed.
        """
        sizes = sizes_in(self._directory)
        for size in to_evict(sizes, self._settings.capacity_bytes, self._file_bytes):
            # Somebody else may have been faster.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(size.name, dir_fd=self._directory)
                self._tally.add(files_evicted=1)
            for file in self._index.files:
                if file.name == size.name:
                    self._index.drop(file)

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
            (writer, file), self._writer = self._writer, None
            file.ours = False
            writer.close()
        self._paused_until = self._clock() + self._settings.retry_s


def file_bytes(format_: LogFormat, settings: PersistentSettings) -> int:
    """How long a file may get: one record at least.

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
    part = min(settings.capacity_bytes // _FILE_PART, _MOST_FILE_BYTES)
    return max(least, part if settings.file_bytes is None else settings.file_bytes)
