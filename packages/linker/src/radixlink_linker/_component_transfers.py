"""`ComponentTransfers`: the phases of a transfer, over all components in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixlink_contracts import ExternalLinkerLoadPhase, LinkerTransferPhase

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

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
        """What the components have at a node; empty for nothing."""
        built = (
            component.build_external_linker_transfer(LinkerTransferPhase.OFFLOAD, node, None)
            for component in self._components
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
        """The load was accepted."""
        for component, transfer in zip(self._components, transfers, strict=True):
            component.update_external_linker_load(
                ExternalLinkerLoadPhase.PREPARE,
                request=request,
                full_transfer=transfers[0],
                transfer=transfer,
                prefix_len=prefix_len,
            )

    def commit(
        self,
        transfers: Sequence[PoolTransfer],
        prefix_len: int,
        result: InsertResult,
        canonical_full: torch.Tensor,
    ) -> None:
        """What landed was inserted. `canonical_full` are the tree's slots of the loaded range."""
        for component, transfer in zip(self._components, transfers, strict=True):
            component.update_external_linker_load(
                ExternalLinkerLoadPhase.COMMIT,
                request=None,
                full_transfer=transfers[0],
                transfer=transfer,
                prefix_len=prefix_len,
                insert_result=result,
                canonical_full=canonical_full,
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
