"""The tree behind the protocol by which benches call any prefix tree.

`tree.py` beside this file calls it, and so does `trees.py`, which is not part of this repository
and times other trees on the same work: packages/tree/BENCHMARK.md says how. Both know it as
`tree_adapter:full`, with this directory on PYTHONPATH.

Nothing is stripped: keys, parameters, results, receipts and actions are the public ones, and each
action is carried out. Only the allocator is a fake, as it is for the others, so that trees are
compared and not allocators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import torch

from radixlink_contracts import (
    EvictParams,
    IncLockRefParams,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
)
from radixlink_contracts.actions import (
    BackupKV,
    FreeComponentDeviceSlot,
    FreeDeviceKV,
    FreeDeviceKVFullOnly,
    RebuildFullToSWAMapping,
)
from radixlink_contracts.errors import ContractError
from radixlink_tree import UnifiedTreeCore

if TYPE_CHECKING:
    from array import array

    from radixlink_contracts import IncLockRefResult, InsertResult, NodeId
    from radixlink_contracts.actions import CacheAction


class CountingSlots:
    """Deals out slots in a circle and only counts them: O(1), whoever holds what."""

    def __init__(self, size: int) -> None:
        """All are free."""
        #: Slots that can be had. The bench sets it, to build more than fits.
        self.avail = size
        self._slots = torch.arange(size)
        self._next = 0

    def available_size(self) -> int:
        """Slots that can be had."""
        return self.avail

    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """Some slots, or None. Shape: (num_tokens,) int64."""
        if num_tokens > self.avail:
            return None
        self.avail -= num_tokens
        if self._next + num_tokens > len(self._slots):
            self._next = 0
        self._next += num_tokens
        return self._slots[self._next - num_tokens : self._next]

    def free(self, indices: torch.Tensor) -> None:
        """Take slots back."""
        self.avail += indices.numel()


class FullTree:
    """A tree of full attention, as the bench calls it."""

    def __init__(self, page_size: int, alloc: CountingSlots) -> None:
        """Start empty."""
        self.alloc = alloc
        self._tree = UnifiedTreeCore(page_size=page_size)

    def insert(self, tokens: array[int], value: torch.Tensor, prev: int = 0) -> tuple[int, NodeId]:
        """Insert, and free what was there already; say how much that was, and where it ended."""
        key = RadixKey(tokens)
        try:
            result = self._insert(key, value, prev)
        except ContractError:
            # To build a tree the bench claims prefixes that are not there, so that no duplicate is
            # freed. The tree takes no such claim: claim what is there.
            found = self._tree.match(MatchPrefixParams(key=key))
            result = self._insert(key, value, found.device_prefix_len)
        return result.prefix_len, result.last_device_node

    def _insert(self, key: RadixKey, value: torch.Tensor, prev: int) -> InsertResult:
        result = self._tree.insert(InsertParams(key=key, value=value, prev_prefix_len=prev))
        self._apply(result.cache_actions)
        return result

    def match(self, tokens: array[int], limit: int | None = None) -> tuple[int, NodeId]:
        """How much of the first `limit` tokens is there, and where that ends."""
        key = RadixKey(tokens if limit is None else tokens[:limit])
        result = self._tree.match(MatchPrefixParams(key=key))
        return result.device_prefix_len, result.last_device_node

    def indices(self, node: NodeId) -> torch.Tensor:
        """The slots from the root to the end of a node."""
        return self._tree.path_indices(node)

    def evict(self, num_tokens: int) -> int:
        """Make room; say how much."""
        result = self._tree.evict(EvictParams(num_tokens=num_tokens))
        self._apply(result.cache_actions)
        return result.num_tokens_evicted

    def lock(self, node: NodeId) -> IncLockRefResult:
        """Lock a path."""
        return self._tree.inc_lock_ref(IncLockRefParams(node_id=node))

    def unlock(self, receipt: IncLockRefResult) -> None:
        """Release it."""
        self._tree.dec_lock_ref(receipt.to_dec_params())

    def evictable(self) -> int:
        """Tokens that no lock protects."""
        return self._tree.evictable_size

    def _apply(self, actions: tuple[CacheAction, ...]) -> None:
        """Do what the tree says."""
        for action in actions:
            match action:
                case FreeDeviceKV():
                    self.alloc.free(action.indices)
                case (
                    BackupKV()
                    | FreeDeviceKVFullOnly()
                    | FreeComponentDeviceSlot()
                    | RebuildFullToSWAMapping()
                ):
                    msg = f"a tree of full attention without a linker has no use for {action}"
                    raise AssertionError(msg)
                case _:
                    assert_never(action)


def full(page_size: int, capacity: int) -> FullTree:
    """A tree of full attention over that many slots."""
    return FullTree(page_size, CountingSlots(capacity))
