"""`StoreLinker`: makes a `UnifiedCacheLinker` of any page store.

Theory of operation. The scheduler thread only queues; one thread of the linker's own moves bytes,
loads before offloads, one operation at a time and, within it, a run of pages and a layer range at a
time::

    load     open pages, then for each layer range:
             store.read into staging -> ask the ticket -> copier.scatter
    offload  for each layer range: ask the ticket -> copier.gather into staging
             then store.put

A store never sees a device slot, only staging that the thread owns. The ticket is asked before each
copy, so an operation that the ranks gave up touches no slot later than one copy after that. Its
quiescence is told then, by the scheduler thread's next question: a store that hangs in a call keeps
nobody's slots. A copy that hangs does: it alone is waited for without a deadline, because to say
"quiesced" any sooner would be a lie. Failures are values; no exception or traceback is kept.

Layer-wise loads come with the layer counter; until then only staged ones are taken.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import attrs
from typing_extensions import override

from radixlink_contracts import (
    Completion,
    LoadMode,
    Outcome,
    PageBits,
    PoolTransferResult,
    UnifiedCacheLinker,
)
from radixlink_contracts.errors import ContractError, TransferError, TransferTimeoutError
from radixlink_linker._pool_stores import OnePoolEach, PoolStores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from radixlink_contracts import (
        BatchIndex,
        ByteRegion,
        Copier,
        DevicePool,
        Fence,
        LayerCounter,
        OperationId,
        OperationTicket,
        PageKeys,
        PageStore,
        PoolGroup,
        PoolName,
        PoolTransfer,
        RequestId,
        Staging,
    )


@attrs.frozen(kw_only=True)
class StoreLinkerSettings:
    """How a `StoreLinker` works; local to its rank.

    Attributes:
        staging_bytes: How much one thread moves at a time.
        lease_s: Seconds for which the store is asked to keep the pages of a load.
        copy_timeout_s: Seconds after which an operation whose copy has not ended counts as failed.
        close_timeout_s: Seconds that `close` waits for a store that is in a call.
        quiesce_timeout_s: Seconds that `reset` waits for the copy that runs, and `close` for the
            thread.
    """

    staging_bytes: int = 16 << 20
    lease_s: float = 10.0
    copy_timeout_s: float = 10.0
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
        pages_loaded: Pages copied to the device by loads that landed.
        pages_stored: Pages that offloads which landed put, or found there.
        pages_by_writer: Pages loaded, by the process that had written them (0: unknown).
        last_error: What the last failed transfer said, for people.
    """

    pages_loaded: int = 0
    pages_stored: int = 0
    pages_by_writer: Mapping[int, int] = attrs.field(factory=dict)
    last_error: str = ""


