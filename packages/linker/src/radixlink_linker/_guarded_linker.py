"""`GuardedLinker`: a linker whose every exception is this rank's verdict on an operation, and a count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixlink_contracts import Outcome, TouchingLinker
from radixlink_contracts.texts import text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import BatchIndex, PoolName, PoolTransfer, UnifiedCacheLinker
    from radixlink_linker._counters import LinkerCounters
    from radixlink_linker._operation import LoadOperation, OffloadOperation, TouchOperation
    from radixlink_linker._operation_table import OperationTable


class GuardedLinker:
    """The calls that a wrapper makes of its `UnifiedCacheLinker`. None of them raises.

    An exception is remembered by its text: itself it would keep its frames alive.

    Ranks: local.
    Thread: the scheduler's.
    """

    def __init__(
        self,
        linker: UnifiedCacheLinker,
        counters: LinkerCounters,
        *,
        elsewhere: frozenset[PoolName] = frozenset(),
    ) -> None:
        """Guard a linker, and count what goes wrong with it.

        Args:
            linker: Moves the bytes.
            counters: Of this rank.
            elsewhere: The pools of which another rank stores the same bytes: offloads and touches
                leave them out here, and are done at once where there is nothing else.
        """
        self.linker = linker
        self._touching = linker if isinstance(linker, TouchingLinker) else None
        self._counters = counters
        self._elsewhere = elsewhere

    @property
    def touches(self) -> bool:
        """True where it can touch pages."""
        return self._touching is not None

    def load(self, operation: LoadOperation) -> None:
        """Queue a load; a refusal is its failure here."""
        why = "it was refused"
        try:
            accepted = self.linker.load(operation.ticket, operation.transfers, operation.mode)
        except Exception as error:  # noqa: BLE001 -- whatever a backend raises is this rank's verdict
            accepted, why = False, self._count(error)
        if not accepted:
            operation.note(Outcome.FAILED, quiesced=True, why=why)

    def start_loads(self, queued: Sequence[LoadOperation]) -> BatchIndex | None:
        """Start these, which are all that is queued; where that fails, all of them have failed here."""
        try:
            return self.linker.start_layer_wise_loading()
        except Exception as error:  # noqa: BLE001 -- whatever a backend raises is this rank's verdict
            why = self._count(error)
            for operation in queued:
                self.cancel(operation, why)
            return None

    def cancel(self, operation: LoadOperation, why: str) -> None:
        """Give a load up on this rank before it moved.

        It is quiesced only if the linker says that it had not begun.
        """
        try:
            cancelled = self.linker.cancel_queued_load(operation.op)
        except Exception as error:  # noqa: BLE001 -- whatever a backend raises is this rank's verdict
            self._count(error)
            cancelled = False
        operation.note(Outcome.FAILED, quiesced=cancelled, why=why)

    def finish_loads(self, batch: BatchIndex) -> bool:
        """Wait for the layers of a batch; what has not ended by then, the caller counts as failed.

        Returns:
            False where its forward may have gone on without a layer.
        """
        try:
            return self.linker.finish_layer_wise_loading(batch)
        except Exception as error:  # noqa: BLE001 -- whatever a backend raises is this rank's verdict
            self._count(error)
            return False

    def offload(self, operation: OffloadOperation) -> None:
        """Queue an offload; a refusal is its failure here."""
        transfers = self._stored_here(operation)
        if not transfers:
            operation.note(Outcome.LANDED, quiesced=True)
            return
        why = "it was refused"
        try:
            accepted = self.linker.offload(operation.ticket, transfers)
        except Exception as error:  # noqa: BLE001 -- whatever a backend raises is this rank's verdict
            accepted, why = False, self._count(error)
        if not accepted:
            operation.note(Outcome.FAILED, quiesced=True, why=why)

    def touch(self, operation: TouchOperation) -> None:
        """Queue a touch; a refusal is its failure here."""
        transfers = self._stored_here(operation)
        if not transfers:
            operation.note(Outcome.LANDED, quiesced=True)
            return
        assert self._touching is not None, "the ranks agreed that all of them touch"
        why = "it was refused"
        try:
            accepted = self._touching.touch(operation.ticket, transfers)
        except Exception as error:  # noqa: BLE001 -- whatever a backend raises is this rank's verdict
            accepted, why = False, self._count(error)
        if not accepted:
            operation.note(Outcome.FAILED, quiesced=True, why=why)

    def _stored_here(
        self, operation: OffloadOperation | TouchOperation
    ) -> tuple[PoolTransfer, ...]:
        """What of an operation is this rank's to store."""
        transfers = operation.transfers
        return tuple([one for one in transfers if one.name not in self._elsewhere])

    def read_completions(self, operations: OperationTable) -> None:
        """Take in what was completed; deadlines turn what cannot be read into failures."""
        linker = self.linker
        try:
            for _ in range(linker.num_completed_loads()):
                self._counters.late_completions += not operations.note(linker.pop_completed_load())
            for _ in range(linker.num_completed_offloads()):
                completion = linker.pop_completed_offload()
                self._counters.late_completions += not operations.note(completion)
        except Exception as error:  # noqa: BLE001 -- whatever a backend raises is this rank's verdict
            self._count(error)

    def _count(self, error: Exception) -> str:
        """Count what a backend raised. Returns its text."""
        self._counters.backend_errors += 1
        self._counters.last_error = text = text_of(error)
        return text
