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
    if node.parent.parent is not None and not standings_agree(tree._policy, node.parent, node):
        yield f"{name} has standing {node.standing}, its parent {node.parent.standing}"
    if not node.children and node.lock_ref == 0:
        if node.queued is None:
            yield f"{name} is an unlocked leaf that eviction does not know"
        elif node.queued > tree._queue.value_of(node):
            yield f"{name} is worth less than the {node.queued} under which eviction has it"
    yield from _auxiliary_faults(tree, node, name)
    yield from _store_faults(tree, node, name)


def _auxiliary_faults(tree: UnifiedTreeCore, node: Node, name: str) -> Iterator[str]:
    """What does not hold of a node's window and state."""
    if node.has_swa and tree._windows is None:
        yield f"{name} has a window in a tree without windows"
    if node.mamba_slot is not None and tree._states is None:
        yield f"{name} has a state in a tree without states"
    if not 0 <= node.swa_lock_ref <= node.lock_ref:
        yield f"{name} has window lock count {node.swa_lock_ref}, lock count {node.lock_ref}"
    if tree._states is not None and tree._states.is_locked(node) and node.mamba_slot is None:
        yield f"{name} has a locked state that is not there"


def _store_faults(tree: UnifiedTreeCore, node: Node, name: str) -> Iterator[str]:
    """What does not hold of a node and the store."""
    marks = node.marks
    if marks is None:
        return
    if tree._offloads.threshold is None and (marks.stored or marks.hit_count or marks.pending_bits):
        yield f"{name} is stored, counted or being offloaded although there is no linker"
    if marks.stored & marks.pending_bits:
        yield f"{name} is being offloaded with what is stored of it"
    if (marks.pending is None) != (marks.pending_bits == 0):
        yield f"{name} is being offloaded by {marks.pending} with parts {marks.pending_bits:#b}"
    if marks.pending is not None and node not in tree._offloads.pending.get(marks.pending, ()):
        yield f"{name} is being offloaded by {marks.pending}, which does not know it"
    if marks.touching_bits & ~marks.stored:
        yield f"{name} is being touched for what is not stored of it"
    if (marks.touching is None) != (marks.touching_bits == 0):
        yield f"{name} is being touched by {marks.touching} for parts {marks.touching_bits:#b}"
    if marks.touching is not None and node not in tree._offloads.touching.get(marks.touching, ()):
        yield f"{name} is being touched by {marks.touching}, which does not know it"
    if marks.chain is not None and marks.chain.tokens != node.tokens:
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
    yield from _window_faults(tree, nodes)
    yield from _state_faults(tree, nodes)
    for operation, offloaded in tree._offloads.pending.items():
        for node in offloaded:
            if node.marks is None or node.marks.pending != operation:
                yield f"node {node.node_id} does not know its offload {operation}"
    for operation, touched in tree._offloads.touching.items():
        for node in touched:
            if node.marks is None or node.marks.touching != operation:
                yield f"node {node.node_id} does not know its touch {operation}"


def _window_faults(tree: UnifiedTreeCore, nodes: list[Node]) -> Iterator[str]:
    """What does not hold of the windows together."""
    windows = tree._windows
    if windows is None:
        return
    unlocked = {node.node_id for node in nodes if node.has_swa and not node.swa_lock_ref}
    if set(windows.unlocked()) != unlocked:
        yield f"windows of {windows.unlocked()} can be given up, counted {sorted(unlocked)}"
    evictable = sum(node.num_tokens for node in nodes if node.node_id in unlocked)
    protected = sum(node.num_tokens for node in nodes if node.has_swa and node.swa_lock_ref)
    if (evictable, protected) != (windows.evictable, windows.protected):
        yield (
            f"ledgers say {windows.evictable} evictable and {windows.protected} protected tokens "
            f"of windows, counted {evictable} and {protected}"
        )
    expected: dict[int, int] = {}
    for receipt in tree._receipts.out():
        above, left = tree._nodes.get(receipt.node_id), receipt.swa_locked_len
        while above is not None and above.parent is not None and left > 0:
            expected[above.node_id] = expected.get(above.node_id, 0) + 1
            left -= above.num_tokens
            above = above.parent
        if left:
            yield f"the window of receipt {receipt.receipt_id} does not end where a node begins"
    for node in nodes:
        if node.swa_lock_ref != expected.get(node.node_id, 0):
            yield (
                f"node {node.node_id} has window lock count {node.swa_lock_ref}, "
                f"receipts make {expected.get(node.node_id, 0)}"
            )


def _state_faults(tree: UnifiedTreeCore, nodes: list[Node]) -> Iterator[str]:
    """What does not hold of the states together."""
    states = tree._states
    if states is None:
        return
    with_state = [node for node in nodes if node.mamba_slot is not None]
    if len({node.mamba_slot for node in with_state}) != len(with_state):
        yield "a state slot is in two places"
    unlocked = {node.node_id for node in with_state if not states.is_locked(node)}
    if set(states.unlocked()) != unlocked:
        yield f"states of {states.unlocked()} can be given up, counted {sorted(unlocked)}"
    expected: dict[int, int] = {}
    for receipt in tree._receipts.out():
        if receipt.mamba_locked:
            expected[receipt.node_id] = expected.get(receipt.node_id, 0) + 1
    if states.lock_refs() != expected:
        yield f"states have lock counts {states.lock_refs()}, receipts make {expected}"


def _lock_faults(tree: UnifiedTreeCore, nodes: list[Node]) -> Iterator[str]:
    """Where lock counts are not what the receipts make."""
    expected: dict[int, int] = {}
    for receipt in tree._receipts.out():
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
