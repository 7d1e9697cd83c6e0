"""`Device`: the pools of one rank and who deals out their slots, as a request uses them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

import attrs

from radixlink_contracts import PoolName
from radixlink_contracts.errors import ContractError
from radixlink_pools import DevicePoolGroup, FullSwaAllocator, PagedAllocator, StateSlotAllocator
from radixlink_transformers._poison import (
    PoisoningAllocator,
    PoisoningPair,
    PoisoningStates,
)
from radixlink_transformers._pool import PagedKVPool
from radixlink_transformers._states import StatePool

if TYPE_CHECKING:
    import torch

    from radixlink_contracts import PairedAllocator, SlotAllocator, StateAllocator
    from radixlink_transformers._geometry import KVGeometry
    from radixlink_transformers._kinds import ModelKind
    from radixlink_transformers._states import StateGeometry


@attrs.frozen(kw_only=True, eq=False)
class Windows:
    """Pages of sliding-window layers.

    Attributes:
        pool: The pages.
        pair: Deals them out, and knows beside which full page each is.
    """

    pool: PagedKVPool
    pair: PairedAllocator


@attrs.frozen(kw_only=True, eq=False)
class States:
    """Recurrent states.

    Attributes:
        pool: The states.
        slots: Deals them out.
        interval: Tokens between two that a prompt leaves behind: whole pages.
    """

    pool: StatePool
    slots: StateAllocator
    interval: int


@attrs.frozen(kw_only=True, eq=False)
class PrefixRows:
    """Where the prefix of a sequence lies.

    Attributes:
        num_tokens: How long it is: whole pages.
        kv: Its pages of full attention. Shape: (pages of the prefix,) int64.
        windows: Its last pages of sliding-window attention, as many as are seen behind it; empty
            for a model without. Shape: (n,) int64.
    """

    num_tokens: int
    kv: torch.Tensor
    windows: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class Device:
    """All that a rank keeps on its device.

    Attributes:
        kind: Of the model.
        kv: Pages of full attention.
        allocator: Deals their slots out; with windows it is their pair, whose `free` frees both.
        windows: Pages of sliding-window attention, where the model has it.
        states: Recurrent states, likewise.
    """

    kind: ModelKind
    kv: PagedKVPool
    allocator: SlotAllocator
    windows: Windows | None = None
    states: States | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse parts that do not fit each other."""
        num_slots = self.kv.num_pages * self.page_size
        if self.allocator.page_size != self.page_size or self.allocator.size > num_slots:
            raise ContractError(
                f"Device: expected an allocator of pages of {self.page_size} tokens, and no more "
                f"slots than the pool's {num_slots}, got pages of {self.allocator.page_size} "
                f"and {self.allocator.size} slots"
            )

    @classmethod
    def allocate(
        cls,
        kind: ModelKind,
        geometry: KVGeometry,
        device: torch.device,
        *,
        num_pages: int,
        num_window_pages: int,
        states: tuple[StateGeometry, int] | None,
        num_states: int | None,
        poison: bool,
    ) -> Self:
        """Make the pools, and who deals them out.

        Args:
            kind: Of the model.
            geometry: Of the pages of every token.
            device: Where.
            num_pages: Pages of full attention.
            num_window_pages: Pages of sliding-window attention; of use where the model has it.
            states: Of a model with recurrent states: their shape, and how many tokens a prompt has
                at least between two that it leaves behind.
            num_states: Their slots. None: as many as prompts that fill the pages leave behind, and
                two.
            poison: Overwrite what is given back.

        Raises:
            ContractError: A number is out of range.
        """
        kv = PagedKVPool(geometry, num_pages, device)
        if kind.has_window_pages:
            pool = PagedKVPool(geometry.of_windows(kind), num_window_pages, device, PoolName.SWA)
            pair: PairedAllocator = FullSwaAllocator(
                num_pages, num_window_pages, geometry.page_size
            )
            if poison:
                pair = PoisoningPair(pair, kv, pool)
            return cls(kind=kind, kv=kv, allocator=pair, windows=Windows(pool=pool, pair=pair))
        allocator: SlotAllocator = PagedAllocator(num_pages, geometry.page_size)
        if poison:
            allocator = PoisoningAllocator(allocator, kv)
        if states is None:
            return cls(kind=kind, kv=kv, allocator=allocator)
        shape, least_interval = states
        interval = math.lcm(geometry.page_size, least_interval)
        if num_states is None:
            num_states = num_pages * geometry.page_size // interval + 2
        state_pool = StatePool(shape, num_states, device)
        slots: StateAllocator = StateSlotAllocator(num_states)
        if poison:
            slots = PoisoningStates(slots, state_pool)
        return cls(
            kind=kind,
            kv=kv,
            allocator=allocator,
            states=States(pool=state_pool, slots=slots, interval=interval),
        )

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.kv.geometry.page_size

    @property
    def full(self) -> SlotAllocator:
        """Deals out the slots of full attention alone."""
        return self.allocator if self.windows is None else self.windows.pair.full

    @property
    def kv_pools(self) -> tuple[PagedKVPool, ...]:
        """All pools of keys and values."""
        return (self.kv,) if self.windows is None else (self.kv, self.windows.pool)

    @property
    def group(self) -> DevicePoolGroup:
        """The pools, as transfers see them."""
        entries = [pool.device_pool for pool in self.kv_pools]
        if self.states is not None:
            entries.append(self.states.pool.device_pool)
        return DevicePoolGroup(entries, self.kind.num_layers)

    def rows_of_prefix(self, slots: torch.Tensor) -> PrefixRows:
        """Where a prefix lies that the cache matched, or is about to load.

        Args:
            slots: Its full slots. Shape: (num_tokens,) int64, whole pages.
        """
        num_tokens, windows = len(slots), slots[:0]
        if self.windows is not None:
            pool = self.windows.pool
            seen = pool.geometry.pages_of(num_tokens) * self.page_size
            windows = pool.rows_of(self.windows.pair.swa_indices(slots[num_tokens - seen :]))
        return PrefixRows(num_tokens=num_tokens, kv=self.kv.rows_of(slots), windows=windows)
