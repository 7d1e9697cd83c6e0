"""The invariants of the tree, recomputed: for tests, and for whoever suspects a fault."""

# ruff: noqa: SLF001 -- these are the tree's own invariants, kept apart so that its file stays short

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from radixlink_contracts.errors import ContractError
from radixlink_tree._hashing import TOKEN_BYTES, framed_namespace
from radixlink_tree._node import NO_CHILDREN
from radixlink_tree._policies import KEEPS_STANDING, standings_agree

if TYPE_CHECKING:
    from radixlink_contracts import NodeId
    from radixlink_tree._core import UnifiedTreeCore
    from radixlink_tree._mamba import States
    from radixlink_tree._node import Node
    from radixlink_tree._swa import Windows


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
    root, *nodes = reached = _all_nodes(tree)
    faults = _Faults()
    _check_links(tree, root, reached, faults)
    _check_nodes(tree, nodes, faults)
    if tree._policy in KEEPS_STANDING:
        _check_standings(tree, root, nodes, faults)
    _check_marks(tree, nodes, faults)
    _check_ledgers(tree, nodes, faults)
    _check_locks(tree, nodes, faults)
    if tree._windows is not None:
        _check_windows(tree, tree._windows, nodes, faults)
    if tree._states is not None:
        _check_states(tree, tree._states, nodes, faults)
    _check_operations(tree, faults)
    if faults:
        msg = "tree invariants broken: " + "; ".join(faults)
        raise ContractError(msg)


class _Faults(list[str]):
    """What does not hold. A message is made only where something does not: mostly nothing is."""

    def of(self, node: Node, what: str) -> None:
        """Something does not hold at a node."""
        self.append(f"node {node.node_id} {what}")


def _all_nodes(tree: UnifiedTreeCore) -> list[Node]:
    """Every node that can be reached from the root, parents first."""
    nodes = [tree._root]
    # It grows while it is walked.
    for node in nodes:
        if node.children:
            nodes.extend(node.children.values())
    return nodes


def _check_links(tree: UnifiedTreeCore, root: Node, reached: list[Node], faults: _Faults) -> None:
    """All are there under their ids; a node and its children know each other."""
    registered, page_bytes = tree._nodes, tree._page_bytes
    for node in reached:
        if registered.get(node.node_id) is not node:
            faults.of(node, "is linked but not registered")
        if node.lock_ref < 0:
            faults.of(node, f"has lock count {node.lock_ref}")
        children = node.children
        if not children:
            if node.only_child is not None:
                faults.of(node, f"has 0 children and an only child {node.only_child}")
            continue
        only = next(iter(children.values())) if len(children) == 1 else None
        if node.only_child is not only:
            faults.of(node, f"has {len(children)} children and an only child {node.only_child}")
        for edge, child in children.items():
            if child.parent is not node or child.edge != edge:
                faults.of(child, "and its parent do not agree about their link")
            first_page = child.tokens[:page_bytes]
            if node is root:
                first_page = framed_namespace(child.namespace) + first_page
            elif child.namespace is not node.namespace and child.namespace != node.namespace:
                faults.of(child, "is of another namespace than its parent")
            if edge != first_page:
                faults.of(child, "is filed under another first page")
            if child.lock_ref > node.lock_ref and node is not root:
                faults.of(child, "is locked more often than its parent")


