"""`ComponentTransfers`: the phases of a transfer, over all components in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import attrs

from radixlink_contracts import ComponentType, ExternalLinkerLoadPhase, LinkerTransferPhase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import (
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
        self, keys: PageKeySource, request: RequestKV, prefix_len: int
    ) -> tuple[PoolTransfer, ...] | None:
        """Allocate for every component; None where one has no room, and nothing is taken then."""
        transfers: list[PoolTransfer] = []
        for component in self._components:
            transfer = component.build_external_linker_transfer(
                LinkerTransferPhase.LOAD, None, keys
            )
            if transfer is None:
                self.abort(transfers, request, prefix_len)
                return None
            transfers.append(transfer)
        return tuple(transfers)

    def prepare(
        self, transfers: Sequence[PoolTransfer], request: RequestKV, prefix_len: int
    ) -> None:
        """The load has its slots; whether the linker took it is its verdict."""
        for component, transfer in zip(self._components, transfers, strict=True):
            component.update_external_linker_load(
                ExternalLinkerLoadPhase.PREPARE,
                request=request,
                full_transfer=transfers[0],
                transfer=transfer,
                prefix_len=prefix_len,
            )

    def brought(
        self, transfers: Sequence[PoolTransfer], prefix_len: int
    ) -> tuple[dict[ComponentType, int], int | None]:
        """What an insert has to be told of what a load brought beside full attention.

        Returns:
            From which token on there is a window, where there are windows; and the state's slot.
        """
        floors: dict[ComponentType, int] = {}
        state: int | None = None
        for component, transfer in zip(self._components, transfers, strict=True):
            slots = transfer.device_indices
            assert slots is not None, "a load has slots"
            match component.component_type:
                case ComponentType.FULL:
                    pass
                case ComponentType.SWA:
                    floors[ComponentType.SWA] = prefix_len - len(slots)
                case ComponentType.MAMBA:
                    state = int(slots)
                case kind:
                    assert_never(kind)
        return floors, state

    def commit(
        self,
        transfers: Sequence[PoolTransfer],
        prefix_len: int,
        result: InsertResult,
    ) -> None:
        """What landed was inserted."""
        for component, transfer in zip(self._components, transfers, strict=True):
            component.update_external_linker_load(
                ExternalLinkerLoadPhase.COMMIT,
                request=None,
                full_transfer=transfers[0],
                transfer=transfer,
                prefix_len=prefix_len,
                insert_result=result,
            )

    def abort(
        self, transfers: Sequence[PoolTransfer], request: RequestKV | None, prefix_len: int
    ) -> None:
        """Take back what was allocated, in reverse order; the last components may have none."""
        built = zip(self._components, transfers, strict=False)
        for component, transfer in reversed(list(built)):
            component.update_external_linker_load(
                ExternalLinkerLoadPhase.ABORT,
                request=request,
                full_transfer=transfers[0],
                transfer=transfer,
                prefix_len=prefix_len,
            )
