"""`MpiStoreFactory`: one window of shared memory for each layout and node, and an exchange between nodes.

Who opens together. The ranks of a communicator that call `open` share the pages of a layout, and a
layout names the shard. So the communicator holds ranks of the *same shard*: with tensor parallelism
that is one rank of each replica, for example `world.Split(color=tp_rank, key=world.rank)`, and with
one replica alone it is a single rank. Replicas are started by one `mpirun` (with several programs
if need be): two `mpirun` cannot share a window. Ranks on different nodes may be in one
communicator; each node has a window of its own, and what misses there is asked of the others.

Rules of the file:

1. `open` is collective: all ranks of the communicator, in the same order. So is `close` where there
   is more than one node. On one node nothing else uses MPI: reading, writing and closing go on when
   other ranks died;
2. a failure of one rank in `open` is every rank's;
3. opening a layout again finds its window, and its pages, until MPI ends;
4. a node answers others until its factory is closed, whichever of its stores are;
5. a forked child uses no MPI: it reads its node's window, asks no other node, opens nothing, and closes
   what it has without a word to the others.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from radixlink_contracts import StoreConfig
from radixlink_contracts.errors import BackendUnavailableError, IdentityError, StaleHandleError
from radixlink_store.segments import SegmentPageStore, differences, map_exceptions
from radixlink_store_mpi._collective import all_or_none, wait
from radixlink_store_mpi._exchange import NodeExchange
from radixlink_store_mpi._mpi import MPI, is_in_child
from radixlink_store_mpi._ranks import Ranks
from radixlink_store_mpi._settings import NodeSettings
from radixlink_store_mpi._window import Window, free_shared_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import PoolLayout
    from radixlink_store_mpi._nodes_store import NodesPageStore

_FIRST: Final = 0


class MpiStoreFactory:
    """Opens stores in memory that the ranks of a node share.

    Thread: one at a time; the stores it opens are for any.
    """

    def __init__(
        self,
        config: StoreConfig | None = None,
        comm: MPI.Intracomm | None = None,
        nodes: NodeSettings | None = None,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Opens nothing yet, and uses no MPI.

        Args:
            config: `location` must be empty: the place is the communicator. The capacity is that
                of each node's first rank.
            comm: The ranks that share pages, see the module; the default is all there are. A
                duplicate of it is used.
            nodes: How nodes ask each other; the default is what the environment says, see
                `NodeSettings`. The same on all ranks.
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
        self._nodes: Final = nodes or NodeSettings.from_environment()
        self._free_bytes: Final = free_bytes or free_shared_memory
        #: By node, with communicators of our own for opening. None before the first.
        self._ranks: Ranks | None = None
        #: None on a single node.
        self._exchange: NodeExchange | None = None
        #: A collective did not end or failed; its communicator may not be used again.
        self._broken = False
        self._closed = False
        #: By the layout's fingerprint; the same on all ranks.
        self._windows: dict[bytes, Window] = {}
        self._stores: list[SegmentPageStore | NodesPageStore] = []

    def open(self, layout: PoolLayout) -> SegmentPageStore | NodesPageStore:
        """Open the store of one layout, making its window where it is not there yet.

        Returns:
            On a single node its segment's store, else one that asks other nodes too.

        Raises:
            IdentityError: The ranks' layouts differ.
            CapacityError: Not one page fits, or the node's shared memory is too small.
            BackendUnavailableError: Not all ranks called within `timeout_s`, or one died; the
                factory cannot be used after that. Or no lock file can be made, or there are several
                nodes and MPI or the system allows no threads; it can.
            StaleHandleError: The factory was closed or cannot be used any more, or this is a forked
                child.

        Ranks: all of the communicator (collective, same order). Once all have called, every error
            is raised on all alike, unless a rank dies.
        Owns: the caller closes it; so does the factory's close.
        """
        if is_in_child():
            raise StaleHandleError(
                f"MPI store: expected to open it in the process that initialised MPI, got its "
                f"forked child {os.getpid()}; open it before the fork, or share pages by a file store"
            )
        if self._closed or self._broken:
            raise StaleHandleError(
                "MPI store: expected an open factory, got one that "
                + ("was closed" if self._closed else "lost a rank when it opened a store before")
            )
        with map_exceptions({MPI.Exception: self._lost}):
            ranks = self._gather_ranks()
            # From here on everybody is there, and what fails on one rank fails on all.
            _agree_on(ranks.comm, layout)
            if ranks.others and self._exchange is None:
                self._exchange = NodeExchange.create(ranks, self._nodes)
            store = all_or_none(
                ranks.comm, lambda: self._store(ranks, layout), lambda store: store.close()
            )
        self._stores.append(store)
        return store

    def close(self) -> None:
        """Close every store it opened, and stop answering other nodes. Idempotent.

        On a single node it waits for nobody. With more, each node answers until all ranks have come
        here, so that none asks one that is gone; a rank that does not come is waited for until
        `timeout_s`.

        Ranks: local on a single node and in a forked child, else all of the communicator
            (collective). The windows' memory is given back when MPI ends.
        """
        self._closed = True
        stores, self._stores = self._stores, []
        for store in stores:
            store.close()
        exchange, self._exchange = self._exchange, None
        if exchange is not None and not is_in_child():
            exchange.close(self._config.timeout_s)
        windows, self._windows = self._windows, {}
        for window in windows.values():
            window.close()

    def _gather_ranks(self) -> Ranks:
        """The ranks, once every one of them has come to this call."""
        if self._ranks is not None:
            self._wait(self._ranks.comm.Ibarrier())
            return self._ranks
        given = MPI.COMM_WORLD if self._given is None else self._given
        comm, request = given.Idup()
        self._wait(request)
        self._ranks = Ranks.of(comm, self._nodes.fake_nodes)
        return self._ranks

    def _store(self, ranks: Ranks, layout: PoolLayout) -> SegmentPageStore | NodesPageStore:
        """A store on the window of a layout, made if it is not there yet.

        Ranks: all of a node; a failure on any is raised on all.
        """
        window = self._windows.get(layout.fingerprint)
        if window is None:
            window = Window.make(ranks.node, layout, self._config.capacity_bytes, self._free_bytes)
            self._windows[layout.fingerprint] = window
        if self._exchange is None:
            return window.open()
        self._exchange.serve(layout, window.open)
        return self._exchange.spread(window.open())

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


def _agree_on(comm: MPI.Intracomm, layout: PoolLayout) -> None:
    """Refuse to share memory with a rank that has other pages.

    Raises:
        IdentityError: Layouts differ.
    """
    layouts: list[PoolLayout] = comm.allgather(layout)
    others = [
        f"rank {rank}: {differences(layouts[_FIRST], other)}"
        for rank, other in enumerate(layouts)
        if other != layouts[_FIRST]
    ]
    if others:
        raise IdentityError(
            f"MPI store: expected the layout of rank {_FIRST} ('there') on all {comm.size} ranks, "
            f"got another ('here') on {'; '.join(others)}; give ranks of different shards "
            f"communicators of their own"
        )
