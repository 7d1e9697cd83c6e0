"""`Node`: one run of pages in the tree, and the view of it that the outside gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from radixlink_contracts import ComponentType, PageKeys
from radixlink_tree._chain import PageChain
from radixlink_tree._hashing import TOKEN_BYTES, namespace_seed

if TYPE_CHECKING:
    import torch

    from radixlink_contracts import Namespace, NodeId, OperationId, PageKeySource

FULL_BIT: Final = 1 << ComponentType.FULL
SWA_BIT: Final = 1 << ComponentType.SWA
MAMBA_BIT: Final = 1 << ComponentType.MAMBA


class StoreMarks:
    """What is known about a node and the store; kept only while a linker is attached."""

    __slots__ = (
        "chain",
        "failures",
        "hit_count",
        "pending",
        "pending_bits",
        "retry_at",
        "stored",
        "touched",
        "touching",
        "touching_bits",
    )

    def __init__(self) -> None:
        """Nothing is known."""
        #: The page keys, made when a linker first asks.
        self.chain: PageChain | None = None
        #: Inserts that passed here.
        self.hit_count = 0
        #: The components that every rank confirmed the store to hold, a bit each. A window or state
        #: that is given up keeps its bit: what the store holds is still what the keys say.
        self.stored = 0
        #: The offload on its way, and what it takes: never what is stored.
        self.pending: OperationId | None = None
        self.pending_bits = 0
        #: Offloads of it that failed since the last that did not, and the tick before which it is
        #: not offered again because of them.
        self.failures = 0
        self.retry_at = 0
        #: The tick at which the store was last known to have used all that is stored of it.
        self.touched = 0
        #: The touch on its way, and what it speaks of: of what is stored.
        self.touching: OperationId | None = None
        self.touching_bits = 0

    def used_in_store(self, bits: int, held: int, tick: int) -> None:
        """The store has used some components at a tick, and they are stored.

        What else is stored of what the node holds was used before, and counts: the oldest decides.
        """
        if not held & self.stored & ~bits:
            self.touched = tick
        self.stored |= bits


class Node:
    """A run of pages. Every node but the root holds the full slots of all its tokens."""

    __slots__ = (
        "children",
        "device_indices",
        "edge",
        "has_swa",
        "last_access",
        "lock_ref",
        "mamba_slot",
        "marks",
        "namespace",
        "node_id",
        "only_child",
        "parent",
        "queued",
        "standing",
        "swa_lock_ref",
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
        #: The tick of the last use that ended here, or at a child that is gone. A leaf has no other
        #: uses, and only leaves are asked: to write it to a whole path would cost a walk a tenth.
        self.last_access = 0
        #: What the eviction policy keeps of it: one number, see `_policies`.
        self.standing = 0
        #: The value under which the eviction queue has it; None where it does not.
        self.queued: int | None = None
        #: The window slots of its tokens are there. False in a tree without a window.
        self.has_swa = False
        #: How many receipts have it in their window, there or not. Never above `lock_ref`.
        self.swa_lock_ref = 0
        #: The slot of the recurrent state at its end.
        self.mamba_slot: int | None = None
        #: None until a linker looks at the node.
        self.marks: StoreMarks | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of this node alone."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def held(self) -> int:
        """The components of which it holds something, a bit each; the root holds nothing."""
        bits = FULL_BIT if self.tokens else 0
        if self.has_swa:
            bits |= SWA_BIT
        if self.mamba_slot is not None:
            bits |= MAMBA_BIT
        return bits

    @property
    def unstored(self) -> int:
        """The components of which it holds something that no store is known to hold, a bit each."""
        marks = self.marks
        return self.held if marks is None else self.held & ~marks.stored

    @property
    def held_stored(self) -> int:
        """The components of which it holds something that every rank confirmed, a bit each."""
        marks = self.marks
        return 0 if marks is None else self.held & marks.stored

    def mark(self) -> StoreMarks:
        """Its marks, to be written to."""
        marks = self.marks
        if marks is None:
            marks = self.marks = StoreMarks()
        return marks

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
    chain: PageChain | None = None
    above: Node | None = node
    while above is not None and above.parent is not None:
        if above.marks is not None and above.marks.chain is not None:
            chain = above.marks.chain
            break
        missing.append(above)
        above = above.parent
    for without in reversed(missing):
        seed = namespace_seed(without.namespace) if chain is None else None
        chain = PageChain(without.tokens, page_size, before=chain, seed=seed)
        without.mark().chain = chain
    assert chain is not None, "the root has no pages"
    return chain


class NodeView:
    """A node as the linker and the components see it. A `TreeNodeView`."""

    # A plain class: it is made for each question about a node.
    __slots__ = ("_node", "_page_size")

    def __init__(self, node: Node, page_size: int) -> None:
        """See a node of a tree with pages of so many tokens."""
        self._node = node
        self._page_size = page_size

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
    def has_swa(self) -> bool:
        """True when the window slots of its tokens are there."""
        return self._node.has_swa

    @property
    def mamba_slot(self) -> int | None:
        """The slot of the state at its end."""
        return self._node.mamba_slot

    @property
    def page_keys(self) -> PageKeySource:
        """The keys of its pages; the root has none."""
        if not self._node.tokens:
            return PageKeys()
        return chain_of(self._node, self._page_size)

    @property
    def unstored(self) -> tuple[ComponentType, ...]:
        """What it holds and not every rank confirmed the store to hold."""
        bits = self._node.unstored
        return tuple(kind for kind in ComponentType if bits & 1 << kind)

    @property
    def stored(self) -> bool:
        """True when nothing is unstored."""
        return not self.unstored

    @property
    def pending_operation(self) -> OperationId | None:
        """The offload on its way."""
        marks = self._node.marks
        return None if marks is None else marks.pending
