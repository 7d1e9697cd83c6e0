"""What a file store holds, whether it is sound, and giving its pages up: for people, not engines.

All of it works on a store that is in use, and on one that nobody has open. A path is the directory
of a store, or of a persistent tier, or one whose subdirectories are some, as the default location
is.

* `inspect` says what there is and changes nothing.
* `verify` reads every page and empties slots that are damaged, as a reader would.
* `clear` gives all pages up, and removes what a process left that died while it made a segment.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Final, TypeVar

import attrs
import numpy as np

from radixlink_contracts.errors import BackendUnavailableError, IdentityError, IntegrityError
from radixlink_store._ages import seconds_of
from radixlink_store._directory import names_in, open_directory
from radixlink_store._errors import map_exceptions
from radixlink_store._file import (
    SUFFIX,
    UNFINISHED_SUFFIX,
    boot_id,
    creation_lock,
    map_segment,
    remove_unfinished,
    unavailable,
)
from radixlink_store._layout import COUNTER_ROWS
from radixlink_store._log_file import LOG_SUFFIX
from radixlink_store._log_maintenance import (
    ClearedLog,
    LogDamage,
    LogStatus,
    LogVerdict,
    clear_logs,
    inspect_logs,
    verify_logs,
)
from radixlink_store._places import NO_TAG, Place
from radixlink_store._state import STATE_MASK, SlotState, generation_of
from radixlink_store._tally import sum_of
from radixlink_store._unreadable import Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from radixlink_contracts import PoolLayout
    from radixlink_store._locks import LockDescriptor
    from radixlink_store._segment import Segment
    from radixlink_store._superblock import Superblock
    from radixlink_store.counters import StoreCounters

__all__ = [
    "Cleared",
    "ClearedLog",
    "Damage",
    "LogDamage",
    "LogStatus",
    "LogVerdict",
    "SegmentStatus",
    "Unreadable",
    "Verdict",
    "clear",
    "inspect",
    "verify",
]

_TIMEOUT_S: Final = 30.0

_Found = TypeVar("_Found")


@attrs.frozen(kw_only=True)
class SegmentStatus:
    """What a segment holds.

    Attributes:
        file: Its file.
        layout: Whose pages, which pool and shard, and how large.
        checksums: Whether layer ranges have checksums.
        total_bytes: Bytes of the file.
        num_slots: Pages that fit.
        num_pages: Pages that can be found.
        num_leased: Those of them that a lease keeps now.
        num_unfinished: Slots that are being written, or whose writer died.
        num_openers: Openers of now, as far as they are counted apart.
        idle_s: Seconds since the last use of a page; None if there is none, or if the segment was
            not opened since the node's last boot.
        counters: What all openers counted since the segment was made.
    """

    file: Path
    layout: PoolLayout
    checksums: bool
    total_bytes: int
    num_slots: int
    num_pages: int
    num_leased: int
    num_unfinished: int
    num_openers: int
    idle_s: int | None
    counters: StoreCounters


@attrs.frozen(kw_only=True)
class Damage:
    """One slot that is not as it should be.

    Attributes:
        slot: Which.
        what: What of it is damaged.
    """

    slot: int
    what: str


@attrs.frozen(kw_only=True)
class Verdict:
    """What a scrub of one segment found.

    Attributes:
        file: Its file.
        num_pages: Pages that were read.
        damages: What was damaged; the slots were emptied unless somebody was writing them.
        checksums: Whether the bytes of pages could be verified, or their headers alone.
    """

    file: Path
    num_pages: int
    damages: tuple[Damage, ...]
    checksums: bool


@attrs.frozen(kw_only=True)
class Cleared:
    """What became of one segment.

    Attributes:
        file: Its file.
        num_pages: Pages that were given up.
        removed: Whether the file is gone. It stays, empty, where somebody has it open: a file that
            was removed would live on as theirs, and the next opener would make another one.
    """

    file: Path
    num_pages: int
    removed: bool


def inspect(path: Path) -> list[SegmentStatus | LogStatus | Unreadable]:
    """What each segment at a path holds, and the files of pages by layout.

    Raises:
        BackendUnavailableError: There is no store, or it cannot be used.
    """
    with _unusable(path, "look at the store"):
        segments, logs = _stores_at(path)
        return [
            *(
                found if isinstance(found, Unreadable) else _status(*found)
                for found in _segments(path, segments)
            ),
            *_each(path, segments, _unfinished),
            *_each(path, logs, inspect_logs),
        ]


def verify(path: Path) -> list[Verdict | LogVerdict | Unreadable]:
    """Read every page at a path, and empty the slots of segments that are damaged.

    Raises:
        BackendUnavailableError: There is no store, or it cannot be used.

    Cost: all bytes of all pages, at the speed of a checksum or a disk.
    """
    with _unusable(path, "read the store"):
        segments, logs = _stores_at(path)
        return [
            *(
                found if isinstance(found, Unreadable) else _scrub(*found[:2])
                for found in _segments(path, segments)
            ),
            *_each(path, segments, _unfinished),
            *_each(path, logs, verify_logs),
        ]


def clear(path: Path) -> list[Cleared | ClearedLog | Unreadable]:
    """Give up all pages at a path. What is no file of ours is left alone.

    Raises:
        BackendUnavailableError: There is no store, or it cannot be used.
    """
    with _unusable(path, "clear the store"):
        segments, logs = _stores_at(path)
        return [
            *(
                found if isinstance(found, Unreadable) else _clear(*found[:2])
                for found in _segments(path, segments, locked=True)
            ),
            *_each(path, [at for at in segments if any(_unfinished(at))], _clear_unfinished),
            *_each(path, logs, clear_logs),
        ]


def _unusable(path: Path, action: str) -> AbstractContextManager[None]:
    """Say of an error of the operating system what could not be done at a path."""
    return map_exceptions({OSError: lambda error: unavailable(path, action, error)})


def _each(
    path: Path,
    directories: list[Path],
    look: Callable[[Path], Iterator[_Found | Unreadable]],
) -> Iterator[_Found | Unreadable]:
    """What is found in each of some directories.

    Args:
        path: What was asked for. Another directory that cannot be used, such as somebody else's, is
            told of and keeps nobody from the rest.
        directories: Where to look.
        look: Looks at one.

    Raises:
        BackendUnavailableError: The directory that was asked for cannot be used.
    """
    for directory in directories:
        try:
            yield from look(directory)
        except BackendUnavailableError as error:
            if directory == path:
                raise
            yield Unreadable(file=directory, why=str(error))


def _segments(
    path: Path, directories: list[Path], *, locked: bool = False
) -> Iterator[tuple[Path, Segment, Superblock] | Unreadable]:
    """Each segment of some directories, open until the next one is asked for.

    Args:
        path: As `_each` says.
        directories: Where segments are.
        locked: Keep others from opening and making segments meanwhile.
    """
    yield from _each(path, directories, lambda directory: _segments_in(directory, locked=locked))


def _segments_in(
    directory: Path, *, locked: bool
) -> Iterator[tuple[Path, Segment, Superblock] | Unreadable]:
    """Each segment of one directory, open until the next one is asked for."""
    descriptor = open_directory(directory)
    try:
        with (
            creation_lock(descriptor, directory, _TIMEOUT_S) if locked else contextlib.nullcontext()
        ):
            for file in sorted(directory.glob(f"*{SUFFIX}")):
                yield from _opened(descriptor, file)
    finally:
        os.close(descriptor)


def _unfinished(directory: Path) -> Iterator[Unreadable]:
    """Each segment of a directory whose maker died before it was whole."""
    files = sorted(directory.glob(f"*{UNFINISHED_SUFFIX}"))
    if not files:
        return
    descriptor = open_directory(directory)
    try:
        with creation_lock(descriptor, directory, timeout_s=0.0):
            files = [file for file in files if file.exists()]
    except BackendUnavailableError:
        # Somebody makes it now.
        return
    finally:
        os.close(descriptor)
    for file in files:
        why = (
            f"{file}: expected a whole segment, got one whose maker died; the next opener removes "
            f"it, or clear"
        )
        yield Unreadable(file=file, why=why)


def _clear_unfinished(directory: Path) -> Iterator[Cleared]:
    """Remove what makers that died left in a directory."""
    descriptor = open_directory(directory)
    try:
        with creation_lock(descriptor, directory, _TIMEOUT_S):
            removed = remove_unfinished(descriptor, names_in(descriptor))
    finally:
        os.close(descriptor)
    for name in removed:
        yield Cleared(file=directory / name, num_pages=0, removed=True)


def _stores_at(path: Path) -> tuple[list[Path], list[Path]]:
    """The directories at a path, itself or directly below, that hold segments, and files of pages.

    Raises:
        BackendUnavailableError: There is none.
    """
    below = sorted(path.iterdir()) if path.is_dir() else []
    directories = [directory for directory in (path, *below) if directory.is_dir()]
    segments, logs = (
        [
            directory
            for directory in directories
            if any(any(directory.glob(f"*{suffix}")) for suffix in suffixes)
        ]
        for suffixes in ((SUFFIX, UNFINISHED_SUFFIX), (LOG_SUFFIX,))
    )
    if not segments and not logs:
        raise BackendUnavailableError(
            f"store: expected {path} to be a directory with segments (*{SUFFIX}) or files of pages "
            f"(*{LOG_SUFFIX}), or with directories of them, got none; give the location of a file "
            f"store or of a persistent tier"
        )
    return segments, logs


def _opened(descriptor: int, file: Path) -> Iterator[tuple[Path, Segment, Superblock] | Unreadable]:
    """One segment, open until the next one is asked for."""
    try:
        segment, superblock = map_segment(descriptor, file)
    except (BackendUnavailableError, IdentityError, IntegrityError) as error:
        yield Unreadable(file=file, why=str(error))
        return
    except FileNotFoundError:
        # Another one who clears was faster.
        return
    except OSError as error:
        # A link, a directory, no right to read it, or no memory to map it: it keeps nobody from the rest.
        why = f"{file}: expected to open a segment, got {error.strerror} (errno {error.errno})"
        yield Unreadable(file=file, why=why)
        return
    try:
        yield file, segment, superblock
    finally:
        segment.locks.close()


def _status(file: Path, segment: Segment, superblock: Superblock) -> SegmentStatus:
    words, tags = segment.lines.ravel(), segment.tag_lines.ravel()
    states = Counter((words & np.uint64(STATE_MASK)).tolist())
    found = (tags != NO_TAG) & ((words & np.uint64(STATE_MASK)) == np.uint64(SlotState.READY))
    now = int(time.monotonic())
    of_this_boot = superblock.boot_id == boot_id()
    stamps = seconds_of(segment.ages[found])
    return SegmentStatus(
        file=file,
        layout=segment.layout,
        checksums=segment.checksums,
        total_bytes=segment.geometry.total_bytes,
        num_slots=segment.geometry.num_slots,
        num_pages=int(found.sum()),
        num_leased=int((segment.leases[found] > now).sum()) if of_this_boot else 0,
        num_unfinished=states[SlotState.WRITING],
        num_openers=_openers(segment),
        idle_s=now - int(stamps.max()) if of_this_boot and len(stamps) else None,
        counters=sum_of(segment.counter_rows()),
    )


def _openers(segment: Segment) -> int:
    """How many rows of counters have an owner. Each is locked for a moment to see."""
    owned = 0
    with segment.locks.lend() as lock:
        for byte in range(segment.in_use_byte + 1, segment.in_use_byte + 1 + COUNTER_ROWS):
            if lock.try_lock(byte):
                lock.unlock(byte)
            else:
                owned += 1
    return owned


def _scrub(file: Path, segment: Segment) -> Verdict:
    damages: list[Damage] = []
    num_pages = 0
    with segment.locks.lend() as lock:
        for slot in range(segment.geometry.num_slots):
            word = segment.word(slot)
            if word & STATE_MASK != SlotState.READY or segment.tag(slot) == NO_TAG:
                continue
            num_pages += 1
            what = _damage(segment, lock, slot, word)
            if what is not None:
                damages.append(Damage(slot=slot, what=what))
    return Verdict(
        file=file, num_pages=num_pages, damages=tuple(damages), checksums=segment.checksums
    )


def _damage(segment: Segment, lock: LockDescriptor, slot: int, word: int) -> str | None:
    """What of a published page is damaged, if anything is; then it is emptied."""
    if segment.empty_if_header_damaged(lock, slot, word):
        return "header"
    place = Place.of(segment.key_of(slot), segment.num_buckets)
    if segment.tag(slot) != place.tag or slot // segment.ways not in place.buckets:
        # It cannot be found where it is. Unless it was written anew since: then all is well.
        return "index" if segment.empty(lock, slot, word) else None
    if segment.checksums:
        for layer_range in range(segment.geometry.num_ranges):
            data = segment.range_of(slot, layer_range)
            right = segment.matches(slot, place.seed, generation_of(word), layer_range, data)
            if not right and segment.empty_if_range_damaged(
                lock, slot, word, place.seed, layer_range
            ):
                return f"layer range {layer_range}"
    return None


def _clear(file: Path, segment: Segment) -> Cleared:
    pages = (segment.tag_lines != NO_TAG).sum()
    with segment.locks.lend() as lock:
        # With the directory's lock nobody opens it meanwhile.
        unused = lock.try_lock(segment.in_use_byte)
        if unused:
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
        else:
            for slot in range(segment.geometry.num_slots):
                word = segment.word(slot)
                if word & STATE_MASK != SlotState.EMPTY:
                    segment.empty(lock, slot, word)
        if unused:
            lock.unlock(segment.in_use_byte)
    return Cleared(file=file, num_pages=int(pages), removed=unused)
