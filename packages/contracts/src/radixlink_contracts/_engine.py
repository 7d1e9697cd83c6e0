"""What an engine hands in: its request's slots and its allocators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from typing_extensions import override

if TYPE_CHECKING:
    import torch

    from radixlink_contracts._ids import RequestId
    from radixlink_contracts._keys import RadixKey


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

    def repoint(self, start: int, indices: torch.Tensor) -> None:
        """From token `start` on the request's KV lies in these slots, which are the cache's.

        Called for layer-wise loads alone: at admission, and once more where the tree had the pages when they landed.

        Args:
            start: Token.
            indices: Shape: (n,) int64, on the device of the allocator's slots.
        """
        ...


class SlotAllocator(Protocol):
    """Deals out slots of one pool. A slot holds one token; pages are runs of `page_size` aligned slots.

    All tensors of slots that it returns are on one device of its choice, host memory or the pool's, and those that it
    is given are on that device too. On another device than the host, whoever looks at their values waits for it.

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
            contiguous and aligned, on the allocator's device.
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


@runtime_checkable
class PairedAllocator(SlotAllocator, Protocol):
    """A full pool with a window pool beside it, and which slot of the one stands beside which of the other.

    Its own `alloc` and `free` are the engine's: both sides at once. `full` and `swa` are one side alone, for loads and
    for the tree, which keeps full slots longer than their window. A slot has at most one partner, and both are in use:
    whatever frees a window slot, on any of the three ways, parts the pair.

    `size` is the full pool's; `available_size` the lesser of both.
    """

    @property
    def full(self) -> SlotAllocator:
        """The full pool alone.

        Its `alloc` gives slots without a partner, its `free` takes only such: `ContractError` where a partner would be
        left in use that nothing names.
        """
        ...

    @property
    def swa(self) -> SlotAllocator:
        """The window pool alone.

        Its `alloc` gives slots without a partner; its `free` parts those that have one.
        """
        ...

    @override
    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """Take full slots and as many window slots, as pairs.

        Args:
            num_tokens: A multiple of the page size.

        Returns:
            The full slots, or None when one of the pools has not enough; nothing is taken then. Shape: (num_tokens,)
            int64, each page contiguous and aligned.
        """
        ...

    @override
    def free(self, indices: torch.Tensor) -> None:
        """Give full slots back, and the window slots of those that have one.

        Args:
            indices: Full slots. Shape: (n * page_size,) int64, each page contiguous and aligned.

        Raises:
            ContractError: A page is free already, or no page of the full pool. Nothing is freed then.
        """
        ...

    def map_full_to_swa(self, full_indices: torch.Tensor, swa_indices: torch.Tensor) -> None:
        """Pair slot i of the one with slot i of the other.

        Pairs that either was part of end. A window slot that so loses its partner stays in use: its owner frees it.

        Args:
            full_indices: Shape: (n * page_size,) int64, each page contiguous and aligned.
            swa_indices: Shape: as `full_indices`.

        Raises:
            ContractError: They are not equally many, or not distinct pages in use. Nothing changes then.
        """
        ...

    def swa_indices(self, full_indices: torch.Tensor) -> torch.Tensor:
        """The partners of full slots.

        Args:
            full_indices: Shape: (n,) int64, any slots of the full pool.

        Returns:
            Shape: (n,) int64, -1 where there is none.

        Raises:
            ContractError: A slot is outside the pool.
        """
        ...

    def free_swa(self, full_indices: torch.Tensor) -> int:
        """Give back the window slots of full slots that leave the window, and keep these.

        Args:
            full_indices: Shape: (n * page_size,) int64, each page contiguous and aligned; with or without partners.

        Returns:
            How many window slots were given back.

        Raises:
            ContractError: They are not distinct pages in use of the full pool. Nothing is freed then.
        """
        ...


class StateAllocator(Protocol):
    """Deals out recurrent-state slots. A slot holds one state, of whatever length of prefix.

    Ranks: all, the same calls in the same order; the answers are then the same.
    Thread: the scheduler's.
    """

    @property
    def size(self) -> int:
        """States of the pool."""
        ...

    @property
    def available_size(self) -> int:
        """States that `alloc` can still give."""
        ...

    def alloc(self) -> int | None:
        """Take one state slot, or None when there is none. What is in it is anything."""
        ...

    def free(self, slot: int) -> None:
        """Give one state slot back.

        Raises:
            ContractError: It is free already, or no slot of this pool. Nothing is freed then.
        """
        ...
