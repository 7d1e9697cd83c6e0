"""One file of the log: a head, records, and behind the last one a list of their keys.

A file is written by one process, from its start to its end, and never again. Its name says whose
pages it holds, who wrote it and in which turn, so that no two writers on any nodes ever want one
name, and how long it may get: `<layout>-<writer>-<turn>-<bytes>.pages`, the first 16 digits of the
layout's fingerprint, 16 random ones, 8 that count, and a number, all hexadecimal.

The writer *seals* a file by taking away the right to write it; then its length is final. Before it
does, it adds the list of keys, which spares whoever opens the file a look at every header:

```
offset          bytes       what
behind records  8           magic "RDXLKEYS"
                8           number of records
                32 * n      the key of each
                8           checksum, with the file's id
                8           number of records, again
                8           magic "RDXLENDS"
```

The list is a hint: if it does not match, the headers are read. A file that was not sealed has a
live writer or one that died; both are read as far as they go. A writer holds a lock on its file
from before its first byte on, for which nobody ever waits: it tells the two apart, see `_log_room`.
A forked child closes the files that its parent writes before anything else of it runs: else it would
keep their locks when the parent dies, and their room when they are evicted.

Nothing waits for the disk: what is written outlives its process, and of what a node loses with its
power the checksums tell.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import struct
from typing import TYPE_CHECKING, Final, Self

import attrs
from xxhash import xxh3_64_intdigest

from radixlink_contracts import PAGE_KEY_BYTES
from radixlink_contracts.errors import StorageError
from radixlink_store._directory import MODE, SAFELY, let_go, open_file
from radixlink_store._log_head import MAX_HEAD_BYTES, LogHead
from radixlink_store._record import RecordFormat

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from radixlink_contracts import PoolLayout
    from radixlink_store._record import RecordHead

LOG_SUFFIX: Final = ".pages"
"""How the name of every file of a log ends."""

_SEALED_MODE: Final = 0o400
_NAME_DIGITS: Final = 16
_KEYS_MAGIC: Final = b"RDXLKEYS"
_END_MAGIC: Final = b"RDXLENDS"
_KEYS_HEAD: Final = struct.Struct("=8sQ")
_KEYS_END: Final = struct.Struct("=QQ8s")
_RESERVED: Final = re.compile(r"-[0-9a-f]{16}-[0-9a-f]{8}-([0-9a-f]{1,16})\.pages$")
_MAX_BUFFERS: Final = min(os.sysconf("SC_IOV_MAX"), 1024)

#: The descriptors of the files that this process writes; each is in it only while it is open.
_WRITTEN: Final[set[int]] = set()


def name_prefix(fingerprint: bytes) -> str:
    """How the names of the files of a layout begin."""
    return fingerprint.hex()[:_NAME_DIGITS] + "-"


def file_name(fingerprint: bytes, writer: str, turn: int, num_bytes: int) -> str:
    """The name of a file of a layout that a writer makes in some turn, of so many bytes at most."""
    return f"{name_prefix(fingerprint)}{writer}-{turn:08x}-{num_bytes:x}{LOG_SUFFIX}"


def reserved_bytes(name: str) -> int:
    """How long a file may get, by its name; 0 if that does not say."""
    found = _RESERVED.search(name)
    return int(found[1], 16) if found else 0


def _keys_bytes(count: int) -> int:
    """Bytes of the list of so many keys."""
    return _KEYS_HEAD.size + PAGE_KEY_BYTES * count + _KEYS_END.size


@attrs.frozen(kw_only=True)
class Scan:
    """What was found from some record on.

    Attributes:
        keys: The key of each record, None for one whose header is not whole; the last one is.
        rest: Records behind them that are not whole: torn, or being written.
    """

    keys: tuple[bytes | None, ...]
    rest: int


class LogFormat:
    """Where everything is in the files of one layout.

    Attributes:
        layout: Whose pages they hold.
        record: What a page looks like.
        start: Where record 0 is: bytes of the head.
    """

    def __init__(self, layout: PoolLayout) -> None:
        """Files of this layout.

        Raises:
            ContractError: The layout is too long for a head.
        """
        self.layout: Final = layout
        self.record: Final = RecordFormat(layout.range_bytes)
        self.start: Final = len(LogHead(layout=layout, file_id=0).pack())

    def offset(self, number: int) -> int:
        """Where a record is."""
        return self.start + number * self.record.record_bytes

    def sealed_bytes(self, count: int) -> int:
        """How long a file of so many records is."""
        return self.offset(count) + _keys_bytes(count)


class LogFile:
    """A file of the log, open for reading.

    Thread: any.
    """

    def __init__(self, descriptor: int, file_id: int, format_: LogFormat) -> None:
        """Take over a descriptor.

        Owns: the descriptor is closed with the file.
        """
        self._descriptor: Final = descriptor
        self.file_id: Final = file_id
        self.format: Final = format_

    @classmethod
    def open(cls, directory: int, path: Path) -> Self:
        """Open a file by its head.

        Raises:
            IdentityError: It is no file of a log that this version can read.
            IntegrityError: Its head is damaged or not finished.
            BackendUnavailableError: It is no plain file of ours.
            OSError: It cannot be opened or read; `FileNotFoundError` also where it was evicted as
                its head was read.

        Owns: the caller closes it.
        """
        descriptor = open_file(directory, path, os.O_RDONLY)
        try:
            head = LogHead.read(os.pread(descriptor, MAX_HEAD_BYTES, 0), str(path))
            return cls(descriptor, head.file_id, LogFormat(head.layout))
        except BaseException as error:
            # Who evicts a file that somebody writes cuts it off.
            is_gone = isinstance(error, StorageError) and not _is_linked(descriptor)
            let_go(descriptor)
            if is_gone:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
            raise

    @classmethod
    def reopen(cls, directory: int, path: Path, file_id: int, format_: LogFormat) -> Self:
        """Open a file whose head was read before.

        Raises:
            BackendUnavailableError: It is no plain file of ours.
            OSError: It cannot be opened.

        Owns: the caller closes it.
        """
        return cls(open_file(directory, path, os.O_RDONLY), file_id, format_)

    @property
    def num_bytes(self) -> int:
        """Its length now."""
        return os.fstat(self._descriptor).st_size

    @property
    def sealed(self) -> bool:
        """Whether its length is final."""
        return not os.fstat(self._descriptor).st_mode & stat.S_IWUSR

    @property
    def is_linked(self) -> bool:
        """Whether it still has its name; it may have been evicted since it was opened."""
        return _is_linked(self._descriptor)

    def listed_keys(self) -> tuple[bytes, ...] | None:
        """The keys of all records, from the list at its end; None if there is no sound one.

        Cost: one read of 32 bytes a record.
        """
        size = self.num_bytes
        end = os.pread(self._descriptor, _KEYS_END.size, max(0, size - _KEYS_END.size))
        if len(end) < _KEYS_END.size:
            return None
        checksum, count, magic = _KEYS_END.unpack(end)
        start = self.format.offset(count)
        if magic != _END_MAGIC or start + _keys_bytes(count) != size:
            return None
        data = os.pread(self._descriptor, _keys_bytes(count) - _KEYS_END.size, start)
        if checksum != xxh3_64_intdigest(data, self.file_id):
            return None
        return tuple(
            data[at : at + PAGE_KEY_BYTES]
            for at in range(_KEYS_HEAD.size, len(data), PAGE_KEY_BYTES)
        )

    def scan(self, first: int = 0) -> Scan:
        """The keys from some record on, from the headers.

        Cost: a small read for each record; payloads are skipped.
        """
        # The last byte of a whole record is at the file's end, or before; whoever evicts a file that
        # somebody writes cuts it off before its head.
        size = max(0, self.num_bytes - self.format.start)
        record_bytes = self.format.record.record_bytes
        keys: list[bytes | None] = []
        whole = 0
        for number in range(first, size // record_bytes):
            data = os.pread(
                self._descriptor, self.format.record.head_bytes, self.format.offset(number)
            )
            if data.startswith(_KEYS_MAGIC):
                return Scan(keys=tuple(keys[:whole]), rest=len(keys) - whole)
            head = self.format.record.read_head(self.file_id, number, data)
            keys.append(head.key if head else None)
            if head:
                whole = len(keys)
        return Scan(
            keys=tuple(keys[:whole]),
            rest=len(keys) - whole + self._has_rest(size),
        )

    def read(self, number: int, ranges: Sequence[memoryview]) -> RecordHead | None:
        """Read a record.

        Args:
            number: Which.
            ranges: Where the layer ranges go. Shape: each of its own length, writable.

        Returns:
            Its header; None if there is no whole record with a sound one. Whether the bytes match
            is for `RecordHead.damaged_range` to say.

        Raises:
            OSError: It cannot be read.
        """
        data = bytearray(self.format.record.head_bytes)
        buffers, offset = [memoryview(data), *ranges], self.format.offset(number)
        for first in range(0, len(buffers), _MAX_BUFFERS):
            some = buffers[first : first + _MAX_BUFFERS]
            wanted = sum(map(len, some))
            if os.preadv(self._descriptor, some, offset) != wanted:
                return None
            offset += wanted
        return self.format.record.read_head(self.file_id, number, bytes(data))

    def close(self) -> None:
        """Close it."""
        let_go(self._descriptor)

    def _has_rest(self, size: int) -> bool:
        """Whether the file ends in the middle of a record, and not with a list of keys."""
        last = size // self.format.record.record_bytes
        start = os.pread(self._descriptor, len(_KEYS_MAGIC), self.format.offset(last))
        return bool(start) and start != _KEYS_MAGIC


class LogWriter:
    """A file of the log that this process writes.

    Attributes:
        is_held: Whether others see that it has a writer; else it may not be written.

    Thread: one at a time; of no use in a forked child, where its descriptor is closed.
    """

    def __init__(self, directory: int, name: str, file_id: int, format_: LogFormat) -> None:
        """Make the file, without a byte.

        Raises:
            OSError: It cannot be made; then it is not there.
        """
        self._file_id: Final = file_id
        self._format: Final = format_
        self._keys: Final[list[bytes]] = []
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFELY
        self._descriptor: Final = os.open(name, flags, mode=MODE, dir_fd=directory)
        _WRITTEN.add(self._descriptor)
        self.is_held: Final = self._hold()

    def _hold(self) -> bool:
        """Lock the file for as long as it is open here.

        Returns:
            False if somebody looks at it just now. A file system without locks has none to hold.
        """
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    @property
    def is_empty(self) -> bool:
        """Whether it has no record."""
        return not self._keys

    @property
    def num_bytes_with_one_more(self) -> int:
        """Its length, if it were sealed after one more record."""
        return self._format.sealed_bytes(len(self._keys) + 1)

    @property
    def is_linked(self) -> bool:
        """Whether it still has its name; others, also on other nodes, may have evicted it."""
        return _is_linked(self._descriptor)

    def begin(self) -> None:
        """Write the head, once there is room for the file.

        Raises:
            OSError: There is none, or the disk fails.
        """
        head = LogHead(layout=self._format.layout, file_id=self._file_id).pack()
        _write_all(self._descriptor, [memoryview(head)], 0)

    def append(self, key: bytes, ranges: Sequence[memoryview]) -> int:
        """Write a page behind all others.

        Args:
            key: The page.
            ranges: Its layer ranges. Shape: each of its own length.

        Returns:
            The record's number.

        Raises:
            OSError: There is no room, or the disk fails. What was written of the record is taken
                back, if that can be; the next record is written in its place.
        """
        number = len(self._keys)
        head = self._format.record.pack_head(self._file_id, number, key, ranges)
        buffers = [memoryview(head), *ranges, memoryview(self._format.record.padding)]
        try:
            _write_all(self._descriptor, buffers, self._format.offset(number))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._format.offset(number))
            raise
        self._keys.append(key)
        return number

    def seal(self) -> None:
        """Add the list of keys, and make the length final.

        Raises:
            OSError: There is no room, or the disk fails.
        """
        count = len(self._keys)
        data = _KEYS_HEAD.pack(_KEYS_MAGIC, count) + b"".join(self._keys)
        end = _KEYS_END.pack(xxh3_64_intdigest(data, self._file_id), count, _END_MAGIC)
        _write_all(self._descriptor, [memoryview(data + end)], self._format.offset(count))
        os.fchmod(self._descriptor, _SEALED_MODE)

    def discard(self, directory: int, name: str) -> None:
        """Remove it, as far as that can be, and close it."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)
        self.close()

    def close(self) -> None:
        """Close it, sealed or not."""
        _WRITTEN.discard(self._descriptor)
        os.close(self._descriptor)


def _close_inherited() -> None:
    """Close the files that the parent writes, in a child that has no other thread yet."""
    while _WRITTEN:
        let_go(_WRITTEN.pop())


os.register_at_fork(after_in_child=_close_inherited)


def _is_linked(descriptor: int) -> bool:
    try:
        return os.fstat(descriptor).st_nlink > 0
    except OSError:
        return False


def _write_all(descriptor: int, buffers: list[memoryview], offset: int) -> None:
    """Write all of these, one behind the other.

    Raises:
        OSError: Not all could be written.
    """
    waiting = [buffer for buffer in buffers if len(buffer)]
    while waiting:
        written = os.pwritev(descriptor, waiting[:_MAX_BUFFERS], offset)
        offset += written
        while waiting and written >= len(waiting[0]):
            written -= len(waiting.pop(0))
        if written:
            waiting[0] = waiting[0][written:]
