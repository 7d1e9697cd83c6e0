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
* Counts have 16 bits, so that those of a large pool stay in the processor's cache, and a call is
  counted in parts that cannot make them overflow (`_tally`).
* Pages go to and from the stack by `memmove`: it costs 0.7 us, `stack[a:b] = pages` 2 us.

The order is a pure function of the calls: ascending at first, then what was given back last goes
out first.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import torch
from typing_extensions import override

from radixlink_contracts import SlotAllocator
from radixlink_contracts.errors import ContractError
from radixlink_pools._tally import MAX_PAGES, Tallies

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Bytes of an index.
_WORD: Final = 8


def _parts(pages: torch.Tensor) -> Iterator[torch.Tensor]:
    """The pages in parts that one tally can count."""
    return (pages[start : start + MAX_PAGES] for start in range(0, pages.numel(), MAX_PAGES))


class PagedAllocator(SlotAllocator):
    """Deals out pages of `page_size` aligned slots; a page size of 1 makes it a token allocator.

    All bookkeeping is in host memory, whatever torch's default device, and every call may come in
    inference mode or outside it. For slots on another device each call waits for what the calling
    thread's current stream there was given: `alloc` until its answer is there, for any stream to
    read, `free` and `check_in_use` until the indices are here.

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
        # Made in inference mode, they could not be written outside it.
        with torch.inference_mode(mode=False):
            self._offsets: Final = torch.arange(page_size, device="cpu")
            self._stack: Final = torch.empty(num_pages, dtype=torch.int64, device="cpu")
            self._free_counts: Final = torch.empty(
                (first_page + num_pages) * page_size, dtype=torch.int16, device="cpu"
            )
        #: Where the stack's memory starts; `_stack` keeps it alive and is never resized.
        self._stack_address: Final = self._stack.data_ptr()
        self._tallies: Final = Tallies()
        self._head = 0
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
        pages = self._stack.new_empty(num_pages)
        ctypes.memmove(
            pages.data_ptr(), self._stack_address + self._head * _WORD, num_pages * _WORD
        )
        if num_pages <= MAX_PAGES:
            self._count_used(pages, num_pages)
        else:
            for part in _parts(pages):
                self._count_used(part, part.numel())
        self._head = end
        slots = pages if self._page_size == 1 else self._slots_of(pages)
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
        pages = self._pages_of(indices, "free")
        num_pages = pages.numel()
        if not num_pages:
            return
        if num_pages > self._head:
            # More than are in use, so one is wrong; and there would be no room in the stack.
            raise ContractError(self._refusal(pages, "free"))
        try:
            if num_pages <= MAX_PAGES:
                accepted = self._count_free(pages, num_pages)
            else:
                accepted = all(self._count_free(part, part.numel()) for part in _parts(pages))
        except (IndexError, RuntimeError) as exc:
            self._count_stack()
            if self._in_table(pages):
                raise
            raise ContractError(self._refusal(pages, "free")) from exc
        if not accepted:
            self._count_stack()
            raise ContractError(self._refusal(pages, "free"))
        # Nothing may follow but what cannot fail.
        self._head -= num_pages
        ctypes.memmove(
            self._stack_address + self._head * _WORD, pages.data_ptr(), num_pages * _WORD
        )

    def check_in_use(self, indices: torch.Tensor) -> None:
        """Nothing, where these are distinct pages in use.

        Args:
            indices: Shape: (n * page_size,) int64, each page contiguous and aligned.

        Raises:
            ContractError: As `free` would.

        Mutates: nothing.
        Cost: O(n log n), whatever the size of the pool.
        """
        pages = self._pages_of(indices, "check_in_use")
        try:
            in_use = not self._free_counts.index_select(0, pages).any()
        except (IndexError, RuntimeError) as exc:
            if self._in_table(pages):
                raise
            raise ContractError(self._refusal(pages, "check_in_use")) from exc
        ordered = pages.sort().values
        if not in_use or torch.any(ordered[1:] == ordered[:-1]):
            raise ContractError(self._refusal(pages, "check_in_use"))

    def clear(self) -> None:
        """Take every page back, whoever has it: for a reset, when nobody uses a slot any more."""
        self._head = 0
        first, step = self._first_slot, self._page_size
        torch.arange(first, len(self._free_counts), step, out=self._stack, device="cpu")
        self._count_stack()

    def _count_used(self, pages: torch.Tensor, num_pages: int) -> None:
        """Count pages of the stack as in use. Shape: (num_pages,) int64, at most MAX_PAGES."""
        if num_pages:
            self._free_counts.index_add_(0, pages, self._tallies[num_pages].minus_ones)

    def _count_free(self, pages: torch.Tensor, num_pages: int) -> bool:
        """Count pages as free that are not in the stack yet.

        Args:
            pages: Shape: (num_pages,) int64.
            num_pages: How many they are, 1..MAX_PAGES.

        Returns:
            True when they are distinct pages in use; otherwise, and after an error of torch, the
            counts mean nothing any more.
        """
        counts, tally = self._free_counts, self._tallies[num_pages]
        counts.index_add_(0, pages, tally.ones)
        torch.index_select(counts, 0, pages, out=tally.seen)
        return tally.all_ones()

    def _slots_of(self, pages: torch.Tensor) -> torch.Tensor:
        """All slots of the pages that start at these."""
        return torch.add(pages.unsqueeze(1), self._offsets).view(-1)

    def _pages_of(self, indices: torch.Tensor, call: str) -> torch.Tensor:
        """The first slot of each page, in host memory, once each page is known to be contiguous.

        Args:
            indices: What the caller gave.
            call: Which call of ours, for the message.

        Returns:
            Shape: (n,) int64, contiguous.

        Raises:
            ContractError: The slots are no whole pages.
        """
        if indices.dim() != 1 or indices.dtype is not torch.int64:
            msg = (
                f"PagedAllocator.{call}: expected slots as (n,) int64, "
                f"got {tuple(indices.shape)} {indices.dtype}"
            )
            raise ContractError(msg)
        if self._elsewhere:
            indices = indices.cpu()
        if self._page_size == 1:
            return indices.contiguous()
        if indices.numel() % self._page_size:
            msg = (
                f"PagedAllocator.{call}: expected a multiple of page_size {self._page_size}, "
                f"got {indices.numel()} slots"
            )
            raise ContractError(msg)
        pages = indices[:: self._page_size].contiguous()
        expected = self._slots_of(pages)
        if not torch.equal(indices, expected):
            place = int((indices != expected).nonzero()[0])
            msg = (
                f"PagedAllocator.{call}: expected aligned contiguous pages of "
                f"{self._page_size} slots, got otherwise at place {place}"
            )
            raise ContractError(msg)
        return pages

    def _count_stack(self) -> None:
        """Set every count to what the stack says. Cost: O(size)."""
        self._free_counts.fill_(1)
        self._free_counts[self._first_slot :: self._page_size] = 0
        self._free_counts[self._stack[self._head :]] = 1

    def _in_table(self, pages: torch.Tensor) -> bool:
        """True when each has a count, so that an error of torch is no fault of theirs."""
        return not torch.any((pages < 0) | (pages >= len(self._free_counts)))

    def _refusal(self, pages: torch.Tensor, call: str) -> str:
        """Say why these are no distinct pages in use. Shape: (n,) int64."""
        limit = len(self._free_counts)
        outside = (pages < self._first_slot) | (pages >= limit)
        if outside.any():
            return (
                f"PagedAllocator.{call}: expected slots in {self._first_slot}..{limit - 1}, "
                f"got {int(pages[outside][0])}, which exceeds the pool"
            )
        unaligned = pages % self._page_size != 0
        if unaligned.any():
            return (
                f"PagedAllocator.{call}: expected aligned contiguous pages of {self._page_size} "
                f"slots, got one that starts at slot {int(pages[unaligned][0])}"
            )
        free_already = self._free_counts[pages] != 0
        if free_already.any():
            slot = int(pages[free_already][0])
            return f"PagedAllocator.{call}: expected pages in use, but that of slot {slot} is free"
        ordered = pages.sort().values
        slot = int(ordered[1:][ordered[1:] == ordered[:-1]][0])
        return f"PagedAllocator.{call}: expected distinct pages, got that of slot {slot} twice"
