"""Which files of a log go when its directory is full: the least recently used ones, whole.

A file is used when a record is added to it, and when a page is read from it: then its time of
modification is set to now, at most once a minute. So what is hot in a directory survives jobs and
nodes, at the cost of one number a file. Files of all layouts and versions count, and all may go,
also one that somebody writes: its writer sees that it lost its name, and begins another.

Two who make room at once choose alike, and a file that is gone is room made, whoever removed it.
What others add meanwhile is not foreseen: a directory may be larger than its capacity by one file
for each other writer.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

import attrs

from radixlink_store._directory import names_in
from radixlink_store._log_file import LOG_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterable


@attrs.frozen(kw_only=True)
class FileSize:
    """What counts of a file.

    Attributes:
        used_ns: When it was last used, by the file system's clock. Nanoseconds.
        name: Its name; of two used at one time the lower goes first.
        num_bytes: Its length.
    """

    used_ns: int
    name: str
    num_bytes: int


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
                    sizes.append(
                        FileSize(used_ns=status.st_mtime_ns, name=name, num_bytes=status.st_size)
                    )
    return sorted(sizes, key=lambda size: (size.used_ns, size.name))


def to_evict(sizes: Iterable[FileSize], capacity_bytes: int, needed_bytes: int) -> list[FileSize]:
    """What has to go so that so many bytes fit beside the rest.

    Args:
        sizes: Least recently used first.
        capacity_bytes: What all may take together.
        needed_bytes: What is about to be added.
    """
    sizes = list(sizes)
    total = sum(size.num_bytes for size in sizes)
    going = []
    for size in sizes:
        if total + needed_bytes <= capacity_bytes:
            break
        going.append(size)
        total -= size.num_bytes
    return going
