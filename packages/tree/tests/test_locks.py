"""A receipt locks the path from its node to the root, and gives back just that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest

from radixlink_contracts import IncLockRefParams, NodeId
from radixlink_contracts.errors import StaleHandleError

if TYPE_CHECKING:
    from .conftest import MakeRig
    from .rig import Rig


def test_lock_protects_the_whole_path_and_nothing_else(rig: Rig) -> None:
    rig.insert(1, 2)
    end = rig.leaf(1, 2, 3)
    rig.insert(1, 2, 4, 5)
    receipt = rig.lock(end)
    assert receipt.node_id == end
    assert rig.sizes == (2, 3)
    rig.unlock(receipt)
    assert rig.sizes == (5, 0)


def test_evict_takes_the_unlocked_sequence_alone(rig: Rig) -> None:
    locked, other = rig.leaf(1, 2), rig.leaf(3, 4)
    receipt = rig.lock(locked)
    assert rig.evict(100).num_tokens_evicted == 2 * rig.page_size
    assert [rig.matched_pages(1, 2), rig.matched_pages(3, 4)] == [2, 0]
    with pytest.raises(StaleHandleError):
        rig.lock(other)
    rig.unlock(receipt)
    assert rig.evict(100).num_tokens_evicted == 2 * rig.page_size


def test_evict_leaves_locked_ancestor(rig: Rig) -> None:
    base = rig.leaf(1, 2)
    rig.insert(1, 2, 3)
    receipt = rig.lock(base)
    rig.evict(100)
    assert rig.matched_pages(1, 2, 3) == 2
    assert rig.sizes == (0, 2)
    rig.unlock(receipt)
    rig.evict(100)
    assert rig.matched_pages(1, 2, 3) == 0


def test_lock_of_one_branch_leaves_the_other_to_eviction(rig: Rig) -> None:
    rig.insert(1, 2)
    rig.insert(1, 2, 3)
    receipt = rig.lock(rig.leaf(1, 2, 4))
    assert rig.evict(100).num_tokens_evicted == rig.page_size
    assert rig.matched_pages(1, 2, 3) == 2
    assert rig.matched_pages(1, 2, 4) == 3
    rig.unlock(receipt)


def test_node_stays_locked_until_every_receipt_is_back(rig: Rig) -> None:
    base, end = rig.leaf(1), rig.leaf(1, 2)
    receipts = [rig.lock(end), rig.lock(base), rig.lock(end)]
    assert len({receipt.receipt_id for receipt in receipts}) == 3
    expected = [(0, 2), (0, 2), (1, 1), (2, 0)]
    assert rig.sizes == expected[0]
    for receipt, sizes in zip((receipts[0], receipts[2], receipts[1]), expected[1:], strict=True):
        rig.unlock(receipt)
        assert rig.sizes == sizes


def test_second_release_is_refused_and_changes_nothing(rig: Rig) -> None:
    end = rig.leaf(1, 2)
    released, other = rig.lock(end), rig.lock(end)
    rig.unlock(released)
    with pytest.raises(StaleHandleError, match=f"got {released.receipt_id} of node {end}"):
        rig.unlock(released)
    assert rig.sizes == (0, 2)
    assert rig.evict(100).num_tokens_evicted == 0
    rig.unlock(other)
    assert rig.sizes == (2, 0)


def test_receipt_of_another_tree_is_refused(make_rig: MakeRig) -> None:
    mine, other = make_rig(4), make_rig(4)
    receipt, foreign = mine.lock(mine.leaf(1)), other.lock(other.leaf(1))
    assert foreign == receipt, "the two trees count alike, so only identity tells them apart"
    with pytest.raises(StaleHandleError):
        mine.unlock(foreign)
    assert mine.sizes == (0, 1)
    mine.unlock(receipt)
    other.unlock(foreign)


def test_receipt_that_names_another_node_is_refused(rig: Rig) -> None:
    base, end = rig.leaf(1), rig.leaf(1, 2)
    receipt = rig.lock(end)
    with pytest.raises(StaleHandleError):
        rig.unlock(attrs.evolve(receipt, node_id=base))
    assert rig.sizes == (0, 2)
    rig.unlock(receipt)


def test_receipt_is_stale_after_reset(rig: Rig) -> None:
    receipt = rig.lock(rig.leaf(1))
    rig.apply(rig.tree.reset())
    rig.insert(1)
    with pytest.raises(StaleHandleError):
        rig.unlock(receipt)
    assert rig.sizes == (1, 0)


def test_node_that_never_was_cannot_be_locked(rig: Rig) -> None:
    with pytest.raises(StaleHandleError, match="got 4711"):
        rig.tree.inc_lock_ref(IncLockRefParams(node_id=NodeId(4711)))


def test_lock_of_the_root_protects_nothing(rig: Rig) -> None:
    rig.insert(1)
    receipt = rig.lock(rig.tree.root)
    assert rig.sizes == (1, 0)
    assert rig.evict(1).num_tokens_evicted == rig.page_size
    rig.unlock(receipt)
    assert rig.sizes == (0, 0)


def test_lock_covers_both_halves_of_a_later_split(rig: Rig) -> None:
    receipt = rig.lock(rig.leaf(1, 2, 3, 4))
    rig.insert(1, 2, 9)
    assert rig.sizes == (1, 4)
    assert rig.evict(100).num_tokens_evicted == rig.page_size
    assert rig.matched_pages(1, 2, 3, 4) == 4
    rig.unlock(receipt)
    assert rig.sizes == (4, 0)
    assert rig.evict(100).num_tokens_evicted == 4 * rig.page_size


def test_lock_of_the_upper_half_leaves_the_lower_to_eviction(rig: Rig) -> None:
    rig.insert(1, 2, 3, 4)
    receipt = rig.lock(rig.match(1, 2).last_device_node)
    assert rig.sizes == (2, 2)
    rig.evict(100)
    assert rig.matched_pages(1, 2, 3, 4) == 2
    rig.unlock(receipt)


def test_receipts_over_several_splits_balance(rig: Rig) -> None:
    receipts = [rig.lock(rig.leaf(1, 2, 3, 4, 5, 6))]
    for length in (4, 2, 5, 1):
        receipts.append(rig.lock(rig.match(*range(1, length + 1)).last_device_node))
        rig.check()
    for index in (2, 0, 1, 1, 0):
        rig.unlock(receipts.pop(index))
        rig.check()
    assert receipts == []
    assert rig.sizes == (6, 0)


def test_leaf_below_a_locked_path_is_not_locked(rig: Rig) -> None:
    receipt = rig.lock(rig.leaf(1))
    rig.insert(1, 2)
    assert rig.sizes == (1, 1)
    rig.unlock(receipt)
