"""`UnifiedTreeCore`: the radix tree over pages of tokens.

It decides; how nodes hang together and come and go is `RadixStructure`'s.

Rules of the file:
1. Nothing is decided by a set's order, `id()`, `hash()` or a clock: ids and ticks are counters. So
   ranks that make the same calls get the same answers.
2. A receipt locks the path from its node to the root. A locked node is never evicted. A split
   copies the count.
3. What must happen outside is returned as actions, never done here.
4. Without a linker no page key, hit count or digest is computed, and what only some policies look
   at is kept only for them.
5. What may be refused is refused before the first change, but for splits and recency.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import torch

from radixlink_contracts import (
    DEFAULT_NAMESPACE,
    AdoptedRanges,
    ComponentType,
    EvictResult,
    IncLockRefResult,
    InsertResult,
    MatchResult,
    PrefixHoldings,
)
from radixlink_contracts.actions import (
    BackupKV,
    FreeDeviceKV,
    FreeDeviceKVFullOnly,
    FreeMambaSlots,
)
from radixlink_contracts.errors import ContractError
from radixlink_tree._boundary import boundary
from radixlink_tree._chain import PageChain
from radixlink_tree._checks import check_auxiliary, check_insert, check_tokens
from radixlink_tree._freed import Freed
from radixlink_tree._hashing import TOKEN_BYTES, namespace_seed
from radixlink_tree._node import Node, NodeView, chain_of
from radixlink_tree._overlap import Fate, LateStretch, late_stretches, overlap, pieces
from radixlink_tree._policies import (
    new_standing,
    note_insert,
)
from radixlink_tree._structure import STATE_CAME, SWA_CAME, SWA_GONE, RadixStructure, no_indices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import (
        DecLockRefParams,
        EvictParams,
        HeldBack,
        IncLockRefParams,
        InsertParams,
        MatchPrefixParams,
        NodeId,
        OperationId,
        PageKeySource,
        RadixKey,
        TreeNodeView,
    )
    from radixlink_contracts.actions import CacheAction
    from radixlink_tree._mamba import States
    from radixlink_tree._swa import Windows


class UnifiedTreeCore(RadixStructure):
    """The tree of one engine rank: full attention, and windows and states where it has them.

    Implements `LinkedTreeCore`.
    """

    # -- reading -----------------------------------------------------------------------------------

    @property
    def mutation_digest(self) -> int:
        """64 bits over the changes since the linker was attached."""
        return self._offloads.digest

    def node(self, node_id: NodeId) -> TreeNodeView:
        """The node of an id; see `LinkedTreeCore.node`."""
        return NodeView(self._find(node_id), self._page_size)

    def path_indices(self, node_id: NodeId) -> torch.Tensor:
        """The full slots from the root to the end of a node. Shape: (tokens of the path,) int64."""
        node = self._nodes.get(node_id) or self._find(node_id)
        runs: list[torch.Tensor] = []
        while (parent := node.parent) is not None:
            runs.append(node.device_indices)
            node = parent
        if not runs:
            return no_indices()
        runs.reverse()
        return torch.cat(runs)

    def key_source(self, node_id: NodeId, tail: RadixKey, start: int) -> PageKeySource:
        """The keys of the whole pages of `tail[start:]`; see `LinkedTreeCore.key_source`."""
        node = self._find(node_id)
        if (
            not 0 <= start <= len(tail)
            or start % self._page_size
            or (start == 0) is not (node is self._root)
        ):
            msg = (
                f"key_source: expected the start of a page of {self._page_size} tokens where node "
                f"{node_id} ends, in a key of {len(tail)}, got token {start}"
            )
            raise ContractError(msg)
        tokens = memoryview(tail.token_ids)[start : self._floor(len(tail))].tobytes()
        if node is self._root:
            return PageChain(
                tokens, self._page_size, before=None, seed=namespace_seed(tail.namespace)
            )
        return PageChain(tokens, self._page_size, before=chain_of(node, self._page_size))

    # -- match and insert --------------------------------------------------------------------------

    def match(self, params: MatchPrefixParams) -> MatchResult:
        """Find the longest prefix; see `TreeCore.match`."""
        self._tick += 1
        node, end = self._walk(params.key)
        length = end // TOKEN_BYTES
        if self._hybrid:
            return self._match_end(node, length)
        return MatchResult(
            device_prefix_len=length, last_device_node=node.node_id, full_kv_hit_length=length
        )

    def _match_end(self, full_end: Node, full_len: int) -> MatchResult:
        """Go back to where every component lets the match end, and use what it needs there."""
        windows, states = self._windows, self._states
        end = boundary(
            full_end,
            0 if windows is None else windows.num_bytes,
            needs_state=states is not None,
        )
        length, node = full_len, full_end
        while node is not end:
            assert node.parent is not None, "the boundary is on the path"
            length -= node.num_tokens
            node = node.parent
        branching_len = 0
        if states is not None:
            states.use(end)
            branching_len = states.branching_len(full_len, length)
        elif full_len > length:
            branching_len = full_len
        if windows is not None:
            windows.use(end)
        return MatchResult(
            device_prefix_len=length,
            last_device_node=end.node_id,
            full_kv_hit_length=full_len,
            branching_len=branching_len,
        )

    def holdings(self, key: RadixKey) -> PrefixHoldings:
        """Say what of a sequence is held piece by piece; see `LinkedTreeCore.holdings`."""
        end, end_byte = self._walk(key)
        windows: list[tuple[int, int]] = []
        states: list[int] = []
        node, at = end, end_byte // TOKEN_BYTES
        while node.parent is not None:
            if node.mamba_slot is not None:
                states.append(at)
            start = at - node.num_tokens
            if node.has_swa:
                stop = windows.pop()[1] if windows and windows[-1][0] == at else at
                windows.append((start, stop))
            node, at = node.parent, start
        return PrefixHoldings(
            full_len=end_byte // TOKEN_BYTES,
            last_node=end.node_id,
            windows=tuple(reversed(windows)),
            states=tuple(reversed(states)),
        )

    def insert(self, params: InsertParams) -> InsertResult:
        """Add a sequence; see `TreeCore.insert`."""
        key, value = params.key, params.value
        total = len(key.token_ids)
        total -= total % self._page_size
        check_insert(params, total, self._page_size)
        if (
            params.component_evicted_seqlens
            or params.mamba_value is not None
            or params.late_windows
        ):
            check_auxiliary(params, total, self._page_size, self.components)
        prev_prefix_len = params.prev_prefix_len
        self._tick += 1
        node, end = self._walk(key)
        prefix_len = end // TOKEN_BYTES
        if prev_prefix_len > prefix_len:
            msg = (
                f"insert: expected at least prev_prefix_len={prev_prefix_len} tokens in the "
                f"tree, got {prefix_len}: the matched prefix was not locked"
            )
            raise ContractError(msg)
        tokens = b""
        if prefix_len < total:
            tokens = memoryview(key.token_ids)[prefix_len:total].tobytes()
            check_tokens(tokens, prefix_len)
        late = late_stretches(node, prefix_len, params.late_windows)
        actions: list[CacheAction] = []
        adopted = AdoptedRanges() if params.track_adopted_ranges else None
        for stretch in late:
            self._come_late(stretch, adopted)
        floor = params.component_evicted_seqlens.get(ComponentType.SWA, 0)
        if prefix_len > prev_prefix_len:
            if self._windows is None:
                actions.append(FreeDeviceKV(indices=value[prev_prefix_len:prefix_len]))
            else:
                self._overlap(node, prefix_len, params, floor, actions, adopted)
        if prefix_len < total:
            for start, stop in self._leaves(prefix_len, total, floor, params.prompt_len):
                first = start - prefix_len
                run = tokens[first * TOKEN_BYTES : (stop - prefix_len) * TOKEN_BYTES]
                node = self._add_leaf(node, key, run, value[start:stop])
                if self._keeps_standing:
                    # Those above the last are raised with the path, by `note_insert`.
                    priority = params.priority - (stop < total)
                    node.standing = new_standing(self._policy, self._tick, priority)
                if self._windows is not None and start >= floor:
                    self._windows.gain(node)
                    self._note(node.node_id, SWA_CAME)
                    if adopted is not None:
                        adopted.record(ComponentType.SWA, start, stop)
            if adopted is not None:
                adopted.record(ComponentType.FULL, prefix_len, total)
        if self._keeps_standing:
            note_insert(self._policy, node, total, params)
        mamba_exist = False
        if self._hybrid:
            mamba_exist = self._insert_end(node, total, params, actions, adopted)
        if node.queued is None:
            self._queue.offer(node)
        hot: tuple[NodeId, ...] = ()
        threshold = self._offloads.threshold
        if threshold is not None:
            due, hot = self._offloads.count_insert(node, total, params, threshold, self._tick)
            if due:
                actions.append(BackupKV(node_ids=due))
        return InsertResult(
            prefix_len=prefix_len,
            total_len=total,
            last_device_node=node.node_id,
            cache_actions=tuple(actions),
            adopted_ranges=adopted,
            mamba_exist=mamba_exist,
            hot_nodes=hot,
        )

    def _overlap(
        self,
        end: Node,
        prefix_len: int,
        params: InsertParams,
        floor: int,
        actions: list[CacheAction],
        adopted: AdoptedRanges | None,
    ) -> None:
        """Give back what a tree with windows has already, and take windows that it lacks."""
        value = params.value
        for stretch in overlap(end, prefix_len, params.prev_prefix_len, floor):
            start, stop, node = stretch.start, stretch.stop, stretch.node
            slots = value[start:stop]
            match stretch.fate:
                case Fate.DUPLICATE:
                    actions.append(FreeDeviceKV(indices=slots))
                case Fate.DUPLICATE_FULL:
                    actions.append(FreeDeviceKVFullOnly(indices=slots))
                case Fate.RECOVERS:
                    assert node is not None, "a tombstone recovers"
                    surplus = node.num_tokens - (stop - start)
                    if surplus:
                        self._split(node, surplus * TOKEN_BYTES)
                    self._recover(node, slots, actions)
                    if adopted is not None:
                        adopted.record(ComponentType.SWA, start, stop)
                        if not node.lock_ref:
                            adopted.record(ComponentType.FULL, start, stop)
                case _:
                    assert_never(stretch.fate)

    def _come_late(self, stretch: LateStretch, adopted: AdoptedRanges | None) -> None:
        """A tombstone gets the window back that has come beside its own full slots."""
        assert self._windows is not None, "only a tree with windows has tombstones"
        node = stretch.node
        surplus = node.num_tokens - (stretch.stop - stretch.start)
        if surplus:
            self._split(node, surplus * TOKEN_BYTES)
        self._windows.gain(node)
        self._note(node.node_id, SWA_CAME)
        if adopted is not None:
            adopted.record(ComponentType.SWA, stretch.start, stretch.stop)

    def _leaves(
        self, start: int, stop: int, floor: int, prompt_len: int
    ) -> Sequence[tuple[int, int]]:
        """How what is new is dealt out to leaves.

        In a tree with windows it is cut at the floor, before which the window is gone, and one
        window before the end, so that a lock on the end protects no more than that.
        """
        if self._windows is None and not prompt_len:
            return ((start, stop),)
        cuts = [self._floor(prompt_len)]
        if self._windows is not None:
            cuts += [floor, max(floor, stop - self._windows.num_tokens)]
        return pieces(start, stop, cuts)

    def _insert_end(
        self,
        end: Node,
        total: int,
        params: InsertParams,
        actions: list[CacheAction],
        adopted: AdoptedRanges | None,
    ) -> bool:
        """Take the state of an insert, and use the window at its end.

        Returns:
            `InsertResult.mamba_exist`.
        """
        if self._windows is not None:
            self._windows.use(end)
        states, slot = self._states, params.mamba_value
        if states is None:
            return False
        exists = end.mamba_slot is not None or end.parent is None
        if exists or slot is None:
            states.use(end)
            return exists
        states.gain(end, slot)
        self._note(end.node_id, STATE_CAME)
        if adopted is not None:
            adopted.record(ComponentType.MAMBA, total - 1, total)
        over = list(states.over_cap(end))
        if over:
            actions.append(
                FreeMambaSlots(slots=tuple(self._lose_state(states, node) for node in over))
            )
        return False

    # -- eviction and locks ------------------------------------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        """Give up what is worth least; see `TreeCore.evict`."""
        windows, states = self._windows, self._states
        if (params.swa_num_tokens and windows is None) or (params.mamba_num and states is None):
            msg = (
                f"evict: expected no more than {[kind.name for kind in self.components]} asked for, "
                f"got swa_num_tokens={params.swa_num_tokens}, mamba_num={params.mamba_num}"
            )
            raise ContractError(msg)
        freed = Freed()
        pop, give_up = self._queue.pop, self._give_up
        while freed.num_tokens < params.num_tokens:
            leaf = pop()
            if leaf is None:
                break
            give_up(leaf, freed)
        if windows is not None:
            self._evict_windows(windows, params.swa_num_tokens, freed)
        if states is not None:
            self._evict_states(states, params.mamba_num, freed)
        return freed.result()

    def _evict_windows(self, windows: Windows, num_tokens: int, freed: Freed) -> None:
        """Give up windows, used longest ago first."""
        states = self._states
        while freed.num_swa_tokens < num_tokens:
            node = windows.oldest()
            if node is None:
                return
            if not node.children and not node.lock_ref:
                self._give_up(node, freed)
                continue
            freed.swa(node.device_indices)
            freed.num_swa_tokens += node.num_tokens
            windows.lose(node)
            self._note(node.node_id, SWA_GONE)
            # No match can end at a state without its window.
            if states is not None and node.mamba_slot is not None and not states.is_locked(node):
                freed.state(self._lose_state(states, node))

    def _evict_states(self, states: States, num_states: int, freed: Freed) -> None:
        """Give up states, used longest ago first; a leaf goes whole: nothing else can end there."""
        while freed.num_states < num_states:
            node = states.oldest()
            if node is None:
                return
            if not node.children and not node.lock_ref:
                self._give_up(node, freed)
            else:
                freed.state(self._lose_state(states, node))

    def inc_lock_ref(self, params: IncLockRefParams) -> IncLockRefResult:
        """Lock a path; see `TreeCore.inc_lock_ref`."""
        end = node = self._nodes.get(params.node_id) or self._find(params.node_id)
        skipped = params.skip_lock_components
        if ComponentType.FULL in skipped:
            msg = (
                f"inc_lock_ref: expected FULL to be locked at node {params.node_id}, got {skipped}"
            )
            raise ContractError(msg)
        locked = 0
        while (parent := node.parent) is not None:
            if node.lock_ref == 0:
                locked += len(node.tokens)
            node.lock_ref += 1
            node = parent
        self._evictable -= locked // TOKEN_BYTES
        self._protected += locked // TOKEN_BYTES
        swa_locked_len, mamba_locked = 0, False
        if self._windows is not None and ComponentType.SWA not in skipped:
            swa_locked_len = self._windows.lock(end)
        if self._states is not None and ComponentType.MAMBA not in skipped:
            mamba_locked = self._states.lock(end)
        return self._receipts.give(params.node_id, skipped, swa_locked_len, mamba_locked)

    def dec_swa_lock_only(self, params: DecLockRefParams) -> IncLockRefResult:
        """Release a receipt's window and state; see `TreeCore.dec_swa_lock_only`."""
        receipt = params.receipt
        self._receipts.take(receipt)
        self._unlock_auxiliary(receipt)
        return self._receipts.give(receipt.node_id, (ComponentType.SWA, ComponentType.MAMBA))

    def receipts(self) -> tuple[IncLockRefResult, ...]:
        """The locks that are out; see `LinkedTreeCore.receipts`."""
        return self._receipts.out()

    def locked_state(self, receipt: IncLockRefResult) -> int:
        """The slot of the state that a receipt protects; see `TreeCore.locked_state`."""
        self._receipts.check(receipt)
        slot = self._nodes[receipt.node_id].mamba_slot
        if not receipt.mamba_locked or slot is None:
            msg = (
                f"locked_state: expected a receipt with a state, got {receipt.receipt_id} of node "
                f"{receipt.node_id}, which protects none"
            )
            raise ContractError(msg)
        return slot

    def dec_lock_ref(self, params: DecLockRefParams) -> None:
        """Release a receipt; see `TreeCore.dec_lock_ref`."""
        receipt = params.receipt
        self._receipts.take(receipt)
        if self._hybrid:
            self._unlock_auxiliary(receipt)
        end = node = self._nodes[receipt.node_id]
        released = 0
        while (parent := node.parent) is not None:
            node.lock_ref = lock_ref = node.lock_ref - 1
            if lock_ref == 0:
                released += len(node.tokens)
            node = parent
        self._evictable += released // TOKEN_BYTES
        self._protected -= released // TOKEN_BYTES
        # All others on the path have a child.
        self._queue.offer(end)

    def _unlock_auxiliary(self, receipt: IncLockRefResult) -> None:
        """Give back the window and the state of a receipt."""
        end = self._nodes[receipt.node_id]
        if receipt.swa_locked_len and self._windows is not None:
            self._windows.unlock(end, receipt.swa_locked_len)
        if receipt.mamba_locked and self._states is not None:
            self._states.unlock(end)

    def reset(self) -> tuple[CacheAction, ...]:
        """Forget everything; see `TreeCore.reset`. Ids are not used again."""
        freed = Freed()
        for node in self._nodes.values():
            if node is self._root:
                continue
            self._free_slots(node, freed)
            if node.mamba_slot is not None:
                freed.state(node.mamba_slot)
        self._queue.clear()
        self._nodes.clear()
        self._receipts.clear()
        self._offloads.clear()
        self._evictable = self._protected = 0
        if self._windows is not None:
            self._windows.clear()
        if self._states is not None:
            self._states.clear()
        self._root = self._new_node(None, b"", b"", no_indices(), DEFAULT_NAMESPACE)
        return freed.result().cache_actions

    # -- what a linker adds ------------------------------------------------------------------------

    def attach_linker(
        self, *, backup_threshold: int, touch_after: int | None = None, retry_after: int = 1
    ) -> None:
        """Start to offer nodes; see `LinkedTreeCore.attach_linker`."""
        self._offloads.attach(backup_threshold, touch_after, retry_after)

    def detach_linker(self) -> None:
        """Be as without a linker; see `LinkedTreeCore.detach_linker`."""
        self._offloads.detach()
        for node in self._nodes.values():
            node.marks = None

    def backup_path(self, node_id: NodeId) -> tuple[NodeId, ...]:
        """What goes with an offload of a node; see `LinkedTreeCore.backup_path`."""
        return self._offloads.backup_path(self._find(node_id), self._tick)

    def held_back(self, node_id: NodeId) -> tuple[HeldBack, ...]:
        """What of a path failed lately; see `LinkedTreeCore.held_back`."""
        return self._offloads.held_back(self._find(node_id), self._tick, self.page_size)

    def mark_offload_pending(self, node_id: NodeId, operation_id: OperationId) -> None:
        """The node is being offloaded; see `LinkedTreeCore.mark_offload_pending`."""
        self._offloads.mark_pending(self._find(node_id), operation_id)

    def finish_offload(self, operation_id: OperationId, *, stored: bool) -> None:
        """The offload ended; see `LinkedTreeCore.finish_offload`."""
        self._offloads.finish(operation_id, self._tick, stored=stored)

    def mark_touch_pending(self, node_id: NodeId, operation_id: OperationId) -> None:
        """The node is being touched in the store; see `LinkedTreeCore.mark_touch_pending`."""
        self._offloads.mark_touching(self._find(node_id), operation_id)

    def finish_touch(self, operation_id: OperationId, *, present: bool) -> None:
        """The touch ended; see `LinkedTreeCore.finish_touch`."""
        self._offloads.finish_touch(operation_id, self._tick, present=present)
