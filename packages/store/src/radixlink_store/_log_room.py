"""Room in the directory of a log: who may begin a file, and which files go for it.

A file is used when a record is added to it, and when a page is read from it: then its time of
modification is set to now, at most once a minute. So what is hot in a directory survives jobs and
nodes, at the cost of one number a file. The least recently used ones go, whole. Files of all layouts
and versions count, and all may go, also one that somebody writes: its writer sees that it lost its
name, and begins another.

No lock keeps all of them together within the capacity, and none is needed, however many write:

1. a file's name says how long it may get, and it counts as that long until it is sealed;
2. a writer makes its file first, without a byte, then lists the directory and removes what has to go
   for all files to fit, its own among them; only then it writes. Where its own would have to go, it
   gives way: it removes that one, and begins another.

Take the files that bytes may be written to, and of these the one that was made last: its writer made
it before it looked, so it saw all the others, and found that they fit. What others make at the same
time has no bytes yet, and is seen by whoever made it. The newest one never gives way, so somebody
goes on.

What it rests on is that a list shows every file that was made before it was asked for and is still
there: so it is on one node. Where a file system keeps old lists for a while (NFS does), what other
nodes began in that while may come on top.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

import attrs

from radixlink_store._directory import SAFELY, names_in
from radixlink_store._log_file import LOG_SUFFIX, reserved_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable


@attrs.frozen(kw_only=True)
class FileSize:
    """What counts of a file.

    Attributes:
        used_ns: When it was last used, by the file system's clock. Nanoseconds.
        name: Its name; of two used at one time the lower goes first.
        num_bytes: Its length; how long it may get, if it is not sealed.
        sealed: Whether nobody writes it any more.
    """

    used_ns: int
    name: str
    num_bytes: int
    sealed: bool


def sizes_in(directory: int) -> list[FileSize]:
    """Every file of a log in a directory, least recently used first.

    Raises:
        OSError: It cannot be listed.
    """
    sizes = []
    for name in names_in(directory):
        if name.endswith(LOG_SUFFIX):
            # It may be gone already.
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    sealed = not status.st_mode & stat.S_IWUSR
                    sizes.append(
                        FileSize(
                            used_ns=status.st_mtime_ns,
                            name=name,
                            num_bytes=max(status.st_size, 0 if sealed else reserved_bytes(name)),
                            sealed=sealed,
                        )
                    )
    return sorted(sizes, key=lambda size: (size.used_ns, size.name))


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


def remove(directory: int, size: FileSize) -> bool:
    """Remove a file, and free its room, also if its writer has not seen that yet.

    Returns:
        Whether it was there; somebody else may have been faster.

    Raises:
        OSError: It cannot be removed.
    """
    descriptor = None
    if not size.sealed:
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_NONBLOCK | SAFELY
            descriptor = os.open(size.name, flags, dir_fd=directory)
    try:
        os.unlink(size.name, dir_fd=directory)
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
