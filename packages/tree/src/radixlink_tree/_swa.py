"""`Windows`: what a tree with sliding-window attention keeps and decides beside full attention.

A node's window slots are all there or all gone; gone, it is a tombstone, which still has its full
slots. Which window slots those are, the allocator knows: it pairs them with the full ones.

Rules of the file:
1. Tombstones come from three places: a request whose own window had moved on when it inserted, an
   eviction of windows, and a load that brought one window only.
2. Recency is an order and no clock: used last is last. Nodes that a receipt has in its window are
   not in it, and come back as used last. So what is first can be given up at once.
3. A receipt has whole nodes up to one window in its window, tombstones too: what comes back to one
   while it is locked is protected. It remembers how many tokens that is, not which nodes: splits
   change the nodes of a path, never its length.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from radixlink_tree._hashing import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radixlink_contracts import NodeId
    from radixlink_tree._node import Node


class Windows:
    """The window slots of one tree. Units: tokens."""

    def __init__(self, num_tokens: int) -> None:
        """Start with none.

        Args:
            num_tokens: A window in whole pages.
        """
        self.num_tokens = num_tokens
        self.num_bytes = num_tokens * TOKEN_BYTES
        self.evictable = 0
        self.protected = 0
        #: The nodes that have their window slots and are in no receipt's window, by use.
        self._unlocked: OrderedDict[NodeId, Node] = OrderedDict()

    def gain(self, node: Node) -> None:
        """A node has its window slots from now on."""
        node.has_swa = True
        if node.swa_lock_ref:
            self.protected += node.num_tokens
        else:
            self.evictable += node.num_tokens
            self._unlocked[node.node_id] = node

    def lose(self, node: Node) -> None:
        """A node that no receipt has in its window gives its window slots up."""
        node.has_swa = False
        self.evictable -= node.num_tokens
        del self._unlocked[node.node_id]

    def split(self, upper: Node, lower: Node) -> None:
        """A node became two: the upper half, which is just being used, has what the lower has."""
        upper.swa_lock_ref = lower.swa_lock_ref
        upper.has_swa = lower.has_swa
        if upper.has_swa and not upper.swa_lock_ref:
            self._unlocked[upper.node_id] = upper

    def use(self, end: Node) -> None:
        """The window that ends at a node is used; its own slots last.

        Cost: O(nodes in the window).
        """
        unlocked = self._unlocked
        for node in reversed(list(self._up(end, self.num_bytes))):
            if node.node_id in unlocked:
                unlocked.move_to_end(node.node_id)

    def oldest(self) -> Node | None:
        """The node whose window slots were used longest ago, of those that can be given up."""
        return next(iter(self._unlocked.values()), None)

    def lock(self, end: Node) -> int:
        """Take the window that ends at a node.

        Returns:
            How many tokens that is: whole nodes.
        """
        taken = 0
        for node in self._up(end, self.num_bytes):
            taken += len(node.tokens)
            node.swa_lock_ref += 1
            if node.swa_lock_ref == 1 and node.has_swa:
                del self._unlocked[node.node_id]
                self.evictable -= node.num_tokens
                self.protected += node.num_tokens
        return taken // TOKEN_BYTES

    def unlock(self, end: Node, num_tokens: int) -> None:
        """Give back what `lock` took."""
        for node in reversed(list(self._up(end, num_tokens * TOKEN_BYTES))):
            node.swa_lock_ref -= 1
            if node.swa_lock_ref == 0 and node.has_swa:
                self._unlocked[node.node_id] = node
                self.protected -= node.num_tokens
                self.evictable += node.num_tokens

    def clear(self) -> None:
        """Forget all."""
        self._unlocked.clear()
        self.evictable = self.protected = 0

    def unlocked(self) -> tuple[NodeId, ...]:
        """What can be given up, what was used longest ago first."""
        return tuple(self._unlocked)

    @staticmethod
    def _up(end: Node, num_bytes: int) -> Iterator[Node]:
        """The nodes from one up, until they have so many bytes of tokens or the path is over."""
        node = end
        while num_bytes > 0 and node.parent is not None:
            yield node
            num_bytes -= len(node.tokens)
            node = node.parent
