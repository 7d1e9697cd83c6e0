"""`StoreLinker`: makes a `UnifiedCacheLinker` of any page store.

Theory of operation. The scheduler thread only queues; one thread of the linker's own moves bytes: the
loads that a forward waits for first, then other loads, then offloads. Of an offload or a staged load
it moves a run of pages at a time, and looks between two runs whether a forward waits::

    layer-wise  open the pages of all loads of the batch, then for each layer, for each load:
                store.read into staging -> ask the ticket -> copier.scatter; then count the layer
    staged      the same, a run of pages after the other
    offload     for each layer range: ask the ticket -> copier.gather into staging
                then store.put

A store never sees a device slot, only staging that the thread owns. The ticket is asked before each
copy, so an operation that the ranks gave up touches no slot later than one copy after that. Its
quiescence is told then, by the scheduler thread's next question: a store that hangs in a call keeps
nobody's slots. A copy that hangs does: it alone is waited for without a deadline, because to say
"quiesced" any sooner would be a lie. Failures are values; no exception or traceback is kept. A load
that fails takes no other load of its batch with it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
from typing_extensions import override

from radixlink_contracts import (
    Completion,
    LoadMode,
    Outcome,
    PoolTransferResult,
    UnifiedCacheLinker,
)
from radixlink_contracts.errors import ContractError, TransferTimeoutError
from radixlink_linker._jobs import Job, LayerWiseBatch
from radixlink_linker._layer_counter import LayerDoneCounter
from radixlink_linker._page_mover import PageMover, writers_of
from radixlink_linker._pool_stores import OnePoolEach, PoolStores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from radixlink_contracts import (
        BatchIndex,
        Copier,
        DevicePool,
        Fence,
        LayerCounter,
        OperationId,
        OperationTicket,
        PageStore,
        PoolGroup,
        PoolName,
        PoolTransfer,
        RequestId,
    )
    from radixlink_linker._page_mover import OpenRun


@attrs.frozen(kw_only=True)
class StoreLinkerSettings:
    """How a `StoreLinker` works; local to its rank.

    Attributes:
        staging_bytes: How much one thread moves at a time.
        lease_s: Seconds for which the store is asked to keep the pages of a load.
        copy_timeout_s: Seconds after which an operation whose copy has not ended counts as failed.
        layer_timeout_s: Seconds from the start of a batch of layer-wise loads after which no
            forward waits for its layers.
        close_timeout_s: Seconds that `close` waits for a store that is in a call.
        quiesce_timeout_s: Seconds that `reset` waits for the copy that runs, and `close` for the
            thread.
    """

    staging_bytes: int = 16 << 20
    lease_s: float = 10.0
    copy_timeout_s: float = 10.0
    layer_timeout_s: float = 10.0
    close_timeout_s: float = 5.0
    quiesce_timeout_s: float = 30.0

    def __attrs_post_init__(self) -> None:
        """Refuse what is no size and no time."""
        fields = attrs.asdict(self)
        if min(fields.values()) <= 0:
            msg = f"StoreLinkerSettings: expected numbers above 0, got {fields}"
            raise ContractError(msg)


@attrs.frozen(kw_only=True)
class StoreLinkerCounters:
    """What a `StoreLinker` moved.

    Attributes:
        pages_loaded: Objects copied to the device by loads that came through here, whatever other
            ranks said; a page that is stored as several objects counts as so many.
        pages_stored: Pages that offloads which landed put, or found there.
        pages_by_writer: Pages loaded, by the process that had written them (0: unknown).
        last_error: What the last failed transfer said, for people.
    """

    pages_loaded: int = 0
    pages_stored: int = 0
    pages_by_writer: Mapping[int, int] = attrs.field(factory=dict)
    last_error: str = ""


class StoreLinker(UnifiedCacheLinker):
    """A `UnifiedCacheLinker` over page stores, one for each pool.

    Ranks: local.
    Thread: see `UnifiedCacheLinker`; owns one thread, started with the first transfer.
    """

    def __init__(
        self,
        *,
        pools: PoolGroup | Mapping[PoolName, DevicePool],
        stores: Iterable[tuple[DevicePool, PageStore]] | Mapping[PoolName, PageStore],
        copier: Copier,
        settings: StoreLinkerSettings | None = None,
    ) -> None:
        """Join device pools and stores.

        Args:
            pools: The device's pools, as a group with a store beside each pool that it resolves to;
                or, where each has its own transfers and a page is one object, both by their names.
            stores: Of the same layer ranges. Owns: the caller closes them, after this.
            copier: Between the device and staging; used by this linker's thread only.
            settings: How to work.

        Raises:
            ContractError: A pool has no store, or one of another pool, page size or layer ranges.
        """
        self._stores = _joined(pools, stores)
        self._settings = settings or StoreLinkerSettings()
        self._mover = PageMover(
            self._stores,
            copier,
            self._copy,
            staging_bytes=self._settings.staging_bytes,
            lease_s=self._settings.lease_s,
        )
        self._counter = LayerDoneCounter(self._stores.num_layers, self._settings.layer_timeout_s)
        self._queued_loads: list[Job] = []
        #: The loads of each batch that was started and not finished. The scheduler thread's.
        self._started: dict[BatchIndex, tuple[Job, ...]] = {}
        #: Guards all below, and tells the thread of work and whoever resets of its end.
        self._changed = threading.Condition()
        self._batches: deque[LayerWiseBatch] = deque()
        self._loads: deque[Job] = deque()
        self._offloads: deque[Job] = deque()
        #: What the thread works at; what it left for a forward that waits comes first.
        self._running: tuple[Job, ...] = ()
        self._closed = False
        self._completed_loads: deque[Completion] = deque()
        self._completed_offloads: deque[Completion] = deque()
        self._thread: threading.Thread | None = None
        self._pages_loaded = 0
        self._pages_stored = 0
        self._pages_by_writer: Counter[int] = Counter()
        self._last_error = ""

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
        with self._changed:
            return StoreLinkerCounters(
                pages_loaded=self._pages_loaded,
                pages_stored=self._pages_stored,
                pages_by_writer=dict(self._pages_by_writer),
                last_error=self._last_error,
            )

    # -- called by the wrapper ---------------------------------------------------------------------

    @override
    def lookup(
        self, request_id: RequestId, transfers: Sequence[PoolTransfer]
    ) -> PoolTransferResult:
        """Ask the stores which prefixes they hold; see `UnifiedCacheLinker.lookup`."""
        return self._stores.restorable(transfers)

    @override
    def load(
        self, ticket: OperationTicket, transfers: Sequence[PoolTransfer], mode: LoadMode
    ) -> bool:
        """Queue a load; see `UnifiedCacheLinker.load`."""
        if self._closed:
            return False
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
        """
        if not self._queued_loads:
            return None
        jobs = tuple(job for job in self._queued_loads if job.layer_wise)
        batch: BatchIndex | None = None
        with self._changed:
            self._wake()
            if jobs:
                batch = self._counter.update_producer()
                self._started[batch] = jobs
                self._batches.append(LayerWiseBatch(index=batch, jobs=jobs))
            self._loads.extend(job for job in self._queued_loads if not job.layer_wise)
        self._queued_loads.clear()
        return batch

    @override
    def finish_layer_wise_loading(self, batch: BatchIndex | None) -> bool:
        """Wait for the layers of a batch, unless the ranks decided all its loads already.

        See `UnifiedCacheLinker.finish_layer_wise_loading`.
        """
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
        """Queue the storing of one node; see `UnifiedCacheLinker.offload`."""
        with self._changed:
            if self._closed:
                return False
            self._wake()
            self._offloads.append(
                Job(ticket=ticket, transfers=tuple(transfers), direction="offload")
            )
        return True

    @override
    def num_completed_loads(self) -> int:
        """How many load completions wait."""
        self._let_go()
        return len(self._completed_loads)

    @override
    def pop_completed_load(self) -> Completion:
        """The oldest load completion; see `UnifiedCacheLinker.pop_completed_load`."""
        return _pop(self._completed_loads)

    @override
    def num_completed_offloads(self) -> int:
        """How many offload completions wait."""
        self._let_go()
        return len(self._completed_offloads)

    @override
    def pop_completed_offload(self) -> Completion:
        """The oldest offload completion; see `UnifiedCacheLinker.pop_completed_offload`."""
        return _pop(self._completed_offloads)

    @override
    def reset(self) -> None:
        """Drop everything and wait for the copy that runs; see `UnifiedCacheLinker.reset`.

        Raises:
            TransferTimeoutError: The copy did not end in time. It is the last of its operation.
        """
        self._queued_loads.clear()
        self._started.clear()
        timeout_s = self._settings.quiesce_timeout_s
        self._counter.reset()
        with self._changed:
            running = self._running
            for job in running:
                job.over = True
            self._batches.clear()
            self._loads.clear()
            self._offloads.clear()
            ended = self._changed.wait_for(
                lambda: not any(job.copying for job in running), timeout_s
            )
            copying = [job for job in running if job.copying]
            self._completed_loads.clear()
            self._completed_offloads.clear()
        if not ended:
            (job,) = copying
            msg = (
                f"reset: expected the copy of operation {job.ticket.op} to end within "
                f"{timeout_s} s, but it still runs"
            )
            raise TransferTimeoutError(
                msg, direction=job.direction, pages=job.num_pages, operation=job.ticket.op
            )

    @override
    def close(self) -> None:
        """`reset`, and end the thread; see `UnifiedCacheLinker.close`.

        A store that hangs in a call is left behind with the thread: it has no slots any more.
        """
        with self._changed:
            self._closed = True
        self.reset()
        with self._changed:
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(self._settings.close_timeout_s)
        self._mover.release()

    def _let_go(self) -> None:
        """Tell the quiescence of what the ranks decided and no copy touches."""
        with self._changed:
            queued = (job for batch in self._batches for job in batch.jobs)
            for job in (*self._running, *queued, *self._loads, *self._offloads):
                if job.ticket.decided and not job.copying:
                    self._tell(job, Outcome.FAILED, quiesced=True)

    def _tell(self, job: Job, outcome: Outcome, *, quiesced: bool, why: str = "") -> None:
        """Say how an operation ended, unless its end was told or nobody wants to know it."""
        with self._changed:
            if not job.over:
                job.over = quiesced
                load = job.direction == "load"
                (self._completed_loads if load else self._completed_offloads).append(
                    Completion(op=job.ticket.op, outcome=outcome, quiesced=quiesced, why=why)
                )

    def _wake(self) -> None:
        """Have a thread that looks for work as soon as the condition, which is held, is let go.

        Raises:
            RuntimeError: There can be no more threads. Nothing may be handed to it before this.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="radixlink-transfer", daemon=True)
            thread.start()
            self._thread = thread
        self._changed.notify_all()

    # -- on the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        """Run jobs until the linker is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._batches or self._loads or self._offloads or self._closed
                )
                if self._closed:
                    return
                job = None if self._batches else (self._loads or self._offloads).popleft()
                if job is not None:
                    self._running = (job,)
            if job is None:
                self._serve_forwards()
            else:
                with self._then_at(()):
                    self._run(job)
            # Nothing of it is kept while there is nothing to do.
            del job

    def _serve_forwards(self) -> None:
        """Run the batches that forwards wait for."""
        while True:
            with self._changed:
                if not self._batches or self._closed:
                    return
                batch = self._batches.popleft()
                before = self._running
                # What leaves a queue runs, with nothing between: whoever resets must find it.
                self._running = (*before, *batch.jobs)
            with self._then_at(before):
                self._run_batch(batch)
            del batch

    def _run(self, job: Job) -> None:
        """Run one job and say how it ended."""
        try:
            if job.direction == "load":
                self._load(job)
            else:
                self._offload(job)
        except Exception as raised:  # noqa: BLE001 -- a failure is a value; its text is kept, no traceback
            self._fail(job, raised)
        else:
            self._tell(job, Outcome.LANDED, quiesced=True)

    def _run_batch(self, batch: LayerWiseBatch) -> None:
        """Bring the layers of all loads of a batch, one layer after the other."""
        open_loads: dict[Job, list[OpenRun]] = {}
        for job in batch.jobs:
            with self._failing_alone(job, open_loads):
                self._ask(job)
                open_loads[job] = list(self._mover.open(job))
        last = self._stores.num_layers - 1
        for layer in range(last + 1):
            for job, runs in list(open_loads.items()):
                with self._failing_alone(job, open_loads):
                    for run in runs:
                        for layer_range in run.ranges_of(layer):
                            self._mover.load(job, run, layer_range)
            if layer == last:
                # Who waits for the last layer asks next how each load ended.
                for job, runs in open_loads.items():
                    self._count_loaded(runs)
                    self._tell(job, Outcome.LANDED, quiesced=True)
            self._counter.complete(batch.index, layer)

    @contextmanager
    def _then_at(self, before: tuple[Job, ...]) -> Iterator[None]:
        """What ran before runs again afterwards."""
        try:
            yield
        finally:
            with self._changed:
                self._running = before
                self._changed.notify_all()

    @contextmanager
    def _failing_alone(self, job: Job, open_loads: dict[Job, list[OpenRun]]) -> Iterator[None]:
        """Whatever is raised meanwhile is one load's failure, and the others go on."""
        try:
            yield
        except Exception as raised:  # noqa: BLE001 -- a failure is a value; its text is kept, no traceback
            open_loads.pop(job, None)
            self._fail(job, raised)

    def _fail(self, job: Job, raised: Exception) -> None:
        """A job did not come through, and touches its slots no more."""
        why = f"{type(raised).__name__}: {raised}"
        with self._changed:
            self._last_error = f"operation {job.ticket.op}: {why}"
        self._tell(job, Outcome.FAILED, quiesced=True, why=why)

    def _load(self, job: Job) -> None:
        """Bring all pages of a load to the device.

        Raises:
            TransferError: Some page is not to be had, or the load was given up.
        """
        runs: list[OpenRun] = []
        self._ask(job)
        for run in self._mover.open(job):
            for layer_range in range(len(run.pool.range_bytes)):
                self._mover.load(job, run, layer_range)
            runs.append(run)
            self._serve_forwards()
        self._count_loaded(runs)

    def _offload(self, job: Job) -> None:
        """Put all pages of a node into the stores.

        Raises:
            TransferError: Some page found no room, or the offload was given up.
        """
        pages = 0
        for stored in self._mover.offload(job):
            pages += stored
            self._serve_forwards()
        with self._changed:
            self._pages_stored += pages

    def _count_loaded(self, runs: list[OpenRun]) -> None:
        """These runs are on the device."""
        with self._changed:
            self._pages_loaded += sum(map(len, runs))
            self._pages_by_writer.update(writers_of(runs))

    def _ask(self, job: Job) -> None:
        """Return while the slots may be touched.

        Raises:
            TransferError: The ranks decided the operation, or the linker was reset.
        """
        if job.ticket.decided or job.over:
            raise job.failed("it was given up")

    def _copy(self, job: Job, start: Callable[[], Fence]) -> None:
        """Ask, start one copy, and wait for its end, however late that is; see `GuardedCopy`."""
        with self._changed:
            self._ask(job)
            job.copying = True
        try:
            fence = start()
            in_time = fence.wait(self._settings.copy_timeout_s)
            if not in_time:
                self._tell(job, Outcome.FAILED, quiesced=False, why="a copy is late")
                while not fence.wait(self._settings.copy_timeout_s):
                    pass
        finally:
            with self._changed:
                job.copying = False
                self._changed.notify_all()
        if not in_time:
            raise job.failed(f"a copy took longer than {self._settings.copy_timeout_s} s")


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


def _pop(completions: deque[Completion]) -> Completion:
    """The oldest completion.

    Raises:
        ContractError: There is none.
    """
    if not completions:
        msg = "pop_completed: expected a completion, got none"
        raise ContractError(msg)
    return completions.popleft()
