"""`RadixStructure`: the nodes of a tree, how a key is followed through them, and how they come and go.

Theory of operation. A key is a namespace and tokens; only whole pages count. A node holds a run of
pages as bytes, so that a comparison is one memcmp at an offset; its parent finds it by the bytes of
its first page. Two sequences that differ inside a page share nothing of that page, so every split
is at a page boundary. The lower half of a split keeps the node's id, so an id names the end of a
path for as long as it lives.

It keeps the ledgers, the eviction queue, windows, states, marks and the digest true whatever happens
to a node; what is to happen is `UnifiedTreeCore`'s to say.

What every call does for each node of its path is written out in its loop, on local names: a call or
a property there costs more than the step itself. So windows and states are no hooks that a node is
shown to; the tree asks `Windows` and `States` once a call, about the end of a path.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final, assert_never, cast
from zlib import crc32

import torch

from radixlink_contracts import DEFAULT_NAMESPACE, ComponentType
from radixlink_contracts.actions import FreeDeviceKVFullOnly, MoveSWA
from radixlink_contracts.errors import ContractError, StaleHandleError
from radixlink_tree._evict import EvictionQueue
from radixlink_tree._hashing import TOKEN_BYTES, framed_namespace
from radixlink_tree._mamba import States
from radixlink_tree._node import NO_CHILDREN, Node
from radixlink_tree._offloads import Offloads
from radixlink_tree._policies import (
    KEEPS_STANDING,
    VALUES_FALL,
    EvictionPolicy,
    split_standing,
    value_of,
)
from radixlink_tree._receipts import Receipts
from radixlink_tree._swa import Windows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radixlink_contracts import Namespace, NodeId, RadixKey
    from radixlink_contracts.actions import CacheAction
    from radixlink_tree._freed import Freed
    from radixlink_tree._mamba import StateRules

#: What happened to a node, for the digest, where it is no number of bytes.
_EVICTED: Final = -1
SWA_GONE: Final = -2
SWA_CAME: Final = -3
_STATE_GONE: Final = -4
STATE_CAME: Final = -5

#: A walk copies so many bytes of a key at a time: bytes are compared in half the time that a view of
#: them takes, but a megabyte is new memory each time, and leaves nothing else in the caches.
_COPY_BYTES: Final = 128 << 10
#: Runs of at least so many bytes are not copied for, but compared where they are. At most a copy.
_LONG_RUN_BYTES: Final = 16 << 10
_NOTHING: Final = memoryview(b"")


class RadixStructure:
    """The nodes of one tree, and all that is kept about them."""

    def __init__(
        self,
        *,
        page_size: int,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        tail_tokens: int = 0,
        sliding_window: int = 0,
        states: StateRules | None = None,
    ) -> None:
        """Make an empty tree.

        Args:
            page_size: Tokens.
            policy: Which unlocked leaf is given up first.
            tail_tokens: How much of the end of each conversation `EvictionPolicy.TLRU` gives up
                before anything else; 0 for the other policies.
            sliding_window: Tokens that sliding-window attention looks back; 0 for a model without.
            states: Where a model with recurrent states can take them; None for one without.

        Raises:
            ContractError: The page size is below 1, the window negative, or the tail negative or
                not asked for.
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
        if sliding_window < 0:
            msg = f"UnifiedTreeCore: expected a sliding_window of at least 0, got {sliding_window}"
            raise ContractError(msg)
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        # Drawn from, not called as types: a NewType is a call of a Python function.
        self._node_ids = cast("Iterator[NodeId]", count())
        self._tick = 0
        self._offloads = Offloads()
        self._policy = policy
        self._keeps_standing = policy in KEEPS_STANDING
        self._values_fall = policy in VALUES_FALL
        #: Every node but those evicted, by id.
        self._nodes: dict[NodeId, Node] = {}
        self._queue = EvictionQueue(value_of(policy, tail_tokens), self._nodes)
        self._receipts = Receipts()
        self._evictable = 0
        self._protected = 0
        #: What nodes hold beside full attention.
        self._windows = (
            Windows(-(-sliding_window // page_size) * page_size) if sliding_window else None
        )
        self._states = None if states is None else States(states, page_size)
        self._hybrid = self._windows is not None or self._states is not None
        self._components = (
            ComponentType.FULL,
            *[ComponentType.SWA] * (self._windows is not None),
            *[ComponentType.MAMBA] * (self._states is not None),
        )
        self._root = self._new_node(None, b"", b"", no_indices(), DEFAULT_NAMESPACE)

    # -- what there is -----------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._page_size

    @property
    def components(self) -> tuple[ComponentType, ...]:
        """What nodes hold, full attention first."""
        return self._components

    @property
    def sliding_window(self) -> int:
        """Tokens of the window, in whole pages; 0 without."""
        return 0 if self._windows is None else self._windows.num_tokens

    @property
    def root(self) -> NodeId:
        """The empty prefix."""
        return self._root.node_id

    @property
    def evictable_size(self) -> int:
        """Tokens of full attention that no lock protects."""
        return self._evictable

    @property
    def protected_size(self) -> int:
        """Tokens of full attention that a lock protects."""
        return self._protected

    def evictable(self, component: ComponentType) -> int:
        """What no lock protects of a component; see `TreeCore.evictable`."""
        match component:
            case ComponentType.FULL:
                return self._evictable
            case ComponentType.SWA:
                return 0 if self._windows is None else self._windows.evictable
            case ComponentType.MAMBA:
                return 0 if self._states is None else self._states.evictable
            case _:
                assert_never(component)

    def protected(self, component: ComponentType) -> int:
        """What a lock protects of a component; see `TreeCore.protected`."""
        match component:
            case ComponentType.FULL:
                return self._protected
            case ComponentType.SWA:
                return 0 if self._windows is None else self._windows.protected
            case ComponentType.MAMBA:
                return 0 if self._states is None else self._states.protected
            case _:
                assert_never(component)

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

    # -- following a key ---------------------------------------------------------------------------

    def _walk(self, key: RadixKey) -> tuple[Node, int]:
        """Follow a key as far as the tree goes, splitting the node in which it ends.

        Its end is as recent as the last use of the tree: who counts this as one has counted it.

        Returns:
            The last node, and the byte of the key behind its end.
        """
        page_bytes = self._page_bytes
        token_ids = key.token_ids
        limit = len(token_ids) * TOKEN_BYTES
        limit -= limit % page_bytes
        node, at = self._root, 0
        if not limit:
            return node, at
        # A copy of the key's bytes from `base` to `copied`. Of a short key it is all there is.
        view, base, copied = _NOTHING, 0, limit
        if limit <= _COPY_BYTES:
            copy = token_ids.tobytes()
        else:
            view = memoryview(token_ids).cast("B")
            copied = max(_COPY_BYTES, page_bytes)
            copy = view[:copied].tobytes()
        starts_with = copy.startswith
        try:
            edge = copy[:page_bytes]
            if key.namespace is not DEFAULT_NAMESPACE:
                edge = framed_namespace(key.namespace) + edge
            child = node.children.get(edge)
            while child is not None:
                run = child.tokens
                end = at + len(run)
                if not starts_with(run, at - base):
                    # It differs, or the copy does not reach so far.
                    beyond = copied < end <= limit
                    if beyond and len(run) < _LONG_RUN_BYTES:
                        base, copied = at, min(at + _COPY_BYTES, limit)
                        copy = view[base:copied].tobytes()
                        starts_with = copy.startswith
                        continue
                    if not beyond or not run.startswith(view[at:end]):
                        stop = min(end, limit)
                        if stop <= copied:
                            shared = _shared_bytes(run, copy, at - base, stop - base, page_bytes)
                        else:
                            shared = _shared_bytes(run, view, at, stop, page_bytes)
                        if shared:
                            node, at = self._split(child, shared), at + shared
                        break
                node, at = child, end
                if at == limit:
                    break
                # An only child is compared at once: no page to copy and hash.
                child = node.only_child
                if child is None:
                    stop = at + page_bytes
                    page = copy[at - base : stop - base] if stop <= copied else bytes(view[at:stop])
                    child = node.children.get(page)
        finally:
            # An exception that is kept would keep the caller from appending to its tokens.
            if view is not _NOTHING:
                view.release()
        # Those above are used too, but whoever asks when looks at leaves: `_give_up` hands it on.
        node.last_access = self._tick
        if self._values_fall:
            self._queue.offer(node)
        return node, at

    # -- nodes that come and go --------------------------------------------------------------------

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
        if self._offloads.threshold is not None:
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
        if node.marks is not None:
            self._offloads.split(node.marks, upper, cut // self._page_bytes)
        if self._windows is not None:
            self._windows.split(upper, node)
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

    def _recover(self, node: Node, slots: torch.Tensor, actions: list[CacheAction]) -> None:
        """A tombstone gets its window back from slots of the same tokens.

        Where nobody reads its full slots it takes the new ones, pairs and all.
        """
        assert self._windows is not None, "only a tree with windows has tombstones"
        if node.lock_ref:
            actions.append(MoveSWA(from_full=slots, to_full=node.device_indices))
            actions.append(FreeDeviceKVFullOnly(indices=slots))
        else:
            actions.append(FreeDeviceKVFullOnly(indices=node.device_indices))
            node.device_indices = slots.clone()
        self._windows.gain(node)
        self._note(node.node_id, SWA_CAME)

    def _lose_state(self, states: States, node: Node) -> int:
        """A node that stays gives up its state. Returns the slot."""
        self._note(node.node_id, _STATE_GONE)
        return states.lose(node)

    def _free_slots(self, node: Node, freed: Freed) -> int:
        """The full slots of a node go, and the window slots beside them. Returns how many tokens."""
        num_tokens = len(node.tokens) // TOKEN_BYTES
        if self._windows is None or node.has_swa:
            freed.full(node.device_indices, num_tokens)
        else:
            freed.full_only(node.device_indices, num_tokens)
        return num_tokens

    def _give_up(self, leaf: Node, freed: Freed) -> None:
        """Take an unlocked leaf out of the tree, with all it holds."""
        num_tokens = self._free_slots(leaf, freed)
        self._evictable -= num_tokens
        if leaf.has_swa and self._windows is not None:
            freed.num_swa_tokens += num_tokens
            self._windows.lose(leaf)
        if leaf.mamba_slot is not None and self._states is not None:
            freed.state(self._states.lose(leaf))
        parent = leaf.parent
        assert parent is not None
        parent.disown(leaf.edge)
        del self._nodes[leaf.node_id]
        self._queue.forget(leaf)
        leaf.parent = None
        parent.last_access = max(parent.last_access, leaf.last_access)
        if parent.children is NO_CHILDREN:
            self._queue.offer(parent)
        self._note(leaf.node_id, _EVICTED)

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

    def _note(self, node_id: NodeId, what: int) -> None:
        """A node changed."""
        self._offloads.note(node_id - self._root.node_id, what)


def no_indices() -> torch.Tensor:
    """No slots. Shape: (0,) int64."""
    return torch.empty(0, dtype=torch.int64)


def _shared_bytes(
    run: bytes, tokens: bytes | memoryview, at: int, limit: int, page_bytes: int
) -> int:
    """How many bytes of `run` in whole pages equal `tokens[at:]`.

    Cost: one comparison of the shared part, and one copy where `tokens` are bytes.
    """
    if not run.startswith(tokens[at : at + page_bytes]):
        return 0
    low, high = 1, min(len(run), limit - at) // page_bytes
    while low < high:
        middle = (low + high + 1) // 2
        if run.startswith(
            tokens[at + low * page_bytes : at + middle * page_bytes], low * page_bytes
        ):
            low = middle
        else:
            high = middle - 1
    return low * page_bytes
