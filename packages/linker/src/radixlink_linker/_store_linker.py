"""`StoreLinker`: makes a `UnifiedCacheLinker` of any page store.

Theory of operation. The scheduler thread only queues, on a `JobBoard`; one thread of the linker's
own, the `TransferThread`, moves bytes with a `PageMover` and says on the board how each job ended.

A store never sees a device slot, only staging that the thread owns. The ticket is asked before each
copy, so an operation that the ranks gave up touches no slot later than one copy after that. Its
quiescence is told then, by the scheduler thread's next question: a store that hangs in a call keeps
nobody's slots. What waits behind such a call fails, and so does at once what would come behind it;
once in a while another thread tries (see `Breaker`). A copy that hangs does keep slots: it alone is
waited for without a deadline, because to say "quiesced" any sooner would be a lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from typing_extensions import override

from radixlink_contracts import (
    BatchingLinker,
    LoadMode,
    PoolTransferResult,
    TouchingLinker,
    UnifiedCacheLinker,
)
from radixlink_contracts.errors import BackendUnavailableError, ContractError
from radixlink_linker._breaker import Breaker
from radixlink_linker._home_process import HomeProcess
from radixlink_linker._job_board import JobBoard
from radixlink_linker._jobs import Job, LayerWiseBatch
from radixlink_linker._layer_counter import LayerDoneCounter
from radixlink_linker._pool_stores import OnePoolEach, PoolStores
from radixlink_linker._runtime import MonotonicClock
from radixlink_linker._store_linker_counters import StoreLinkerTally
from radixlink_linker._store_linker_settings import StoreLinkerSettings
from radixlink_linker._transfer_thread import TransferThread
from radixlink_linker._watched_store import WatchedStore, watched

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from radixlink_contracts import (
        BatchIndex,
        Clock,
        Completion,
        Copier,
        DevicePool,
        LayerCounter,
        OperationId,
        OperationTicket,
        PageStore,
        PoolGroup,
        PoolName,
        PoolTransfer,
        RequestId,
    )
    from radixlink_linker._store_linker_counters import StoreLinkerCounters


class StoreLinker(UnifiedCacheLinker, TouchingLinker, BatchingLinker):
    """A `UnifiedCacheLinker` over page stores, one for each pool.

    Ranks: local.
    Thread: see `UnifiedCacheLinker`; owns one thread, started with the first transfer. In a forked
        child, which has no such thread, every call but `lookup` and `close` is refused.
    """

    def __init__(
        self,
        *,
        pools: PoolGroup | Mapping[PoolName, DevicePool],
        stores: Iterable[tuple[DevicePool, PageStore]] | Mapping[PoolName, PageStore],
        copier: Copier,
        settings: StoreLinkerSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Join device pools and stores.

        Args:
            pools: The device's pools, as a group with a store beside each pool that it resolves to;
                or, where each has its own transfers and a page is one object, both by their names.
            stores: Of the same layer ranges. Owns: the caller closes them, after this.
            copier: Between the device and staging; used by this linker's thread only.
            settings: How to work.
            clock: For how long a call of a store takes; None for the machine's.

        Raises:
            ContractError: A pool has no store, or one of another pool, page size or layer ranges.
        """
        self._home = HomeProcess("StoreLinker")
        self._settings = settings or StoreLinkerSettings()
        self._breakers: list[Breaker] = []
        self._stores = self._watched(pools, stores, clock or MonotonicClock())
        self._counter = LayerDoneCounter(
            self._stores.num_layers,
            self._settings.layer_timeout_s,
            lambda: self._hanging() is not None,
        )
        self._copier = copier
        self._tally = StoreLinkerTally()
        self._board = JobBoard()
        self._thread = self._new_thread()
        self._queued_loads: list[Job] = []
        #: The loads of each batch that was started and not finished.
        self._started: dict[BatchIndex, tuple[Job, ...]] = {}

    @property
    @override
    def pools(self) -> frozenset[PoolName]:
        """The pools that it can hold."""
        return self._stores.sources

    @property
    @override
    def layer_done_counter(self) -> LayerCounter:
        """What a forward waits on."""
        return self._counter

    @property
    def counters(self) -> StoreLinkerCounters:
        """What was moved so far."""
        return self._tally.counters()

    # -- called by the wrapper ---------------------------------------------------------------------

    @override
    def lookup(
        self, request_id: RequestId, transfers: Sequence[PoolTransfer]
    ) -> PoolTransferResult:
        """Ask the stores which prefixes they hold; see `UnifiedCacheLinker.lookup`."""
        (result,) = self._stores.restorable([transfers])
        return result

    @override
    def lookup_batch(
        self, questions: Sequence[tuple[RequestId, Sequence[PoolTransfer]]]
    ) -> Sequence[PoolTransferResult]:
        """Ask each store once for several requests; see `BatchingLinker.lookup_batch`."""
        return self._stores.restorable([transfers for _, transfers in questions])

    @override
    def load(
        self, ticket: OperationTicket, transfers: Sequence[PoolTransfer], mode: LoadMode
    ) -> bool:
        """Queue a load; see `UnifiedCacheLinker.load`.

        Raises:
            BackendUnavailableError: A store hangs.
            StaleHandleError: This is a forked child.
        """
        self._home.check()
        if self._board.closed:
            return False
        self._check_stores()
        self._queued_loads.append(
            Job(
                ticket=ticket,
                transfers=tuple(transfers),
                direction="load",
                layer_wise=mode is LoadMode.LAYER_WISE,
            )
        )
        return True

    @override
    def start_layer_wise_loading(self) -> BatchIndex | None:
        """Hand everything queued to the thread; what is layer-wise as one batch.

        See `UnifiedCacheLinker.start_layer_wise_loading`.

        Raises:
            StaleHandleError: This is a forked child.
        """
        self._home.check()
        if not self._queued_loads:
            return None
        self._thread.ensure_started()
        jobs = tuple(job for job in self._queued_loads if job.layer_wise)
        batch: LayerWiseBatch | None = None
        if jobs:
            batch = LayerWiseBatch(index=self._counter.update_producer(), jobs=jobs)
            self._started[batch.index] = jobs
        self._board.add_loads(batch, [job for job in self._queued_loads if not job.layer_wise])
        self._queued_loads.clear()
        return None if batch is None else batch.index

    @override
    def finish_layer_wise_loading(self, batch: BatchIndex | None) -> bool:
        """Wait for the layers of a batch, unless the ranks decided all its loads already.

        See `UnifiedCacheLinker.finish_layer_wise_loading`.

        Raises:
            StaleHandleError: This is a forked child.
        """
        self._home.check()
        if batch is None:
            return True
        if all(job.ticket.decided for job in self._started.pop(batch, ())):
            self._counter.fail(batch)
        return self._counter.finish(batch)

    @override
    def cancel_queued_load(self, op: OperationId) -> bool:
        """Take back a load that was not started; see `UnifiedCacheLinker.cancel_queued_load`."""
        kept = [job for job in self._queued_loads if job.ticket.op != op]
        cancelled = len(kept) < len(self._queued_loads)
        self._queued_loads = kept
        return cancelled

    @override
    def offload(self, ticket: OperationTicket, transfers: Sequence[PoolTransfer]) -> bool:
        """Queue the storing of one node; see `UnifiedCacheLinker.offload`.

        Raises:
            BackendUnavailableError: A store hangs.
            StaleHandleError: This is a forked child.
        """
        self._home.check()
        if self._board.closed:
            return False
        self._check_stores()
        self._thread.ensure_started()
        self._board.add_offload(Job(ticket=ticket, transfers=tuple(transfers), direction="offload"))
        return True

    @override
    def touch(self, ticket: OperationTicket, transfers: Sequence[PoolTransfer]) -> bool:
        """Queue the touching of one node; see `TouchingLinker.touch`.

        Raises:
            BackendUnavailableError: A store hangs.
            StaleHandleError: This is a forked child.
        """
        self._home.check()
        if self._board.closed:
            return False
        self._check_stores()
        self._thread.ensure_started()
        self._board.add_touch(Job(ticket=ticket, transfers=tuple(transfers), direction="touch"))
        return True

    @override
    def num_completed_loads(self) -> int:
        """How many load completions wait; behind a call that hangs nothing waits any longer.

        Raises:
            StaleHandleError: This is a forked child.
        """
        self._home.check()
        self._fail_waiting()
        return self._board.num_completed_loads()

    @override
    def pop_completed_load(self) -> Completion:
        """The oldest load completion; see `UnifiedCacheLinker.pop_completed_load`."""
        return self._board.pop_completed_load()

    @override
    def num_completed_offloads(self) -> int:
        """How many offload completions wait, touches among them; likewise.

        Raises:
            StaleHandleError: This is a forked child.
        """
        self._home.check()
        self._fail_waiting()
        return self._board.num_completed_offloads()

    @override
    def pop_completed_offload(self) -> Completion:
        """The oldest offload completion; see `UnifiedCacheLinker.pop_completed_offload`."""
        return self._board.pop_completed_offload()

    @override
    def reset(self) -> None:
        """Drop everything and wait for the copy that runs; see `UnifiedCacheLinker.reset`.

        Raises:
            TransferTimeoutError: The copy did not end in time. It is the last of its operation.
            StaleHandleError: This is a forked child.
        """
        self._home.check()
        self._queued_loads.clear()
        self._started.clear()
        self._counter.reset()
        self._board.clear(self._settings.quiesce_timeout_s)

    @override
    def close(self) -> None:
        """`reset`, and end the thread, which lets the staging go; see `UnifiedCacheLinker.close`.

        A store that hangs in a call is left behind with the thread: it has no slots any more. In a
        forked child, nothing: all of it is its parent's.
        """
        if not self._home.is_here:
            return
        self._board.close()
        try:
            self.reset()
        finally:
            self._thread.join(self._settings.close_timeout_s)

    def __enter__(self) -> Self:
        """Closed at the end of the `with`."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """`close`."""
        self.close()

    # -- stores that hang --------------------------------------------------------------------------

    def _watched(
        self,
        pools: PoolGroup | Mapping[PoolName, DevicePool],
        stores: Iterable[tuple[DevicePool, PageStore]] | Mapping[PoolName, PageStore],
        clock: Clock,
    ) -> PoolStores:
        """The stores beside their pools, each with a breaker.

        Raises:
            ContractError: They do not fit.
        """

        def with_breaker(store: PageStore) -> WatchedStore:
            settings = self._settings
            breaker = Breaker(
                clock, patience_s=settings.hang_s, max_hanging=settings.max_hanging_calls
            )
            self._breakers.append(breaker)
            return watched(store, breaker)

        if isinstance(stores, Mapping):
            return _joined(pools, {name: with_breaker(store) for name, store in stores.items()})
        return _joined(pools, [(pool, with_breaker(store)) for pool, store in stores])

    def _new_thread(self) -> TransferThread:
        """A thread for the board; it is not started."""
        return TransferThread(
            self._board, self._stores, self._copier, self._counter, self._settings, self._tally
        )

    def _hanging(self) -> str | None:
        """What hangs on the transfer thread; None for nothing. Thread: any."""
        ident = self._thread.ident
        for breaker in self._breakers:
            if breaker.hangs_on(ident):
                return breaker.hanging()
        return None

    def _fail_waiting(self) -> None:
        """What waits behind a call that hangs has failed, whoever asks for completions, and is counted."""
        hangs = self._hanging()
        if hangs is not None:
            self._count_refused(self._board.fail_waiting(hangs), hangs)

    def _check_stores(self) -> None:
        """Return where an operation is to be begun; where the thread hangs, on another.

        Raises:
            BackendUnavailableError: A store hangs, and it is not the time to try again.
        """
        for breaker in self._breakers:
            refusal = breaker.refusal()
            if refusal is not None:
                self._tally.count_refused(1, refusal)
                raise BackendUnavailableError(refusal, transient=True)
        hangs = self._hanging()
        if hangs is not None and (left := self._board.abandon(hangs)) is not None:
            self._board, failed = left
            self._count_refused(failed, hangs)
            self._thread = self._new_thread()

    def _count_refused(self, jobs: Sequence[Job], why: str) -> None:
        """These jobs failed, and no forward waits for them."""
        if jobs:
            self._tally.count_refused(len(jobs), why)
            for batch, loads in self._started.items():
                if any(job in loads for job in jobs):
                    self._counter.fail(batch)


def _joined(
    pools: PoolGroup | Mapping[PoolName, DevicePool],
    stores: Iterable[tuple[DevicePool, PageStore]] | Mapping[PoolName, PageStore],
) -> PoolStores:
    """The stores beside their pools.

    Raises:
        ContractError: They do not fit.
    """
    if isinstance(pools, Mapping) and isinstance(stores, Mapping):
        if pools.keys() != stores.keys():
            msg = f"StoreLinker: expected stores for {sorted(pools)}, got {sorted(stores)}"
            raise ContractError(msg)
        return PoolStores(OnePoolEach(pools), [(pools[name], stores[name]) for name in pools])
    if isinstance(pools, Mapping) or isinstance(stores, Mapping):
        msg = (
            "StoreLinker: expected a group with pairs of pool and store, or both by name, got a mix"
        )
        raise ContractError(msg)
    return PoolStores(pools, stores)
