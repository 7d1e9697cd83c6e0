"""What an engine hands in: its request's slots and its allocators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from radixlink_contracts._ids import RequestId
    from radixlink_contracts._keys import RadixKey
    from radixlink_contracts._pools import ComponentType


class RequestKV(Protocol):
    """An engine's request, as far as the cache needs to know it.

    Thread: the scheduler's.
    """

    @property
    def request_id(self) -> RequestId:
        """Its id, the same on all ranks."""
        ...

    @property
    def key(self) -> RadixKey:
        """The sequence to match: what of the prompt need not be computed, so at most all but its last token."""
        ...

    @property
    def kv_allocated_len(self) -> int:
        """Tokens that the request has slots for (provisional: of use with layer-wise loads)."""
        ...

    def evicted_floor(self, component: ComponentType) -> int:
        """The token below which the request's own state of an auxiliary component is gone (provisional)."""
        ...

    def repoint(self, start: int, indices: torch.Tensor) -> None:
        """From token `start` on the request's KV lives in these slots (provisional: with layer-wise loads).

        Args:
            start: Token.
            indices: Shape: (n,) int64.
        """
        ...

    @property
    def state_slot(self) -> int | None:
        """The request's own recurrent-state slot (provisional)."""
        ...


class SlotAllocator(Protocol):
    """Deals out slots of one pool. A slot holds one token; pages are runs of `page_size` aligned slots.

    Ranks: all, the same calls in the same order; the answers are then the same.
    Thread: the scheduler's.
    """

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        ...

    @property
    def size(self) -> int:
        """Slots of the pool."""
        ...

    @property
    def available_size(self) -> int:
        """Slots that `alloc` can still give."""
        ...

    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """Take slots for whole pages.

        Args:
            num_tokens: A multiple of the page size.

        Returns:
            The slots, or None when there are not enough; nothing is taken then. Shape: (num_tokens,) int64, each page
            contiguous and aligned.
        """
        ...

    def free(self, indices: torch.Tensor) -> None:
        """Give whole pages back.

        Args:
            indices: Shape: (n * page_size,) int64, each page contiguous and aligned.

        Raises:
            ContractError: A page is free already, or no page of this pool. Nothing is freed then.
        """
        ...


class PairedAllocator(SlotAllocator, Protocol):
    """A full pool with a window pool beside it and a mapping between their slots (provisional)."""

    @property
    def swa(self) -> SlotAllocator:
        """The window pool."""
        ...

    def map_full_to_swa(self, full_indices: torch.Tensor, swa_indices: torch.Tensor) -> None:
        """Pair full slots with window slots. Shape of both: (n,) int64."""
        ...


class StateAllocator(Protocol):
    """Deals out recurrent-state slots (provisional)."""

    @property
    def available_size(self) -> int:
        """States that `alloc` can still give."""
        ...

    def alloc(self) -> int | None:
        """Take one state slot, or None."""
        ...

    def free(self, slot: int) -> None:
        """Give one state slot back."""
        ...