@attrs.define(kw_only=True, eq=False)
class _Job:
    """One operation, as the thread gets it. The last two are guarded by the linker's condition.

    Attributes:
        ticket: The operation.
        transfers: What to move.
        direction: "load" or "offload".
        copying: A copy touches its slots.
        over: It touches no slot any more, and nothing more is told of it.
    """

    ticket: OperationTicket
    transfers: tuple[PoolTransfer, ...]
    direction: Literal["load", "offload"]
    copying: bool = False
    over: bool = False

    @property
    def num_pages(self) -> int:
        """Pages of all pools."""
        return sum(len(transfer.keys) for transfer in self.transfers)


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
        self._copier = copier
        self._settings = settings or StoreLinkerSettings()
        self._queued_loads: list[_Job] = []
        #: Guards all below, and tells the thread of work and whoever resets of its end.
        self._changed = threading.Condition()
        self._loads: deque[_Job] = deque()
        self._offloads: deque[_Job] = deque()
        self._running: _Job | None = None
        self._closed = False
        self._completed_loads: deque[Completion] = deque()
        self._completed_offloads: deque[Completion] = deque()
        self._thread: threading.Thread | None = None
        self._staging: Staging | None = None
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
    def layer_done_counter(self) -> LayerCounter | None:
        """None: layer-wise loads come later."""
        return None

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
        return PoolTransferResult(restorable_prefix_pages=self._stores.restorable(transfers))

    @override
    def load(
        self, ticket: OperationTicket, transfers: Sequence[PoolTransfer], mode: LoadMode
    ) -> bool:
        """Queue a load; see `UnifiedCacheLinker.load`. A layer-wise one is refused."""
        if mode is not LoadMode.STAGED or self._closed:
            return False
        self._queued_loads.append(_Job(ticket=ticket, transfers=tuple(transfers), direction="load"))
        return True

    @override
    def start_layer_wise_loading(self) -> BatchIndex | None:
        """Hand everything queued to the thread; none of it is layer-wise.

        See `UnifiedCacheLinker.start_layer_wise_loading`.
        """
        if self._queued_loads:
            with self._changed:
                self._loads.extend(self._queued_loads)
                self._wake()
            self._queued_loads.clear()
        return None

    @override
    def finish_layer_wise_loading(self, batch: BatchIndex | None) -> bool:
        """True: there are no layer-wise loads to wait for."""
        return batch is None

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
            self._offloads.append(
                _Job(ticket=ticket, transfers=tuple(transfers), direction="offload")
            )
            self._wake()
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
        timeout_s = self._settings.quiesce_timeout_s
        with self._changed:
            running = self._running
            if running is not None:
                running.over = True
            self._loads.clear()
            self._offloads.clear()
            ended = self._changed.wait_for(
                lambda: running is None or not running.copying, timeout_s
            )
            self._completed_loads.clear()
            self._completed_offloads.clear()
        if not ended and running is not None:
            msg = (
                f"reset: expected the copy of operation {running.ticket.op} to end within "
                f"{timeout_s} s, but it still runs"
            )
            raise TransferTimeoutError(
                msg,
                direction=running.direction,
                pages=running.num_pages,
                operation=running.ticket.op,
            )

    @override
    def close(self) -> None:
        """`reset`, and end the thread; see `UnifiedCacheLinker.close`.

        A store that hangs in a call is left behind with the thread: it has no slots any more.
        """
        with self._changed:
            closed_before = self._closed
            self._closed = True
        if closed_before:
            return
        self.reset()
        with self._changed:
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(self._settings.close_timeout_s)
        self._staging = None

    def _let_go(self) -> None:
        """Tell the quiescence of what the ranks decided and no copy touches."""
        if self._running is None and not self._loads and not self._offloads:
            return
        with self._changed:
            for job in (self._running, *self._loads, *self._offloads):
                if job is not None and job.ticket.decided and not job.copying:
                    self._tell(job, Outcome.FAILED, quiesced=True)

    def _tell(self, job: _Job, outcome: Outcome, *, quiesced: bool) -> None:
        """Say how an operation ended, unless its end was told or nobody wants to know it."""
        with self._changed:
            if not job.over:
                job.over = quiesced
                load = job.direction == "load"
                (self._completed_loads if load else self._completed_offloads).append(
                    Completion(op=job.ticket.op, outcome=outcome, quiesced=quiesced)
                )

    def _wake(self) -> None:
        """Tell the thread of work, starting it with the first. The condition is held."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="radixlink-transfer", daemon=True
            )
            self._thread.start()
        self._changed.notify_all()

    # -- on the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        """Run jobs, loads first, until the linker is closed."""
        while True:
            with self._changed:
                self._running = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._loads or self._offloads or self._closed)
                if self._closed:
                    return
                job = self._running = (self._loads or self._offloads).popleft()
            self._run(job)
            # Nothing of it is kept while there is nothing to do.
            del job

    def _run(self, job: _Job) -> None:
        """Run one job and say how it ended."""
        outcome = Outcome.LANDED
        try:
            if job.direction == "load":
                self._load(job)
            else:
                self._offload(job)
        except Exception as raised:  # noqa: BLE001 -- a failure is a value; its text is kept, no traceback
            outcome = Outcome.FAILED
            with self._changed:
                self._last_error = f"operation {job.ticket.op}: {type(raised).__name__}: {raised}"
        self._tell(job, outcome, quiesced=True)

    def _load(self, job: _Job) -> None:
        """Bring all pages of a load to the device.

        Raises:
            TransferError: Some page is not to be had, or the load was given up.
        """
        writers: Counter[int] = Counter()
        pages = 0
        for pool, transfer in self._stores.resolve(job.transfers):
            store = self._stores.store_of(pool)
            rows = pool.page_rows(transfer)
            for keys, some_rows in self._runs(pool, transfer.keys.resolve(), rows):
                self._ask(job)
                handles = store.open(keys, self._settings.lease_s)
                if not handles.found.complete:
                    raise _failed(job, f"{_absent(handles.found)} are gone")
                for layer_range, size in enumerate(pool.range_bytes):
                    staging = self._staging_of(len(keys) * size)
                    good = store.read(handles, layer_range, staging.buffer)
                    if not good.complete:
                        raise _failed(job, f"{_absent(good)} cannot be read in range {layer_range}")
                    region = pool.region(layer_range, some_rows)
                    self._copy(job, self._copier.scatter, region, staging.tensor)
                writers.update(handles.writers)
                pages += len(keys)
        with self._changed:
            self._pages_loaded += pages
            self._pages_by_writer.update(writers)

    def _offload(self, job: _Job) -> None:
        """Put all pages of a node into the stores, windows and states before the full pages.

        Raises:
            TransferError: Some page found no room, or the offload was given up.
        """
        pages = 0
        for pool, transfer in reversed(self._stores.resolve(job.transfers)):
            store = self._stores.store_of(pool)
            rows = pool.page_rows(transfer)
            for keys, some_rows in self._runs(pool, transfer.keys.resolve(), rows):
                staging = self._staging_of(len(keys) * sum(pool.range_bytes))
                parts: list[memoryview] = []
                at = 0
                for layer_range, size in enumerate(pool.range_bytes):
                    end = at + len(keys) * size
                    region = pool.region(layer_range, some_rows)
                    self._copy(job, self._copier.gather, region, staging.tensor[at:end])
                    parts.append(staging.buffer[at:end])
                    at = end
                stored = store.put(keys, parts)
                if not stored.complete:
                    raise _failed(job, f"{_absent(stored)} found no room")
                pages += len(keys)
        with self._changed:
            self._pages_stored += pages

    def _runs(
        self, pool: DevicePool, keys: PageKeys, rows: torch.Tensor
    ) -> Iterator[tuple[PageKeys, torch.Tensor]]:
        """The pages in runs that fit the staging memory, at least one page each."""
        step = max(1, self._settings.staging_bytes // sum(pool.range_bytes))
        for start in range(0, len(keys), step):
            stop = min(start + step, len(keys))
            yield keys.span(start, stop), rows[start:stop]

    def _staging_of(self, num_bytes: int) -> Staging:
        """The first `num_bytes` of this thread's staging memory, which grows as needed."""
        whole = self._staging
        if whole is None or whole.tensor.numel() < num_bytes:
            whole = self._staging = self._copier.staging(num_bytes)
        if whole.tensor.numel() == num_bytes:
            return whole
        return attrs.evolve(whole, tensor=whole.tensor[:num_bytes], buffer=whole.buffer[:num_bytes])

    def _ask(self, job: _Job) -> None:
        """Return while the slots may be touched.

        Raises:
            TransferError: The ranks decided the operation, or the linker was reset.
        """
        if job.ticket.decided or job.over:
            raise _failed(job, "it was given up")

    def _copy(
        self,
        job: _Job,
        start: Callable[[ByteRegion, torch.Tensor], Fence],
        region: ByteRegion,
        staged: torch.Tensor,
    ) -> None:
        """Ask, start one copy, and wait for its end, however late that is.

        Raises:
            TransferError: The operation was given up before, or the copy was late.
        """
        with self._changed:
            self._ask(job)
            job.copying = True
        try:
            fence = start(region, staged)
            in_time = fence.wait(self._settings.copy_timeout_s)
            if not in_time:
                self._tell(job, Outcome.FAILED, quiesced=False)
                while not fence.wait(self._settings.copy_timeout_s):
                    pass
        finally:
            with self._changed:
                job.copying = False
                self._changed.notify_all()
        if not in_time:
            raise _failed(job, f"a copy took longer than {self._settings.copy_timeout_s} s")


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


def _failed(job: _Job, why: str) -> TransferError:
    """The error of a transfer that did not come through."""
    return TransferError(
        f"{job.direction}: {why}",
        direction=job.direction,
        pages=job.num_pages,
        operation=job.ticket.op,
    )


def _absent(bits: PageBits) -> str:
    """How many pages of how many are not set, for people."""
    return f"{len(bits) - bits.total} of {len(bits)} pages"


def _pop(completions: deque[Completion]) -> Completion:
    """The oldest completion.

    Raises:
        ContractError: There is none.
    """
    if not completions:
        msg = "pop_completed: expected a completion, got none"
        raise ContractError(msg)
    return completions.popleft()
