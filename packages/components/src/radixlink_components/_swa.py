"""`SWAComponent`: sliding-window attention.

A tree keeps windows as pairs: window slots beside full slots, which the allocator knows. So a node's
window slots are asked of it, and a load has to pair those that it brings.

| phase | keys | slots |
|---|---|---|
| OFFLOAD | all pages of a node that is live | those beside the node's |
| LOOKUP | the last window of the missing tail | none |
| LOAD | the last window of the missing tail | taken here, after eviction where they lack |
| PREPARE | | the last paired with the full slots of the load; COMMIT pairs those before |
| ABORT | | `release`, which parts the pairs |

A tail that is shorter than a window is enough: the tree let the device's part end only where a
window is live, so the rest of it is there, and locked for as long as the load lasts. The keys of a
LOAD are those that the device lacks, which may be fewer still, and need not follow each other.
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
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from radixlink_contracts import (
        InsertResult,
        PageKeySource,
        PairedAllocator,
        RequestKV,
        TreeNodeView,
    )


class SWAComponent(LinkerComponent):
    """The external phases of sliding-window attention. It keeps nothing between calls.

    Ranks: all, the same calls in the same order.
    Thread: the scheduler's, but for LOOKUP: any.
    """

    def __init__(
        self,
        *,
        pair: PairedAllocator,
        sliding_window: int,
        evict: Callable[[int], None],
        release: Callable[[torch.Tensor], None],
    ) -> None:
        """Take what it works with.

        Args:
            pair: Deals out window slots and knows which full slot each is beside.
            sliding_window: Tokens that attention looks back: the tree's.
            evict: Makes that many tokens of window slots free where it can.
            release: Takes back window slots of a load that is given up, when nothing may touch them.

        Raises:
            ContractError: The window is below 1.
        """
        if sliding_window < 1:
            msg = f"SWAComponent: expected a sliding_window of at least 1, got {sliding_window}"
            raise ContractError(msg)
        self._pair: Final = pair
        self._window_pages: Final = -(-sliding_window // pair.page_size)
        self._evict: Final = evict
        self._release: Final = release

    @property
    @override
    def component_type(self) -> ComponentType:
        """SWA."""
        return ComponentType.SWA

    @override
    def build_external_linker_transfer(
        self,
        phase: LinkerTransferPhase,
        node: TreeNodeView | None,
        keys: PageKeySource | None,
    ) -> PoolTransfer | None:
        """Say which pages a phase moves: all of a live node, the last window of a tail.

        See `LinkerComponent.build_external_linker_transfer`.
        """
        match phase:
            case LinkerTransferPhase.OFFLOAD:
                if node is None or not node.has_swa:
                    return None
                slots = self._pair.swa_indices(node.device_indices)
                return self._transfer(node.page_keys, slots)
            case LinkerTransferPhase.LOOKUP:
                if keys is None or not len(keys):
                    return None
                return self._transfer(self._last_window(keys), None)
            case LinkerTransferPhase.LOAD:
                if keys is None or not len(keys):
                    return None
                keys = self._last_window(keys)
                num_tokens = len(keys) * self._pair.page_size
                slots_or_none = allocate(self._pair.swa, self._evict, num_tokens)
                return None if slots_or_none is None else self._transfer(keys, slots_or_none)
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
        """PREPARE pairs the slots, ABORT takes them back.

        Where a load brings more window pages than full ones, its first are for full slots that are
        the tree's: whoever publishes the load pairs them, so that nobody names them before.
        See `LinkerComponent.update_external_linker_load`.
        """
        slots = transfer.device_indices
        assert slots is not None, "a load has slots"
        match phase:
            case ExternalLinkerLoadPhase.PREPARE:
                full = None if full_transfer is None else full_transfer.device_indices
                if full is not None:
                    paired = min(len(full), len(slots))
                    self._pair.map_full_to_swa(full[-paired:], slots[-paired:])
            case ExternalLinkerLoadPhase.COMMIT:
                return
            case ExternalLinkerLoadPhase.ABORT:
                self._release(slots)
            case _:
                assert_never(phase)

    def _last_window(self, keys: PageKeySource) -> PageKeySource:
        """The keys of the last window, or all where there are fewer."""
        return keys.span(max(0, len(keys) - self._window_pages), len(keys))

    @staticmethod
    def _transfer(keys: PageKeySource, slots: torch.Tensor | None) -> PoolTransfer:
        return PoolTransfer(
            name=PoolName.SWA,
            keys=keys,
            device_indices=slots,
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )
