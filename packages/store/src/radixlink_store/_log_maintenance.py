"""What the files of a persistent tier hold, whether they are sound, and giving their pages up.

All of it works on files that are in use. A file without a byte is one that somebody begins, or left
when it died, and is passed over. Nothing is ever changed in a file: what is damaged stays,
a miss for whoever asks for it, until its file is evicted or cleared.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

import attrs

from radixlink_contracts.errors import StorageError
from radixlink_store._directory import let_go, open_directory
from radixlink_store._log_file import LOG_SUFFIX, LogFile
from radixlink_store._log_room import remove, remove_empty, sizes_in
from radixlink_store._unreadable import Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from radixlink_contracts import PoolLayout
    from radixlink_store._log_file import Scan


@attrs.frozen(kw_only=True)
class LogStatus:
    """What the files of one layout in a directory hold.

    Attributes:
        directory: Where they are.
        layout: Whose pages, which pool and shard, and how large.
        num_files: Files of that layout.
        num_unsealed: Those of them that somebody writes, or whose writer died.
        num_records: Records with a sound header.
        num_pages: Different pages among them.
        num_torn: Records that are not whole: torn, being written, or with a damaged header.
        total_bytes: Bytes of the files.
    """

    directory: Path
    layout: PoolLayout
    num_files: int
    num_unsealed: int
    num_records: int
    num_pages: int
    num_torn: int
    total_bytes: int


@attrs.frozen(kw_only=True)
class LogDamage:
    """One part of a file that is not as it should be.

    Attributes:
        file: Which.
        record: Which record of it; None for the list of keys at its end.
        what: What of it is damaged.
    """

    file: Path
    record: int | None
    what: str


@attrs.frozen(kw_only=True)
class LogVerdict:
    """What a scrub of the files of one layout found.

    Attributes:
        directory: Where they are.
        layout: Whose pages.
        num_files: Files of that layout.
        num_records: Records with a sound header, all of whose bytes were read.
        num_torn: Records at the end of files that were not sealed, and are not whole.
        damages: What is damaged.
    """

    directory: Path
    layout: PoolLayout
    num_files: int
    num_records: int
    num_torn: int
    damages: tuple[LogDamage, ...]


@attrs.frozen(kw_only=True)
class ClearedLog:
    """What became of the files of one layout.

    Attributes:
        directory: Where they were.
        layout: Whose pages.
        num_files: Files that were removed. Who writes one begins another.
        num_records: Records that they had.
    """

    directory: Path
    layout: PoolLayout
    num_files: int
    num_records: int


def inspect_logs(directory: Path) -> Iterator[LogStatus | Unreadable]:
    """What the files in a directory hold, by layout.

    Raises:
        BackendUnavailableError: It is no directory of ours.
        OSError: It cannot be read.
    """
    statuses: dict[PoolLayout, LogStatus] = {}
    pages: dict[PoolLayout, set[bytes]] = {}
    for file in _files(directory):
        if isinstance(file, Unreadable):
            yield file
            continue
        _, opened = file
        layout, scan = opened.format.layout, opened.scan()
        if not opened.is_linked:
            # Evicted since it was opened: it has no page any more, and what is cut off is not torn.
            continue
        keys = [key for key in scan.keys if key is not None]
        pages.setdefault(layout, set()).update(keys)
        before = statuses.get(layout)
        statuses[layout] = LogStatus(
            directory=directory,
            layout=layout,
            num_files=1 + (before.num_files if before else 0),
            num_unsealed=(not opened.sealed) + (before.num_unsealed if before else 0),
            num_records=len(keys) + (before.num_records if before else 0),
            num_pages=len(pages[layout]),
            num_torn=len(scan.keys) - len(keys) + scan.rest + (before.num_torn if before else 0),
            total_bytes=opened.num_bytes + (before.total_bytes if before else 0),
        )
    yield from statuses.values()


def verify_logs(directory: Path) -> Iterator[LogVerdict | Unreadable]:
    """Read every record of the files in a directory, by layout.

    Raises:
        BackendUnavailableError: It is no directory of ours.
        OSError: It cannot be read.

    Cost: all bytes of all records, at the speed of the disk.
    """
    verdicts: dict[PoolLayout, LogVerdict] = {}
    for file in _files(directory):
        if isinstance(file, Unreadable):
            yield file
            continue
        path, opened = file
        layout, scan, sealed = opened.format.layout, opened.scan(), opened.sealed
        damages = [
            LogDamage(file=path, record=record, what=what)
            for record, what in _damages(opened, scan, sealed=sealed)
        ]
        if not opened.is_linked:
            # Evicted since it was opened: what is cut off is no damage.
            continue
        before = verdicts.get(layout)
        sound = len(scan.keys) - scan.keys.count(None)
        verdicts[layout] = LogVerdict(
            directory=directory,
            layout=layout,
            num_files=1 + (before.num_files if before else 0),
            num_records=sound + (before.num_records if before else 0),
            num_torn=(0 if sealed else scan.rest) + (before.num_torn if before else 0),
            damages=(*(before.damages if before else ()), *damages),
        )
    yield from verdicts.values()


def clear_logs(directory: Path) -> Iterator[ClearedLog | Unreadable]:
    """Remove the files of pages in a directory, by layout. What is none of ours is left alone.

    Raises:
        BackendUnavailableError: It is no directory of ours.
        OSError: It cannot be read.
    """
    cleared: dict[PoolLayout, ClearedLog] = {}
    descriptor = open_directory(directory)
    try:
        for file in _files(directory):
            if isinstance(file, Unreadable):
                yield file
                continue
            path, opened = file
            layout, scan = opened.format.layout, opened.scan()
            if not remove(descriptor, path.name, final=opened.sealed):
                # Evicted since it was opened.
                continue
            before = cleared.get(layout)
            cleared[layout] = ClearedLog(
                directory=directory,
                layout=layout,
                num_files=1 + (before.num_files if before else 0),
                num_records=len(scan.keys)
                - scan.keys.count(None)
                + (before.num_records if before else 0),
            )
        remove_empty(descriptor, sizes_in(descriptor))
    finally:
        let_go(descriptor)
    yield from cleared.values()


def _files(directory: Path) -> Iterator[tuple[Path, LogFile] | Unreadable]:
    """Each file of pages in a directory, open until the next one is asked for."""
    descriptor = open_directory(directory)
    try:
        for path in sorted(directory.glob(f"*{LOG_SUFFIX}")):
            yield from _opened(descriptor, path)
    finally:
        let_go(descriptor)


def _opened(descriptor: int, path: Path) -> Iterator[tuple[Path, LogFile] | Unreadable]:
    try:
        status = os.stat(path.name, dir_fd=descriptor, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode) and not status.st_size:
            return
        opened = LogFile.open(descriptor, path)
    except FileNotFoundError:
        # Evicted since it was listed.
        return
    except (OSError, StorageError) as error:
        yield Unreadable(file=path, why=str(error))
        return
    with contextlib.closing(opened):
        yield path, opened


def _damages(opened: LogFile, scan: Scan, *, sealed: bool) -> Iterator[tuple[int | None, str]]:
    """The records of a file that are damaged, and what of them."""
    ranges = [memoryview(bytearray(size)) for size in opened.format.layout.range_bytes]
    for number, key in enumerate(scan.keys):
        try:
            head = None if key is None else opened.read(number, ranges)
        except OSError as error:
            yield number, f"cannot be read: {error.strerror} (errno {error.errno})"
            continue
        if head is None:
            yield number, "header"
        elif (layer_range := head.damaged_range(ranges)) is not None:
            yield number, f"layer range {layer_range}"
    if sealed:
        for number in range(len(scan.keys), len(scan.keys) + scan.rest):
            yield number, "header"
        listed = opened.listed_keys()
        if listed is None or any(
            key not in {None, there} for key, there in zip(scan.keys, listed, strict=False)
        ):
            yield None, "list of keys"
