"""A transfer of pages between a pool and a store, and what a lookup answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import attrs

from radixlink_contracts._bits import PageBits
from radixlink_contracts._pools import PoolHitPolicy, PoolName
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from radixlink_contracts._keys import PageKeySource


@attrs.frozen(kw_only=True, eq=False)
class PoolTransfer:
    """Pages of one pool, by key and by device slot.

    Attributes:
        name: The pool.
        keys: The pages' keys, first page first; perhaps not hashed yet.
        device_indices: The slots, page after page, on the device of the allocator that dealt them out. Shape:
            (num_pages * page_size,) int64 for page pools, (1,) in host memory for a Mamba state. None in a LOOKUP.
        hit_policy: Which of the pages a lookup needs.
        held: In a LOOKUP: which of all its pages, those of its KV transfer, the device holds still. No store need be
            asked for them, and they count as found. None for none.
    """

    name: PoolName
    keys: PageKeySource
    device_indices: torch.Tensor | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    held: PageBits | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse slots that cannot be dealt out evenly to the pages."""
        if self.device_indices is None:
            return
        num_slots, num_pages = len(self.device_indices), len(self.keys)
        if num_pages == 0 or num_slots % num_pages:
            msg = (
                f"PoolTransfer {self.name}: expected slots for {num_pages} whole pages, "
                f"got {num_slots} slots"
            )
            raise ContractError(msg)

    def restorable(self, found: PageBits) -> PageBits:
        """Which prefixes this pool lets be restored.

        Args:
            found: Which of all pages of the lookup, those of its KV transfer, the pool's store holds.

        Returns:
            Bit L-1 is set where L pages can be restored, with those that the device holds still.

        Raises:
            ContractError: Store and device are asked about different numbers of pages.
        """
        if self.held is not None:
            found |= self.held
        match self.hit_policy:
            case PoolHitPolicy.ALL_PAGES:
                return PageBits((1 << found.leading) - 1, found.count)
            case PoolHitPolicy.TRAILING_PAGES:
                return found.trailing(max(1, len(self.keys)))
            case _:
                assert_never(self.hit_policy)


@attrs.frozen(kw_only=True)
class PoolTransferResult:
    """What one rank's store holds of the pages that were asked for.

    The whole set of restorable lengths, not just the longest: a pool that needs only a trailing window makes the set
    sparse (5 pages may do while 3 and 4 do not), and ranks hold different shards, so only the intersection of the sets
    is safe.

    Attributes:
        restorable_prefix_pages: Bit L-1 is set where a prefix of L pages can be restored on this rank.
        found: Which of all pages asked for the store holds in each pool, for explanations; may be empty. No part of
            what a result is equal to.
    """

    restorable_prefix_pages: PageBits
    found: Mapping[PoolName, PageBits] = attrs.field(factory=dict, eq=False)

    @classmethod
    def empty(cls, num_pages: int) -> PoolTransferResult:
        """A miss: no length of `num_pages` can be restored."""
        return cls(restorable_prefix_pages=PageBits.none(num_pages))

    @property
    def longest(self) -> int:
        """The longest restorable prefix, in pages; 0 for a miss."""
        return self.restorable_prefix_pages.mask.bit_length()
