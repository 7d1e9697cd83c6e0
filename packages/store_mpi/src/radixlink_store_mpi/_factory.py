"""`MpiStoreFactory`: one window of shared memory for each layout and node, a segment in each.

Who opens together. The ranks of a communicator that call `open` share the pages of a layout, and a
layout names the shard. So the communicator holds ranks of the *same shard*: with tensor parallelism
that is one rank of each replica, for example `world.Split(color=tp_rank, key=world.rank)`, and with
one replica alone it is a single rank. Replicas are started by one `mpirun` (with several programs
if need be): two `mpirun` cannot share a window. Ranks on different nodes may be in one
communicator; each node has a window of its own.

Rules of the file:

1. `open` is collective: all ranks of the communicator, in the same order. Nothing else is. Reading,
   writing and closing use no MPI at all, so they go on when other ranks died;
2. a failure of one rank in `open` is every rank's;
3. a window lives until MPI ends. `MPI_Win_free` is collective, and a replica that goes, or dies,
   while others stay must not wait for them. Opening a layout again finds its window, and its pages;
4. the locks are a file that loses its name as soon as all have opened it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np

from radixlink_contracts import StoreConfig
from radixlink_contracts.errors import (
    BackendUnavailableError,
    CapacityError,
    IdentityError,
    StaleHandleError,
)
from radixlink_store import (
    Geometry,
    Segment,
    SegmentPageStore,
    SlotLocks,
    Superblock,
    boot_id,
    differences,
    map_exceptions,
)
from radixlink_store_mpi._collective import all_or_none, only_on, wait
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
class _Window:
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


class MpiStoreFactory:
    """Opens stores in memory that the ranks of a node share.

    Thread: one at a time; the stores it opens are for any.
    """

    def __init__(
        self,
        config: StoreConfig | None = None,
        comm: MPI.Intracomm | None = None,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Opens nothing yet, and uses no MPI.

        Args:
            config: `location` must be empty: the place is the communicator. The capacity is that
                of each node's first rank.
            comm: The ranks that share pages, see the module; the default is all there are. A
                duplicate of it is used.
            free_bytes: How many bytes of shared memory are free; the default asks the system.
        """
        self._config: Final = config or StoreConfig()
        if self._config.location:
            raise BackendUnavailableError(
                f"MPI store: expected an empty location, got {self._config.location!r}; its pages "
                f"are in memory and end with the job: use the file store to keep them in a place"
            )
        if self._config.persistent_path or self._config.persistent_bytes:
            raise BackendUnavailableError(
                f"MPI store: expected no persistent tier, got {self._config.persistent_path!r} of "
                f"{self._config.persistent_bytes} bytes; make the factory by mpi_stores"
            )
        self._given: Final = comm
        self._free_bytes: Final = free_bytes or _free_shared_memory
        #: Of our own, for opening: all ranks, and those of this node. None before the first.
        self._comms: tuple[MPI.Intracomm, MPI.Intracomm] | None = None
        #: A collective did not end or failed; its communicator may not be used again.
        self._broken = False
        self._closed = False
        #: By the layout's fingerprint; the same on all ranks.
        self._windows: dict[bytes, _Window] = {}
        self._stores: list[SegmentPageStore] = []

    def open(self, layout: PoolLayout) -> SegmentPageStore:
        """Open the store of one layout, making its window where it is not there yet.

        Raises:
            IdentityError: The ranks' layouts differ.
            CapacityError: Not one page fits, or the node's shared memory is too small.
            BackendUnavailableError: Not all ranks called within `timeout_s`, or one died; the
                factory cannot be used after that. Or no lock file can be made; it can.
            StaleHandleError: The factory was closed or cannot be used any more.

        Ranks: all of the communicator (collective, same order). Once all have called, every error
            is raised on all alike, unless a rank dies.
        Owns: the caller closes it; so does the factory's close.
        """
        if self._closed or self._broken:
            raise StaleHandleError(
                "MPI store: expected an open factory, got one that "
                + ("was closed" if self._closed else "lost a rank when it opened a store before")
            )
        with map_exceptions({MPI.Exception: self._lost}):
            comm, node = self._gather_ranks()
            # From here on everybody is there, and what fails on one rank fails on all.
            _agree_on(comm, layout)
            segment = all_or_none(comm, lambda: _segment_of(self._window(node, layout)))
        store = SegmentPageStore(segment, f"the MPI window of {layout.pool.value}")
        self._stores.append(store)
        return store

    def close(self) -> None:
        """Close every store it opened. Idempotent; waits for nobody.

        Ranks: local. The windows' memory is given back when MPI ends.
        """
        self._closed = True
        stores, self._stores = self._stores, []
        for store in stores:
            store.close()
        windows, self._windows = self._windows, {}
        for window in windows.values():
            os.close(window.locks)

    def _gather_ranks(self) -> tuple[MPI.Intracomm, MPI.Intracomm]:
        """Our communicators, once every rank has come to this call."""
        if self._comms is not None:
            self._wait(self._comms[0].Ibarrier())
            return self._comms
        given = MPI.COMM_WORLD if self._given is None else self._given
        comm, request = given.Idup()
        self._wait(request)
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        assert isinstance(comm, MPI.Intracomm)
        assert isinstance(node, MPI.Intracomm)
        for each in (comm, node):
            each.Set_errhandler(MPI.ERRORS_RETURN)
        self._comms = comm, node
        return self._comms

    def _wait(self, request: MPI.Request) -> None:
        """Wait for all ranks.

        Raises:
            BackendUnavailableError: Some did not come in time.
        """
        timeout_s = self._config.timeout_s
        if not wait(request, timeout_s):
            self._broken = True
            raise BackendUnavailableError(
                f"MPI store: expected all ranks to open a store within {timeout_s} s, got no answer "
                f"from some; every rank of the communicator must call open, in one order"
            )

    def _lost(self, error: MPI.Exception) -> BackendUnavailableError:
        """What an MPI error in a collective means: no other collective may follow."""
        self._broken = True
        return BackendUnavailableError(
            f"MPI store: expected all ranks to open it together, got MPI error "
            f"{error.Get_error_code()} ({error.Get_error_string()}); a rank may have died: start "
            f"the job again"
        )

    def _window(self, node: MPI.Intracomm, layout: PoolLayout) -> _Window:
        """The window of a layout on this node, made if it is not there yet.

        Ranks: all of the node; a failure on any is raised on all.
        """
        window = self._windows.get(layout.fingerprint)
        if window is None:
            window = self._make(node, layout)
            self._windows[layout.fingerprint] = window
        return window

    def _make(self, node: MPI.Intracomm, layout: PoolLayout) -> _Window:
        """Make the window of a layout on this node, with an empty segment in it.

        Ranks: all of the node; a failure on any is raised on all.
        """
        geometry = only_on(node, _LEADER, lambda: self._plan(node, layout))
        leads = node.rank == _LEADER
        size = geometry.total_bytes if leads else 0
        window = all_or_none(node, lambda: _allocate(node, size, geometry, self._free_bytes))
        shared, _ = window.Shared_query(_LEADER)
        # A buffer all right, but typed as one from Python 3.12 on.
        memory = memoryview(shared)[: geometry.total_bytes]  # type: ignore[arg-type]
        superblock = Superblock(layout=layout, geometry=geometry, boot_id=boot_id())
        locks = _open_lock_file(node)

        def fill() -> None:
            if leads:
                _fill(memory, superblock, locks, self._free_bytes)

        try:
            all_or_none(node, fill)
        except BaseException:
            os.close(locks)
            raise
        return _Window(window=window, superblock=superblock, memory=memory, locks=locks)

    def _plan(self, node: MPI.Intracomm, layout: PoolLayout) -> Geometry:
        """The geometry, by this node's first rank.

        Raises:
            CapacityError: Not one page fits, or all together do not fit into shared memory.
        """
        geometry = Geometry.within(self._config.capacity_bytes, layout.range_bytes)
        # Asked before MPI is: in Open MPI 5.0 only the first rank gets an error from MPI, and the
        # others wait for it for good. Where a node has but one rank, it takes ordinary memory.
        if node.size > 1:
            available, needed = self._free_bytes(), geometry.total_bytes + _OVERHEAD_BYTES
            if available < needed:
                raise _no_room(needed, available)
        return geometry


