"""`dump`: all that a tree is made of, to be compared before and after a call that must change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixlink_tree import UnifiedTreeCore
    from radixlink_tree._node import Node


def dump(tree: UnifiedTreeCore, *, recency: bool = True) -> object:
    """Nodes, orders, locks, ledgers, marks and counters but for the tick itself.

    Args:
        tree: Read only.
        recency: With each node's last use. False where a walk is allowed to use nodes.
    """
    windows, states, offloads = tree._windows, tree._states, tree._offloads
    return (
        [_node(node, recency=recency) for node in tree._nodes.values()],
        sorted(tree._queue.entries().items()) if recency else None,
        tree._receipts.out(),
        None if windows is None else (windows.unlocked(), windows.evictable, windows.protected),
        None if states is None else (states.unlocked(), states.lock_refs()),
        (tree.evictable_size, tree.protected_size),
        (offloads.threshold, offloads.digest),
        {op: [node.node_id for node in nodes] for op, nodes in offloads.pending.items()},
    )


def _node(node: Node, *, recency: bool) -> object:
    marks = node.marks
    return (
        (node.node_id, node.parent and node.parent.node_id, node.edge, node.tokens),
        (list(node.children), node.only_child and node.only_child.node_id),
        (node.device_indices.tolist(), node.namespace, node.standing),
        (node.last_access, node.queued) if recency else None,
        (node.lock_ref, node.swa_lock_ref, node.has_swa, node.mamba_slot),
        marks
        and (marks.hit_count, marks.stored, marks.pending, marks.pending_bits, id(marks.chain)),
    )
