"""The directories of a run: where they are, that nothing of them stays, and what a killed run left.

A run has one directory in the temp dir, and one in shared memory if it needs one. Both bear the run's process id:
whoever is killed by SIGKILL removes nothing, so each run removes first what runs left that are dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from radixlink.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable

_PREFIX: Final = "radixlink-demo-"
_NAME: Final = re.compile(rf"{_PREFIX}(\d+)-\w+")
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 -- new directories of our own are made in it
#: A store in shared memory takes at most half of what is free there.
_SHARE_OF_MEMORY: Final = 2


class Places:
    """The directories of this run. A context manager: leaving it removes them."""

    def __init__(self, shared_memory: Path = _SHARED_MEMORY) -> None:
        """Remove what dead runs left, and make the directory in the temp dir.

        Args:
            shared_memory: Where a directory is made if one is needed and it can be.

        Raises:
            OSError: The temp dir cannot be written.
        """
        self._shared_memory: Final = shared_memory
        self._in_memory: Path | None = None
        #: Descriptors of the directories, each locked: a sign of life that other containers see too.
        self._locks: list[int] = []
        temp = Path(tempfile.gettempdir())
        remove_leftovers((temp, shared_memory))
        #: For sockets, logs, and all that has no other place.
        self.directory: Final = self._make(temp)

    def __enter__(self) -> Self:
        """Nothing to begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove everything."""
        self.remove()

    def remove(self) -> None:
        """Remove everything. Idempotent."""
        for directory in (self.directory, self._in_memory):
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
        locks, self._locks = self._locks, []
        for descriptor in locks:
            os.close(descriptor)

    def new_backing(self) -> Path:
        """A new directory for what the ranks of an MPI job share: in memory where that can be written."""
        parent = self._memory() or self.directory
        return Path(tempfile.mkdtemp(prefix="mpi-", dir=parent))

    def new_store(self, num_bytes: int) -> Path:
        """A new directory for a store of this size: in memory where that is large enough, else on disk."""
        try:
            fits = shutil.disk_usage(self._shared_memory).free > _SHARE_OF_MEMORY * num_bytes
        except OSError:
            fits = False
        parent = (self._memory() if fits else None) or self.directory
        return Path(tempfile.mkdtemp(prefix="store-", dir=parent))

    def _memory(self) -> Path | None:
        """The directory in shared memory, made when it is first needed; None where there can be none."""
        if self._in_memory is None:
            with contextlib.suppress(OSError):
                self._in_memory = self._make(self._shared_memory)
        return self._in_memory

    def _make(self, parent: Path) -> Path:
        """A new directory of this process, locked where the file system has locks."""
        made = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
        descriptor = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        self._locks.append(descriptor)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return made


def remove_leftovers(parents: Iterable[Path]) -> None:
    """No directory of a dead run of this user is left in these."""
    for parent in parents:
        for path in parent.glob(f"{_PREFIX}*"):
            if _is_leftover(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_leftover(path: Path) -> bool:
    """True for a directory of this user, made by a process that is gone, and locked by nobody.

    The process may live in another container, where its id means another or none: it still holds the lock.
    """
    named = _NAME.fullmatch(path.name)
    if named is None or Path(f"/proc/{named[1]}").exists():
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def require_store_directory(path: Path) -> None:
    """A store can be made in this directory; it is as it was before, or as absent.

    Raises:
        StoreError: It is no directory, cannot be made, or cannot be written.
    """
    try:
        made = not path.exists()
        if made:
            path.mkdir(mode=0o700)
        try:
            tempfile.TemporaryFile(dir=path).close()
        finally:
            if made:
                path.rmdir()
    except OSError as error:
        raise StoreError(
            f"--store-dir {path}: expected a directory that can be written, or whose parent can, "
            f"got: {error}"
        ) from error
