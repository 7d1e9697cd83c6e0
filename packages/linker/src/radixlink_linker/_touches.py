"""`Touches`: stored nodes that stay hot are used in the store too, so that they are not its coldest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixlink_linker._operation import TouchOperation, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from radixlink_contracts import LinkedTreeCore, NodeId
    from radixlink_linker._component_transfers import ComponentTransfers
    from radixlink_linker._counters import LinkerCounters
    from radixlink_linker._guarded_linker import GuardedLinker
    from radixlink_linker._operation_table import OperationTable


class Touches:
    """The touches of one replica. One node is one operation, without slots and without a lock.

    The tree names what is hot at an insert, which every request ends with, so that a match is not
    slowed: of what is stored of the path, the nodes that the store was last known to have used long
    ago. What is over the cap is not kept: the next insert that passes names it again.

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
        max_touches: int,
        counters: LinkerCounters,
    ) -> None:
        """Start with none.

        Args:
            tree: Whose nodes they are.
            operations: What else is on its way.
            transfers: Names the keys.
            linker: Touches.
            max_touches: How many may be on their way at once.
            counters: Of what happens.
        """
        self._tree = tree
        self._operations = operations
        self._transfers = transfers
        self._linker = linker
        self._max_touches = max_touches
        self._counters = counters
        #: Touches that are not over.
        self._num_begun = 0

    def begin(self, node_ids: Iterable[NodeId]) -> None:
        """Touch nodes, root first, as many as the cap allows: a head is worth more than what follows."""
        for node_id in node_ids:
            if self._num_begun == self._max_touches or not self._operations.has_room():
                return
            transfers = self._transfers.touch(self._tree.node(node_id))
            op, deadline = self._operations.mint()
            operation = TouchOperation(op, node_id, deadline, transfers)
            self._tree.mark_touch_pending(node_id, op)
            self._operations.add(operation)
            self._num_begun += 1
            self._linker.touch(operation)

    def decide(self, operation: TouchOperation) -> None:
        """The ranks agreed: all is there on all of them, or the node is unstored."""
        present = operation.verdict is Verdict.DONE
        self._tree.finish_touch(operation.op, present=present)
        self._num_begun -= 1
        if present:
            self._counters.touches_landed += 1
        else:
            self._counters.touches_failed += 1

    def clear(self) -> None:
        """Nobody will decide those that are not over; the tree forgets them too."""
        self._num_begun = 0
