"""`Rig`: a tree with pools beside it, and the calls of a request in short."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch

from radixlink_contracts import (
    DEFAULT_NAMESPACE,
    ComponentType,
    EvictParams,
    IncLockRefParams,
    InsertOrigin,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
)
from radixlink_tree import EvictionPolicy, StateRules, UnifiedTreeCore, check_invariants

from .pools import Pools

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterable

    from radixlink_contracts import (
        EvictResult,
        IncLockRefResult,
        InsertResult,
        LinkedTreeCore,
        MatchResult,
        Namespace,
        NodeId,
    )
    from radixlink_contracts.actions import CacheAction
    from radixlink_tree._node import Node

    # The tree is what the contracts ask for.
    _CORE: type[LinkedTreeCore] = UnifiedTreeCore


class Rig:
    """A tree, and pools that carry out what its actions say.

    A page of tokens is named by a number: page 7 is the token 7, `page_size` times.
    """

    def __init__(
        self,
        page_size: int,
        num_pages: int = 64,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        tail_pages: int = 0,
        *,
        window: int = 0,
        states: StateRules | None = None,
        num_states: int = 32,
    ) -> None:
        """Make an empty tree and full pools.

        Args:
            page_size: Tokens.
            num_pages: Of the full pool, and of the window pool where there is one.
            policy: Of the tree.
            tail_pages: Of the tree, for TLRU.
            window: Tokens; 0 for none.
            states: Of the tree.
            num_states: Of the state pool, where there is one.
        """
        self.page_size = page_size
        self.tree = UnifiedTreeCore(
            page_size=page_size,
            policy=policy,
            tail_tokens=tail_pages * page_size,
            sliding_window=window,
            states=states,
        )
        self.has_states = states is not None
        self.num_pages = num_pages
        self.pools = Pools(
            page_size,
            num_pages,
            num_window_pages=num_pages if window else 0,
            num_states=num_states if self.has_states else 0,
        )

    @property
    def free_pages(self) -> deque[int]:
        """Pages of the full pool that are free, the next one to hand out first."""
        return self.pools.free_pages

    @property
    def offered(self) -> list[NodeId]:
        """What the tree offered to the store, oldest first."""
        return self.pools.offered

    @property
    def window_pages(self) -> int:
        """A window in pages; 0 without."""
        return self.tree.sliding_window // self.page_size

    # -- what a request does -----------------------------------------------------------------------

    def key(self, *pages: int, tail: int = 0, namespace: Namespace = DEFAULT_NAMESPACE) -> RadixKey:
        """The pages, and `tail` tokens that make no whole page."""
        tokens = [page for page in pages for _ in range(self.page_size)]
        return RadixKey(array("q", tokens + [99] * tail), namespace)

    def match(
        self, *pages: int, tail: int = 0, namespace: Namespace = DEFAULT_NAMESPACE
    ) -> MatchResult:
        key = self.key(*pages, tail=tail, namespace=namespace)
        return self.tree.match(MatchPrefixParams(key=key))

    def matched_pages(self, *pages: int, namespace: Namespace = DEFAULT_NAMESPACE) -> int:
        """How many of the pages a request can go on from."""
        return self.match(*pages, namespace=namespace).device_prefix_len // self.page_size

    def full_pages(self, *pages: int) -> int:
        """How many of the pages full attention has."""
        return self.match(*pages).full_kv_hit_length // self.page_size

    def insert(
        self,
        *pages: int,
        tail: int = 0,
        namespace: Namespace = DEFAULT_NAMESPACE,
        matched: int = 0,
        inserted: int = 0,
        priority: int = 0,
        origin: InsertOrigin = InsertOrigin.COMPUTED,
        track: bool = False,
        floor: int = 0,
        prompt: int = 0,
        state: bool | None = None,
    ) -> InsertResult:
        """Insert with fresh slots for all but the first `matched` pages, as a request would.

        Lengths are in pages: what was matched, what an insert counted before, the floor of windows,
        the prompt. With `state` None a state is brought wherever one can be.
        """
        key = self.key(*pages, tail=tail, namespace=namespace)
        prefix = torch.empty(0, dtype=torch.int64)
        if matched:
            result = self.match(*pages[:matched], namespace=namespace)
            assert result.device_prefix_len == matched * self.page_size, "the test is wrong"
            prefix = self.tree.path_indices(result.last_device_node)
        fresh = self.pools.alloc(len(pages) - matched + bool(tail), bare=max(0, floor - matched))
        if state is None:
            state = self.has_states and not tail
        slot = self.pools.take_state() if state else None
        outcome = self.tree.insert(
            InsertParams(
                key=key,
                value=torch.cat([prefix, self.pools.slots(fresh)])[: len(key)],
                prev_prefix_len=matched * self.page_size,
                inserted_len=inserted * self.page_size,
                prompt_len=prompt * self.page_size,
                priority=priority,
                origin=origin,
                track_adopted_ranges=track,
                component_evicted_seqlens=(
                    {ComponentType.SWA: floor * self.page_size} if floor else {}
                ),
                mamba_value=slot,
            )
        )
        self.apply(outcome.cache_actions)
        if tail:
            self.pools.free(fresh[-1:])
        if slot is not None and outcome.mamba_exist:
            self.pools.free_state(slot)
        return outcome

    def params(
        self, key: RadixKey, *, value: torch.Tensor | None = None, prompt_len: int = 0
    ) -> InsertParams:
        """An insert of a key as it is, with fresh slots unless some are given; for one's own use."""
        num_pages = -(-len(key) // self.page_size)
        return InsertParams(
            key=key,
            value=self.alloc(num_pages)[: len(key)] if value is None else value,
            prompt_len=prompt_len,
            mamba_value=self.pools.take_state() if self.has_states else None,
        )

    def leaf(self, *pages: int, matched: int = 0) -> NodeId:
        """Insert, and say where it ended."""
        return self.insert(*pages, matched=matched).last_device_node

    def lock(self, node_id: NodeId, *skipped: ComponentType) -> IncLockRefResult:
        return self.tree.inc_lock_ref(
            IncLockRefParams(node_id=node_id, skip_lock_components=skipped)
        )

    def unlock(self, receipt: IncLockRefResult) -> None:
        self.tree.dec_lock_ref(receipt.to_dec_params())

    def move_on(self, receipt: IncLockRefResult) -> IncLockRefResult:
        """Release the window and the state of a receipt early."""
        return self.tree.dec_swa_lock_only(receipt.to_dec_params())

    def evict(self, num_pages: int = 0, *, windows: int = 0, states: int = 0) -> EvictResult:
        """Give up pages of full attention, pages of windows, states."""
        result = self.tree.evict(
            EvictParams(
                num_tokens=num_pages * self.page_size,
                swa_num_tokens=windows * self.page_size,
                mamba_num=states,
            )
        )
        self.apply(result.cache_actions)
        return result

    # -- the pools ---------------------------------------------------------------------------------

    def alloc(self, num_pages: int) -> torch.Tensor:
        """Slots of free pages, with windows beside them where the tree has windows."""
        return self.pools.slots(self.pools.alloc(num_pages))

    def free(self, indices: torch.Tensor) -> None:
        """Take whole pages back; each must be out."""
        self.pools.free(self.pages_of(indices))

    def pages_of(self, indices: torch.Tensor) -> list[int]:
        """The pool's pages that these slots are, which must be whole."""
        return self.pools.pages_of(indices)

    def apply(self, actions: Iterable[CacheAction]) -> None:
        """Do what the tree says."""
        self.pools.apply(actions)

    # -- looking -----------------------------------------------------------------------------------

    def path_pages(self, node_id: NodeId) -> list[int]:
        """The pool's pages from the root to the end of a node."""
        return self.pages_of(self.tree.path_indices(node_id))

    def path(self, node_id: NodeId) -> list[Node]:
        """The nodes from the root, which is not among them, to one."""
        nodes: list[Node] = []
        node = self.tree._nodes[node_id]
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def picture(self, node_id: NodeId) -> str:
        """The path to a node: pages of each node, `-` for each without a window, `*` for a state.

        So `4-|4*` is a tombstone of four pages above four live ones with a state at their end.
        """
        has_windows = bool(self.window_pages)
        return "|".join(
            f"{node.num_tokens // self.page_size}"
            f"{'-' * (has_windows and not node.has_swa)}{'*' * (node.mamba_slot is not None)}"
            for node in self.path(node_id)
        )

    @property
    def sizes(self) -> tuple[int, int]:
        """Evictable and protected pages."""
        return self.sizes_of(ComponentType.FULL)

    def sizes_of(self, component: ComponentType) -> tuple[int, int]:
        """Evictable and protected, in pages; in states for Mamba."""
        unit = 1 if component is ComponentType.MAMBA else self.page_size
        tree = self.tree
        return tree.evictable(component) // unit, tree.protected(component) // unit

    def check(self, held_pages: Iterable[int] = (), held_states: Iterable[int] = ()) -> None:
        """Free slots, the tree's and those that requests hold are the pools, each slot once."""
        check_invariants(self.tree)
        cached: list[int] = []
        states: list[int] = []
        for node in self.tree._nodes.values():
            pages = self.pages_of(node.device_indices)
            cached += pages
            if self.window_pages:
                assert [page in self.pools.pairs for page in pages] == [node.has_swa] * len(pages)
            if node.mamba_slot is not None:
                states.append(node.mamba_slot)
        self.pools.check([*cached, *held_pages], [*states, *held_states])
