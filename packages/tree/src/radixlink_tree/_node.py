"""`Node`: one run of pages in the tree, and the view of it that the outside gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from radixlink_contracts import PageKeys
from radixlink_tree._chain import PageChain
from radixlink_tree._hashing import TOKEN_BYTES, namespace_seed

if TYPE_CHECKING:
    import torch

    from radixlink_contracts import Namespace, NodeId, OperationId, PageKeySource


class Node:
    """A run of pages. Every node but the root holds the full slots of all its tokens."""

    __slots__ = (
        "chain",
        "children",
        "device_indices",
        "edge",
        "hit_count",
        "last_access",
        "lock_ref",
        "namespace",
        "node_id",
        "only_child",
        "parent",
        "pending_operation",
        "queued",
        "standing",
        "stored",
        "tokens",
    )

    def __init__(
        self,
        node_id: NodeId,
        parent: Node | None,
        edge: bytes,
        tokens: bytes,
        device_indices: torch.Tensor,
        namespace: Namespace,
    ) -> None:
        """Make a node that nobody uses yet. The caller links it to its parent."""
        self.node_id = node_id
        #: None for the root, and for a node that was evicted.
        self.parent = parent
        #: The key under which its parent has it: its first page, and for a child of the root the
        #: namespace before that.
        self.edge = edge
        #: Signed 64-bit tokens, whole pages; empty for the root.
        self.tokens = tokens
        #: Shape: (tokens,) int64.
        self.device_indices = device_indices
        self.namespace = namespace
        #: By edge. Written only by `adopt` and `disown`.
        self.children: dict[bytes, Node] = NO_CHILDREN
        #: The child, where there is just one; so a walk along a conversation, which is mostly a
        #: chain, looks nothing up.
        self.only_child: Node | None = None
        #: How many receipts have this node on their path. Never below 0; the root, which is never
        #: evicted, counts none.
        self.lock_ref = 0
        #: The tick of its last use; a parent's is never below a child's.
        self.last_access = 0
        #: What the eviction policy keeps of it: one number, see `_policies`.
        self.standing = 0
        #: Inserts that passed here; counted only while a linker is attached.
        self.hit_count = 0
        #: Every rank confirmed that the store holds it.
        self.stored = False
        #: The offload on its way; never set on a stored node.
        self.pending_operation: OperationId | None = None
        #: The value under which the eviction queue has it; None where it does not.
        self.queued: int | None = None
        #: The page keys, made when a linker first asks.
        self.chain: PageChain | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of this node alone."""
        return len(self.tokens) // TOKEN_BYTES

    def adopt(self, edge: bytes, child: Node) -> None:
        """Take a child, in the place of another under the same edge if there is one."""
        if self.children is NO_CHILDREN:
            self.children = {edge: child}
        else:
            self.children[edge] = child
        self.only_child = child if len(self.children) == 1 else None

    def disown(self, edge: bytes) -> None:
        """Let a child go."""
        del self.children[edge]
        if not self.children:
            self.children = NO_CHILDREN
            self.only_child = None
        elif len(self.children) == 1:
            (self.only_child,) = self.children.values()


#: What all leaves share, and nobody writes to: most nodes are leaves, and a dictionary of its own
#: would be a tenth of such a node.
NO_CHILDREN: Final[dict[bytes, Node]] = {}


def chain_of(node: Node, page_size: int) -> PageChain:
    """The key chain of a node other than the root, made parent first where there is none yet.

    Cost: O(nodes without a chain on the path); nothing is hashed.
    """
    missing: list[Node] = []
    above: Node | None = node
    while above is not None and above.chain is None and above.parent is not None:
        missing.append(above)
        above = above.parent
    chain = above.chain if above is not None else None
    for without in reversed(missing):
        seed = namespace_seed(without.namespace) if chain is None else None
        chain = PageChain(without.tokens, page_size, before=chain, seed=seed)
        without.chain = chain
    assert chain is not None, "the root has no pages"
    return chain


@attrs.frozen(kw_only=True, eq=False)
class NodeView:
    """A node as the linker and the components see it. A `TreeNodeView`."""

    _node: Node
    _page_size: int

    @property
    def node_id(self) -> NodeId:
        """Its id."""
        return self._node.node_id

    @property
    def num_tokens(self) -> int:
        """Tokens of this node alone."""
        return self._node.num_tokens

    @property
    def device_indices(self) -> torch.Tensor:
        """Its full slots. Shape: (num_tokens,) int64."""
        return self._node.device_indices

    @property
    def page_keys(self) -> PageKeySource:
        """The keys of its pages; the root has none."""
        if not self._node.tokens:
            return PageKeys()
        return chain_of(self._node, self._page_size)

    @property
    def stored(self) -> bool:
        """True when every rank confirmed that the store holds it."""
        return self._node.stored

    @property
    def pending_operation(self) -> OperationId | None:
        """The offload on its way."""
        return self._node.pending_operation
