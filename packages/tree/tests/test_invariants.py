"""`check_invariants` finds each kind of fault and names it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from radixlink_contracts import Namespace, OperationId
from radixlink_contracts.errors import ContractError
from radixlink_tree import EvictionPolicy, StateRules, UnifiedTreeCore, check_invariants
from radixlink_tree._node import FULL_BIT, NO_CHILDREN

from .rig import Rig

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_tree._mamba import States
    from radixlink_tree._node import Node
    from radixlink_tree._swa import Windows


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


def store_while_pending(tree: UnifiedTreeCore, _: Node, lower: Node) -> None:
    tree.mark_offload_pending(lower.node_id, OperationId(1))
    lower.mark().stored = FULL_BIT


def forget_offload(tree: UnifiedTreeCore, _: Node, lower: Node) -> None:
    tree.mark_offload_pending(lower.node_id, OperationId(1))
    tree._offloads.pending.clear()


def forget_operation(tree: UnifiedTreeCore, _: Node, lower: Node) -> None:
    tree.mark_offload_pending(lower.node_id, OperationId(1))
    lower.mark().pending, lower.mark().pending_bits = None, 0


def offload_nothing(tree: UnifiedTreeCore, _: Node, lower: Node) -> None:
    tree.mark_offload_pending(lower.node_id, OperationId(1))
    lower.mark().pending_bits = 0


def gain_window_without_windows(_: UnifiedTreeCore, __: Node, lower: Node) -> None:
    lower.has_swa = True


def gain_state_without_states(_: UnifiedTreeCore, __: Node, lower: Node) -> None:
    lower.mamba_slot = 3


def offload_without_linker(tree: UnifiedTreeCore, _: Node, lower: Node) -> None:
    tree.mark_offload_pending(lower.node_id, OperationId(1))
    tree._offloads.threshold = None


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
    store_while_pending: "is being offloaded with what is stored of it",
    forget_offload: "which does not know it",
    forget_operation: "does not know its offload",
    offload_nothing: "is being offloaded by 1 with parts 0b0",
    offload_without_linker: "or being offloaded although there is no linker",
    gain_window_without_windows: "has a window in a tree without windows",
    gain_state_without_states: "has a state in a tree without states",
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


def lose_window_unnoticed(_: Windows, __: States, ___: Node, lower: Node) -> None:
    lower.has_swa = False


def offer_locked_window(windows: Windows, _: States, __: Node, lower: Node) -> None:
    windows._unlocked[lower.node_id] = lower


def forget_window(windows: Windows, _: States, __: Node, ___: Node) -> None:
    windows._unlocked.clear()


def lock_window_without_receipt(_: Windows, __: States, ___: Node, lower: Node) -> None:
    lower.swa_lock_ref = 2


def lock_window_of_what_is_not_locked(_: Windows, __: States, ___: Node, lower: Node) -> None:
    lower.lock_ref = 0


def unlock_window_without_receipt(_: Windows, __: States, upper: Node, ___: Node) -> None:
    upper.swa_lock_ref = -1


def lose_locked_state(_: Windows, __: States, ___: Node, lower: Node) -> None:
    lower.mamba_slot = None


def forget_state(_: Windows, states: States, __: Node, ___: Node) -> None:
    states._unlocked.clear()


def share_state(_: Windows, __: States, upper: Node, lower: Node) -> None:
    upper.mamba_slot = lower.mamba_slot


def unlock_state_without_receipt(_: Windows, states: States, __: Node, lower: Node) -> None:
    states.unlock(lower)


def lock_state_twice(_: Windows, states: States, __: Node, lower: Node) -> None:
    states.lock(lower)


HYBRID_FAULTS: dict[Callable[[Windows, States, Node, Node], None], str] = {
    lose_window_unnoticed: "ledgers say 4 evictable and 8 protected tokens of windows, counted 4 and 0",
    offer_locked_window: r"can be given up, counted \[",
    forget_window: r"windows of \(\) can be given up, counted \[",
    lock_window_without_receipt: "has window lock count 2, receipts make 1",
    lock_window_of_what_is_not_locked: "has window lock count 1, lock count 0",
    unlock_window_without_receipt: "has window lock count -1, lock count 1",
    lose_locked_state: "has a locked state that is not there",
    forget_state: r"states of \(\) can be given up, counted \[",
    share_state: "a state slot is in two places",
    unlock_state_without_receipt: r"states have lock counts \{\}, receipts make \{",
    lock_state_twice: r"states have lock counts \{\d+: 2\}, receipts make \{\d+: 1\}",
}


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    HYBRID_FAULTS.items(),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_fault_of_a_window_or_state_is_found_and_named(
    break_it: Callable[[Windows, States, Node, Node], None], complaint: str
) -> None:
    rig = Rig(4, window=8, states=StateRules())
    end = rig.insert(1, 2, 3, floor=1).last_device_node
    rig.lock(end)
    rig.insert(7)
    check_invariants(rig.tree)
    windows, states = rig.tree._windows, rig.tree._states
    assert windows is not None
    assert states is not None
    upper, lower = rig.path(end)
    break_it(windows, states, upper, lower)
    with pytest.raises(ContractError, match=complaint):
        check_invariants(rig.tree)


def test_window_of_a_receipt_that_ends_inside_a_node_is_found() -> None:
    rig = Rig(4, window=8)
    end = rig.leaf(1, 2)
    receipts = rig.tree._receipts
    # Given by nobody: half of the node.
    receipts.give(end, (), 4)
    with pytest.raises(ContractError, match="does not end where a node begins"):
        check_invariants(rig.tree)


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
