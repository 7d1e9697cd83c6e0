"""`EvictionQueue`: which unlocked leaf is worth least.

A heap of (value, node id) that is put right when it is read. What a leaf is worth is the policy's
to say, and changes with time:

* It rises: nobody tells the queue. The entry is too early, never too late; when it comes up, the
  leaf is queued again by what it is worth then.
* It falls: whoever makes it fall calls `offer`, which adds a second entry. The first is void from
  then on: a node knows the value of its one valid entry, `Node.queued`.

So each unlocked leaf has an entry that is not too late. A node that is locked or has children may
keep one; it is dropped when it comes up, and whoever makes it an unlocked leaf again calls `offer`.
Void entries are swept out once they are half of the heap, so that a leaf which is used a million
times does not fill it.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixlink_contracts import NodeId
    from radixlink_tree._node import Node
    from radixlink_tree._policies import Value


class EvictionQueue:
    """The unlocked leaves, the least valuable first; ties by node id, the same on all ranks."""

    def __init__(self, value_of: Value) -> None:
        """Start with no leaf."""
        self._value_of = value_of
        self._heap: list[tuple[int, NodeId, Node]] = []
        #: Entries that another one has made void, at least; some may have come up since.
        self._void = 0

    def offer(self, node: Node) -> None:
        """The node may have become an unlocked leaf, or worth less.

        Cost: O(log leaves), or nothing where it has an entry that is early enough.
        """
        if node.children or node.lock_ref or node.parent is None:
            return
        value = self._value_of(node)
        queued = node.queued
        if queued is not None and queued <= value:
            return
        node.queued = value
        if queued is not None:
            self._note_void()
        heapq.heappush(self._heap, (value, node.node_id, node))

    def pop(self) -> Node | None:
        """Take out the unlocked leaf that is worth least; None when there is none.

        Cost: O(log leaves) amortised over the uses since the last call.
        """
        heap, value_of = self._heap, self._value_of
        while heap:
            queued, _, node = heapq.heappop(heap)
            if queued != node.queued:
                continue
            node.queued = None
            if node.children or node.lock_ref:
                continue
            if queued != value_of(node):
                self.offer(node)
                continue
            return node
        return None

    def entries(self) -> dict[NodeId, int]:
        """The value of each node that has a valid entry."""
        return {node_id: value for value, node_id, node in self._heap if value == node.queued}

    def value_of(self, node: Node) -> int:
        """What a node is worth now."""
        return self._value_of(node)

    def clear(self) -> None:
        """Forget every entry."""
        self._heap.clear()
        self._void = 0

    def _note_void(self) -> None:
        """An entry became void: sweep when half of them may be.

        Cost: O(1) amortised.
        """
        self._void += 1
        if self._void * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].queued]
            heapq.heapify(self._heap)
            self._void = 0
