"""`MambaComponent`: recurrent states, of Mamba or any other kind.

A state is one object under the key of the page at whose end it stands.

| phase | keys | slots |
|---|---|---|
| OFFLOAD | the node's last, where it has a state | the node's |
| LOOKUP | the missing tail's last | none |
| LOAD | the missing tail's last | one taken here, after eviction where there is none |
| ABORT | | `release` |

A restored state becomes a checkpoint of the tree, which nobody writes to: the request that waited
for it goes on from a copy (`PrefixCache.fork_state`). Where the tree has one at that place already,
the insert after the load says so, and the slot goes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never

import torch
from typing_extensions import override

from radixlink_contracts import (
    ComponentType,
    ExternalLinkerLoadPhase,
    LinkerComponent,
    LinkerTransferPhase,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import (
        InsertResult,
        PageKeySource,
        RequestKV,
        StateAllocator,
        TreeNodeView,
    )


class MambaComponent(LinkerComponent):
    """The external phases of recurrent states. It keeps nothing between calls.

    Ranks: all, the same calls in the same order.
    Thread: the scheduler's, but for LOOKUP: any.
    """

    def __init__(
        self,
        *,
        states: StateAllocator,
        evict: Callable[[int], None],
        release: Callable[[int], None],
    ) -> None:
        """Take what it works with.

        Args:
            states: Deals out state slots.
            evict: Makes that many states free where it can.
            release: Takes back the slot of a load that is given up, when nothing may touch it.
        """
        self._states: Final = states
        self._evict: Final = evict
        self._release: Final = release

    @property
    @override
    def component_type(self) -> ComponentType:
        """MAMBA."""
        return ComponentType.MAMBA

    @override
    def build_external_linker_transfer(
        self,
        phase: LinkerTransferPhase,
        node: TreeNodeView | None,
        keys: PageKeySource | None,
    ) -> PoolTransfer | None:
        """Say which state a phase moves: that at the end of a node or tail.

        See `LinkerComponent.build_external_linker_transfer`.
        """
        match phase:
            case LinkerTransferPhase.OFFLOAD:
                if node is None or node.mamba_slot is None:
                    return None
                return _transfer(node.page_keys, node.mamba_slot)
            case LinkerTransferPhase.LOOKUP:
                if keys is None or not len(keys):
                    return None
                return _transfer(keys, None)
            case LinkerTransferPhase.LOAD:
                if keys is None or not len(keys):
                    return None
                if not self._states.available_size:
                    self._evict(1)
                slot = self._states.alloc()
                return None if slot is None else _transfer(keys, slot)
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
        """ABORT takes the slot back; see `LinkerComponent.update_external_linker_load`."""
        if phase is ExternalLinkerLoadPhase.ABORT and transfer.device_indices is not None:
            self._release(int(transfer.device_indices))


def _transfer(keys: PageKeySource, slot: int | None) -> PoolTransfer:
    """The state behind the last of these pages."""
    return PoolTransfer(
        name=PoolName.MAMBA,
        keys=keys.span(len(keys) - 1, len(keys)),
        device_indices=None if slot is None else torch.tensor([slot]),
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
    )
