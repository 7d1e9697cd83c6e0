"""Allocators that know which slots are in use, and wipe what comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from radixlink_contracts import PairedAllocator, SlotAllocator, StateAllocator

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

#: What is in a slot that nobody has: no page has a row of these.
SENTINEL = 0xEE


class WatchedAllocator(SlotAllocator):
    """Another allocator, of one pool."""

    def __init__(self, inner: SlotAllocator, rows: Sequence[torch.Tensor]) -> None:
        self._inner = inner
        self._rows = rows
        self.in_use: set[int] = set()

    @property
    @override
    def page_size(self) -> int:
        return self._inner.page_size

    @property
    @override
    def size(self) -> int:
        return self._inner.size

    @property
    @override
    def available_size(self) -> int:
        return self._inner.available_size

    @override
    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        slots = self._inner.alloc(num_tokens)
        if slots is not None:
            self.taken(slots)
        return slots

    @override
    def free(self, indices: torch.Tensor) -> None:
        self._inner.free(indices)
        self.given_back(indices)

    def taken(self, slots: torch.Tensor) -> None:
        self.in_use.update(slots.tolist())

    def given_back(self, slots: torch.Tensor) -> None:
        """Nobody has these any more, so nobody may read them."""
        self.in_use.difference_update(slots.tolist())
        for rows in self._rows:
            rows[slots[:: self.page_size] // self.page_size] = SENTINEL


class WatchedPair(PairedAllocator):
    """Another pair of pools, each of them watched."""

    def __init__(
        self,
        inner: PairedAllocator,
        full_rows: Sequence[torch.Tensor],
        swa_rows: Sequence[torch.Tensor],
    ) -> None:
        self._inner = inner
        self._full = WatchedAllocator(inner.full, full_rows)
        self._swa = WatchedAllocator(inner.swa, swa_rows)

    @property
    def in_use(self) -> set[int]:
        """Full slots."""
        return self._full.in_use

    @property
    @override
    def full(self) -> WatchedAllocator:
        return self._full

    @property
    @override
    def swa(self) -> WatchedAllocator:
        return self._swa

    @property
    @override
    def page_size(self) -> int:
        return self._inner.page_size

    @property
    @override
    def size(self) -> int:
        return self._inner.size

    @property
    @override
    def available_size(self) -> int:
        return self._inner.available_size

    @override
    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        full = self._inner.alloc(num_tokens)
        if full is not None:
            self._full.taken(full)
            self._swa.taken(self._inner.swa_indices(full))
        return full

    @override
    def free(self, indices: torch.Tensor) -> None:
        partners = self._partners(indices)
        self._inner.free(indices)
        self._full.given_back(indices)
        self._swa.given_back(partners)

    @override
    def map_full_to_swa(self, full_indices: torch.Tensor, swa_indices: torch.Tensor) -> None:
        self._inner.map_full_to_swa(full_indices, swa_indices)

    @override
    def swa_indices(self, full_indices: torch.Tensor) -> torch.Tensor:
        return self._inner.swa_indices(full_indices)

    @override
    def free_swa(self, full_indices: torch.Tensor) -> int:
        partners = self._partners(full_indices)
        count = self._inner.free_swa(full_indices)
        assert count == len(partners)
        self._swa.given_back(partners)
        return count

    def _partners(self, full: torch.Tensor) -> torch.Tensor:
        """The window slots beside those that have any."""
        partners = self._inner.swa_indices(full)
        return partners[partners >= 0]


class WatchedStates(StateAllocator):
    """Another pool of states."""

    def __init__(self, inner: StateAllocator, rows: Iterable[torch.Tensor]) -> None:
        self._inner = inner
        self._rows = tuple(rows)
        self.in_use: set[int] = set()

    @property
    @override
    def size(self) -> int:
        return self._inner.size

    @property
    @override
    def available_size(self) -> int:
        return self._inner.available_size

    @override
    def alloc(self) -> int | None:
        slot = self._inner.alloc()
        if slot is not None:
            self.in_use.add(slot)
        return slot

    @override
    def free(self, slot: int) -> None:
        self._inner.free(slot)
        self.in_use.remove(slot)
        for rows in self._rows:
            rows[slot] = SENTINEL
