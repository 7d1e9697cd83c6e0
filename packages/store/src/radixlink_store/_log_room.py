"""Room in the directory of a log: who may begin a file, and which files go for it.

A file is used when a record is added to it, and when a page is read from it: then its time of
modification is set to now, at most once a minute. So what is hot in a directory survives jobs and
nodes, at the cost of one number a file. The least recently used ones go, whole. Files of all layouts
and versions count, and all may go, also one that somebody writes: its writer sees that it lost its
name, and begins another.

Nobody waits for anybody to keep all of them together within the capacity, however many write:

1. a file's name says how long it may get, and it counts as that long while it has a writer: until it
   is sealed, or its writer died, with which its lock is gone;
2. a writer makes its file first, without a byte, and locks it; then it lists the directory and
   removes what has to go for all files to fit, its own among them; only then it writes. Where its own
   would have to go, it gives way: it removes that one, and begins another. So it does if it did not
   get the lock, since somebody looked at the file in that moment;
3. what a writer that died left without a byte it removes, too. Should another's file be taken for
   one, on a file system whose locks are not seen by all nodes, that one finds it gone and begins anew.

Take the files that bytes may be written to, and of these the one that was locked last: its writer
locked it before it looked, so it saw all the others, and found that they fit. What others make at the
same time has no bytes yet, and is seen by whoever made it. The newest one never gives way, so somebody
goes on.

Clocks go back, and those of nodes differ: to a writer, what nobody writes any more was never used
after its own file was made. Among themselves such files keep their order.

What it rests on is that a list shows every file that was made before it was asked for and is still
there: so it is on one node. Where a file system keeps old lists for a while (NFS does), what other
nodes began in that while may come on top.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from typing import TYPE_CHECKING

import attrs

from radixlink_store._directory import SAFELY, let_go, names_in
from radixlink_store._log_file import LOG_SUFFIX, reserved_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable


@attrs.frozen(kw_only=True)
class FileSize:
    """What counts of a file.

    Attributes:
        used_ns: When it was last used, by the file system's clock. Nanoseconds.
        name: Its name; of two used at one time the lower goes first.
        num_bytes: Its length; how long it may get, if it has a writer.
        final: Whether nobody writes it any more: it is sealed, or its writer died.
    """

    used_ns: int
    name: str
    num_bytes: int
    final: bool


def sizes_in(directory: int) -> list[FileSize]:
    """Every file of a log in a directory, least recently used first.

    Raises:
        OSError: It cannot be listed.

    Cost: a system call for each, and four more for each that is not sealed.
    """
    sizes = []
    for name in names_in(directory):
        if name.endswith(LOG_SUFFIX):
            # It may be gone already.
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    final = not status.st_mode & stat.S_IWUSR or _is_left(directory, name)
                    sizes.append(
                        FileSize(
                            used_ns=status.st_mtime_ns,
                            name=name,
                            num_bytes=max(status.st_size, 0 if final else reserved_bytes(name)),
                            final=final,
                        )
                    )
    return sorted(sizes, key=lambda size: (size.used_ns, size.name))


def _is_left(directory: int, name: str) -> bool:
    """Whether the writer of a file that is not sealed died. Not, where that cannot be told."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | SAFELY, dir_fd=directory)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        let_go(descriptor)


def as_seen_by(own: FileSize, sizes: Iterable[FileSize]) -> list[FileSize]:
    """Files, least recently used first, as whoever made one of them a moment ago has to see them."""

    def order(size: FileSize) -> tuple[int, bool, int, str]:
        used_ns = min(size.used_ns, own.used_ns) if size.final else size.used_ns
        return used_ns, not size.final, size.used_ns, size.name

    return sorted(sizes, key=order)


def to_evict(sizes: Iterable[FileSize], capacity_bytes: int) -> list[FileSize]:
    """What has to go so that the rest fits.

    Args:
        sizes: Least recently used first.
        capacity_bytes: What all may take together.
    """
    sizes = list(sizes)
    total = sum(size.num_bytes for size in sizes)
    going = []
    for size in sizes:
        if total <= capacity_bytes:
            break
        going.append(size)
        total -= size.num_bytes
    return going


def remove_empty(directory: int, sizes: Iterable[FileSize]) -> None:
    """Remove the files without a byte that writers left which died before they had written any.

    Raises:
        OSError: One cannot be removed.
    """
    for size in sizes:
        if size.final and not size.num_bytes:
            remove(directory, size.name, final=True)


def remove(directory: int, name: str, *, final: bool) -> bool:
    """Remove a file, and free its room, also if its writer has not seen that yet.

    Args:
        directory: Where it is.
        name: The file.
        final: Whether nobody writes it any more.

    Returns:
        Whether it was there; somebody else may have been faster.

    Raises:
        OSError: It cannot be removed.
    """
    descriptor = None
    if not final:
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_NONBLOCK | SAFELY
            descriptor = os.open(name, flags, dir_fd=directory)
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return False
    else:
        return True
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                # Somebody may have given it another name, to keep it.
                if not os.fstat(descriptor).st_nlink:
                    os.ftruncate(descriptor, 0)
            os.close(descriptor)
