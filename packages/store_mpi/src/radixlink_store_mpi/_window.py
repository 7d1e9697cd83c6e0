"""A window of shared memory with a segment in it, for one layout on one node.

A window lives until MPI ends: `MPI_Win_free` is collective, and a replica that goes, or dies, while
others stay must not wait for them. Only one that could not be made is freed, by all who tried it.
The locks are a file that loses its name as soon as all have opened it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import attrs
import numpy as np

from radixlink_contracts.errors import BackendUnavailableError, CapacityError, LinkError
from radixlink_store.segments import (
    Geometry,
    Segment,
    SegmentPageStore,
    SlotLocks,
    Superblock,
    boot_id,
    map_exceptions,
)
from radixlink_store_mpi._collective import all_or_none, only_on
from radixlink_store_mpi._mpi import MPI
from radixlink_store_mpi._populate import populate

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import PoolLayout

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - where MPI libraries keep windows
_LEADER: Final = 0

_OVERHEAD_BYTES: Final = 1 << 20
"""What an MPI library keeps in shared memory beside a window, rounded up."""


@attrs.frozen(kw_only=True, eq=False)
class Window:
    """The shared memory of one layout on this node.

    Attributes:
        window: MPI's handle; never freed, see the module.
        superblock: What is in it.
        memory: Its bytes.
        locks: A descriptor of the lock file.
    """

    window: MPI.Win
    superblock: Superblock
    memory: memoryview
    locks: int

    @classmethod
    def make(
        cls,
        node: MPI.Intracomm,
        layout: PoolLayout,
        capacity_bytes: int,
        free_bytes: Callable[[], int],
    ) -> Self:
        """Make the window of a layout on a node, with an empty segment in it.

        Args:
            node: Its ranks.
            layout: What the pages are.
            capacity_bytes: Room for pages; that of the node's first rank counts.
            free_bytes: How many bytes of shared memory are free.

        Raises:
            CapacityError: Not one page fits, or the node's shared memory is too small.
            BackendUnavailableError: No lock file can be made, or the boot id not be read.

        Ranks: all of the node (collective); a failure on any is raised on all.
        """
        superblock = only_on(
            node, _LEADER, lambda: _plan(node.size, layout, capacity_bytes, free_bytes)
        )
        geometry = superblock.geometry
        size = geometry.total_bytes if node.rank == _LEADER else 0
        window = all_or_none(node, lambda: _allocate(node, size, geometry, free_bytes))
        try:
            return cls._filled(node, window, superblock, free_bytes)
        except LinkError:
            # All ranks come to this or none: its memory may be all that there is.
            window.Free()
            raise

    @classmethod
    def _filled(
        cls,
        node: MPI.Intracomm,
        window: MPI.Win,
        superblock: Superblock,
        free_bytes: Callable[[], int],
    ) -> Self:
        """Put an empty segment into a window, and make its lock file.

        Ranks: all of the node (collective); a failure on any is raised on all.
        """
        # Whatever may fail is a step that all agree on: one rank that went on alone, to free the
        # window, would wait for the others and they for it.
        locks = _open_lock_file(node)

        def fill() -> memoryview:
            memory = _memory_of(window, superblock.geometry)
            if node.rank == _LEADER:
                _fill(memory, superblock, locks, free_bytes)
            return memory

        try:
            memory = all_or_none(node, fill)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(locks)
            raise
        return cls(window=window, superblock=superblock, memory=memory, locks=locks)

    def open(self) -> SegmentPageStore:
        """Another store on the window, with locks of its own.

        Raises:
            BackendUnavailableError: There are no more descriptors.
        """
        where = f"the MPI window of {self.superblock.layout.pool.value}"
        with map_exceptions({OSError: _no_descriptor}):
            locks = SlotLocks(os.dup(self.locks))
            try:
                return SegmentPageStore(Segment(self.memory, self.superblock, locks), where)
            except BaseException:
                locks.close()
                raise

    def close(self) -> None:
        """Close the lock file; the memory is given back when MPI ends."""
        os.close(self.locks)


def free_shared_memory() -> int:
    """Bytes that are free where MPI libraries keep windows.

    Raises:
        BackendUnavailableError: There is no such place.
    """
    with map_exceptions({OSError: _no_shared_memory}):
        status = os.statvfs(_SHARED_MEMORY)
    return status.f_bavail * status.f_frsize


def _plan(
    node_size: int, layout: PoolLayout, capacity_bytes: int, free_bytes: Callable[[], int]
) -> Superblock:
    """What is to be in the window, by a node's first rank.

    Raises:
        CapacityError: Not one page fits, or all together do not fit into shared memory.
        BackendUnavailableError: The node does not say which boot this is.
    """
    geometry = Geometry.within(capacity_bytes, layout.range_bytes)
    # Asked before MPI is: in Open MPI 5.0 only the first rank gets an error from MPI, and the
    # others wait for it for good. Where a node has but one rank, it takes ordinary memory.
    if node_size > 1:
        available, needed = free_bytes(), geometry.total_bytes + _OVERHEAD_BYTES
        if available < needed:
            raise _no_room(needed, available)
    return Superblock(layout=layout, geometry=geometry, boot_id=boot_id())


def _allocate(
    node: MPI.Intracomm, size: int, geometry: Geometry, free_bytes: Callable[[], int]
) -> MPI.Win:
    """Allocate a window; on all ranks but the leader, nothing of it is theirs.

    Raises:
        CapacityError: MPI has not so much memory.
    """
    with map_exceptions({MPI.Exception: lambda _: _no_room(geometry.total_bytes, free_bytes())}):
        window = MPI.Win.Allocate_shared(size, 1, MPI.INFO_NULL, node)
    window.Set_errhandler(MPI.ERRORS_RETURN)
    return window


def _memory_of(window: MPI.Win, geometry: Geometry) -> memoryview:
    """The bytes of a window. Shape: (geometry.total_bytes,).

    Raises:
        BackendUnavailableError: MPI does not say where they are.
    """
    with map_exceptions({MPI.Exception: _no_memory}):
        shared, _ = window.Shared_query(_LEADER)
    # A buffer all right, but typed as one from Python 3.12 on.
    return memoryview(shared)[: geometry.total_bytes]  # type: ignore[arg-type]


def _open_lock_file(node: MPI.Intracomm) -> int:
    """A descriptor of one new file on every rank of the node; its name is gone when all have one.

    Raises:
        BackendUnavailableError: It cannot be made, or opened.
    """

    def make() -> str:
        with map_exceptions({OSError: _no_lock_file}):
            descriptor, path = tempfile.mkstemp(prefix="radixlink-", suffix=".locks")
            os.close(descriptor)
            return path

    def open_() -> int:
        with map_exceptions({OSError: _no_lock_file}):
            return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    path = only_on(node, _LEADER, make)
    try:
        return all_or_none(node, open_, os.close)
    finally:
        if node.rank == _LEADER:
            # A name that stays is of an empty file, and no reason to fail, least of all alone.
            with contextlib.suppress(OSError):
                Path(path).unlink()


def _fill(
    memory: memoryview, superblock: Superblock, locks: int, free_bytes: Callable[[], int]
) -> None:
    """Make a segment of the window's memory.

    Raises:
        CapacityError: Shared memory is full.
        BackendUnavailableError: There are no more descriptors.
    """
    needed = superblock.geometry.total_bytes
    with map_exceptions({OSError: lambda _: _no_room(needed, free_bytes())}):
        populate(np.frombuffer(memory, np.uint8))
    with map_exceptions({OSError: _no_descriptor}):
        own = SlotLocks(os.dup(locks))
    try:
        Segment.format(memory, superblock, own)
    finally:
        own.close()


def _no_room(needed: int, available: int) -> CapacityError:
    return CapacityError(
        f"MPI store: expected {needed} bytes of shared memory for a window, got {available} free in "
        f"{_SHARED_MEMORY}; lower capacity_bytes or give the node or container more",
        needed=needed,
        available=available,
    )


def _no_memory(error: MPI.Exception) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"MPI store: expected to be told where a window's memory is, got MPI error "
        f"{error.Get_error_code()} ({error.Get_error_string()}); use the file store"
    )


def _no_lock_file(error: OSError) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"MPI store: expected to make and open a file for locks in {tempfile.gettempdir()}, got "
        f"{error.strerror} (errno {error.errno}); point TMPDIR at a directory that all ranks of "
        f"the node can write"
    )


def _no_descriptor(error: OSError) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"MPI store: expected one more descriptor for the locks of a store, got {error.strerror} "
        f"(errno {error.errno}); raise the limit of open files"
    )


def _no_shared_memory(error: OSError) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"MPI store: expected shared memory at {_SHARED_MEMORY}, got {error.strerror} (errno "
        f"{error.errno}); use the file store"
    )
