"""`Bridge`: SGLang's calls of a linker, answered by a `StoreLinker`.

SGLang's wrapper decides together with the other ranks; it asks each rank for local facts: which
prefixes its store has, whether a batch of loads landed, whether an offload did. Rules of the file:

1. what SGLang branches on without asking the other ranks says the same on all of them. A load or an
   offload is accepted by its transfers alone; whatever goes wrong on this rank is its verdict later;
2. an offload is answered once, in the order of submission, when its slots are touched no more;
3. a batch of loads is finished when none of its slots is touched any more. Where a copy does not
   end, that cannot be said at all, and the engine gets an error instead;
4. nothing waits without a deadline, but for a copy that runs.

Thread: the scheduler's, but for the layer gate.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Final, TypeVar

from radixlink_contracts import (
    LoadMode,
    OperationId,
    Outcome,
    PageBits,
    PageKeys,
    PoolName,
    RequestId,
)
from radixlink_contracts.errors import ContractError, TransferTimeoutError
from radixlink_contracts.texts import named
from radixlink_sglang._known_pages import FailedPages, RestoredPages
from radixlink_sglang._layer_gate import NO_BATCH, LayerGate
from radixlink_sglang._lookups import LookupFailed, TimedLookups
from radixlink_sglang._operations import Operation, Ticket
from radixlink_sglang._transfers import translated, without

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from radixlink_contracts import (
        Clock,
        Completion,
        Executor,
        PoolTransfer,
        UnifiedCacheLinker,
    )
    from radixlink_sglang._config import LinkerConfig
    from radixlink_sglang._engine import EngineEvent, EngineTransfer
    from radixlink_sglang._ready_pools import ReadyPools

_Taken = TypeVar("_Taken")

_LOG: Final = logging.getLogger(__name__)

_POLL_S: Final = 1e-3
"""How often it is asked whether a copy has ended, where one is late."""


class Bridge:
    """One rank's loads and offloads."""

    def __init__(
        self,
        *,
        linker: UnifiedCacheLinker,
        gate: LayerGate,
        ready: ReadyPools,
        record_ready: Callable[[], Iterable[EngineEvent]],
        stored_elsewhere: Collection[PoolName],
        executor: Executor,
        clock: Clock,
        config: LinkerConfig,
    ) -> None:
        """Queue nothing yet.

        Args:
            linker: Moves the bytes.
            gate: What forwards wait on.
            ready: The pools that the linker moves between.
            record_ready: The events after which slots that SGLang hands over are ready.
            stored_elsewhere: Pools whose bytes another rank stores for this one.
            executor: Runs lookups, one at a time.
            clock: The time.
            config: How long is waited for what.
        """
        self._linker: Final = linker
        self._gate: Final = gate
        self._ready: Final = ready
        self._record_ready: Final = record_ready
        self._stored_elsewhere: Final = frozenset(stored_elsewhere)
        self._clock: Final = clock
        self._config: Final = config
        self._lookups: Final = TimedLookups(linker, executor, config.lookup_timeout_s)
        self._failed: Final = FailedPages(clock, config.miss_s)
        self._restored: Final = RestoredPages()
        self._next_op = 0
        #: Everything our linker has not finished with.
        self._operations: Final[dict[OperationId, Operation]] = {}
        self._queued: Final[dict[str, Operation]] = {}
        self._batches: Final[dict[int, tuple[Operation, ...]]] = {}
        #: Accepted and not answered yet, oldest first.
        self._offloads: Final[deque[Operation]] = deque()

    def lookup(self, rid: str, transfers: Sequence[EngineTransfer]) -> list[int]:
        """Every length, in pages, that this rank can restore; ascending.

        Raises:
            ContractError: The transfers are not what SGLang 0.5.23 sends.
        """
        asked = translated(transfers)
        pages = next((one.keys.resolve() for one in asked if one.name is PoolName.KV), PageKeys())
        known = self._failed.leading(pages)
        if not known or self._failed.all_missing:
            return []
        result = self._lookups.ask(RequestId(rid), asked)
        if isinstance(result, LookupFailed):
            _LOG.warning("lookup of request %s is a miss: %s", rid, result.why)
            if result.late:
                self._failed.add_all()
            return []
        allowed = PageBits((1 << known) - 1, len(pages))
        return [page + 1 for page in result.restorable_prefix_pages & allowed]

    def load(self, rid: str, transfers: Sequence[EngineTransfer]) -> bool:
        """Queue a load.

        Returns:
            False where there is nothing to load.

        Raises:
            ContractError: The request has a load in the queue.
        """
        if rid in self._queued:
            raise ContractError(f"load: expected one load of request {rid}, got a second one")
        operation = self._new_operation(translated(transfers))
        if not operation.transfers:
            return False
        self._queued[rid] = operation
        self._hand_over(
            operation,
            lambda: self._linker.load(operation.ticket, operation.transfers, LoadMode.LAYER_WISE),
        )
        return True

    def start_layer_wise_loading(self) -> int:
        """Start what is queued as one batch; -1 where nothing is."""
        if not self._queued:
            return NO_BATCH
        operations = tuple(self._queued.values())
        self._queued.clear()
        try:
            batch = self._when_ready(self._linker.start_layer_wise_loading, refused=None)
        except Exception as error:  # noqa: BLE001 -- as in `_hand_over`
            batch = None
            for operation in operations:
                self._linker.cancel_queued_load(operation.ticket.op)
                operation.end(Outcome.FAILED, quiesced=True, why=named(error))
        number = self._gate.open(batch)
        self._batches[number] = operations
        return number

    def finish_layer_wise_loading(self, number: int) -> bool:
        """Return when the loads of a batch touch no slot any more; True when all of them landed.

        Of a batch that is not known (it was finished, or a reset dropped it) nobody can say that
        anything landed. -1 is none, of which nothing is missing.

        Raises:
            TransferTimeoutError: A copy goes on and on, so that its slots cannot be given back.
        """
        if number == NO_BATCH:
            return True
        operations = self._batches.pop(number, None)
        if operations is None:
            _LOG.warning("finish_layer_wise_loading: expected a started batch, got %d", number)
            return False
        in_time = self._linker.finish_layer_wise_loading(self._gate.forget(number))
        self._drain()
        if not in_time:
            self._failed.add_all()
            self._give_up(operations)
        for operation in operations:
            self._operations.pop(operation.ticket.op, None)
            if operation.landed:
                self._restored.add(operation.transfers)
            else:
                self._failed.add(operation.transfers)
                _LOG.warning("a load failed: %s", operation.why or "it was late")
        return in_time and all(operation.landed for operation in operations)

    def cancel_queued_load(self, rid: str) -> bool:
        """Take a load back; True when it was queued."""
        operation = self._queued.pop(rid, None)
        if operation is None:
            return False
        self._operations.pop(operation.ticket.op, None)
        self._linker.cancel_queued_load(operation.ticket.op)
        return True

    def offload(self, transfers: Sequence[EngineTransfer]) -> bool:
        """Queue the storing of one node.

        Returns:
            False where there is nothing to store.
        """
        offered = translated(transfers)
        if not offered:
            return False
        operation = self._new_operation(tuple(self._to_store(offered)))
        self._offloads.append(operation)
        if not operation.transfers:
            operation.end(Outcome.LANDED, quiesced=True)
        elif len(self._offloads) > self._config.max_offloads:
            operation.end(Outcome.FAILED, quiesced=True, why="too many are on their way")
        else:
            self._hand_over(operation, lambda: self._offload_when_ready(operation))
        return True

    def num_completed_offloads(self) -> int:
        """How many of the oldest offloads have ended. Asked each iteration: nothing, where there is none."""
        if not self._offloads:
            return 0
        too_old = self._clock.now() - self._config.offload_timeout_s
        for operation in self._offloads:
            if operation.started_at > too_old:
                break
            operation.ticket.give_up()
        self._drain()
        for place, operation in enumerate(self._offloads):
            if not operation.quiesced:
                return place
        return len(self._offloads)

    def pop_completed_offload(self) -> bool:
        """Whether the oldest offload landed.

        Raises:
            ContractError: None has ended.
        """
        if not self._offloads or not self._offloads[0].quiesced:
            raise ContractError("pop_completed_offload: expected one that has ended, got none")
        operation = self._offloads.popleft()
        self._operations.pop(operation.ticket.op, None)
        if not operation.landed:
            _LOG.warning("an offload failed: %s", operation.why or "it was late")
        return operation.landed

    def close(self) -> None:
        """`reset`, and end the linker. Idempotent.

        Raises:
            TransferTimeoutError: A copy did not end; nothing is taken any more all the same.
        """
        self._drop_everything(self._linker.close)

    def reset(self) -> None:
        """Drop everything; return when no copy runs. Idempotent.

        Raises:
            TransferTimeoutError: A copy did not end.
        """
        self._drop_everything(self._linker.reset)

    def _drop_everything(self, end: Callable[[], None]) -> None:
        """Give everything up, have our linker end it, and forget it."""
        for operation in self._operations.values():
            operation.ticket.give_up()
        end()
        self._gate.clear()
        self._operations.clear()
        self._queued.clear()
        self._batches.clear()
        self._offloads.clear()

    def _new_operation(self, transfers: tuple[PoolTransfer, ...]) -> Operation:
        op = OperationId(self._next_op)
        self._next_op += 1
        return Operation(ticket=Ticket(op), transfers=transfers, started_at=self._clock.now())

    def _to_store(self, offered: Iterable[PoolTransfer]) -> Iterable[PoolTransfer]:
        """What of a node this rank has to store."""
        for transfer in offered:
            left = without(transfer, self._restored.take(transfer))
            if left is not None and transfer.name not in self._stored_elsewhere:
                yield left

    def _hand_over(self, operation: Operation, accept: Callable[[], bool]) -> None:
        """Hand an operation to our linker; what it says against it is the operation's end."""
        try:
            accepted, why = accept(), "the linker is closed"
        except Exception as error:  # noqa: BLE001 -- a local failure is a verdict, never a branch
            accepted, why = False, named(error)
        if accepted:
            self._operations[operation.ticket.op] = operation
        else:
            operation.end(Outcome.FAILED, quiesced=True, why=why)

    def _offload_when_ready(self, operation: Operation) -> bool:
        """Whether our linker takes an offload."""
        return self._when_ready(
            lambda: self._linker.offload(operation.ticket, operation.transfers), refused=False
        )

    def _when_ready(self, take: Callable[[], _Taken], *, refused: _Taken) -> _Taken:
        """What our linker says when it is handed slots that SGLang's streams still use.

        It may look at them at once, so the events are there before. Where it takes no slots nothing
        would ever wait for the events, so they go again.
        """
        events = tuple(self._record_ready())
        self._ready.record(events)
        try:
            taken = take()
        except Exception:
            self._ready.drop(events)
            raise
        if taken is refused:
            self._ready.drop(events)
        return taken

    def _drain(self) -> None:
        """Note how operations ended."""
        for _ in range(self._linker.num_completed_loads()):
            self._note(self._linker.pop_completed_load())
        for _ in range(self._linker.num_completed_offloads()):
            self._note(self._linker.pop_completed_offload())

    def _note(self, completion: Completion) -> None:
        operation = self._operations.get(completion.op)
        if operation is not None:
            operation.end(completion.outcome, quiesced=completion.quiesced, why=completion.why)

    def _give_up(self, operations: Sequence[Operation]) -> None:
        """Have no copy of these start any more, and wait for the one that runs.

        Raises:
            TransferTimeoutError: It goes on and on.
        """
        deadline = self._clock.now() + self._config.quiesce_timeout_s
        for operation in operations:
            operation.ticket.give_up()
        while not all(operation.quiesced for operation in operations):
            if self._clock.now() >= deadline:
                busy = next(operation for operation in operations if not operation.quiesced)
                raise TransferTimeoutError(
                    f"finish_layer_wise_loading: expected the copy of operation {busy.ticket.op} to "
                    f"end within {self._config.quiesce_timeout_s} s, but it still runs",
                    direction="load",
                    pages=sum(len(transfer.keys) for transfer in busy.transfers),
                    operation=busy.ticket.op,
                )
            time.sleep(_POLL_S)
            self._drain()