def _agree_on(comm: MPI.Intracomm, layout: PoolLayout) -> None:
    """Refuse to share memory with a rank that has other pages.

    Raises:
        IdentityError: Layouts differ.
    """
    layouts: list[PoolLayout] = comm.allgather(layout)
    others = [
        f"rank {rank}: {differences(layouts[_LEADER], other)}"
        for rank, other in enumerate(layouts)
        if other != layouts[_LEADER]
    ]
    if others:
        raise IdentityError(
            f"MPI store: expected the layout of rank {_LEADER} ('there') on all {comm.size} ranks, "
            f"got another ('here') on {'; '.join(others)}; give ranks of different shards "
            f"communicators of their own"
        )


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
        return all_or_none(node, open_)
    finally:
        if node.rank == _LEADER:
            Path(path).unlink(missing_ok=True)


def _fill(
    memory: memoryview, superblock: Superblock, locks: int, free_bytes: Callable[[], int]
) -> None:
    """Make a segment of the window's memory.

    Raises:
        CapacityError: Shared memory is full.
    """
    needed = superblock.geometry.total_bytes
    with map_exceptions({OSError: lambda _: _no_room(needed, free_bytes())}):
        populate(np.frombuffer(memory, np.uint8))
    own = SlotLocks(os.dup(locks))
    Segment.format(memory, superblock, own)
    own.close()


def _segment_of(window: _Window) -> Segment:
    """Another look at a window, with locks of its own."""
    with map_exceptions({OSError: _no_lock_file}):
        locks = os.dup(window.locks)
    return Segment(window.memory, window.superblock, SlotLocks(locks))


def _free_shared_memory() -> int:
    """Bytes that are free where MPI libraries keep windows."""
    with map_exceptions({OSError: _no_shared_memory}):
        status = os.statvfs(_SHARED_MEMORY)
    return status.f_bavail * status.f_frsize


def _no_room(needed: int, available: int) -> CapacityError:
    return CapacityError(
        f"MPI store: expected {needed} bytes of shared memory for a window, got {available} free in "
        f"{_SHARED_MEMORY}; lower capacity_bytes or give the node or container more",
        needed=needed,
        available=available,
    )


def _no_lock_file(error: OSError) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"MPI store: expected to make and open a file for locks in {tempfile.gettempdir()}, got "
        f"{error.strerror} (errno {error.errno}); point TMPDIR at a directory that all ranks of "
        f"the node can write"
    )


def _no_shared_memory(error: OSError) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"MPI store: expected shared memory at {_SHARED_MEMORY}, got {error.strerror} (errno "
        f"{error.errno}); use the file store"
    )