def _check_nodes(tree: UnifiedTreeCore, nodes: list[Node], faults: _Faults) -> None:
    """What each node has fits together."""
    page_bytes, worth = tree._page_bytes, tree._queue.value_of
    no_windows, no_states = tree._windows is None, tree._states is None
    for node in nodes:
        num_bytes, lock_ref = len(node.tokens), node.lock_ref
        if not num_bytes or num_bytes % page_bytes:
            faults.of(node, f"holds {num_bytes} bytes of tokens, which is not whole pages")
        num_slots = node.device_indices.numel()
        if num_slots * TOKEN_BYTES != num_bytes:
            faults.of(node, f"holds {num_slots} slots for {num_bytes // TOKEN_BYTES} tokens")
        if not lock_ref and not node.children:
            if node.queued is None:
                faults.of(node, "is an unlocked leaf that eviction does not know")
            elif node.queued > worth(node):
                faults.of(node, f"is worth less than the {node.queued} under which eviction has it")
        if no_windows and node.has_swa:
            faults.of(node, "has a window in a tree without windows")
        if no_states and node.mamba_slot is not None:
            faults.of(node, "has a state in a tree without states")
        if not 0 <= node.swa_lock_ref <= lock_ref:
            faults.of(node, f"has window lock count {node.swa_lock_ref}, lock count {lock_ref}")


def _check_standings(tree: UnifiedTreeCore, root: Node, nodes: list[Node], faults: _Faults) -> None:
    """Each node's standing and its parent's can be of one history."""
    for node in nodes:
        parent = node.parent
        if parent is None or parent is root:
            continue
        if not standings_agree(tree._policy, parent, node):
            faults.of(node, f"has standing {node.standing}, its parent {parent.standing}")


def _check_marks(tree: UnifiedTreeCore, nodes: list[Node], faults: _Faults) -> None:
    """What is known of each node and the store fits together."""
    offloads = tree._offloads
    for node in nodes:
        marks = node.marks
        if marks is None:
            continue
        stored, pending, touching = marks.stored, marks.pending, marks.touching
        if offloads.threshold is None and (stored or marks.hit_count or marks.pending_bits):
            faults.of(node, "is stored, counted or being offloaded although there is no linker")
        if stored & marks.pending_bits:
            faults.of(node, "is being offloaded with what is stored of it")
        if (pending is None) != (marks.pending_bits == 0):
            faults.of(node, f"is being offloaded by {pending} with parts {marks.pending_bits:#b}")
        if pending is not None and node not in offloads.pending.get(pending, ()):
            faults.of(node, f"is being offloaded by {pending}, which does not know it")
        if marks.touching_bits & ~stored:
            faults.of(node, "is being touched for what is not stored of it")
        if (touching is None) != (marks.touching_bits == 0):
            faults.of(node, f"is being touched by {touching} for parts {marks.touching_bits:#b}")
        if touching is not None and node not in offloads.touching.get(touching, ()):
            faults.of(node, f"is being touched by {touching}, which does not know it")
        if marks.chain is not None and marks.chain.tokens != node.tokens:
            faults.of(node, "has the keys of other tokens")


def _check_ledgers(tree: UnifiedTreeCore, nodes: list[Node], faults: _Faults) -> None:
    """The sums are those of the nodes."""
    if len(tree._nodes) != len(nodes) + 1:
        faults.append(f"{len(tree._nodes)} nodes are registered, {len(nodes) + 1} are linked")
    evictable = protected = 0
    queued: dict[NodeId, int] = {}
    for node in nodes:
        if node.lock_ref == 0:
            evictable += len(node.tokens)
        elif node.lock_ref > 0:
            protected += len(node.tokens)
        if node.queued is not None:
            queued[node.node_id] = node.queued
    evictable, protected = evictable // TOKEN_BYTES, protected // TOKEN_BYTES
    if (evictable, protected) != (tree.evictable_size, tree.protected_size):
        faults.append(
            f"ledgers say {tree.evictable_size} evictable and {tree.protected_size} protected, "
            f"counted {evictable} and {protected}"
        )
    slots = torch.cat([node.device_indices for node in nodes]).tolist() if nodes else []
    if len(slots) != len(set(slots)):
        faults.append(f"{len(slots) - len(set(slots))} slots are in two places")
    entries = tree._queue.entries()
    if entries != queued:
        faults.append(f"the eviction queue has entries {entries}, which is not what its nodes say")


