"""`WatchedTree`: the real tree; what it is asked and what it decides is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from radixlink_contracts import POOL_OF
from radixlink_contracts.errors import StaleHandleError
from radixlink_testing.simulator._device import pages_of
from radixlink_testing.simulator._rules import Rule
from radixlink_tree import UnifiedTreeCore

if TYPE_CHECKING:
    from radixlink_contracts import (
        DecLockRefParams,
        EvictParams,
        EvictResult,
        IncLockRefParams,
        IncLockRefResult,
        InsertParams,
        InsertResult,
        MatchPrefixParams,
        MatchResult,
        NodeId,
        OperationId,
        PrefixHoldings,
        RadixKey,
        TreeNodeView,
    )
    from radixlink_contracts.actions import CacheAction
    from radixlink_testing.simulator._watch import Watch
    from radixlink_tree import StateRules


class WatchedTree(UnifiedTreeCore):
    """The tree of one rank."""

    def __init__(
        self, watch: Watch, *, page_size: int, window: int, states: StateRules | None
    ) -> None:
        """Be the tree of a rank."""
        super().__init__(page_size=page_size, sliding_window=window, states=states)
        self._watch = watch
        watch.window_pages = self.sliding_window // page_size
        #: Something changed since whoever checks the tree's invariants set it back.
        self.changed = True
        #: Matches and inserts.
        self._uses = 0
        self._retry_after = 1
        #: The nodes of offloads on their way; and of those that failed, how often, and at how many
        #: uses each may be tried again.
        self._offloading: dict[OperationId, NodeId] = {}
        self._failed: dict[NodeId, tuple[int, int]] = {}

    @override
    def match(self, params: MatchPrefixParams) -> MatchResult:
        """Find the longest prefix; a split is a change, which a digest tells while one is kept."""
        self._uses += 1
        before = self.mutation_digest
        result = super().match(params)
        self.changed |= not self._watch.attached or self.mutation_digest != before
        if self._watch.acting == "init_load_back":
            self._watch.prefix_pages = result.device_prefix_len // self.page_size
            self._watch.full_pages = result.full_kv_hit_length // self.page_size
        return result

    @override
    def holdings(self, key: RadixKey) -> PrefixHoldings:
        """Say what is held; a split is a change, and this is no use."""
        before = self.mutation_digest
        holdings = super().holdings(key)
        self.changed |= not self._watch.attached or self.mutation_digest != before
        return holdings

    @override
    def insert(self, params: InsertParams) -> InsertResult:
        """Add a sequence."""
        self.changed = True
        self._uses += 1
        result = super().insert(params)
        self._watch.inserted(params, result)
        if result.cache_actions:
            self._check_locked()
        return result

    @override
    def evict(self, params: EvictParams) -> EvictResult:
        """Give up what is worth least; what is locked must still be there."""
        self.changed = True
        result = super().evict(params)
        self._watch.gave_up(result.cache_actions)
        self._check_locked()
        return result

    def _check_locked(self) -> None:
        """What a receipt has is there."""
        nodes: dict[NodeId, TreeNodeView] = {}
        for lock in self._watch.locks.values():
            node_id = lock.receipt.node_id
            try:
                node = nodes.get(node_id) or nodes.setdefault(node_id, self.node(node_id))
            except StaleHandleError:
                self._watch.breach(
                    Rule.RECEIPTS, f"node {lock.receipt.node_id} was evicted while it was locked"
                )
                continue
            if lock.state is not None and node.mamba_slot != lock.state:
                self._watch.breach(
                    Rule.RECEIPTS,
                    f"the state of node {lock.receipt.node_id} was given up while it was locked",
                )

    @override
    def inc_lock_ref(self, params: IncLockRefParams) -> IncLockRefResult:
        """Lock a path."""
        self.changed = True
        receipt = super().inc_lock_ref(params)
        locked, end, window = receipt.swa_locked_len, 0, list[int]()
        if locked or self._watch.acting == "init_load_back":
            path = self.path_indices(params.node_id)
            end = len(path)
            window = pages_of(path[end - locked :], self.page_size)
        state = self.node(params.node_id).mamba_slot if receipt.mamba_locked else None
        self._watch.locked(receipt, end, window, state)
        return receipt

    @override
    def dec_swa_lock_only(self, params: DecLockRefParams) -> IncLockRefResult:
        """Release a window and a state early."""
        self.changed = True
        receipt = super().dec_swa_lock_only(params)
        self._watch.lock_reduced(params.receipt, receipt)
        return receipt

    @override
    def dec_lock_ref(self, params: DecLockRefParams) -> None:
        """Release a path; twice is one too many."""
        self.changed = True
        try:
            super().dec_lock_ref(params)
        except StaleHandleError as error:
            self._watch.breach(Rule.RECEIPTS, f"{self._watch.acting}: {error}")
            raise
        self._watch.unlocked(params.receipt)

    @override
    def finish_offload(self, operation_id: OperationId, *, stored: bool) -> None:
        """An offload ended."""
        self.changed = True
        super().finish_offload(operation_id, stored=stored)
        node_id = self._offloading.pop(operation_id)
        times, _ = self._failed.pop(node_id, (0, 0))
        if not stored:
            wait = self._retry_after * min(2**times, 64)
            self._failed[node_id] = (times + 1, self._uses + wait)
        self._watch.offload_ended(operation_id, stored=stored)

    @override
    def mark_offload_pending(self, node_id: NodeId, operation_id: OperationId) -> None:
        """An offload begins."""
        self.changed = True
        node = self.node(node_id)
        unstored = {POOL_OF[one] for one in node.unstored}
        super().mark_offload_pending(node_id, operation_id)
        self._offloading[operation_id] = node_id
        times, retry_at = self._failed.get(node_id, (0, 0))
        if self._uses < retry_at:
            self._watch.breach(
                Rule.STORED,
                f"node {node_id} is offloaded at use {self._uses} of the tree; it failed {times} "
                f"times and is held back until {retry_at}",
            )
        self._watch.offload_begun(operation_id, node.device_indices, node.mamba_slot, unstored)

    @override
    def mark_touch_pending(self, node_id: NodeId, operation_id: OperationId) -> None:
        """A touch begins."""
        self.changed = True
        super().mark_touch_pending(node_id, operation_id)
        node = self.node(node_id)
        self._watch.touch_begun(
            operation_id,
            node.device_indices,
            node.mamba_slot,
            {POOL_OF[one] for one in node.unstored},
        )

    @override
    def finish_touch(self, operation_id: OperationId, *, present: bool) -> None:
        """A touch ended."""
        self.changed = True
        super().finish_touch(operation_id, present=present)
        self._watch.touch_ended(operation_id, present=present)

    @override
    def attach_linker(
        self, *, backup_threshold: int, touch_after: int | None = None, retry_after: int = 1
    ) -> None:
        """Offer nodes."""
        super().attach_linker(
            backup_threshold=backup_threshold, touch_after=touch_after, retry_after=retry_after
        )
        self._retry_after = retry_after

    @override
    def detach_linker(self) -> None:
        """Be as without a linker."""
        self.changed = True
        self._offloading.clear()
        self._failed.clear()
        super().detach_linker()
        self._watch.device.forget_restored()

    @override
    def reset(self) -> tuple[CacheAction, ...]:
        """Forget everything."""
        self.changed = True
        self._watch.locks.clear()
        self._offloading.clear()
        self._failed.clear()
        actions = super().reset()
        self._watch.gave_up(actions)
        return actions
