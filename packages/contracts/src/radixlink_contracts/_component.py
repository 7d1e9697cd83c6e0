"""`LinkerComponent`: how one kind of attention state takes part in external caching."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from radixlink_contracts._engine import RequestKV
    from radixlink_contracts._insert import InsertResult
    from radixlink_contracts._keys import PageKeySource
    from radixlink_contracts._phases import ExternalLinkerLoadPhase, LinkerTransferPhase
    from radixlink_contracts._pools import ComponentType
    from radixlink_contracts._transfers import PoolTransfer
    from radixlink_contracts._tree import TreeNodeView


class LinkerComponent(Protocol):
    """The external phases of a component.

    What a node holds of it is the tree's: a tree that knows its windows and states walks them without a call a node.

    Ranks: all, the same calls in the same order.
    Thread: the scheduler's, but for LOOKUP, which any thread may build: it reads nothing but its arguments.
    """

    @property
    def component_type(self) -> ComponentType:
        """Which kind of state this is."""
        ...

    def build_external_linker_transfer(
        self,
        phase: LinkerTransferPhase,
        node: TreeNodeView | None,
        keys: PageKeySource | None,
    ) -> PoolTransfer | None:
        """Say which pages of this component a phase moves.

        Args:
            phase: LOOKUP and LOAD come with keys, OFFLOAD with a node.
            node: The node to offload.
            keys: The keys of the tail that the device lacks, first missing page first.

        Returns:
            The transfer. None for OFFLOAD: nothing of this component is at the node. None for LOOKUP: the component
            cannot take part, so nothing can be restored. None for LOAD: no slots are to be had, so the load is given
            up and what other components allocated is taken back.

        Mutates: LOAD allocates slots, evicting for them where it must; the others nothing.
        """
        ...

    def update_external_linker_load(
        self,
        phase: ExternalLinkerLoadPhase,
        *,
        request: RequestKV | None,
        full_transfer: PoolTransfer | None,
        transfer: PoolTransfer,
        prefix_len: int,
        insert_result: InsertResult | None = None,
    ) -> None:
        """Follow what becomes of a load.

        Args:
            phase: PREPARE, before anything moves. COMMIT, after the insert: its actions say what becomes of slots that
                the tree did not take, so nothing is to be freed. ABORT: the component takes its slots back.
            request: Whom it is for, with PREPARE and where LOAD is given up at once. None once the load was queued:
                its request, if it is still there, is told by the wrapper.
            full_transfer: The full component's transfer of the same load.
            transfer: This component's own.
            prefix_len: Tokens of the sequence up to the end of the load.
            insert_result: With COMMIT: what the tree took, ranges included.
        """
        ...
