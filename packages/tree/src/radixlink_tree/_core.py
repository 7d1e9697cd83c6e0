"""`UnifiedTreeCore`: the radix tree over pages of tokens.

Theory of operation. A key is a namespace and tokens; only whole pages count. A node holds a run of
pages as bytes, so that a comparison is one memcmp at an offset; its parent finds it by the bytes of
its first page. Two sequences that differ inside a page share nothing of that page, so every split
is at a page boundary. The lower half of a split keeps the node's id, so an id names the end of a
path for as long as it lives.

Rules of the file:
1. Nothing is decided by a set's order, `id()`, `hash()` or a clock: ids and ticks are counters. So
   ranks that make the same calls get the same answers.
2. A receipt locks the path from its node to the root. A locked node is never evicted. A split
   copies the count.
3. What must happen outside is returned as actions, never done here.
4. Without a linker no page key, hit count or digest is computed, and what only some policies look
   at is kept only for them.
5. What every call does for each node of its path is written out in its loop, on local names: a call
   or a property there costs more than the step itself.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final, cast
from zlib import crc32

import torch

from radixlink_contracts import (
    DEFAULT_NAMESPACE,
    AdoptedRanges,
    ComponentType,
    EvictResult,
    IncLockRefResult,
    InsertOrigin,
    InsertResult,
    MatchResult,
)
from radixlink_contracts.actions import BackupKV, FreeDeviceKV
from radixlink_contracts.errors import ContractError, InvalidTransitionError, StaleHandleError
from radixlink_tree._chain import PageChain
from radixlink_tree._evict import EvictionQueue
from radixlink_tree._hashing import TOKEN_BYTES, framed_namespace, namespace_seed
from radixlink_tree._node import NO_CHILDREN, Node, NodeView, chain_of
from radixlink_tree._policies import (
    KEEPS_STANDING,
    VALUES_FALL,
    EvictionPolicy,
    new_standing,
    note_insert,
    split_standing,
    value_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radixlink_contracts import (
        DecLockRefParams,
        EvictParams,
        IncLockRefParams,
        InsertParams,
        MatchPrefixParams,
        Namespace,
        NodeId,
        OperationId,
        PageKeySource,
        RadixKey,
        ReceiptId,
        TreeNodeView,
    )
    from radixlink_contracts.actions import CacheAction

_DIGEST_MASK: Final = (1 << 64) - 1
_DIGEST_PRIME: Final = 0x100000001B3
#: A large eviction is handed over in pieces: each is made in memory that the nodes of the one before
#: gave back, where a whole one would take as much new memory as it is about to free.
_PIECE_TOKENS: Final = 8192


class UnifiedTreeCore:
    """The tree of one engine rank, for full attention. Implements `LinkedTreeCore`."""

    def __init__(
        self,
        *,
        page_size: int,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        tail_tokens: int = 0,
    ) -> None:
        """Make an empty tree.

        Args:
            page_size: Tokens.
            policy: Which unlocked leaf is given up first.
            tail_tokens: How much of the end of each conversation `EvictionPolicy.TLRU` gives up
                before anything else; 0 for the other policies.

        Raises:
            ContractError: The page size is below 1, or the tail is negative or not asked for.
        """
        if page_size < 1:
            msg = f"UnifiedTreeCore: expected a page_size of at least 1, got {page_size}"
            raise ContractError(msg)
        if tail_tokens < 0 or (tail_tokens and policy is not EvictionPolicy.TLRU):
            msg = (
                "UnifiedTreeCore: expected tail_tokens of 0, or more for TLRU, "
                f"got {tail_tokens} for {policy.name}"
            )
            raise ContractError(msg)
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        # Drawn from, not called as types: a NewType is a call of a Python function.
        self._node_ids = cast("Iterator[NodeId]", count())
        self._receipt_ids = cast("Iterator[ReceiptId]", count(1))
        self._tick = 0
        #: The threshold of the attached linker; None without one.
        self._backup_threshold: int | None = None
        self._digest = 0
        self._policy = policy
        self._keeps_standing = policy in KEEPS_STANDING
        self._values_fall = policy in VALUES_FALL
        #: Every node but those evicted, by id.
        self._nodes: dict[NodeId, Node] = {}
        self._queue = EvictionQueue(value_of(policy, tail_tokens), self._nodes)
        #: The receipts that were not given back.
        self._receipts: dict[ReceiptId, IncLockRefResult] = {}
        #: The nodes that each offload on its way speaks of: one, or more after splits. Some may be
        #: evicted by now: an offload that is copied out needs no lock any more.
        self._pending: dict[OperationId, list[Node]] = {}
        self._evictable = 0
        self._protected = 0
        self._root = self._new_node(None, b"", b"", _no_indices(), DEFAULT_NAMESPACE)

    # -- reading -----------------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._page_size

    @property
    def root(self) -> NodeId:
        """The empty prefix."""
        return self._root.node_id

    @property
    def evictable_size(self) -> int:
        """Tokens that no lock protects."""
        return self._evictable

    @property
    def protected_size(self) -> int:
        """Tokens that a lock protects."""
        return self._protected

    @property
    def mutation_digest(self) -> int:
        """64 bits over the changes since the linker was attached."""
        return self._digest

    def node(self, node_id: NodeId) -> TreeNodeView:
        """The node of an id; see `LinkedTreeCore.node`."""
        return NodeView(node=self._find(node_id), page_size=self._page_size)

    def path_indices(self, node_id: NodeId) -> torch.Tensor:
        """The full slots from the root to the end of a node. Shape: (tokens of the path,) int64."""
        node = self._nodes.get(node_id) or self._find(node_id)
        runs: list[torch.Tensor] = []
        while (parent := node.parent) is not None:
            runs.append(node.device_indices)
            node = parent
        if not runs:
            return _no_indices()
        runs.reverse()
        return torch.cat(runs)

    def key_source(self, node_id: NodeId, tail: RadixKey, start: int) -> PageKeySource:
        """The keys of the whole pages of `tail[start:]`; see `LinkedTreeCore.key_source`."""
        node = self._find(node_id)
        if start % self._page_size or (node is self._root and start):
            msg = (
                f"key_source: expected the start of a page of {self._page_size} tokens where node "
                f"{node_id} ends, got token {start}"
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
        node, end = self._walk(params.key, params.key.token_ids.tobytes())
        return MatchResult(device_prefix_len=end // TOKEN_BYTES, last_device_node=node.node_id)

    def insert(self, params: InsertParams) -> InsertResult:
        """Add a sequence; see `TreeCore.insert`."""
        key, value = params.key, params.value
        total = len(key.token_ids)
        total -= total % self._page_size
        if value.numel() < total:
            msg = f"insert: expected slots for {total} tokens, got {value.numel()}"
            raise ContractError(msg)
        prev_prefix_len = params.prev_prefix_len
        if prev_prefix_len < 0 or prev_prefix_len % self._page_size:
            msg = (
                f"insert: expected a prev_prefix_len in whole pages of {self._page_size} tokens, "
                f"got {prev_prefix_len}"
            )
            raise ContractError(msg)
        tokens = key.token_ids.tobytes()
        node, end = self._walk(key, tokens)
        prefix_len = end // TOKEN_BYTES
        if prev_prefix_len > prefix_len:
            msg = (
                f"insert: expected at least prev_prefix_len={prev_prefix_len} tokens in the "
                f"tree, got {prefix_len}: the matched prefix was not locked"
            )
            raise ContractError(msg)
        actions: list[CacheAction] = []
        if prefix_len > prev_prefix_len:
            actions.append(FreeDeviceKV(indices=value[prev_prefix_len:prefix_len]))
        adopted = AdoptedRanges() if params.track_adopted_ranges else None
        if prefix_len < total:
            node = self._add_leaf(
                node, key, tokens[end : total * TOKEN_BYTES], value[prefix_len:total]
            )
            if self._keeps_standing:
                node.standing = new_standing(self._policy, self._tick, params.priority)
            if adopted is not None:
                adopted.record(ComponentType.FULL, prefix_len, total)
        if self._keeps_standing:
            note_insert(self._policy, node, total, params)
        if node.queued is None:
            self._queue.offer(node)
        if self._backup_threshold is not None:
            self._note_insert(node, total, params, actions, self._backup_threshold)
        return InsertResult(
            prefix_len=prefix_len,
            total_len=total,
            last_device_node=node.node_id,
            cache_actions=tuple(actions),
            adopted_ranges=adopted,
        )

    def _walk(self, key: RadixKey, tokens: bytes) -> tuple[Node, int]:
        """Follow a key as far as the tree goes, splitting the node in which it ends.

        Returns:
            The last node, and the byte of `tokens` behind its end.
        """
        page_bytes = self._page_bytes
        limit = len(tokens) - len(tokens) % page_bytes
        self._tick = tick = self._tick + 1
        starts_with = tokens.startswith
        node, at = self._root, 0
        if not limit:
            return node, at
        edge = tokens[:page_bytes]
        if key.namespace is not DEFAULT_NAMESPACE:
            edge = framed_namespace(key.namespace) + edge
        child = node.children.get(edge)
        while child is not None:
            run = child.tokens
            if not starts_with(run, at):
                shared = _shared_bytes(run, tokens, at, limit, page_bytes)
                if shared:
                    node, at = self._split(child, shared), at + shared
                break
            child.last_access = tick
            node = child
            at += len(run)
            if at == limit:
                break
            # An only child is compared at once: no page to copy and hash.
            child = node.only_child or node.children.get(tokens[at : at + page_bytes])
        if self._values_fall:
            self._queue.offer(node)
        return node, at

    def _add_leaf(self, parent: Node, key: RadixKey, tokens: bytes, value: torch.Tensor) -> Node:
        """Hang a new leaf under a node.

        It holds a copy of the slots, so that no larger tensor is kept alive.
        """
        edge = tokens[: self._page_bytes]
        if parent is self._root:
            edge = framed_namespace(key.namespace) + edge
        leaf = self._new_node(parent, edge, tokens, value.clone(), key.namespace)
        parent.adopt(edge, leaf)
        leaf.last_access = self._tick
        self._evictable += len(tokens) // TOKEN_BYTES
        if self._backup_threshold is not None:
            self._note(leaf.node_id, crc32(tokens, crc32(edge)))
        return leaf

    def _split(self, node: Node, cut: int) -> Node:
        """Cut a node at a byte: a new node takes the upper part, the old one keeps id and rest."""
        parent = node.parent
        assert parent is not None, "the root has no tokens to split"
        num_tokens = cut // TOKEN_BYTES
        upper = self._new_node(
            parent,
            node.edge,
            node.tokens[:cut],
            node.device_indices[:num_tokens].clone(),
            node.namespace,
        )
        upper.lock_ref = node.lock_ref
        upper.last_access = self._tick
        upper.hit_count = node.hit_count
        upper.stored = node.stored
        if node.pending_operation is not None:
            upper.pending_operation = node.pending_operation
            self._pending[node.pending_operation].append(upper)
        if node.chain is not None:
            upper.chain, node.chain = node.chain.split(cut // self._page_bytes)
        parent.adopt(node.edge, upper)
        node.parent = upper
        node.tokens = node.tokens[cut:]
        node.device_indices = node.device_indices[num_tokens:].clone()
        node.edge = node.tokens[: self._page_bytes]
        upper.adopt(node.edge, node)
        upper.standing = split_standing(self._policy, node)
        self._note(node.node_id, cut)
        if self._values_fall:
            self._queue.offer(node)
        return upper

    # -- eviction and locks ------------------------------------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        """Give up unlocked leaves; see `TreeCore.evict`."""
        if params.swa_num_tokens or params.mamba_num:
            msg = (
                "evict: expected only num_tokens in a tree of full attention, "
                f"got swa_num_tokens={params.swa_num_tokens}, mamba_num={params.mamba_num}"
            )
            raise ContractError(msg)
        actions: list[CacheAction] = []
        freed: list[torch.Tensor] = []
        evicted = handed_over = 0
        while evicted < params.num_tokens:
            leaf = self._queue.pop()
            if leaf is None:
                break
            evicted += len(leaf.tokens) // TOKEN_BYTES
            freed.append(leaf.device_indices)
            self._remove(leaf)
            if evicted - handed_over >= _PIECE_TOKENS:
                actions.append(_free(freed))
                freed, handed_over = [], evicted
        self._evictable -= evicted
        if freed:
            actions.append(_free(freed))
        return EvictResult(num_tokens_evicted=evicted, cache_actions=tuple(actions))

    def _remove(self, leaf: Node) -> None:
        """Take an unlocked leaf out of the tree; the ledger is the caller's."""
        parent = leaf.parent
        assert parent is not None
        parent.disown(leaf.edge)
        del self._nodes[leaf.node_id]
        leaf.parent = None
        if parent.children is NO_CHILDREN:
            self._queue.offer(parent)
        self._note(leaf.node_id, -1)

    def inc_lock_ref(self, params: IncLockRefParams) -> IncLockRefResult:
        """Lock a path; see `TreeCore.inc_lock_ref`."""
        node = self._nodes.get(params.node_id) or self._find(params.node_id)
        locked = 0
        while (parent := node.parent) is not None:
            if node.lock_ref == 0:
                locked += len(node.tokens)
            node.lock_ref += 1
            node = parent
        self._evictable -= locked // TOKEN_BYTES
        self._protected += locked // TOKEN_BYTES
        receipt_id = next(self._receipt_ids)
        result = IncLockRefResult(receipt_id=receipt_id, node_id=params.node_id)
        self._receipts[receipt_id] = result
        return result

    def dec_lock_ref(self, params: DecLockRefParams) -> None:
        """Release a receipt; see `TreeCore.dec_lock_ref`."""
        receipt = params.receipt
        if self._receipts.get(receipt.receipt_id) is not receipt:
            msg = (
                f"dec_lock_ref: expected a receipt that is out, got {receipt.receipt_id} of node "
                f"{receipt.node_id}, which was released before or is not this tree's"
            )
            raise StaleHandleError(msg)
        del self._receipts[receipt.receipt_id]
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

    def reset(self) -> tuple[CacheAction, ...]:
        """Forget everything; see `TreeCore.reset`. Ids are not used again."""
        held = [node.device_indices for node in self._nodes.values() if node is not self._root]
        self._queue.clear()
        self._nodes.clear()
        self._receipts.clear()
        self._pending.clear()
        self._evictable = self._protected = 0
        self._root = self._new_node(None, b"", b"", _no_indices(), DEFAULT_NAMESPACE)
        # Ranks whose trees differed are equal again: neither the digest nor the ids of before count.
        self._digest = 0
        return (FreeDeviceKV(indices=torch.cat(held)),) if held else ()

    # -- what a linker adds ------------------------------------------------------------------------

    def attach_linker(self, *, backup_threshold: int) -> None:
        """Start to offer nodes; see `LinkedTreeCore.attach_linker`."""
        if self._backup_threshold is not None:
            msg = "attach_linker: expected no linker, got a second one"
            raise InvalidTransitionError(msg, state="linked", event="attach")
        if backup_threshold < 1:
            msg = (
                f"attach_linker: expected a backup_threshold of at least 1, got {backup_threshold}"
            )
            raise ContractError(msg)
        self._backup_threshold = backup_threshold
        self._digest = 0

    def detach_linker(self) -> None:
        """Be as without a linker; see `LinkedTreeCore.detach_linker`."""
        self._backup_threshold = None
        self._digest = 0
        self._pending.clear()
        for node in self._nodes.values():
            node.chain = None
            node.hit_count = 0
            node.stored = False
            node.pending_operation = None

    def mark_offload_pending(self, node_id: NodeId, operation_id: OperationId) -> None:
        """The node is being offloaded; see `LinkedTreeCore.mark_offload_pending`."""
        node = self._find(node_id)
        if node.stored or node.pending_operation is not None:
            state = "stored" if node.stored else f"offloaded by {node.pending_operation}"
            msg = f"mark_offload_pending: expected node {node_id} unstored and idle, got it {state}"
            raise InvalidTransitionError(msg, state=state, event="offload", operation=operation_id)
        node.pending_operation = operation_id
        self._pending.setdefault(operation_id, []).append(node)

    def finish_offload(self, operation_id: OperationId, *, stored: bool) -> None:
        """The offload ended; see `LinkedTreeCore.finish_offload`."""
        nodes = self._pending.pop(operation_id, None)
        if nodes is None:
            msg = f"finish_offload: expected an offload on its way, got operation {operation_id}"
            raise InvalidTransitionError(msg, state="idle", event="finish", operation=operation_id)
        for node in nodes:
            node.pending_operation = None
            node.stored = node.stored or stored

    def _note_insert(
        self,
        end: Node,
        total: int,
        params: InsertParams,
        actions: list[CacheAction],
        threshold: int,
    ) -> None:
        """Count the insert's use of its path and offer what is due, root first.

        What is above a node that is due goes with it, so that its prefix is stored too.
        """
        restored = params.origin is InsertOrigin.RESTORED
        due: list[NodeId] = []
        node, at = end, total
        while node.parent is not None:
            start = at - node.num_tokens
            idle = node.pending_operation is None
            if not restored:
                node.hit_count += at > params.inserted_len
            elif idle and start >= params.prev_prefix_len:
                node.stored = True
            if idle and not node.stored and (due or node.hit_count >= threshold):
                due.append(node.node_id)
            node, at = node.parent, start
        if due:
            actions.append(BackupKV(node_ids=tuple(reversed(due))))

    # -- bookkeeping -------------------------------------------------------------------------------

    def _new_node(
        self,
        parent: Node | None,
        edge: bytes,
        tokens: bytes,
        device_indices: torch.Tensor,
        namespace: Namespace,
    ) -> Node:
        """A node under the next id, not yet linked."""
        node_id = next(self._node_ids)
        node = Node(node_id, parent, edge, tokens, device_indices, namespace)
        self._nodes[node_id] = node
        return node

    def _find(self, node_id: NodeId) -> Node:
        """The node of an id, or an error that names it."""
        node = self._nodes.get(node_id)
        if node is None:
            msg = f"tree: expected a node that is there, got {node_id}, which was evicted or reset"
            raise StaleHandleError(msg)
        return node

    def _floor(self, num_tokens: int) -> int:
        """Tokens in whole pages."""
        return num_tokens - num_tokens % self._page_size

    def _note(self, node_id: NodeId, what: int) -> None:
        """Mix a change into the digest, while there is somebody to compare it."""
        if self._backup_threshold is not None:
            mixed = (self._digest ^ (node_id - self._root.node_id)) * _DIGEST_PRIME
            self._digest = ((mixed ^ (what & _DIGEST_MASK)) * _DIGEST_PRIME) & _DIGEST_MASK


def _free(runs: list[torch.Tensor]) -> FreeDeviceKV:
    """The action that frees these slots."""
    # What one node held is nobody else's any more: it needs no copy.
    return FreeDeviceKV(indices=runs[0] if len(runs) == 1 else torch.cat(runs))


def _no_indices() -> torch.Tensor:
    """No slots. Shape: (0,) int64."""
    return torch.empty(0, dtype=torch.int64)


def _shared_bytes(run: bytes, tokens: bytes, at: int, limit: int, page_bytes: int) -> int:
    """How many bytes of `run` in whole pages equal `tokens[at:]`.

    Cost: one comparison and one copy of the shared part.
    """
    if not tokens.startswith(run[:page_bytes], at):
        return 0
    low, high = 1, min(len(run), limit - at) // page_bytes
    while low < high:
        middle = (low + high + 1) // 2
        if tokens.startswith(run[low * page_bytes : middle * page_bytes], at + low * page_bytes):
            low = middle
        else:
            high = middle - 1
    return low * page_bytes
