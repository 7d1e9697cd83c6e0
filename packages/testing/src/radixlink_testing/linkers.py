"""What drives a linker by hand: time, threads, faults and completions that a test decides on.

* `ManualClock`, `InlineExecutor`: a `Clock` and an `Executor` without time and threads.
* `FaultyPageStore`: a page store that loses pages, finds no room, raises or is late when told to.
* `SyncLinker`: a `UnifiedCacheLinker` that moves and completes nothing before it is told to.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import attrs
from typing_extensions import override

from radixlink_contracts import (
    Clock,
    Completion,
    Executor,
    LoadMode,
    Outcome,
    PageBits,
    PoolName,
    PoolTransferResult,
    TouchingLinker,
    UnifiedCacheLinker,
)
from radixlink_contracts.errors import ContractError, InvalidTransitionError, StorageError
from radixlink_testing.faults import FaultKind, FaultyStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import (
        BatchIndex,
        Copier,
        DevicePool,
        LayerCounter,
        OperationId,
        OperationTicket,
        PageHandles,
        PageKeys,
        PageStore,
        PoolTransfer,
        RequestId,
    )
    from radixlink_testing.faults import StoreCall


class ManualClock(Clock):
    """A clock that stands still until somebody moves it."""

    def __init__(self) -> None:
        """Start at 0 seconds."""
        self._now = 0.0

    @override
    def now(self) -> float:
        """What was advanced so far."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Go forward."""
        self._now += seconds


class InlineExecutor(Executor):
    """Runs each task within `submit`; while `held`, within `release`."""

    def __init__(self) -> None:
        """Run tasks at once."""
        #: Keep tasks instead of running them.
        self.held = False
        self._waiting: list[Callable[[], None]] = []
        self._closed = False

    @override
    def submit(self, task: Callable[[], None]) -> None:
        """Run a task, or keep it.

        Raises:
            InvalidTransitionError: The executor was closed.
        """
        if self._closed:
            msg = "InlineExecutor: expected an open executor, got a task after close"
            raise InvalidTransitionError(msg, state="closed", event="submit")
        self._waiting.append(task)
        if not self.held:
            self.release()

    def release(self) -> None:
        """Run what was kept, oldest first."""
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            task()

    @override
    def close(self) -> None:
        """Run what was kept and take no more."""
        self._closed = True
        self.release()


class FaultyPageStore(FaultyStore):
    """Another page store, with faults that a test switches on and off by hand.

    Thread: as the other store's; a test sets faults from any thread.
    """

    def __init__(self, inner: PageStore) -> None:
        """Hand every call on while there is no fault."""
        super().__init__(inner)
        #: Calls that raise a `StorageError`: "contains", "open", "read" or "put".
        self.raising: set[str] = set()
        #: Calls that are late: they wait for `gate`, having set `waiting`.
        self.hanging: set[str] = set()
        #: Pages that are gone, until they are put again.
        self.lost: set[bytes] = set()
        #: Pages for which there is no room.
        self.unwelcome: set[bytes] = set()

    @override
    def fault_of(self, call: StoreCall) -> FaultKind | None:
        """What the test set, else what the plan says."""
        raising, hanging = call.value in self.raising, call.value in self.hanging
        if raising:
            return FaultKind.HANGS if hanging else FaultKind.FAILS
        return FaultKind.LATE if hanging else super().fault_of(call)

    @override
    def contains(self, keys: PageKeys) -> PageBits:
        """Which pages are there."""
        return super().contains(keys) & self._kept(keys)

    @override
    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        """Find pages for a load."""
        handles = super().open(keys, ttl_s)
        return attrs.evolve(handles, found=handles.found & self._kept(keys))

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        """Read one layer range of each page that was found."""
        return super().read(handles, layer_range, out) & self._kept(handles.keys)

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        """Store pages; those without room are not looked for in the other store."""
        stored = super().put(keys, parts)
        self.lost.difference_update(keys)
        self.lost.update(key for key in keys if key in self.unwelcome)
        return stored & self._kept(keys)

    def _kept(self, keys: PageKeys) -> PageBits:
        pages = (page for page, key in enumerate(keys) if key not in self.lost)
        return PageBits.of(pages, len(keys))


