"""`PoisoningAllocator`: whoever reads a freed page reads NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from typing_extensions import override

from radixlink_contracts import SlotAllocator

if TYPE_CHECKING:
    import torch

    from radixlink_transformers._pool import PagedKVPool


class PoisoningAllocator(SlotAllocator):
    """Another allocator, whose freed pages are overwritten. For debugging.

    Cost: a write of each freed page in each layer.
    """

    def __init__(self, allocator: SlotAllocator, pool: PagedKVPool) -> None:
        """Deal out the slots of this allocator, which are the pool's."""
        self._allocator: Final = allocator
        self._pool: Final = pool

    @property
    @override
    def page_size(self) -> int:
        return self._allocator.page_size

    @property
    @override
    def size(self) -> int:
        return self._allocator.size

    @property
    @override
    def available_size(self) -> int:
        return self._allocator.available_size

    @override
    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        return self._allocator.alloc(num_tokens)

    @override
    def free(self, indices: torch.Tensor) -> None:
        # The allocator first: it refuses a page that is not in use, which must then stay as it is.
        self._allocator.free(indices)
        self._pool.poison(self._pool.rows_of(indices))
