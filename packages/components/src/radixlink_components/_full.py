"""`FullComponent`: full attention, the base that decides whether a node exists.

| phase | keys | slots | who frees the slots |
|---|---|---|---|
| OFFLOAD | the node's | the node's | nobody here: the tree keeps them |
| LOOKUP | the missing tail's | none | |
| LOAD | the missing tail's | taken here, after eviction where they lack | see below |
| ABORT | | | `release`, for all |

So each slot that LOAD took ends up in the tree, in an action of the insert after the load, or in
`release`; never in two of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never

from typing_extensions import override

from radixlink_components._allocation import allocate
from radixlink_contracts import (
    ComponentType,
    ExternalLinkerLoadPhase,
    LinkerComponent,
    LinkerTransferPhase,
    PoolName,
    PoolTransfer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from radixlink_contracts import (
        InsertResult,
        PageKeySource,
        RequestKV,
        SlotAllocator,
        TreeNodeView,
    )


class FullComponent(LinkerComponent):
    """The external phases of full attention. It keeps nothing between calls.

    Ranks: all, the same calls in the same order.
    Thread: the scheduler's, but for LOOKUP: any.
    """

    def __init__(
        self,
        *,
        allocator: SlotAllocator,
        evict: Callable[[int], None],
        release: Callable[[torch.Tensor], None],
    ) -> None:
        """Take what it works with.

        Args:
            allocator: Deals out the slots of full attention alone; never one that takes slots of
                another component with them.
            evict: Makes that many tokens free where it can.
            release: Takes back the slots of a load that is given up. It decides when they may be
                used again: what a running batch or copy may still touch is not free at once.
        """
        self._allocator: Final = allocator
        self._evict: Final = evict
        self._release: Final = release

    @property
    @override
    def component_type(self) -> ComponentType:
        """FULL."""
        return ComponentType.FULL

    @override
    def build_external_linker_transfer(
        self,
        phase: LinkerTransferPhase,
        node: TreeNodeView | None,
        keys: PageKeySource | None,
    ) -> PoolTransfer | None:
        """Say which pages a phase moves: all of a node, all of a tail.

        See `LinkerComponent.build_external_linker_transfer`.
        """
        match phase:
            case LinkerTransferPhase.OFFLOAD:
                if node is None or not node.num_tokens:
                    return None
                return PoolTransfer(
                    name=PoolName.KV, keys=node.page_keys, device_indices=node.device_indices
                )
            case LinkerTransferPhase.LOOKUP:
                if keys is None or not len(keys):
                    return None
                return PoolTransfer(name=PoolName.KV, keys=keys)
            case LinkerTransferPhase.LOAD:
                if keys is None or not len(keys):
                    return None
                num_tokens = len(keys) * self._allocator.page_size
                slots = allocate(self._allocator, self._evict, num_tokens)
                if slots is None:
                    return None
                return PoolTransfer(name=PoolName.KV, keys=keys, device_indices=slots)
            case _:
                assert_never(phase)

    @override
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
        """ABORT takes the slots back; see `LinkerComponent.update_external_linker_load`."""
        if phase is ExternalLinkerLoadPhase.ABORT and transfer.device_indices is not None:
            self._release(transfer.device_indices)
