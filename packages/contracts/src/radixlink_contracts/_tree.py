"""What the linker, a component and an engine may see of a prefix tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from radixlink_contracts._evict import EvictParams, EvictResult
    from radixlink_contracts._explain import HeldBack
    from radixlink_contracts._ids import NodeId, OperationId
    from radixlink_contracts._insert import InsertParams, InsertResult
    from radixlink_contracts._keys import PageKeySource, RadixKey
    from radixlink_contracts._locks import DecLockRefParams, IncLockRefParams, IncLockRefResult
    from radixlink_contracts._match import MatchPrefixParams, MatchResult, PrefixHoldings
    from radixlink_contracts._pools import ComponentType
    from radixlink_contracts.actions import CacheAction


class TreeNodeView(Protocol):
    """One node, to be read on the scheduler thread and not kept: it changes with the tree."""

    @property
    def node_id(self) -> NodeId:
        """Its id."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of this node alone."""
        ...

    @property
    def device_indices(self) -> torch.Tensor:
        """The full slots of this node's tokens. Shape: (num_tokens,) int64."""
        ...

    @property
    def page_keys(self) -> PageKeySource:
        """The keys of this node's pages, hashed by whoever resolves them."""
        ...

    @property
    def has_swa(self) -> bool:
        """True when the window slots of its tokens are there. All of them are, or none."""
        ...

    @property
    def mamba_slot(self) -> int | None:
        """The slot of the recurrent state at its end, where it has one."""
        ...

    @property
    def unstored(self) -> tuple[ComponentType, ...]:
        """What it holds that no store is known to hold, in the components' order.

        What every rank confirmed is not in it. That is a hint, not a promise.
        """
        ...

    @property
    def stored(self) -> bool:
        """True when nothing is unstored."""
        ...

    @property
    def pending_operation(self) -> OperationId | None:
        """The offload that is on the way, where there is one."""
        ...


class TreeCore(Protocol):
    """A radix tree over pages of tokens. It decides; whoever calls it carries out the actions it returns.

    Ranks: all, the same calls in the same order; every answer is then the same on all of them.
    Thread: the scheduler's.
    """

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        ...

    @property
    def components(self) -> tuple[ComponentType, ...]:
        """What its nodes hold, full attention first."""
        ...

    @property
    def sliding_window(self) -> int:
        """Tokens of the window, in whole pages; 0 without SWA."""
        ...

    @property
    def root(self) -> NodeId:
        """The empty prefix. Never evicted."""
        ...

    def match(self, params: MatchPrefixParams) -> MatchResult:
        """Find the longest prefix on the device that a request can go on from.

        It ends where every component allows: at a node with a state, behind a live window or a path that is live from
        the root on.

        Mutates: splits the node in which the full part ends, and recency; allocates nothing.
        Cost: O(nodes on the path), plus one comparison of the matched bytes.
        """
        ...

    def insert(self, params: InsertParams) -> InsertResult:
        """Add a sequence. Slots of pages that were there already come back in a `FreeDeviceKV`.

        A window or state that a node lacked is taken from the sequence where that has it.

        Raises:
            ContractError: The value does not cover the key's whole pages, a length is not in whole pages or out of
                range, or something of a component that this tree has not is given. Nothing changes then but splits
                and recency.

        Cost: O(nodes on the path), plus one comparison of the matched bytes.
        """
        ...

    def evict(self, params: EvictParams) -> EvictResult:
        """Give up what is worth least until enough is free or nothing is left: full, then SWA, then Mamba.

        Full goes by unlocked leaves, with all they hold. Of SWA and Mamba goes what was used longest ago: of an inner
        node, or one whose full slots are locked, just that and what stands on it (a state on its window).

        Cost: O(log leaves) for each leaf given up, O(1) for each window and state.
        """
        ...

    def inc_lock_ref(self, params: IncLockRefParams) -> IncLockRefResult:
        """Lock the path from a node to the root against eviction.

        Raises:
            StaleHandleError: There is no such node.
            ContractError: FULL is to be skipped.

        Cost: O(nodes on the path).
        """
        ...

    def dec_swa_lock_only(self, params: DecLockRefParams) -> IncLockRefResult:
        """Release the window and the state of a receipt early: its request has moved on past them.

        Returns:
            The receipt for the full path, which stays locked. The one that was given is void.

        Raises:
            StaleHandleError: The receipt was released before, or is another tree's. Nothing changes.

        Cost: O(nodes in the window).
        """
        ...

    def locked_state(self, receipt: IncLockRefResult) -> int:
        """The slot of the state that a receipt protects.

        Raises:
            StaleHandleError: The receipt was released before, or is another tree's.
            ContractError: It protects no state.
        """
        ...

    def dec_lock_ref(self, params: DecLockRefParams) -> None:
        """Release what a receipt took.

        Raises:
            StaleHandleError: The receipt was released before, or is another tree's. Nothing changes.

        Cost: O(nodes on the path).
        """
        ...

    def path_indices(self, node_id: NodeId) -> torch.Tensor:
        """The full slots from the root to the end of a node.

        Shape: (tokens of the path,) int64.
        Cost: one concatenation.
        """
        ...

    def reset(self) -> tuple[CacheAction, ...]:
        """Forget every node and receipt. Idempotent.

        Returns:
            What the caller must do now: free every slot that the tree held.
        """
        ...

    @property
    def evictable_size(self) -> int:
        """Tokens of full attention that no lock protects."""
        ...

    @property
    def protected_size(self) -> int:
        """Tokens of full attention that a lock protects."""
        ...

    def evictable(self, component: ComponentType) -> int:
        """What no lock protects. Units: tokens; states for Mamba."""
        ...

    def protected(self, component: ComponentType) -> int:
        """What a lock protects. Units: tokens; states for Mamba."""
        ...


