"""`Offloads`: which nodes are due to be stored, and what became of those that are on their way."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from radixlink_contracts import IncLockRefParams
from radixlink_contracts.errors import StaleHandleError
from radixlink_linker._operation import OffloadOperation, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from radixlink_contracts import LinkedTreeCore, NodeId, TreeNodeView
    from radixlink_linker._component_transfers import ComponentTransfers
    from radixlink_linker._counters import LinkerCounters
    from radixlink_linker._guarded_linker import GuardedLinker
    from radixlink_linker._operation_table import OperationTable
    from radixlink_linker._report import ReportBuilder


class Offloads:
    """The offloads of one replica. One node is one operation.

    Ranks: all, the same calls in the same order.
    Thread: the scheduler's.
    """

    def __init__(
        self,
        *,
        tree: LinkedTreeCore,
        operations: OperationTable,
        transfers: ComponentTransfers,
        linker: GuardedLinker,
        counters: LinkerCounters,
    ) -> None:
        """Start with nothing due."""
        self._tree = tree
        self._operations = operations
        self._transfers = transfers
        self._linker = linker
        self._counters = counters
        #: Nodes whose offload waits for the cap of operations, oldest first. Written only here.
        self.due: dict[NodeId, None] = {}

    def add(self, node_ids: Iterable[NodeId]) -> None:
        """Offload nodes, root first; what is over the cap of operations waits for its turn."""
        self.due.update(dict.fromkeys(node_ids))
        self.start()

    def start(self) -> None:
        """Start what is due, as far as the cap allows; what was evicted meanwhile is due no more.

        A node that is being offloaded stays due for what came to it since.
        """
        over: list[NodeId] = []
        for node_id in self.due:
            if not self._operations.has_room():
                break
            try:
                node = self._tree.node(node_id)
            except StaleHandleError:
                over.append(node_id)
                continue
            waits = node.pending_operation is not None
            # A split since has left a part of it above.
            for part in self._tree.backup_path(node_id):
                if not self._operations.has_room():
                    waits = True
                    break
                self._offload_node(self._tree.node(part))
            if not waits:
                over.append(node_id)
        for node_id in over:
            del self.due[node_id]

    def _offload_node(self, node: TreeNodeView) -> None:
        """Lock, mint, and hand one node to the linker. What raises in between leaves no lock behind."""
        node_id = node.node_id
        transfers = self._transfers.offload(node)
        if not transfers:
            return
        receipt = self._tree.inc_lock_ref(IncLockRefParams(node_id=node_id))
        try:
            op, deadline = self._operations.mint()
            operation = OffloadOperation(op, receipt, deadline, transfers)
            self._tree.mark_offload_pending(node_id, op)
        except BaseException:
            self._tree.dec_lock_ref(receipt.to_dec_params())
            raise
        # From here on it has an end, which gives the lock back.
        self._operations.add(operation)
        self._linker.offload(operation)

    def decide(self, operation: OffloadOperation, report: ReportBuilder) -> None:
        """The ranks agreed: the node is stored, or is as before."""
        stored = operation.verdict is Verdict.DONE
        self._tree.finish_offload(operation.op, stored=stored)
        if stored:
            self._counters.offloads_stored += 1
            report.num_offloads_stored += 1
        else:
            self._counters.offloads_failed += 1
            report.num_offloads_failed += 1
            self._drop_what_waits_behind()

    def _drop_what_waits_behind(self) -> None:
        """Nothing is offered behind what just failed; what is due there waits for its next use, too.

        Else it would be due until there is room, and by then uses of other paths would have what
        failed tried again.
        """
        for node_id in list(self.due):
            with contextlib.suppress(StaleHandleError):
                node = self._tree.node(node_id)
                if node.pending_operation is not None or self._tree.backup_path(node_id):
                    continue
            del self.due[node_id]

    def clear(self) -> None:
        """Nothing is due any more."""
        self.due.clear()
