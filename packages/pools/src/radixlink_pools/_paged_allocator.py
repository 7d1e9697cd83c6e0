"""`PagedAllocator`: deals out whole pages of one pool.

A stack of free pages and a count for each slot; no operation walks, copies or concatenates the
rest of the pool.

* A page is known by its first slot. `_stack[_head:]` holds the first slots of the free pages, the
  next to give first. Alloc moves `_head` up past a slice; free moves it down and writes what came
  back into the room.
* `_free_counts[s]` says how often the page that starts at slot s is in the free list: 0 for a
  page in use, 1 for a free one. It is 1 for good where no page starts, so that such a slot can
  never be given back.
* Free adds 1 for each page and looks whether every sum is just 1. One comparison so finds pages
  that were free, pages named twice in the call, unaligned slots and reserved pages; slots outside
  the pool are refused by the addition itself. The stack is written only after that, so a refused
  call is undone by counting the stack again.

The order is a pure function of the calls: ascending at first, then what was given back last goes
out first.
"""

from __future__ import annotations

from typing import Final

import torch
from typing_extensions import override

from radixlink_contracts import SlotAllocator
from radixlink_contracts.errors import ContractError


class PagedAllocator(SlotAllocator):
    """Deals out pages of `page_size` aligned slots; a page size of 1 makes it a token allocator.

    All bookkeeping is in host memory. For slots on another device `alloc` copies its answer
    there, and `free` fetches the indices and thereby waits for that device.

    Ranks: all, the same calls in the same order; the answers are then the same.
    Thread: the scheduler's.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        device: str | torch.device = "cpu",
        first_page: int = 0,
    ) -> None:
        """Start with every page free.

        Args:
            num_pages: Pages to deal out.
            page_size: Slots of a page.
            device: Where the slots that `alloc` returns live.
            first_page: The first page to deal out; those before it are the engine's own (padding,
                for example).

        Raises:
            ContractError: A number is out of range.
        """
        if num_pages < 1 or page_size < 1 or first_page < 0:
            msg = (
                "PagedAllocator: expected num_pages >= 1, page_size >= 1 and first_page >= 0, "
                f"got {num_pages}, {page_size} and {first_page}"
            )
            raise ContractError(msg)
        self._num_pages: Final = num_pages
        self._page_size: Final = page_size
        self._first_slot: Final = first_page * page_size
        self._device: Final = torch.device(device)
        self._elsewhere: Final = self._device.type != "cpu"
        self._offsets: Final = torch.arange(page_size)
        self._stack: Final = torch.empty(num_pages, dtype=torch.int64)
        self._free_counts: Final = torch.empty(
            (first_page + num_pages) * page_size, dtype=torch.int32
        )
        self._head = 0
        # As many ones as the last call had pages: calls of equal size come in rows.
        self._ones = torch.ones(1, dtype=torch.int32)
        self._num_ones = 1
        self.clear()

    @property
    @override
    def page_size(self) -> int:
        """Slots of a page."""
        return self._page_size

    @property
    @override
    def size(self) -> int:
        """Slots of the pool, without reserved pages."""
        return self._num_pages * self._page_size

    @property
    @override
    def available_size(self) -> int:
        """Slots that `alloc` can still give."""
        return (self._num_pages - self._head) * self._page_size

    @override
    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """Take slots for whole pages.

        Args:
            num_tokens: A multiple of the page size.

        Returns:
            The slots, or None when there are not enough; nothing is taken then. Shape:
            (num_tokens,) int64, each page contiguous and aligned.

        Raises:
            ContractError: `num_tokens` is no multiple of the page size, or negative.

        Cost: O(num_tokens), whatever the size of the pool.
        """
        num_pages, rest = divmod(num_tokens, self._page_size)
        if rest or num_pages < 0:
            msg = (
                f"PagedAllocator.alloc: expected a multiple of page_size {self._page_size}, "
                f"got {num_tokens} tokens"
            )
            raise ContractError(msg)
        end = self._head + num_pages
        if end > self._num_pages:
            return None
        pages = self._stack[self._head : end]
        slots = pages.clone() if self._page_size == 1 else self._slots_of(pages)
        self._free_counts.index_add_(0, pages, self._ones_for(num_pages), alpha=-1)
        self._head = end
        return slots.to(self._device) if self._elsewhere else slots

    @override
    def free(self, indices: torch.Tensor) -> None:
        """Give whole pages back.

        Args:
            indices: Shape: (n * page_size,) int64, each page contiguous and aligned. Not kept.

        Raises:
            ContractError: A page is free already or named twice, is not contiguous and aligned,
                or is none of this pool's. Nothing is freed then.

        Cost: O(len(indices)), whatever the size of the pool; a refusal O(size).
        """
        if self._elsewhere:
            indices = indices.cpu()
        if indices.ndim != 1 or indices.dtype is not torch.int64:
            msg = (
                "PagedAllocator.free: expected slots as (n,) int64, "
                f"got {tuple(indices.shape)} {indices.dtype}"
            )
            raise ContractError(msg)
        pages = indices if self._page_size == 1 else self._pages_of(indices)
        num_pages = pages.numel()
        ones = self._ones_for(num_pages)
        try:
            self._free_counts.index_add_(0, pages, ones)
            accepted = torch.equal(self._free_counts.index_select(0, pages), ones)
        except (IndexError, RuntimeError) as exc:
            self._count_stack()
            raise ContractError(self._refusal(pages)) from exc
        if not accepted:
            self._count_stack()
            raise ContractError(self._refusal(pages))
        # There is room: the counts have just shown these pages to be distinct and not in the stack.
        head = self._head - num_pages
        self._stack[head : self._head] = pages
        self._head = head

    def clear(self) -> None:
        """Take every page back, whoever has it: for a reset, when nobody uses a slot any more."""
        self._head = 0
        first, step = self._first_slot, self._page_size
        torch.arange(first, len(self._free_counts), step, out=self._stack)
        self._count_stack()

    def _ones_for(self, count: int) -> torch.Tensor:
        """That many ones. Shape: (count,) int32."""
        if count != self._num_ones:
            self._ones = torch.ones(count, dtype=torch.int32)
            self._num_ones = count
        return self._ones

    def _slots_of(self, pages: torch.Tensor) -> torch.Tensor:
        """All slots of the pages that start at these."""
        return torch.add(pages.unsqueeze(1), self._offsets).view(-1)

    def _pages_of(self, indices: torch.Tensor) -> torch.Tensor:
        """The first slot of each page, once each page is known to be contiguous.

        Raises:
            ContractError: One is not.
        """
        if indices.numel() % self._page_size:
            msg = (
                f"PagedAllocator.free: expected a multiple of page_size {self._page_size}, "
                f"got {indices.numel()} slots"
            )
            raise ContractError(msg)
        pages = indices[:: self._page_size]
        expected = self._slots_of(pages)
        if not torch.equal(indices, expected):
            place = int((indices != expected).nonzero()[0])
            msg = (
                "PagedAllocator.free: expected aligned contiguous pages of "
                f"{self._page_size} slots, got otherwise at place {place}"
            )
            raise ContractError(msg)
        return pages

    def _count_stack(self) -> None:
        """Set every count to what the stack says. Cost: O(size)."""
        self._free_counts.fill_(1)
        self._free_counts[self._first_slot :: self._page_size] = 0
        self._free_counts[self._stack[self._head :]] = 1

    def _refusal(self, pages: torch.Tensor) -> str:
        """Say why these pages cannot be given back. Shape: (n,) int64."""
        limit = len(self._free_counts)
        outside = (pages < self._first_slot) | (pages >= limit)
        if outside.any():
            return (
                f"PagedAllocator.free: expected slots in {self._first_slot}..{limit - 1}, "
                f"got {int(pages[outside][0])}, which exceeds the pool"
            )
        unaligned = pages % self._page_size != 0
        if unaligned.any():
            return (
                f"PagedAllocator.free: expected aligned contiguous pages of {self._page_size} "
                f"slots, got one that starts at slot {int(pages[unaligned][0])}"
            )
        free_already = self._free_counts[pages] != 0
        if free_already.any():
            slot = int(pages[free_already][0])
            return f"PagedAllocator.free: expected pages in use, but that of slot {slot} is free"
        ordered = pages.sort().values
        slot = int(ordered[1:][ordered[1:] == ordered[:-1]][0])
        return f"PagedAllocator.free: expected distinct pages, got that of slot {slot} twice"
