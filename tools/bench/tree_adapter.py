"""The tree behind the protocol of a bench that times prefix trees side by side.

The bench, `trees.py` with its `impls.py`, is not part of this repository: `SGL_DIR` and
`TREES_BENCH` in packages/tree/BENCHMARK.md say how both are found. It knows an implementation as
`tree_adapter:full`, with this directory on PYTHONPATH.

Nothing is stripped: keys, parameters, results, receipts and actions are the public ones, and each
action is carried out. Only the allocator is the bench's own, which deals out slots without looking
at them, so that trees are compared and not allocators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, assert_never

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

    import torch

    from radixlink_contracts import IncLockRefResult, InsertResult, NodeId
    from radixlink_contracts.actions import CacheAction


class Slots(Protocol):
    """The bench's allocator."""

    def available_size(self) -> int:
        """Slots that can be had."""
        ...

    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """Some slots, or None. Shape: (num_tokens,) int64."""
        ...

    def free(self, indices: torch.Tensor) -> None:
        """Take slots back."""
        ...


class FullTree:
    """A tree of full attention, as the bench calls it."""

    def __init__(self, page_size: int, alloc: Slots) -> None:
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
    """A tree of full attention over the bench's own slots."""
    from impls import CountAlloc  # type: ignore[import-not-found]  # noqa: PLC0415

    return FullTree(page_size, CountAlloc(capacity, page_size))
