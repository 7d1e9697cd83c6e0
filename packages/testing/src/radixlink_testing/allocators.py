"""Allocators that know which slots are in use, and tell an observer what comes and goes.

Each wraps a real one, so what is dealt out is what that deals out. Whoever has to know whose a slot
is, or wants to wipe what comes back, is a `SlotObserver`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from radixlink_contracts import PairedAllocator, PoolName, SlotAllocator, StateAllocator

if TYPE_CHECKING:
    import torch


class SlotObserver:
    """Hears of every slot that is dealt out, given back or paired; by itself it does nothing.

    Thread: the scheduler's.
    """

    def taken(self, pool: PoolName, slots: list[int]) -> None:
        """A pool dealt these out."""

    def given_back(self, pool: PoolName, slots: list[int]) -> None:
        """A pool has these again: nobody may read them. Called before another can have them."""

    def paired(self, full: list[int], swa: list[int]) -> None:
        """Slot i of the one is beside slot i of the other; pairs that either was part of ended."""


class _Dealt:
    """What of one pool is dealt out, told to an observer."""

    def __init__(self, pool: PoolName, observer: SlotObserver) -> None:
        """Nothing is."""
        self._pool = pool
        self._observer = observer
        #: Slots that are dealt out.
        self.in_use: set[int] = set()

    def taken(self, slots: list[int]) -> None:
        """Somebody has these."""
        self.in_use.update(slots)
        self._observer.taken(self._pool, slots)

    def given_back(self, slots: list[int]) -> None:
        """Nobody has these any more."""
        self.in_use.difference_update(slots)
        self._observer.given_back(self._pool, slots)


class WatchedAllocator(_Dealt, SlotAllocator):
    """Another allocator, of one pool."""

    def __init__(self, inner: SlotAllocator, pool: PoolName, observer: SlotObserver) -> None:
        """Watch `inner`, which deals out the slots of `pool`."""
        super().__init__(pool, observer)
        self._inner = inner

    @property
    @override
    def page_size(self) -> int:
        """Slots of a page."""
        return self._inner.page_size

    @property
    @override
    def size(self) -> int:
        """Slots of the pool."""
        return self._inner.size

    @property
    @override
    def available_size(self) -> int:
        """Slots that are free."""
        return self._inner.available_size

    @override
    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """Take slots; see `SlotAllocator.alloc`."""
        slots = self._inner.alloc(num_tokens)
        if slots is not None:
            self.taken(slots.tolist())
        return slots

    @override
    def free(self, indices: torch.Tensor) -> None:
        """Give slots back; see `SlotAllocator.free`."""
        slots = indices.tolist()
        self._inner.free(indices)
        self.given_back(slots)


class WatchedPair(PairedAllocator):
    """Another pair of pools, each of them watched."""

    def __init__(self, inner: PairedAllocator, observer: SlotObserver) -> None:
        """Watch both pools of `inner`, and what is beside what."""
        self._inner = inner
        self._observer = observer
        self._full = WatchedAllocator(inner.full, PoolName.KV, observer)
        self._swa = WatchedAllocator(inner.swa, PoolName.SWA, observer)

    @property
    def in_use(self) -> set[int]:
        """Full slots that are dealt out."""
        return self._full.in_use

    @property
    @override
    def full(self) -> WatchedAllocator:
        """The full pool alone."""
        return self._full

    @property
    @override
    def swa(self) -> WatchedAllocator:
        """The window pool alone."""
        return self._swa

    @property
    @override
    def page_size(self) -> int:
        """Slots of a page, in both."""
        return self._inner.page_size

    @property
    @override
    def size(self) -> int:
        """Full slots."""
        return self._inner.size

    @property
    @override
    def available_size(self) -> int:
        """Slots that are free in both."""
        return self._inner.available_size

    @override
    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """Take pairs; see `PairedAllocator.alloc`."""
        full = self._inner.alloc(num_tokens)
        if full is not None:
            slots, partners = full.tolist(), self._inner.swa_indices(full).tolist()
            self._full.taken(slots)
            self._swa.taken(partners)
            self._observer.paired(slots, partners)
        return full

    @override
    def free(self, indices: torch.Tensor) -> None:
        """Give full slots back, and those beside them; see `PairedAllocator.free`."""
        slots, partners = indices.tolist(), self._partners(indices)
        self._inner.free(indices)
        self._swa.given_back(partners)
        self._full.given_back(slots)

    @override
    def map_full_to_swa(self, full_indices: torch.Tensor, swa_indices: torch.Tensor) -> None:
        """Pair slots; see `PairedAllocator.map_full_to_swa`."""
        self._inner.map_full_to_swa(full_indices, swa_indices)
        self._observer.paired(full_indices.tolist(), swa_indices.tolist())

    @override
    def swa_indices(self, full_indices: torch.Tensor) -> torch.Tensor:
        """What is beside full slots; see `PairedAllocator.swa_indices`."""
        return self._inner.swa_indices(full_indices)

    @override
    def free_swa(self, full_indices: torch.Tensor) -> int:
        """Give back the window slots beside full slots; see `PairedAllocator.free_swa`."""
        partners = self._partners(full_indices)
        count = self._inner.free_swa(full_indices)
        self._swa.given_back(partners)
        return count

    def _partners(self, full: torch.Tensor) -> list[int]:
        """The window slots beside those that have any."""
        partners: list[int] = self._inner.swa_indices(full).tolist()
        return [slot for slot in partners if slot >= 0]


class WatchedStates(_Dealt, StateAllocator):
    """Another pool of states."""

    def __init__(self, inner: StateAllocator, observer: SlotObserver) -> None:
        """Watch `inner`."""
        super().__init__(PoolName.MAMBA, observer)
        self._inner = inner

    @property
    @override
    def size(self) -> int:
        """States of the pool."""
        return self._inner.size

    @property
    @override
    def available_size(self) -> int:
        """States that are free."""
        return self._inner.available_size

    @override
    def alloc(self) -> int | None:
        """Take one; see `StateAllocator.alloc`."""
        slot = self._inner.alloc()
        if slot is not None:
            self.taken([slot])
        return slot

    @override
    def free(self, slot: int) -> None:
        """Give one back; see `StateAllocator.free`."""
        self._inner.free(slot)
        self.given_back([slot])
