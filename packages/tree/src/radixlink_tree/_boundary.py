"""`boundary`: where on a path a match may end when a node holds more than full attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixlink_tree._node import Node


def boundary(end: Node, window_bytes: int, *, needs_state: bool) -> Node:
    """The deepest node from `end` up where every component lets a match end.

    That is a node with a state, where there are states, behind which one window is live; behind
    nodes that are live from the root on a shorter one is enough. The root always is one.

    Looked for from the end up and not on the way down: mostly the first node looked at is it, so a
    walk pays nothing for it.

    Args:
        end: Where the full part of the match ends.
        window_bytes: A window as bytes of tokens; 0 without windows.
        needs_state: There are states.

    Cost: O(nodes in the window), and those that it passes over; each once.
    """
    while end.parent is not None:
        if needs_state and end.mamba_slot is None:
            end = end.parent
            continue
        node, missing = end, window_bytes
        while missing > 0 and node.has_swa:
            missing -= len(node.tokens)
            # Only the root has no parent, and the root has no window.
            node = node.parent or node
        if missing <= 0 or node.parent is None:
            break
        end = node.parent
    return end
