"""`FullComponent`: full attention, the base that decides whether a node exists.

The tree holds the slots of full attention itself, so what is left here is to say, phase by phase,
which pages move and whose slots they are:

| phase | keys | slots | who frees the slots |
|---|---|---|---|
| OFFLOAD | the node's | the node's | nobody here: the tree keeps them |
| LOOKUP | the missing tail's | none | |
| LOAD | the missing tail's | taken here, after eviction where they lack | see below |
| PREPARE | as they were | as they were | |
| COMMIT | those the tree took | those the tree took | for the rest, the insert's `FreeDeviceKV` |
| ABORT | none | none | `release`, for all |

So each slot that LOAD took ends up in the tree, in one `FreeDeviceKV`, or in `release`; never in
two of them. COMMIT frees nothing: to give back there what the tree did not take would free it
twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never

import torch
from typing_extensions import override

from radixlink_components._joined_keys import JoinedPageKeys
from radixlink_contracts import (
    ComponentType,
    ExternalLinkerLoadPhase,
    LinkerComponent,
    LinkerTransferPhase,
    PoolName,
    PoolTransfer,
)
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import (
        InsertResult,
        PageKeySource,
        RequestKV,
        SlotAllocator,
        TreeNodeView,
    )
    from radixlink_contracts.actions import CacheAction


class FullComponent(LinkerComponent):
    """The external phases of full attention.

    It keeps nothing between calls.

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
            evict: Makes that many tokens free where it can. Called before an allocation that would
                not fit; whether it helped is seen by the allocation.
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
        """Say which pages a phase moves.

        Args:
            phase: LOOKUP and LOAD come with keys, OFFLOAD with a node.
            node: The node to offload.
            keys: The keys of the tail that the device lacks, first missing page first.

        Returns:
            The transfer. None where there is nothing to move (no slots at the node, no keys in the
            tail) and for LOAD where slots are not to be had even after eviction.

        Mutates: LOAD evicts and allocates; nothing else does.
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
                slots = self._allocate(len(keys) * self._allocator.page_size)
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
        canonical_full: torch.Tensor | None = None,
    ) -> PoolTransfer | None:
        """Follow what becomes of a load.

        Args:
            phase: PREPARE, COMMIT or ABORT.
            request: Not needed here.
            full_transfer: Not needed here.
            transfer: What LOAD built.
            prefix_len: Tokens of the sequence up to the end of the load.
            insert_result: With COMMIT: what the tree took, ranges included.
            canonical_full: Not needed here.

        Returns:
            PREPARE: the transfer as it is. COMMIT: the whole pages of it that the tree took, or
            None where it took none. ABORT: None.

        Raises:
            ContractError: The transfer has no slots; the load would begin before the sequence; or
                COMMIT came without adopted ranges.

        Mutates: ABORT hands the slots to `release`; nothing else does. With COMMIT the slots that
            the tree did not take are in the `FreeDeviceKV` of the insert.
        """
        slots = transfer.device_indices
        if slots is None:
            msg = f"FullComponent {phase}: expected a transfer with slots, got one without"
            raise ContractError(msg)
        match phase:
            case ExternalLinkerLoadPhase.PREPARE:
                return transfer
            case ExternalLinkerLoadPhase.COMMIT:
                pages = self._adopted_pages(len(slots), prefix_len, insert_result)
                return self._reduced(transfer.keys, slots, pages) if pages else None
            case ExternalLinkerLoadPhase.ABORT:
                self._release(slots)
                return None
            case _:
                assert_never(phase)

    @override
    def apply_action(self, action: CacheAction) -> None:
        """Refuse: the tree routes no action to full attention.

        Raises:
            ContractError: Always.
        """
        msg = f"FullComponent: expected no action, got {type(action).__name__}"
        raise ContractError(msg)

    def _allocate(self, num_tokens: int) -> torch.Tensor | None:
        """Slots for that many tokens, evicting what is missing; None when there are not enough."""
        shortfall = num_tokens - self._allocator.available_size
        if shortfall > 0:
            self._evict(shortfall)
        return self._allocator.alloc(num_tokens)

    def _adopted_pages(
        self, num_tokens: int, prefix_len: int, insert_result: InsertResult | None
    ) -> tuple[tuple[int, int], ...]:
        """The pages of a load that the tree took, as half-open spans, ascending, from its first.

        Ranges are of tokens and absolute in the sequence; a page counts only when all of it is in.

        Raises:
            ContractError: There are no ranges, or the load would begin before the sequence.
        """
        if insert_result is None or insert_result.adopted_ranges is None:
            msg = "FullComponent commit: expected an insert with track_adopted_ranges, got none"
            raise ContractError(msg)
        start = prefix_len - num_tokens
        if start < 0:
            msg = (
                f"FullComponent commit: expected a prefix of at least the {num_tokens} tokens "
                f"that were loaded, got {prefix_len}"
            )
            raise ContractError(msg)
        page_size = self._allocator.page_size
        spans: list[tuple[int, int]] = []
        for low, high in insert_result.adopted_ranges.ranges(ComponentType.FULL):
            first = -((start - max(low, start)) // page_size)
            stop = (min(high, prefix_len) - start) // page_size
            if first < stop:
                spans.append((first, stop))
        return tuple(spans)

    def _reduced(
        self, keys: PageKeySource, slots: torch.Tensor, pages: tuple[tuple[int, int], ...]
    ) -> PoolTransfer:
        """The transfer of these spans of pages; views where one span is left."""
        page_size = self._allocator.page_size
        keys_left = [keys.span(first, stop) for first, stop in pages]
        slots_left = [slots[first * page_size : stop * page_size] for first, stop in pages]
        if len(pages) == 1:
            return PoolTransfer(name=PoolName.KV, keys=keys_left[0], device_indices=slots_left[0])
        return PoolTransfer(
            name=PoolName.KV, keys=JoinedPageKeys(keys_left), device_indices=torch.cat(slots_left)
        )