@attrs.define(kw_only=True, eq=False)
class _Held:
    """An operation that was accepted and is not over."""

    ticket: OperationTicket
    transfers: tuple[PoolTransfer, ...]
    is_load: bool
    started: bool
    is_touch: bool = False


class SyncLinker(UnifiedCacheLinker, TouchingLinker):
    """Moves bytes between device pools and stores within `run`, and says nothing by itself.

    Thread: one.
    """

    def __init__(
        self,
        *,
        pools: Mapping[PoolName, DevicePool],
        stores: Mapping[PoolName, PageStore],
        copier: Copier,
    ) -> None:
        """Join device pools and stores by their names; the stores stay their owner's."""
        self._pools = dict(pools)
        self._stores = dict(stores)
        self._copier = copier
        #: Methods that raise a `StorageError`.
        self.raising: set[str] = set()
        #: Methods that refuse: "load", "offload" or "touch".
        self.refusing: set[str] = set()
        #: The calls so far, by name.
        self.calls: list[str] = []
        self._held: dict[OperationId, _Held] = {}
        self._completed_loads: deque[Completion] = deque()
        self._completed_offloads: deque[Completion] = deque()

    # -- what a test says --------------------------------------------------------------------------

    @property
    def queued(self) -> tuple[OperationId, ...]:
        """Loads that were not started, oldest first."""
        return tuple(op for op, held in self._held.items() if not held.started)

    @property
    def started(self) -> tuple[OperationId, ...]:
        """Loads that were started, offloads and touches, oldest first."""
        return tuple(op for op, held in self._held.items() if held.started)

    def run(self, op: OperationId) -> Outcome:
        """Move all bytes of a started operation, unless it is decided, and complete it.

        Returns:
            How it ended.
        """
        held = self._held[op]
        if held.ticket.decided:
            outcome = Outcome.FAILED
        else:
            try:
                move = self._load if held.is_load else self._offload
                done = all(map(self._touch if held.is_touch else move, held.transfers))
            except StorageError:
                done = False
            outcome = Outcome.LANDED if done else Outcome.FAILED
        self.complete(op, outcome)
        return outcome

    def run_all(self) -> None:
        """`run` everything that was started."""
        for op in self.started:
            self.run(op)

    def complete(self, op: OperationId, outcome: Outcome, *, quiesced: bool = True) -> None:
        """Say something of an operation without moving a byte; it is held until it is quiesced."""
        held = self._held.pop(op) if quiesced else self._held[op]
        completion = Completion(op=op, outcome=outcome, quiesced=quiesced)
        (self._completed_loads if held.is_load else self._completed_offloads).append(completion)

    # -- what the wrapper calls --------------------------------------------------------------------

    @property
    @override
    def pools(self) -> frozenset[PoolName]:
        """The pools that it was made with."""
        return frozenset(self._pools)

    @property
    @override
    def layer_done_counter(self) -> LayerCounter | None:
        """None: it takes staged loads only."""
        return None

    @override
    def lookup(
        self, request_id: RequestId, transfers: Sequence[PoolTransfer]
    ) -> PoolTransferResult:
        """The prefixes that the stores together can restore."""
        self._enter("lookup")
        keys = next(
            transfer.keys for transfer in transfers if transfer.name is PoolName.KV
        ).resolve()
        lengths = PageBits.all(len(keys))
        for transfer in transfers:
            lengths &= transfer.restorable(self._stores[transfer.name].contains(keys))
        return PoolTransferResult(restorable_prefix_pages=lengths)

    @override
    def load(
        self, ticket: OperationTicket, transfers: Sequence[PoolTransfer], mode: LoadMode
    ) -> bool:
        """Queue a staged load."""
        self._enter("load")
        if mode is not LoadMode.STAGED or "load" in self.refusing:
            return False
        self._hold(ticket, transfers, is_load=True)
        return True

    @override
    def start_layer_wise_loading(self) -> BatchIndex | None:
        """Count what is queued as started."""
        self._enter("start_layer_wise_loading")
        for held in self._held.values():
            held.started = True
        return None

    @override
    def finish_layer_wise_loading(self, batch: BatchIndex | None) -> bool:
        """True for no batch: there are none."""
        return batch is None

    @override
    def cancel_queued_load(self, op: OperationId) -> bool:
        """Take back a load that was not started."""
        self._enter("cancel_queued_load")
        if op not in self.queued:
            return False
        del self._held[op]
        return True

    @override
    def num_completed_loads(self) -> int:
        """How many load completions wait."""
        return len(self._completed_loads)

    @override
    def pop_completed_load(self) -> Completion:
        """The oldest load completion."""
        self._enter("pop_completed_load")
        return _pop(self._completed_loads)

    @override
    def offload(self, ticket: OperationTicket, transfers: Sequence[PoolTransfer]) -> bool:
        """Take the storing of a node."""
        self._enter("offload")
        if "offload" in self.refusing:
            return False
        self._hold(ticket, transfers, is_load=False)
        return True

    @override
    def touch(self, ticket: OperationTicket, transfers: Sequence[PoolTransfer]) -> bool:
        """Take the touching of a node."""
        self._enter("touch")
        if "touch" in self.refusing:
            return False
        self._hold(ticket, transfers, is_load=False)
        self._held[ticket.op].is_touch = True
        return True

    @override
    def num_completed_offloads(self) -> int:
        """How many offload completions wait."""
        return len(self._completed_offloads)

    @override
    def pop_completed_offload(self) -> Completion:
        """The oldest offload completion."""
        self._enter("pop_completed_offload")
        return _pop(self._completed_offloads)

    @override
    def reset(self) -> None:
        """Drop everything."""
        self._enter("reset")
        self._held.clear()
        self._completed_loads.clear()
        self._completed_offloads.clear()

    @override
    def close(self) -> None:
        """`reset`."""
        self._enter("close")
        self.reset()

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        if call in self.raising:
            raise StorageError(f"{call}: a fault that the test asked for", transient=True)

    def _hold(
        self, ticket: OperationTicket, transfers: Sequence[PoolTransfer], *, is_load: bool
    ) -> None:
        self._held[ticket.op] = _Held(
            ticket=ticket, transfers=tuple(transfers), is_load=is_load, started=not is_load
        )

    def _load(self, transfer: PoolTransfer) -> bool:
        pool, store = self._pools[transfer.name], self._stores[transfer.name]
        keys, rows = transfer.keys.resolve(), pool.page_rows(transfer)
        handles = store.open(keys, ttl_s=1.0)
        for layer_range, size in enumerate(pool.range_bytes):
            staging = self._copier.staging(len(keys) * size)
            if not store.read(handles, layer_range, staging.buffer).complete:
                return False
            self._copier.scatter(pool.region(layer_range, rows), staging.tensor).wait(1.0)
        return True

    def _touch(self, transfer: PoolTransfer) -> bool:
        return self._stores[transfer.name].contains(transfer.keys.resolve()).complete

    def _offload(self, transfer: PoolTransfer) -> bool:
        pool, store = self._pools[transfer.name], self._stores[transfer.name]
        keys, rows = transfer.keys.resolve(), pool.page_rows(transfer)
        parts: list[memoryview] = []
        for layer_range, size in enumerate(pool.range_bytes):
            staging = self._copier.staging(len(keys) * size)
            self._copier.gather(pool.region(layer_range, rows), staging.tensor).wait(1.0)
            parts.append(staging.buffer)
        return store.put(keys, parts).complete


def _pop(completions: deque[Completion]) -> Completion:
    if not completions:
        raise ContractError("pop_completed: expected a completion, got none")
    return completions.popleft()
