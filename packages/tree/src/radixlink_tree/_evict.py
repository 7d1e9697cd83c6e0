"""`EvictionQueue`: which unlocked leaf is worth least.

A heap of (value, node id), each pair in one integer, which is half the size of a tuple and no work
for the garbage collector. It is put right when it is read. What a leaf is worth is the policy's
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
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from radixlink_contracts import NodeId
    from radixlink_tree._node import Node
    from radixlink_tree._policies import Value


#: Of an entry, the low bits are the node's id, so that equal values go by id.
_ID_BITS: Final = 40
_ID_MASK: Final = (1 << _ID_BITS) - 1


class EvictionQueue:
    """The unlocked leaves, the least valuable first; ties by node id, the same on all ranks."""

    def __init__(self, value_of: Value, nodes: dict[NodeId, Node]) -> None:
        """Start with no leaf.

        Args:
            value_of: The policy.
            nodes: The tree's, by id; read only.
        """
        self._value_of = value_of
        self._nodes = nodes
        self._heap: list[int] = []
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
        heapq.heappush(self._heap, value << _ID_BITS | node.node_id)

    def pop(self) -> Node | None:
        """Take out the unlocked leaf that is worth least; None when there is none.

        Cost: O(log leaves) amortised over the uses since the last call.
        """
        heap, nodes, value_of = self._heap, self._nodes, self._value_of
        while heap:
            entry = heapq.heappop(heap)
            queued = entry >> _ID_BITS
            node = nodes.get(cast("NodeId", entry & _ID_MASK))
            if node is None or queued != node.queued:
                continue
            node.queued = None
            if node.children or node.lock_ref:
                continue
            if queued != value_of(node):
                self.offer(node)
                continue
            return node
        return None

    def forget(self, node: Node) -> None:
        """A node was given up on another way: its entry, if it has one, is void."""
        if node.queued is not None:
            node.queued = None
            self._note_void()

    def entries(self) -> dict[NodeId, int]:
        """The value of each node that has a valid entry."""
        nodes = self._nodes
        valid: dict[NodeId, int] = {}
        for entry in self._heap:
            node = nodes.get(cast("NodeId", entry & _ID_MASK))
            if node is not None and node.queued == entry >> _ID_BITS:
                valid[node.node_id] = node.queued
        return valid

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
            self._heap = [value << _ID_BITS | node_id for node_id, value in self.entries().items()]
            heapq.heapify(self._heap)
            self._void = 0
