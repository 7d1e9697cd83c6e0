"""`States`: what a tree with recurrent states keeps and decides beside full attention.

A state is of one moment: it stands for all tokens up to the end of its node and for no other
prefix. Nobody writes to it; a request goes on from a copy.

Rules of the file:
1. A split leaves the state with the lower half, whose end is where it was.
2. Recency is an order and no clock: used last is last. Locked states are not in it.
3. A receipt has the state of its own node alone.
"""

from __future__ import annotations

from collections import OrderedDict
from math import lcm
from typing import TYPE_CHECKING

import attrs

from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radixlink_contracts import NodeId
    from radixlink_tree._node import Node


@attrs.frozen(kw_only=True)
class StateRules:
    """Where a tree has recurrent states, and how many.

    Attributes:
        chunk_tokens: An engine can take a state only at multiples of this many tokens.
        max_per_path: States from the root to an end; None for any number. What is over goes,
            shallowest first; the end, forks and leaves keep theirs.
    """

    chunk_tokens: int = 1
    max_per_path: int | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse what is no number of tokens or states."""
        if self.chunk_tokens < 1 or (self.max_per_path is not None and self.max_per_path < 1):
            msg = f"StateRules: expected numbers of at least 1, got {self}"
            raise ContractError(msg)


class States:
    """The recurrent states of one tree. Units: states."""

    def __init__(self, rules: StateRules, page_size: int) -> None:
        """Start with none."""
        self._grid = lcm(rules.chunk_tokens, page_size)
        self._max_per_path = rules.max_per_path
        #: The nodes whose state no receipt has, by use.
        self._unlocked: OrderedDict[NodeId, Node] = OrderedDict()
        #: How many receipts have the state of a node; no entry for none.
        self._lock_refs: dict[NodeId, int] = {}

    @property
    def evictable(self) -> int:
        """States that no receipt has."""
        return len(self._unlocked)

    @property
    def protected(self) -> int:
        """States that a receipt has."""
        return len(self._lock_refs)

    def gain(self, node: Node, slot: int) -> None:
        """A node without a state has one from now on."""
        node.mamba_slot = slot
        self._unlocked[node.node_id] = node

    def lose(self, node: Node) -> int:
        """A node gives its state up, which no receipt has.

        Returns:
            The slot.
        """
        slot = node.mamba_slot
        assert slot is not None, f"node {node.node_id} has no state"
        del self._unlocked[node.node_id]
        node.mamba_slot = None
        return slot

    def use(self, node: Node) -> None:
        """The state of a node is used."""
        if node.node_id in self._unlocked:
            self._unlocked.move_to_end(node.node_id)

    def oldest(self) -> Node | None:
        """The node whose state was used longest ago, of those that can be given up."""
        return next(iter(self._unlocked.values()), None)

    def is_locked(self, node: Node) -> bool:
        """True when a receipt has the state of a node."""
        return node.node_id in self._lock_refs

    def lock(self, node: Node) -> bool:
        """Take the state of a node; False where there is none."""
        if node.mamba_slot is None:
            return False
        self._unlocked.pop(node.node_id, None)
        self._lock_refs[node.node_id] = self._lock_refs.get(node.node_id, 0) + 1
        return True

    def unlock(self, node: Node) -> None:
        """Give the state of a node back."""
        left = self._lock_refs.pop(node.node_id) - 1
        if left:
            self._lock_refs[node.node_id] = left
        else:
            self._unlocked[node.node_id] = node

    def over_cap(self, end: Node) -> Iterator[Node]:
        """The nodes on the path to a new state that have to give theirs up, shallowest first.

        Cost: O(nodes on the path), nothing where there is no cap.
        """
        if self._max_per_path is None:
            return
        path: list[Node] = []
        node: Node | None = end
        while node is not None:
            if node.mamba_slot is not None:
                path.append(node)
            node = node.parent
        over = len(path) - self._max_per_path
        for node in reversed(path):
            if over <= 0 or node is end:
                return
            if node.only_child is not None and node.node_id in self._unlocked:
                over -= 1
                yield node

    def branching_len(self, full_len: int, prefix_len: int) -> int:
        """Where a state would have helped: on the grid, within `full_len`, beyond `prefix_len`.

        Returns:
            Tokens; 0 for nowhere.
        """
        at = full_len - full_len % self._grid
        return at if at > prefix_len else 0

    def clear(self) -> None:
        """Forget all."""
        self._unlocked.clear()
        self._lock_refs.clear()

    def unlocked(self) -> tuple[NodeId, ...]:
        """Whose state can be given up, used longest ago first."""
        return tuple(self._unlocked)

    def lock_refs(self) -> dict[NodeId, int]:
        """How many receipts have the state of each node."""
        return dict(self._lock_refs)
