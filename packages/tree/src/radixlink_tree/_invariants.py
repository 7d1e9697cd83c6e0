"""The invariants of the tree, recomputed: for tests, and for whoever suspects a fault."""

# ruff: noqa: SLF001 -- these are the tree's own invariants, kept apart so that its file stays short

from __future__ import annotations

from typing import TYPE_CHECKING

from radixlink_contracts.errors import ContractError
from radixlink_tree._hashing import TOKEN_BYTES, framed_namespace
from radixlink_tree._node import NO_CHILDREN
from radixlink_tree._policies import standings_agree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radixlink_tree._core import UnifiedTreeCore
    from radixlink_tree._node import Node


def check_invariants(tree: UnifiedTreeCore) -> None:
    """Return when everything holds.

    Raises:
        ContractError: Names each invariant that does not hold, and the node.

    Mutates: nothing.
    Cost: O(tree).
    """
    if NO_CHILDREN:
        # Every leaf leads there: no walk would end.
        ids = [node.node_id for node in NO_CHILDREN.values()]
        msg = f"tree invariants broken: nodes {ids} are children of every leaf"
        raise ContractError(msg)
    faults = [fault for node in _all_nodes(tree) for fault in _node_faults(tree, node)]
    faults += _ledger_faults(tree)
    if faults:
        msg = "tree invariants broken: " + "; ".join(faults)
        raise ContractError(msg)


def _all_nodes(tree: UnifiedTreeCore) -> Iterator[Node]:
    """Every node that can be reached from the root, parents first."""
    todo = [tree._root]
    while todo:
        node = todo.pop()
        yield node
        todo.extend(node.children.values())


def _node_faults(tree: UnifiedTreeCore, node: Node) -> Iterator[str]:
    """What does not hold at one node."""
    name = f"node {node.node_id}"
    if tree._nodes.get(node.node_id) is not node:
        yield f"{name} is linked but not registered"
    if node.lock_ref < 0:
        yield f"{name} has lock count {node.lock_ref}"
    children = list(node.children.values())
    if node.only_child is not (children[0] if len(children) == 1 else None):
        yield f"{name} has {len(children)} children and an only child {node.only_child}"
    for edge, child in node.children.items():
        below = f"node {child.node_id}"
        if child.parent is not node or child.edge != edge:
            yield f"{below} and its parent do not agree about their link"
        namespace = framed_namespace(child.namespace) if node.parent is None else b""
        if edge != namespace + child.tokens[: tree._page_bytes]:
            yield f"{below} is filed under another first page"
        if node.parent is not None and child.namespace != node.namespace:
            yield f"{below} is of another namespace than its parent"
        if node.parent is not None and child.lock_ref > node.lock_ref:
            yield f"{below} is locked more often than its parent"
    if node.parent is None:
        return
    if not node.tokens or len(node.tokens) % tree._page_bytes:
        yield f"{name} holds {len(node.tokens)} bytes of tokens, which is not whole pages"
    if len(node.device_indices) * TOKEN_BYTES != len(node.tokens):
        yield f"{name} holds {len(node.device_indices)} slots for {node.num_tokens} tokens"
    if node.parent.parent is not None and node.parent.last_access < node.last_access:
        yield f"{name} was used after its parent"
    if node.parent.parent is not None and not standings_agree(tree._policy, node.parent, node):
        yield f"{name} has standing {node.standing}, its parent {node.parent.standing}"
    if not node.children and node.lock_ref == 0:
        if node.queued is None:
            yield f"{name} is an unlocked leaf that eviction does not know"
        elif node.queued > tree._queue.value_of(node):
            yield f"{name} is worth less than the {node.queued} under which eviction has it"
    yield from _store_faults(tree, node, name)


def _store_faults(tree: UnifiedTreeCore, node: Node, name: str) -> Iterator[str]:
    """What does not hold of a node and the store."""
    operation = node.pending_operation
    if tree._backup_threshold is None and (node.stored or node.hit_count):
        yield f"{name} is stored or counted although there is no linker"
    if node.stored and operation is not None:
        yield f"{name} is stored and being offloaded"
    if operation is not None and node not in tree._pending.get(operation, ()):
        yield f"{name} is being offloaded by {operation}, which does not know it"
    if node.chain is not None and node.chain.tokens != node.tokens:
        yield f"{name} has the keys of other tokens"


def _ledger_faults(tree: UnifiedTreeCore) -> Iterator[str]:
    """What does not hold of the sums."""
    nodes = [node for node in _all_nodes(tree) if node.parent is not None]
    if len(tree._nodes) != len(nodes) + 1:
        yield f"{len(tree._nodes)} nodes are registered, {len(nodes) + 1} are linked"
    evictable = sum(node.num_tokens for node in nodes if node.lock_ref == 0)
    protected = sum(node.num_tokens for node in nodes if node.lock_ref > 0)
    if (evictable, protected) != (tree.evictable_size, tree.protected_size):
        yield (
            f"ledgers say {tree.evictable_size} evictable and {tree.protected_size} protected, "
            f"counted {evictable} and {protected}"
        )
    slots = [slot for node in nodes for slot in node.device_indices.tolist()]
    if len(slots) != len(set(slots)):
        yield f"{len(slots) - len(set(slots))} slots are in two places"
    entries = tree._queue.entries()
    if entries != {node.node_id: node.queued for node in nodes if node.queued is not None}:
        yield f"the eviction queue has entries {entries}, which is not what its nodes say"
    yield from _lock_faults(tree, nodes)
    for operation, offloaded in tree._pending.items():
        for node in offloaded:
            if node.pending_operation != operation:
                yield f"node {node.node_id} does not know its offload {operation}"


def _lock_faults(tree: UnifiedTreeCore, nodes: list[Node]) -> Iterator[str]:
    """Where lock counts are not what the receipts make."""
    expected: dict[int, int] = {}
    for receipt in tree._receipts.values():
        above = tree._nodes.get(receipt.node_id)
        if above is None:
            yield f"receipt {receipt.receipt_id} locks node {receipt.node_id}, which is not there"
        while above is not None and above.parent is not None:
            expected[above.node_id] = expected.get(above.node_id, 0) + 1
            above = above.parent
    for node in nodes:
        if node.lock_ref != expected.get(node.node_id, 0):
            yield (
                f"node {node.node_id} has lock count {node.lock_ref}, "
                f"receipts make {expected.get(node.node_id, 0)}"
            )
