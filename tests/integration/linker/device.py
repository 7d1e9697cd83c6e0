"""The device of one rank: its pools, whose bytes are a function of key, pool and rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tests.integration.linker.watched import SENTINEL, Wiper

from radixlink_contracts import PoolName
from radixlink_pools import (
    DevicePoolEntry,
    DevicePoolGroup,
    FullSwaAllocator,
    PagedAllocator,
    StateSlotAllocator,
)
from radixlink_testing.allocators import WatchedAllocator, WatchedPair, WatchedStates
from radixlink_testing.pages import range_bytes

if TYPE_CHECKING:
    from collections.abc import Collection

    from tests.integration.linker.models import Model


class Device:
    """Pools and allocators of a model."""

    def __init__(
        self, model: Model, num_pages: int, rank: int, *, alike: Collection[PoolName] = ()
    ) -> None:
        self.model = model
        self._rank = rank
        #: Whose bytes each pool has: those of all ranks, or its own.
        self._bytes_of = {pool: 0 if pool in alike else rank for pool in model.pools}
        self.entries = {
            pool: DevicePoolEntry(
                pool,
                [
                    torch.full((model.rows(pool, num_pages), size), SENTINEL, dtype=torch.uint8)
                    for size in sizes
                ],
                model.slots_of_page(pool),
            )
            for pool, sizes in model.pools.items()
        }
        self.group = DevicePoolGroup(self.entries.values())
        page_size = model.page_size
        wiper = Wiper(
            {pool: self._rows(pool) for pool in model.pools},
            {pool: model.slots_of_page(pool) for pool in model.pools},
        )
        self.allocator: WatchedAllocator | WatchedPair = (
            WatchedPair(FullSwaAllocator(num_pages, model.num_swa_pages, page_size), wiper)
            if model.window
            else WatchedAllocator(PagedAllocator(num_pages, page_size), PoolName.KV, wiper)
        )
        self.states: WatchedStates | None = (
            WatchedStates(StateSlotAllocator(model.num_states), wiper) if model.states else None
        )

    @property
    def pair(self) -> WatchedPair | None:
        """The allocator of a model with windows."""
        return self.allocator if isinstance(self.allocator, WatchedPair) else None

    @property
    def full(self) -> WatchedAllocator:
        """The allocator of full slots alone."""
        return self.allocator.full if isinstance(self.allocator, WatchedPair) else self.allocator

    def copy_state(self, source: int, target: int) -> None:
        """What the engine does for `fork_state`."""
        states = self.entries[PoolName.MAMBA]
        states.copy_pages(torch.tensor([source]), torch.tensor([target]))

    # -- bytes -------------------------------------------------------------------------------------

    def fill(self, pool: PoolName, slots: torch.Tensor, keys: list[bytes]) -> None:
        """A forward writes these pages, or states."""
        for row, key in zip(self._pages(pool, slots), keys, strict=True):
            for layer_range, rows in enumerate(self._rows(pool)):
                rows[row] = torch.tensor(self._bytes(pool, layer_range, key))

    def check(self, pool: PoolName, slots: torch.Tensor, keys: list[bytes]) -> None:
        """They hold what they should."""
        for row, key in zip(self._pages(pool, slots), keys, strict=True):
            for layer_range, rows in enumerate(self._rows(pool)):
                assert rows[row].tolist() == self._bytes(pool, layer_range, key), (
                    f"rank {self._rank}: {pool} page {row} holds other bytes"
                )

    def _rows(self, pool: PoolName) -> list[torch.Tensor]:
        entry, none = self.entries[pool], torch.zeros(0, dtype=torch.int64)
        return [entry.region(place, none).rows for place in range(len(entry.range_bytes))]

    def _pages(self, pool: PoolName, slots: torch.Tensor) -> list[int]:
        size = self.model.slots_of_page(pool)
        return [int(slot) // size for slot in slots[::size]]

    def _bytes(self, pool: PoolName, layer_range: int, key: bytes) -> list[int]:
        size = self.model.pools[pool][layer_range]
        return list(
            range_bytes(key, layer_range, size, variant=f"{pool} of rank {self._bytes_of[pool]}")
        )
