"""The tree behind the protocol by which benches call any prefix tree.

`tree.py` beside this file calls it, and so does `trees.py`, which is not part of this repository
and times other trees on the same work: packages/tree/BENCHMARK.md says how. Both know it as
`tree_adapter:full`, `:full_swa` and `:full_mamba`, with this directory on PYTHONPATH.

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
    FreeDeviceKV,
    FreeDeviceKVFullOnly,
    FreeMambaSlots,
    FreeSWA,
    MoveSWA,
)
from radixlink_contracts.errors import ContractError
from radixlink_tree import StateRules, UnifiedTreeCore

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


class PairedSlots:
    """Slots of full attention with window slots beside them, both counted only."""

    def __init__(self, size: int) -> None:
        """All are free. Of window slots there are as many as of full ones."""
        self.full_attn_allocator = CountingSlots(size)
        self.swa_attn_allocator = CountingSlots(size)

    def available_size(self) -> int:
        """Full slots that can be had."""
        return self.full_attn_allocator.avail

    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """Some slots of both, or None. Shape: (num_tokens,) int64."""
        slots = self.full_attn_allocator.alloc(num_tokens)
        if slots is not None:
            self.swa_attn_allocator.avail -= num_tokens
        return slots

    def free(self, indices: torch.Tensor) -> None:
        """Take slots of both back."""
        self.full_attn_allocator.free(indices)
        self.swa_attn_allocator.free(indices)


class BenchTree:
    """A tree, as the bench calls it."""

    def __init__(
        self,
        tree: UnifiedTreeCore,
        alloc: CountingSlots | PairedSlots,
        states: CountingSlots | None = None,
    ) -> None:
        """Start with an empty tree."""
        self.alloc = alloc
        self._tree = tree
        self._states = states

    def insert(self, tokens: array[int], value: torch.Tensor, prev: int = 0) -> tuple[int, NodeId]:
        """Insert, and free what was there already; say how much that was, and where it ended."""
        key = RadixKey(tokens)
        state = None if self._states is None else self._state_slot(self._states)
        try:
            result = self._insert(key, value, prev, state)
        except ContractError:
            # To build a tree the bench claims prefixes that are not there, so that no duplicate is
            # freed. The tree takes no such claim: claim what is there.
            found = self._tree.match(MatchPrefixParams(key=key))
            result = self._insert(key, value, found.full_kv_hit_length, state)
        if self._states is not None and result.mamba_exist:
            self._states.avail += 1
        return result.prefix_len, result.last_device_node

    def _insert(
        self, key: RadixKey, value: torch.Tensor, prev: int, state: int | None
    ) -> InsertResult:
        result = self._tree.insert(
            InsertParams(key=key, value=value, prev_prefix_len=prev, mamba_value=state)
        )
        self._apply(result.cache_actions)
        return result

    def _state_slot(self, states: CountingSlots) -> int:
        """A slot for a state, for which another may have to go."""
        slot = states.alloc(1)
        if slot is None:
            self._apply(self._tree.evict(EvictParams(mamba_num=1)).cache_actions)
            slot = states.alloc(1)
        assert slot is not None, "every state is locked"
        return int(slot)

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
                case FreeDeviceKVFullOnly():
                    self._paired.full_attn_allocator.free(action.indices)
                case FreeSWA():
                    self._paired.swa_attn_allocator.free(action.full_indices)
                case MoveSWA():
                    pass  # which slot is beside which is not counted
                case FreeMambaSlots():
                    assert self._states is not None, "only a tree with states frees them"
                    self._states.avail += len(action.slots)
                case BackupKV():
                    msg = f"a tree without a linker has no use for {action}"
                    raise AssertionError(msg)
                case _:
                    assert_never(action)

    @property
    def _paired(self) -> PairedSlots:
        """The slots of a tree with windows."""
        assert isinstance(self.alloc, PairedSlots), "only a tree with windows frees one side"
        return self.alloc


def full(page_size: int, capacity: int) -> BenchTree:
    """A tree of full attention over that many slots."""
    return BenchTree(UnifiedTreeCore(page_size=page_size), CountingSlots(capacity))


def full_swa(page_size: int, capacity: int) -> BenchTree:
    """Full attention and a window of 1,024 tokens, as the other trees are given."""
    tree = UnifiedTreeCore(page_size=page_size, sliding_window=1024)
    return BenchTree(tree, PairedSlots(capacity))


def full_mamba(page_size: int, capacity: int, mamba_slots: int = 1 << 20) -> BenchTree:
    """Full attention and recurrent states, one at the end of each insert."""
    tree = UnifiedTreeCore(page_size=page_size, states=StateRules(chunk_tokens=64))
    return BenchTree(tree, CountingSlots(capacity), CountingSlots(mamba_slots))