def _check_locks(tree: UnifiedTreeCore, nodes: list[Node], faults: _Faults) -> None:
    """Lock counts are what the receipts make."""
    expected: dict[NodeId, int] = {}
    for receipt in tree._receipts.out():
        node_id = receipt.node_id
        if node_id not in tree._nodes:
            faults.append(f"receipt {receipt.receipt_id} locks node {node_id}, which is not there")
        expected[node_id] = expected.get(node_id, 0) + 1
    # Children first: who locks a node locks its parent.
    for node in reversed(nodes):
        count = expected.get(node.node_id, 0)
        if node.lock_ref != count:
            faults.of(node, f"has lock count {node.lock_ref}, receipts make {count}")
        if count and node.parent is not None:
            above = node.parent.node_id
            expected[above] = expected.get(above, 0) + count


def _check_windows(
    tree: UnifiedTreeCore, windows: Windows, nodes: list[Node], faults: _Faults
) -> None:
    """The windows together are what the nodes and the receipts make."""
    unlocked: set[NodeId] = set()
    evictable = protected = 0
    for node in nodes:
        if node.has_swa:
            if node.swa_lock_ref:
                protected += len(node.tokens)
            else:
                evictable += len(node.tokens)
                unlocked.add(node.node_id)
    if set(windows.unlocked()) != unlocked:
        faults.append(
            f"windows of {windows.unlocked()} can be given up, counted {sorted(unlocked)}"
        )
    evictable, protected = evictable // TOKEN_BYTES, protected // TOKEN_BYTES
    if (evictable, protected) != (windows.evictable, windows.protected):
        faults.append(
            f"ledgers say {windows.evictable} evictable and {windows.protected} protected tokens "
            f"of windows, counted {evictable} and {protected}"
        )
    expected: dict[NodeId, int] = {}
    for receipt in tree._receipts.out():
        above, left = tree._nodes.get(receipt.node_id), receipt.swa_locked_len * TOKEN_BYTES
        while left > 0 and above is not None and above.parent is not None:
            expected[above.node_id] = expected.get(above.node_id, 0) + 1
            left -= len(above.tokens)
            above = above.parent
        if left:
            faults.append(
                f"the window of receipt {receipt.receipt_id} does not end where a node begins"
            )
    for node in nodes:
        count = expected.get(node.node_id, 0)
        if node.swa_lock_ref != count:
            faults.of(node, f"has window lock count {node.swa_lock_ref}, receipts make {count}")


def _check_states(
    tree: UnifiedTreeCore, states: States, nodes: list[Node], faults: _Faults
) -> None:
    """The states together are what the nodes and the receipts make."""
    lock_refs = states.lock_refs()
    slots: list[int] = []
    unlocked: set[NodeId] = set()
    for node in nodes:
        if node.mamba_slot is not None:
            slots.append(node.mamba_slot)
            if node.node_id not in lock_refs:
                unlocked.add(node.node_id)
        elif node.node_id in lock_refs:
            faults.of(node, "has a locked state that is not there")
    if len(set(slots)) != len(slots):
        faults.append("a state slot is in two places")
    if set(states.unlocked()) != unlocked:
        faults.append(f"states of {states.unlocked()} can be given up, counted {sorted(unlocked)}")
    expected: dict[NodeId, int] = {}
    for receipt in tree._receipts.out():
        if receipt.mamba_locked:
            expected[receipt.node_id] = expected.get(receipt.node_id, 0) + 1
    if lock_refs != expected:
        faults.append(f"states have lock counts {lock_refs}, receipts make {expected}")


def _check_operations(tree: UnifiedTreeCore, faults: _Faults) -> None:
    """The nodes of offloads and touches know them."""
    for operation, offloaded in tree._offloads.pending.items():
        for node in offloaded:
            if node.marks is None or node.marks.pending != operation:
                faults.of(node, f"does not know its offload {operation}")
    for operation, touched in tree._offloads.touching.items():
        for node in touched:
            if node.marks is None or node.marks.touching != operation:
                faults.of(node, f"does not know its touch {operation}")
