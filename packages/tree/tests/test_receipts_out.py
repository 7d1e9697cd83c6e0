from __future__ import annotations

from radixlink_contracts import IncLockRefParams
from radixlink_tree import UnifiedTreeCore


def test_the_locks_that_are_out_are_told_oldest_first() -> None:
    tree = UnifiedTreeCore(page_size=1)
    assert tree.receipts() == ()
    first, second = (tree.inc_lock_ref(IncLockRefParams(node_id=tree.root)) for _ in range(2))
    assert tree.receipts() == (first, second)
    tree.dec_lock_ref(first.to_dec_params())
    assert tree.receipts() == (second,)
    tree.reset()
    assert tree.receipts() == ()
