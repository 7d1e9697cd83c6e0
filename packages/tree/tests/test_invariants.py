"""`check_invariants` finds each kind of fault and names it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from radixlink_contracts import Namespace, OperationId
from radixlink_contracts.errors import ContractError
from radixlink_tree import EvictionPolicy, UnifiedTreeCore, check_invariants
from radixlink_tree._node import FULL_BIT, NO_CHILDREN

from .rig import Rig

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_tree._node import Node


def a_tree() -> tuple[UnifiedTreeCore, Node, Node]:
    """A tree whose pages 1, 2 are one node and 3 another below it, with a linker, nothing locked."""
    rig = Rig(4)
    rig.tree.attach_linker(backup_threshold=1)
    upper, lower = rig.leaf(1, 2), rig.leaf(1, 2, 3)
    rig.insert(5)
    check_invariants(rig.tree)
    return rig.tree, rig.tree._nodes[upper], rig.tree._nodes[lower]


def unregister(tree: UnifiedTreeCore, _: Node, lower: Node) -> None:
    del tree._nodes[lower.node_id]


def unlink(_: UnifiedTreeCore, upper: Node, lower: Node) -> None:
    del upper.children[lower.edge]


def adopt(tree: UnifiedTreeCore, _: Node, lower: Node) -> None:
    lower.parent = tree._root


def misfile(_: UnifiedTreeCore, upper: Node, lower: Node) -> None:
    del upper.children[lower.edge]
    lower.edge = bytes(32)
    upper.children[lower.edge] = lower


def emigrate(_: UnifiedTreeCore, __: Node, lower: Node) -> None:
    lower.namespace = Namespace(extra_key="a")


def lock_without_receipt(_: UnifiedTreeCore, __: Node, lower: Node) -> None:
    lower.lock_ref += 1


def unlock_without_receipt(_: UnifiedTreeCore, __: Node, lower: Node) -> None:
    lower.lock_ref -= 1


def tear(_: UnifiedTreeCore, __: Node, lower: Node) -> None:
    lower.tokens = lower.tokens[:-1]


def lose_slots(_: UnifiedTreeCore, __: Node, lower: Node) -> None:
    lower.device_indices = lower.device_indices[1:]


def share_slots(_: UnifiedTreeCore, upper: Node, lower: Node) -> None:
    lower.device_indices = upper.device_indices[:4].clone()


def forget_in_queue(tree: UnifiedTreeCore, _: Node, lower: Node) -> None:
    tree._queue.clear()
    lower.queued = None


def queue_too_late(_: UnifiedTreeCore, __: Node, lower: Node) -> None:
    lower.queued = lower.last_access + 1


def forget_only_child(_: UnifiedTreeCore, upper: Node, lower: Node) -> None:
    lower.only_child = upper


def forget_path(tree: UnifiedTreeCore, _: Node, __: Node) -> None:
    tree._policy = EvictionPolicy.TLRU


def prefer_child(tree: UnifiedTreeCore, _: Node, lower: Node) -> None:
    tree._policy = EvictionPolicy.PRIORITY
    lower.standing += 1


def miscount(tree: UnifiedTreeCore, _: Node, __: Node) -> None:
    tree._evictable += 4


def use_child_alone(_: UnifiedTreeCore, upper: Node, lower: Node) -> None:
    lower.last_access = upper.last_access + 1


def store_while_pending(tree: UnifiedTreeCore, _: Node, lower: Node) -> None:
    tree.mark_offload_pending(lower.node_id, OperationId(1))
    lower.mark().stored = FULL_BIT


def forget_offload(tree: UnifiedTreeCore, _: Node, lower: Node) -> None:
    tree.mark_offload_pending(lower.node_id, OperationId(1))
    tree._offloads.pending.clear()


def forget_operation(tree: UnifiedTreeCore, _: Node, lower: Node) -> None:
    tree.mark_offload_pending(lower.node_id, OperationId(1))
    lower.mark().pending, lower.mark().pending_bits = None, 0


def count_without_linker(tree: UnifiedTreeCore, _: Node, __: Node) -> None:
    tree._offloads.threshold = None


def rekey(tree: UnifiedTreeCore, upper: Node, lower: Node) -> None:
    assert len(tree.node(lower.node_id).page_keys) == 1
    lower.mark().chain = upper.mark().chain


FAULTS: dict[Callable[[UnifiedTreeCore, Node, Node], None], str] = {
    unregister: "linked but not registered",
    unlink: "4 nodes are registered, 3 are linked",
    adopt: "do not agree about their link",
    misfile: "filed under another first page",
    emigrate: "of another namespace than its parent",
    lock_without_receipt: "has lock count 1, receipts make 0",
    unlock_without_receipt: "has lock count -1",
    tear: "which is not whole pages",
    lose_slots: "holds 3 slots for 4 tokens",
    share_slots: "4 slots are in two places",
    forget_in_queue: "an unlocked leaf that eviction does not know",
    queue_too_late: "is worth less than the 3 under which eviction has it",
    forget_only_child: "has 0 children and an only child",
    forget_path: "has standing 0, its parent 0",
    prefer_child: "has standing 1, its parent 0",
    miscount: "ledgers say 20 evictable and 0 protected, counted 16 and 0",
    use_child_alone: "was used after its parent",
    store_while_pending: "is being offloaded with what is stored of it",
    forget_offload: "which does not know it",
    forget_operation: "does not know its offload",
    count_without_linker: "although there is no linker",
    rekey: "has the keys of other tokens",
}


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    FAULTS.items(),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_fault_is_found_and_named(
    break_it: Callable[[UnifiedTreeCore, Node, Node], None], complaint: str
) -> None:
    tree, upper, lower = a_tree()
    break_it(tree, upper, lower)
    with pytest.raises(ContractError, match=complaint):
        check_invariants(tree)


def test_child_of_every_leaf_is_found() -> None:
    tree, upper, _ = a_tree()
    NO_CHILDREN[b""] = upper
    try:
        with pytest.raises(ContractError, match="children of every leaf"):
            check_invariants(tree)
    finally:
        NO_CHILDREN.clear()


def test_lock_of_a_node_that_is_gone_is_found() -> None:
    rig = Rig(4)
    receipt = rig.lock(rig.leaf(1))
    rig.tree._nodes[receipt.node_id].lock_ref = 0
    rig.tree._evictable, rig.tree._protected = 4, 0
    rig.tree._queue.offer(rig.tree._nodes[receipt.node_id])
    rig.evict(1)
    with pytest.raises(ContractError, match="which is not there"):
        check_invariants(rig.tree)
