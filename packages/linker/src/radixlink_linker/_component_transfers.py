"""`ComponentTransfers`: the phases of a transfer, over all components in their order."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import attrs

from radixlink_contracts import (
    POOL_OF,
    ExternalLinkerLoadPhase,
    LinkerTransferPhase,
    PoolName,
)
from radixlink_linker._transfers import transfer_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from radixlink_contracts import (
        ComponentType,
        InsertResult,
        LinkerComponent,
        PageKeySource,
        PoolTransfer,
        RequestKV,
        TreeNodeView,
    )


class ComponentTransfers:
    """Builds the transfers of an operation, full attention first, and follows what becomes of them.

    Ranks: all, the same calls in the same order.
    Thread: the scheduler's, but for `lookup`: any.
    """

    def __init__(self, components: Sequence[LinkerComponent]) -> None:
        """Ask these components, in this order."""
        self._components = tuple(components)

    def lookup(self, keys: PageKeySource) -> list[PoolTransfer] | None:
        """What every component asks for; None where one cannot take part."""
        transfers: list[PoolTransfer] = []
        for component in self._components:
            transfer = component.build_external_linker_transfer(
                LinkerTransferPhase.LOOKUP, None, keys
            )
            if transfer is None:
                return None
            transfers.append(transfer)
        return transfers

    def offload(self, node: TreeNodeView) -> tuple[PoolTransfer, ...]:
        """What no store is known to hold of a node, in the components' order; empty for nothing."""
        return self._of_node(node, stored=False)

    def touch(self, node: TreeNodeView) -> tuple[PoolTransfer, ...]:
        """What a node holds and the store is known to hold, without slots: nothing is moved."""
        transfers = self._of_node(node, stored=True)
        return tuple(attrs.evolve(transfer, device_indices=None) for transfer in transfers)

    def _of_node(self, node: TreeNodeView, *, stored: bool) -> tuple[PoolTransfer, ...]:
        """What a node holds that is stored, or is not, in the components' order."""
        unstored = node.unstored
        built = (
            component.build_external_linker_transfer(LinkerTransferPhase.OFFLOAD, node, None)
            for component in self._components
            if (component.component_type in unstored) is not stored
        )
        return tuple(transfer for transfer in built if transfer is not None)

    def load(
        self, keys: Mapping[ComponentType, PageKeySource], request: RequestKV, prefix_len: int
    ) -> tuple[PoolTransfer, ...] | None:
        """Allocate for every component that lacks something.

        Args:
            keys: What each lacks.
            request: Whom it is for.
            prefix_len: Tokens of the sequence up to the end of the load.

        Returns:
            In the components' order. None where one has no room; nothing is taken then, nor where
            one raises.
        """
        transfers: list[PoolTransfer] = []
        with ExitStack() as undo:
            # Looks at the list when it is called.
            undo.callback(self.abort, transfers, request, prefix_len)
            for component in self._components:
                lacking = keys.get(component.component_type)
                if lacking is None:
                    continue
                transfer = component.build_external_linker_transfer(
                    LinkerTransferPhase.LOAD, None, lacking
                )
                if transfer is None:
                    return None
                transfers.append(transfer)
            undo.pop_all()
        return tuple(transfers)

    def prepare(
        self, transfers: Sequence[PoolTransfer], request: RequestKV, prefix_len: int
    ) -> None:
        """The load has its slots; whether the linker took it is its verdict."""
        full = transfer_of(transfers, PoolName.KV)
        for component, transfer in self._taking_part(transfers):
            component.update_external_linker_load(
                ExternalLinkerLoadPhase.PREPARE,
                request=request,
                full_transfer=full,
                transfer=transfer,
                prefix_len=prefix_len,
            )

    def commit(
        self,
        transfers: Sequence[PoolTransfer],
        prefix_len: int,
        result: InsertResult,
    ) -> None:
        """What landed was inserted."""
        full = transfer_of(transfers, PoolName.KV)
        for component, transfer in self._taking_part(transfers):
            component.update_external_linker_load(
                ExternalLinkerLoadPhase.COMMIT,
                request=None,
                full_transfer=full,
                transfer=transfer,
                prefix_len=prefix_len,
                insert_result=result,
            )

    def abort(
        self, transfers: Sequence[PoolTransfer], request: RequestKV | None, prefix_len: int
    ) -> None:
        """Take back what was allocated, in reverse order."""
        for count in range(len(transfers), 0, -1):
            self.abort_last(transfers[:count], request, prefix_len)

    def abort_last(
        self, transfers: Sequence[PoolTransfer], request: RequestKV | None, prefix_len: int
    ) -> None:
        """Take back what was allocated last: at least one transfer, in the components' order."""
        component, transfer = self._taking_part(transfers)[-1]
        component.update_external_linker_load(
            ExternalLinkerLoadPhase.ABORT,
            request=request,
            full_transfer=transfer_of(transfers, PoolName.KV),
            transfer=transfer,
            prefix_len=prefix_len,
        )

    def _taking_part(
        self, transfers: Sequence[PoolTransfer]
    ) -> list[tuple[LinkerComponent, PoolTransfer]]:
        """The components that a load brings something of, in their order, beside what that is."""
        return [
            (component, transfer)
            for component in self._components
            if (transfer := transfer_of(transfers, POOL_OF[component.component_type])) is not None
        ]
