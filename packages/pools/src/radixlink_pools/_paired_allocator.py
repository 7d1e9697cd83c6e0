"""`FullSwaAllocator`: a full pool, a window pool, and the pairs between their slots.

The tree keeps the KV of a prefix in every full-attention layer, but that of sliding-window layers
only for the last window, so full slots outlive their window slots. Rules of this file:

1. `_swa_of[f]` is the partner of full slot f, `_full_of[s]` that of window slot s, -1 for none.
   They are each other's inverse, and only slots in use have partners. So a partner never has to be
   looked for in a free list, and freeing it cannot fail.
2. Whatever may be refused is checked before the first change: the free of the full side refuses by
   itself and comes first; a mapping is checked on both sides.
3. A window slot is given back in one place, `_free_pairs`, and that parts its pair.
4. A full slot goes back alone only if it has no partner: else a window slot would stay in use that
   nothing names.

Both tables are in host memory, one entry a slot, and every call touches just the slots it is about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from typing_extensions import override

from radixlink_contracts import PairedAllocator, SlotAllocator
from radixlink_contracts.errors import ContractError
from radixlink_pools._paged_allocator import PagedAllocator

if TYPE_CHECKING:
    from collections.abc import Callable

#: Stands for no partner.
NO_PARTNER: Final = -1


class _OneSide(SlotAllocator):
    """One of the two pools; what its `free` means is the pair's to say."""

    def __init__(
        self,
        pool: PagedAllocator,
        device: torch.device,
        free: Callable[[torch.Tensor], None],
    ) -> None:
        """Stand for a pool in host memory whose slots are wanted on `device`."""
        self._pool: Final = pool
        self._device: Final = device
        self._free: Final = free

    @property
    @override
    def page_size(self) -> int:
        """Slots of a page."""
        return self._pool.page_size

    @property
    @override
    def size(self) -> int:
        """Slots of this pool, without reserved pages."""
        return self._pool.size

    @property
    @override
    def available_size(self) -> int:
        """Slots that `alloc` can still give."""
        return self._pool.available_size

    @override
    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """Take slots without a partner; see `PagedAllocator.alloc`."""
        slots = self._pool.alloc(num_tokens)
        return None if slots is None else slots.to(self._device)

    @override
    def free(self, indices: torch.Tensor) -> None:
        """Give slots of this side back; see `PairedAllocator.full` and `PairedAllocator.swa`."""
        self._free(indices.cpu())


