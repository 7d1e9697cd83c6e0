"""`PageBits`: one bit for each page of a sequence, in one integer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@attrs.frozen
class PageBits:
    """A yes or no for each of `count` pages: bit i belongs to page i.

    To loop over it, or to ask `in`, is about the pages that are set. It has no `len`, which could be `count`, of all
    pages, or `total`, of those that are set.

    One Python integer carries all bits, so that an AND over thousands of pages is one operation and no list is built.

    Attributes:
        mask: The bits; bits at and above `count` are 0.
        count: How many pages the value speaks of.
    """

    mask: int
    count: int

    def __attrs_post_init__(self) -> None:
        """Refuse bits that belong to no page."""
        if self.count < 0 or self.mask < 0 or self.mask >> self.count:
            msg = f"PageBits: expected a mask of {self.count} bits, 0 or more, got {self.mask:#x}"
            raise ContractError(msg)

    @classmethod
    def none(cls, count: int) -> PageBits:
        """No page of `count`."""
        return cls(0, count)

    @classmethod
    def all(cls, count: int) -> PageBits:
        """Every page of `count`."""
        return cls((1 << max(0, count)) - 1, count)

    @classmethod
    def of(cls, pages: Iterable[int], count: int) -> PageBits:
        """Just the pages named.

        Raises:
            ContractError: A page is outside 0..count-1.
        """
        mask = 0
        for page in pages:
            if not 0 <= page < count:
                msg = f"PageBits: expected a page in 0..{count - 1}, got {page}"
                raise ContractError(msg)
            mask |= 1 << page
        return cls(mask, count)

    @property
    def complete(self) -> bool:
        """True when every page's bit is set (so also for no pages)."""
        return self.mask == (1 << self.count) - 1

    @property
    def leading(self) -> int:
        """How many pages from page 0 on are set without a hole."""
        holes = ~self.mask & ((1 << self.count) - 1)
        return self.count if not holes else (holes & -holes).bit_length() - 1

    def trailing(self, num_pages: int) -> PageBits:
        """Which lengths end in so many set pages, or consist of set pages only where they are shorter.

        Args:
            num_pages: At least 1.

        Returns:
            Bit L-1 is set where pages [max(0, L - num_pages), L) are.

        Cost: O(log num_pages) operations on the whole mask.
        """
        # Before page 0 everything counts as set. After each turn a bit says that it and the `seen - 1` below it are.
        reach = min(num_pages, self.count)
        runs = (self.mask << reach) | ((1 << reach) - 1)
        seen = 1
        while seen < reach:
            step = min(seen, reach - seen)
            runs &= (runs << step) | ((1 << step) - 1)
            seen += step
        return PageBits((runs >> reach) & ((1 << self.count) - 1), self.count)

    @property
    def total(self) -> int:
        """How many pages are set."""
        return self.mask.bit_count()

    def __and__(self, other: PageBits) -> PageBits:
        """Pages set in both.

        Raises:
            ContractError: The two speak of different numbers of pages.
        """
        if self.count != other.count:
            msg = f"PageBits: expected {self.count} pages on both sides of &, got {other.count}"
            raise ContractError(msg)
        return PageBits(self.mask & other.mask, self.count)

    def __or__(self, other: PageBits) -> PageBits:
        """Pages set in either.

        Raises:
            ContractError: The two speak of different numbers of pages.
        """
        if self.count != other.count:
            msg = f"PageBits: expected {self.count} pages on both sides of |, got {other.count}"
            raise ContractError(msg)
        return PageBits(self.mask | other.mask, self.count)

    def __invert__(self) -> PageBits:
        """Pages that are not set."""
        return PageBits(~self.mask & ((1 << self.count) - 1), self.count)

    def runs(self) -> Iterator[tuple[int, int]]:
        """The pages that are set as ranges [first, behind the last), ascending.

        Cost: O(runs) operations on the whole mask.
        """
        mask, at = self.mask, 0
        while mask:
            skipped = (mask & -mask).bit_length() - 1
            mask >>= skipped
            # The lowest bit that is not set is where the run ends.
            length = (~mask & (mask + 1)).bit_length() - 1
            yield at + skipped, at + skipped + length
            mask >>= length
            at += skipped + length

    def __bool__(self) -> bool:
        """Refused: it could mean that some page is set, that all are, or that there are any.

        Raises:
            TypeError: Always; ask `complete`, `total` or `count`.
        """
        msg = "the truth of PageBits is ambiguous: ask complete, total or count"
        raise TypeError(msg)

    def __contains__(self, page: int) -> bool:
        """True when the page's bit is set."""
        return 0 <= page < self.count and bool(self.mask >> page & 1)

    def __iter__(self) -> Iterator[int]:
        """The pages that are set, ascending."""
        mask = self.mask
        while mask:
            lowest = mask & -mask
            yield lowest.bit_length() - 1
            mask ^= lowest