class LinkedTreeCore(TreeCore, Protocol):
    """What a tree offers beyond `TreeCore` so that a linker can be attached."""

    def attach_linker(
        self, *, backup_threshold: int, touch_after: int | None = None, retry_after: int = 1
    ) -> None:
        """From now on insert emits `BackupKV` for nodes used `backup_threshold` times that are not stored.

        A node that is being offloaded is named again only where it has what that offload does not take. One whose
        offload failed is held back for a while; with its pages unstored so is all behind it, which would serve nobody.

        Args:
            backup_threshold: 1 offers each node at its first insert.
            touch_after: An insert names in `hot_nodes` what is stored of its path and was stored, restored or touched
                at least so many uses of the tree (matches and inserts) ago. None: nothing.
            retry_after: For how many uses of the tree a node is held back whose offload failed: so many after the
                first failure, twice as many after each further one in a row, up to 64 times as many. At least 1: what
                fails waits until the tree is used again, or a linker would try it for ever.

        Raises:
            InvalidTransitionError: A linker is attached already.
            ContractError: One of the numbers is below 1.
        """
        ...

    def detach_linker(self) -> None:
        """Be as before `attach_linker`: no action, key or count for a store any more. Idempotent."""
        ...

    def node(self, node_id: NodeId) -> TreeNodeView:
        """The node of an id.

        Raises:
            StaleHandleError: There is no such node.
        """
        ...

    def holdings(self, key: RadixKey) -> PrefixHoldings:
        """Say what the device holds of a sequence of each component, also behind where a match may end.

        Mutates: splits the node in which the full part ends, which becomes as recent as the last use of the tree. This
            is none: it goes with a match or an insert of the same sequence.
        Cost: O(nodes on the path), plus one comparison of the matched bytes.
        """
        ...

    def key_source(self, node_id: NodeId, tail: RadixKey, start: int) -> PageKeySource:
        """The keys of the whole pages of `tail[start:]`, chained behind the end of a node.

        Args:
            node_id: Where `tail[:start]` ends.
            tail: The whole sequence.
            start: Token; a multiple of the page size.

        Cost: O(nodes on the path) the first time, else O(1) and one copy of the tail's tokens; nothing is hashed.
        """
        ...

    def backup_path(self, node_id: NodeId) -> tuple[NodeId, ...]:
        """What of the path to a node is to be offloaded with it: all unstored, on no way, not held back, root first.

        Raises:
            StaleHandleError: There is no such node.

        Cost: O(nodes on the path).
        """
        ...

    def held_back(self, node_id: NodeId) -> tuple[HeldBack, ...]:
        """The nodes on the path to a node whose offload failed and that are not offered yet, root first. For people.

        Raises:
            StaleHandleError: There is no such node.

        Cost: O(nodes on the path).
        """
        ...

    def mark_offload_pending(self, node_id: NodeId, operation_id: OperationId) -> None:
        """What is unstored of the node is being offloaded by this operation.

        Whoever reads its slots holds a lock on it for that long.

        Raises:
            InvalidTransitionError: It is stored, another operation offloads it, or there is no linker. Nothing
                changes.
        """
        ...

    def finish_offload(self, operation_id: OperationId, *, stored: bool) -> None:
        """The operation ended: what it took of its node, and of what was split off it since, is stored or is not.

        What was stored before stays stored; what came to the node since is unstored.

        Raises:
            InvalidTransitionError: No node is being offloaded by it.
        """
        ...

    def mark_touch_pending(self, node_id: NodeId, operation_id: OperationId) -> None:
        """What the node holds and the store is known to hold is being touched by this operation; no lock is needed.

        Raises:
            StaleHandleError: There is no such node.
            InvalidTransitionError: Nothing of it is stored, or another operation touches it. Nothing changes.
        """
        ...

    def finish_touch(self, operation_id: OperationId, *, present: bool) -> None:
        """The touch ended: all of it was there on all ranks, or it is unstored, so that it is offered again.

        So is what was split off the node since; of what was evicted since, nothing remains to be said.

        Raises:
            InvalidTransitionError: No node is being touched by it.
        """
        ...

    def receipts(self) -> tuple[IncLockRefResult, ...]:
        """The locks that are out, oldest first."""
        ...

    @property
    def mutation_digest(self) -> int:
        """64 bits that change with the nodes of the tree and are equal on ranks that made the same calls.

        Splits, new leaves, evictions, and windows and states that come or go change it; locks, recency and marks show
        in those later.

        Made of replicated facts only: no page hash, clock or address is in it.
        """
        ...