class FullSwaAllocator(PairedAllocator):
    """Deals out full slots with window slots beside them.

    All bookkeeping is in host memory, whatever torch's default device, and every call may come in
    inference mode or outside it. For slots on another device `full_to_swa` has a copy there, and
    every call that takes or gives slots, those of `full` and `swa` too, waits for what the calling
    thread's current stream there was given: slots are fetched and sent, and so are the entries of
    the copy. What a call returns is there then, for any stream to read. `clear` does not wait.

    Ranks: all, the same calls in the same order; the answers are then the same.
    Thread: the scheduler's.
    """

    def __init__(
        self,
        num_full_pages: int,
        num_swa_pages: int,
        page_size: int,
        device: str | torch.device = "cpu",
        first_page: int = 0,
    ) -> None:
        """Start with every page of both pools free.

        Args:
            num_full_pages: Full pages to deal out.
            num_swa_pages: Window pages to deal out.
            page_size: Slots of a page, in both.
            device: Where the slots that are returned live, and `full_to_swa`.
            first_page: The first page to deal out in both; those before it are the engine's own.

        Raises:
            ContractError: A number is out of range.
        """
        self._device: Final = torch.device(device)
        self._full: Final = PagedAllocator(num_full_pages, page_size, first_page=first_page)
        self._swa: Final = PagedAllocator(num_swa_pages, page_size, first_page=first_page)
        reserved = first_page * page_size
        elsewhere = self._device.type != "cpu"
        # Made in inference mode, they could not be written outside it.
        with torch.inference_mode(mode=False):
            num_full, num_swa = reserved + self._full.size, reserved + self._swa.size
            self._swa_of: Final = torch.full((num_full,), NO_PARTNER, device="cpu")
            self._full_of: Final = torch.full((num_swa,), NO_PARTNER, device="cpu")
            self._device_swa_of: Final = self._swa_of.to(self._device) if elsewhere else None
        self._full_side: Final = _OneSide(self._full, self._device, self._free_full)
        self._swa_side: Final = _OneSide(self._swa, self._device, self._free_swa)

    @property
    @override
    def page_size(self) -> int:
        """Slots of a page, in both pools."""
        return self._full.page_size

    @property
    @override
    def size(self) -> int:
        """Slots of the full pool, without reserved pages."""
        return self._full.size

    @property
    @override
    def available_size(self) -> int:
        """Pairs that `alloc` can still give: the lesser of both pools."""
        return min(self._full.available_size, self._swa.available_size)

    @property
    @override
    def full(self) -> SlotAllocator:
        """The full pool alone: gives slots without a partner, takes only such."""
        return self._full_side

    @property
    @override
    def swa(self) -> SlotAllocator:
        """The window pool alone: gives slots without a partner, parts those it takes."""
        return self._swa_side

    @property
    def full_to_swa(self) -> torch.Tensor:
        """The table itself, for an engine's kernels to read; it changes with the calls.

        On another device a change is ordered on the calling thread's current stream, as a forward
        is that is launched after it. The call that makes it waits for what that stream was given
        before, and not always for the change.

        Shape: (full slots, reserved ones included,) int64 on the device, -1 for no partner.
        Owns: this allocator; nobody else writes it.
        """
        return self._swa_of if self._device_swa_of is None else self._device_swa_of

    @override
    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """Take full slots and as many window slots, as pairs.

        Args:
            num_tokens: A multiple of the page size.

        Returns:
            The full slots, or None when one of the pools has not enough; nothing is taken then.
            Shape: (num_tokens,) int64, each page contiguous and aligned.

        Raises:
            ContractError: `num_tokens` is no multiple of the page size, or negative.

        Cost: O(num_tokens), whatever the size of the pools.
        """
        full = self._full.alloc(num_tokens)
        if full is None:
            return None
        swa = self._swa.alloc(num_tokens)
        if swa is None:
            # What was given back last goes out first: the pool is as it was.
            self._full.free(full)
            return None
        # Slots that were free have no partners, so there is no pair to part.
        self._pair(full, swa)
        return full.to(self._device)

    @override
    def free(self, indices: torch.Tensor) -> None:
        """Give full slots back, and the window slots of those that have one.

        Args:
            indices: Full slots. Shape: (n * page_size,) int64, each page contiguous and aligned.

        Raises:
            ContractError: A page is free already or named twice, is not contiguous and aligned, or
                is none of the full pool's. Nothing is freed then.

        Cost: O(len(indices)), whatever the size of the pools; a refusal O(size).
        """
        indices = indices.cpu()
        self._full.free(indices)
        full, swa = self._paired(self._swa_of, indices)
        self._free_pairs(full, swa)

    @override
    def map_full_to_swa(self, full_indices: torch.Tensor, swa_indices: torch.Tensor) -> None:
        """Pair slot i of the one with slot i of the other; pairs that either was in end.

        Args:
            full_indices: Shape: (n * page_size,) int64, each page contiguous and aligned.
            swa_indices: Shape: as `full_indices`.

        Raises:
            ContractError: They are not equally many, or not distinct pages in use. Nothing changes
                then.

        Cost: O(n log n), whatever the size of the pools.
        """
        full, swa = full_indices.cpu(), swa_indices.cpu()
        if full.shape != swa.shape:
            msg = (
                "FullSwaAllocator.map_full_to_swa: expected as many window slots as full slots, "
                f"got {tuple(swa.shape)} for {tuple(full.shape)}"
            )
            raise ContractError(msg)
        self._full.check_in_use(full)
        self._swa.check_in_use(swa)
        _, left_swa = self._paired(self._swa_of, full)
        _, left_full = self._paired(self._full_of, swa)
        self._full_of.index_fill_(0, left_swa, NO_PARTNER)
        self._set_swa_of(left_full, NO_PARTNER)
        self._pair(full, swa)

    @override
    def swa_indices(self, full_indices: torch.Tensor) -> torch.Tensor:
        """The partners of full slots, on the device.

        Args:
            full_indices: Shape: (n,) int64, any slots of the full pool.

        Returns:
            Shape: (n,) int64, -1 where there is none.

        Raises:
            ContractError: They are no slots, or one is outside the pool.

        Cost: O(n), whatever the size of the pools.
        """
        try:
            return self._swa_of.index_select(0, full_indices.cpu()).to(self._device)
        except (IndexError, RuntimeError) as exc:
            msg = (
                f"FullSwaAllocator.swa_indices: expected (n,) int64 in 0..{len(self._swa_of) - 1}, "
                f"got {tuple(full_indices.shape)} {full_indices.dtype}, or one outside the pool"
            )
            raise ContractError(msg) from exc

    @override
    def free_swa(self, full_indices: torch.Tensor) -> int:
        """Give back the window slots of full slots that leave the window, and keep these.

        Args:
            full_indices: Shape: (n * page_size,) int64, each page contiguous and aligned; with or
                without partners.

        Returns:
            How many window slots were given back.

        Raises:
            ContractError: They are not distinct pages in use of the full pool. Nothing is freed
                then.

        Cost: O(n log n), whatever the size of the pools.
        """
        full = full_indices.cpu()
        self._full.check_in_use(full)
        full, swa = self._paired(self._swa_of, full)
        self._free_pairs(full, swa)
        return swa.numel()

    def clear(self) -> None:
        """Take every page of both back and part all pairs: for a reset, when nobody uses a slot.

        Cost: O(size).
        """
        self._full.clear()
        self._swa.clear()
        self._full_of.fill_(NO_PARTNER)
        self._swa_of.fill_(NO_PARTNER)
        if self._device_swa_of is not None:
            self._device_swa_of.fill_(NO_PARTNER)

    def _free_full(self, full: torch.Tensor) -> None:
        """Give back full slots that have no partner.

        Raises:
            ContractError: One has, or they are no distinct pages in use.
        """
        self._full.check_in_use(full)
        partners = self._swa_of.index_select(0, full)
        if (partners != NO_PARTNER).any():
            place = int((partners != NO_PARTNER).nonzero()[0])
            msg = (
                "FullSwaAllocator.full.free: expected full slots without a window slot, got slot "
                f"{int(full[place])}, beside which window slot {int(partners[place])} is in use"
            )
            raise ContractError(msg)
        self._full.free(full)

    def _free_swa(self, swa: torch.Tensor) -> None:
        """Give back window slots, with or without partners.

        Raises:
            ContractError: They are no distinct pages in use. Nothing is freed then.
        """
        self._swa.check_in_use(swa)
        _, full = self._paired(self._full_of, swa)
        self._free_pairs(full, swa)

    def _free_pairs(self, full: torch.Tensor, swa: torch.Tensor) -> None:
        """Give back window slots and part their pairs.

        Args:
            full: The full slots beside them, as far as there are any. Shape: (at most n,) int64.
            swa: Distinct pages in use. Shape: (n,) int64.
        """
        self._swa.free(swa)
        self._full_of.index_fill_(0, swa, NO_PARTNER)
        self._set_swa_of(full, NO_PARTNER)

    @staticmethod
    def _paired(table: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Those slots that have a partner, and the partners. Shape of both: (at most n,) int64."""
        partners = table.index_select(0, slots)
        paired = partners != NO_PARTNER
        # Mostly all or none are: a mask costs more than looking.
        return (slots, partners) if paired.all() else (slots[paired], partners[paired])

    def _pair(self, full: torch.Tensor, swa: torch.Tensor) -> None:
        """Write pairs of slots that are in none."""
        self._full_of.index_copy_(0, swa, full)
        self._set_swa_of(full, swa)

    def _set_swa_of(self, full: torch.Tensor, swa: torch.Tensor | int) -> None:
        """Write the partners of full slots, on the device too.

        To send them there waits for the calling thread's current stream; the write that follows is
        ordered on it.
        """
        for table in (self._swa_of, self._device_swa_of):
            if table is None:
                continue
            index = full.to(table.device)
            if isinstance(swa, int):
                table.index_fill_(0, index, swa)
            else:
                table.index_copy_(0, index, swa.to(table.device))
