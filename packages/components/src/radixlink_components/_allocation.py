"""Slots for a load, evicting for them what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from radixlink_contracts import SlotAllocator


def allocate(
    allocator: SlotAllocator, evict: Callable[[int], None], num_tokens: int
) -> torch.Tensor | None:
    """Slots for so many tokens; None when there are not enough even after eviction.

    Args:
        allocator: Where from.
        evict: Makes that many tokens free where it can; whether it helped is seen by the allocation.
        num_tokens: A multiple of the page size.

    Returns:
        Shape: (num_tokens,) int64.
    """
    shortfall = num_tokens - allocator.available_size
    if shortfall > 0:
        evict(shortfall)
    return allocator.alloc(num_tokens)
