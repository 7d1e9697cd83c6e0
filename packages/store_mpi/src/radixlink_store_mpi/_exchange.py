"""`NodeExchange`: what one rank needs to ask other nodes, and a leader to answer them, as one thing."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final, Self

from radixlink_contracts.errors import BackendUnavailableError
from radixlink_store_mpi._asking import Asking
from radixlink_store_mpi._collective import all_or_none, wait
from radixlink_store_mpi._courier import Courier
from radixlink_store_mpi._desk import Desk
from radixlink_store_mpi._mpi import MPI
from radixlink_store_mpi._nodes_store import NodesPageStore
from radixlink_store_mpi._server import Server
from radixlink_store_mpi.counters import NodeTally

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import PoolLayout
    from radixlink_store.segments import SegmentPageStore
    from radixlink_store_mpi._ranks import Ranks
    from radixlink_store_mpi._settings import NodeSettings

_MIN_STOP_S: Final = 1.0
"""A server is waited for that long, also where nothing is left of the time to close."""


class NodeExchange:
    """Asks other nodes for what misses here. The leader of each node answers for it.

    Thread: one at a time; what it makes of stores is for any.
    """

    def __init__(
        self,
        ranks: Ranks,
        settings: NodeSettings,
        requests: MPI.Intracomm,
        answers: MPI.Intracomm,
    ) -> None:
        """Begin to answer, where this rank is a leader. Ranks: local.

        Raises:
            RuntimeError: No thread can be started.
        """
        self._settings: Final = settings
        self._tally: Final = NodeTally()
        self._requests: Final = requests
        self._courier: Final = Courier(
            requests, answers, ranks.others, settings.answer_timeout_s, self._tally
        )
        self._desk: Desk | None = None
        self._server: Server | None = None
        if ranks.leads:
            self._desk = Desk(settings.max_answer_bytes, self._tally)
            self._server = Server(requests, answers, self._desk)

    @classmethod
    def create(cls, ranks: Ranks, settings: NodeSettings) -> Self:
        """Begin on all ranks.

        Raises:
            BackendUnavailableError: MPI does not allow several threads, on any rank; or a leader
                cannot start one.

        Ranks: all (collective); a failure on any is raised on all.
        """
        all_or_none(ranks.comm, _check_threads)
        # Of our own, so that no message of anybody else is ever taken for one of these. Where a
        # leader fails they stay until MPI ends: another's server may not have stopped in time.
        requests, answers = _duplicate(ranks.comm), _duplicate(ranks.comm)
        return all_or_none(
            ranks.comm,
            lambda: cls(ranks, settings, requests, answers),
            lambda exchange: exchange._stop(_MIN_STOP_S),  # noqa: SLF001 - of this class
        )

    def serve(self, layout: PoolLayout, open_: Callable[[], SegmentPageStore]) -> None:
        """Answer others from a store of this node, where this rank is the leader; once a layout.

        Args:
            layout: What its pages are.
            open_: Opens it: one of its own, so that it goes on when others are closed.
        """
        if self._desk is not None and not self._desk.serves(layout):
            self._desk.serve(open_())

    def spread(self, local: SegmentPageStore) -> NodesPageStore:
        """Make of a node's store one of all nodes. Owns: it closes `local`."""
        asking = Asking(self._courier, local.layout, self._settings.max_answer_bytes, self._tally)
        return NodesPageStore(local, asking, self._tally)

    def close(self, timeout_s: float) -> None:
        """Go on answering until all ranks have come, then stop; after `timeout_s` stop anyway.

        Ranks: all (collective). One that does not come costs the others the time.
        """
        deadline = time.monotonic() + timeout_s
        # A node that is stopped may owe an answer for ever.
        self._courier.settle(min(timeout_s, self._settings.answer_timeout_s))
        # A rank that has ended fails this at once: then nobody is to be waited for.
        with contextlib.suppress(MPI.Exception):
            wait(self._requests.Ibarrier(), max(0.0, deadline - time.monotonic()))
        self._courier.end()
        self._stop(max(_MIN_STOP_S, deadline - time.monotonic()))

    def _stop(self, timeout_s: float) -> None:
        """Answer no more. Ranks: local."""
        if self._desk is not None and self._server is not None and self._server.stop(timeout_s):
            self._desk.close()


def _duplicate(comm: MPI.Intracomm) -> MPI.Intracomm:
    duplicate = comm.Dup()
    duplicate.Set_errhandler(MPI.ERRORS_RETURN)
    return duplicate


def _check_threads() -> None:
    """Refuse an MPI whose library may not be used by several threads at once.

    Raises:
        BackendUnavailableError: It may not.
    """
    provided = MPI.Query_thread()
    if provided < MPI.THREAD_MULTIPLE:
        raise BackendUnavailableError(
            f"MPI store: expected an MPI initialised with MPI_THREAD_MULTIPLE "
            f"({MPI.THREAD_MULTIPLE}), since nodes answer each other from a thread, got level "
            f"{provided}; let mpi4py initialise MPI, or give MPI_Init_thread that level"
        )
