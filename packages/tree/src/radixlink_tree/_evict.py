"""`EvictionQueue`: which unlocked leaf is the least recently used.

A heap of (tick, node id) that is put right when it is read. Ticks only grow, so an entry with an
old tick is too early, never too late: it is pushed back with the node's own tick when it comes up.
A node has at most one entry; whoever makes a node an unlocked leaf calls `offer`.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixlink_contracts import NodeId
    from radixlink_tree._node import Node


class EvictionQueue:
    """The unlocked leaves, least recently used first; ties by node id, the same on all ranks."""

    def __init__(self) -> None:
        """Start with no leaf."""
        self._heap: list[tuple[int, NodeId, Node]] = []

    def offer(self, node: Node) -> None:
        """The node may have become an unlocked leaf.

        Cost: O(log leaves), or nothing where it has an entry.
        """
        if not node.queued and not node.children and node.lock_ref == 0 and node.parent is not None:
            node.queued = True
            heapq.heappush(self._heap, (node.last_access, node.node_id, node))

    def pop(self) -> Node | None:
        """Take out the least recently used unlocked leaf; None when there is none.

        Cost: O(log leaves) amortised over the uses since the last call.
        """
        heap = self._heap
        while heap:
            tick, _, node = heapq.heappop(heap)
            node.queued = False
            if node.children or node.lock_ref:
                continue
            if tick != node.last_access:
                self.offer(node)
                continue
            return node
        return None

    def entries(self) -> list[Node]:
        """The node of each entry, in no order."""
        return [node for _, _, node in self._heap]

    def clear(self) -> None:
        """Forget every entry."""
        self._heap.clear()
