"""Where a file store is: which directory, and that it is ours alone."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from radixlink_contracts.errors import BackendUnavailableError
from radixlink_store._errors import map_exceptions
from radixlink_store._room import lines_of, room_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_store._room import Room

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108
"""Where Linux keeps shared memory that has names."""

_MOUNTS: Final = Path("/proc/self/mounts")
MODE: Final = 0o600
"""Files of a store are for their owner alone."""

SAFELY: Final = os.O_NOFOLLOW | os.O_CLOEXEC
"""How every file of a store is opened."""

_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def default_directory(
    user: int,
    needed_bytes: int,
    *,
    temp: Path,
    shared_memory: Path = SHARED_MEMORY,
    mounts: Path = _MOUNTS,
    room: Callable[[Path], Room] = room_at,
) -> Path:
    """The directory of a user who named none.

    In shared memory if it has room, else in the directory for temporary files. Once the one in
    shared memory exists it stays the answer, whatever room is left: the next process, for which
    there is less room because of the first, must find the same pages.

    Args:
        user: The user's number.
        needed_bytes: Bytes that the first segment takes.
        temp: The directory for temporary files.
        shared_memory: The directory of shared memory.
        mounts: The kernel's table of file systems.
        room: What may be taken at a path; the default asks the system.
    """
    name = f"radixlink-{user}"
    in_memory = shared_memory / name
    if in_memory.is_dir():
        return in_memory
    if _is_tmpfs(shared_memory, mounts) and room(shared_memory).num_bytes >= needed_bytes:
        return in_memory
    return temp / name


def _is_tmpfs(path: Path, mounts: Path) -> bool:
    """True when a file system in memory is mounted at just this path and can be written."""
    if not (mounts.exists() and os.access(path, os.W_OK)):
        return False
    kinds = [
        fields[2]
        for fields in (line.split(" ") for line in lines_of(mounts))
        if fields[1] == str(path)
    ]
    return kinds[-1:] == ["tmpfs"]


def open_directory(path: Path) -> int:
    """Open a directory of our own, made if it is not there; its parent must be.

    Returns:
        A descriptor.

    Raises:
        BackendUnavailableError: It cannot be made or opened, or is not ours alone: a symbolic link,
            another user's, or one that others may write.

    Owns: the caller closes the descriptor.
    """
    with map_exceptions({OSError: lambda error: _unavailable(path, error)}):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if path.is_symlink():
            raise BackendUnavailableError(
                f"file store: expected {path} to be a directory, got a symbolic link to "
                f"{path.readlink()}; give the directory itself as location"
            )
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    problem = None
    if status.st_uid != os.geteuid():
        problem = f"one of user {status.st_uid}"
    elif status.st_mode & _OTHERS_MAY_WRITE:
        problem = f"one that others may write (mode {stat.S_IMODE(status.st_mode):o})"
    if problem:
        os.close(descriptor)
        raise BackendUnavailableError(
            f"file store: expected {path} to be a directory of user {os.geteuid()} that only they "
            f"may write, got {problem}; choose another location, or change owner and mode (700)"
        )
    return descriptor


def open_file(directory: int, file: Path, access: int) -> int:
    """Open a file of a store, and nothing else that may be under its name.

    Raises:
        BackendUnavailableError: It is no plain file, or another user's.
        OSError: It cannot be opened.

    Owns: the caller closes the descriptor.
    """
    descriptor = os.open(file.name, access | os.O_NONBLOCK | SAFELY, dir_fd=directory)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise BackendUnavailableError(
            f"{file}: expected a plain file of user {os.geteuid()}, got mode {status.st_mode:o} of "
            f"user {status.st_uid}; remove it or choose another location"
        )
    return descriptor


def let_go(descriptor: int) -> None:
    """Close a descriptor by which nothing was written: it is closed, whatever the file system says."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def names_in(directory: int) -> list[str]:
    """The names in a directory.

    Listing moves the place of a description, and whoever lists by the same one meanwhile misses
    names: so it is opened anew.

    Raises:
        OSError: It cannot be listed.

    Thread: any, several at once.
    """
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return os.listdir(descriptor)  # noqa: PTH208 - a descriptor, not a path
    finally:
        let_go(descriptor)


def _unavailable(path: Path, error: OSError) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"file store: expected to make or open the directory {path}, got {error.strerror} "
        f"(errno {error.errno}); give a directory that can be written, whose parent exists, as "
        f"location"
    )
