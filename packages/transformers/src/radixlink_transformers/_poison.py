"""Allocators that overwrite what is given back: whoever reads a freed page or state reads NaN.

For debugging. Each stands before another allocator, which decides; only what that took is
overwritten, since what it refuses must stay as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from typing_extensions import override

from radixlink_contracts import PairedAllocator, SlotAllocator, StateAllocator

if TYPE_CHECKING:
    import torch

    from radixlink_transformers._pool import PagedKVPool
    from radixlink_transformers._states import StatePool


class PoisoningAllocator(SlotAllocator):
    """Another allocator, whose freed pages are overwritten.

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
        self._allocator.free(indices)
        self._pool.poison(self._pool.rows_of(indices))


class PoisoningPair(PairedAllocator):
    """Another pair of allocators, whose freed pages are overwritten, on both sides.

    Cost: a write of each freed page in each layer.
    """

    def __init__(self, pair: PairedAllocator, kv: PagedKVPool, windows: PagedKVPool) -> None:
        """Deal out the slots of this pair, which are the pools'."""
        self._pair: Final = pair
        self._kv: Final = kv
        self._windows: Final = windows
        self._full: Final = PoisoningAllocator(pair.full, kv)
        self._swa: Final = PoisoningAllocator(pair.swa, windows)

    @property
    @override
    def page_size(self) -> int:
        return self._pair.page_size

    @property
    @override
    def size(self) -> int:
        return self._pair.size

    @property
    @override
    def available_size(self) -> int:
        return self._pair.available_size

    @property
    @override
    def full(self) -> SlotAllocator:
        return self._full

    @property
    @override
    def swa(self) -> SlotAllocator:
        return self._swa

    @override
    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        return self._pair.alloc(num_tokens)

    @override
    def free(self, indices: torch.Tensor) -> None:
        partners = self._pair.swa_indices(indices)
        self._pair.free(indices)
        self._kv.poison(self._kv.rows_of(indices))
        self._poison_windows(partners)

    @override
    def map_full_to_swa(self, full_indices: torch.Tensor, swa_indices: torch.Tensor) -> None:
        self._pair.map_full_to_swa(full_indices, swa_indices)

    @override
    def swa_indices(self, full_indices: torch.Tensor) -> torch.Tensor:
        return self._pair.swa_indices(full_indices)

    @override
    def free_swa(self, full_indices: torch.Tensor) -> int:
        partners = self._pair.swa_indices(full_indices)
        freed = self._pair.free_swa(full_indices)
        self._poison_windows(partners)
        return freed

    def _poison_windows(self, partners: torch.Tensor) -> None:
        """Overwrite the window slots that there were. Shape: (n,) int64, -1 for none."""
        self._windows.poison(self._windows.rows_of(partners[partners >= 0]))


class PoisoningStates(StateAllocator):
    """Another allocator, whose freed states are overwritten.

    Cost: a write of each freed state.
    """

    def __init__(self, slots: StateAllocator, pool: StatePool) -> None:
        """Deal out the slots of this allocator, which are the pool's."""
        self._slots: Final = slots
        self._pool: Final = pool

    @property
    @override
    def size(self) -> int:
        return self._slots.size

    @property
    @override
    def available_size(self) -> int:
        return self._slots.available_size

    @override
    def alloc(self) -> int | None:
        return self._slots.alloc()

    @override
    def free(self, slot: int) -> None:
        self._slots.free(slot)
        self._pool.poison(slot)
