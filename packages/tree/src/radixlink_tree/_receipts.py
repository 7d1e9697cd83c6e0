"""`Receipts`: the locks that are out, each good for one release."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, cast

from radixlink_contracts import IncLockRefResult
from radixlink_contracts.errors import StaleHandleError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radixlink_contracts import ComponentType, NodeId, ReceiptId


class Receipts:
    """The receipts of one tree. Ids are never used again."""

    def __init__(self) -> None:
        """None is out."""
        # Drawn from, not called as a type: a NewType is a call of a Python function.
        self._ids = cast("Iterator[ReceiptId]", count(1))
        self._out: dict[ReceiptId, IncLockRefResult] = {}

    def give(
        self,
        node_id: NodeId,
        skipped: tuple[ComponentType, ...],
        swa_locked_len: int = 0,
        mamba_locked: bool = False,  # noqa: FBT001, FBT002 -- a keyword costs, and this is on every request's way
    ) -> IncLockRefResult:
        """A receipt for what was just taken."""
        receipt_id = next(self._ids)
        receipt = IncLockRefResult(
            receipt_id=receipt_id,
            node_id=node_id,
            skipped_lock_components=skipped,
            swa_locked_len=swa_locked_len,
            mamba_locked=mamba_locked,
        )
        self._out[receipt_id] = receipt
        return receipt

    def check(self, receipt: IncLockRefResult) -> None:
        """Return when a receipt is out.

        Raises:
            StaleHandleError: It was released before, or is not this tree's.
        """
        if self._out.get(receipt.receipt_id) is not receipt:
            msg = (
                f"expected a receipt that is out, got {receipt.receipt_id} of node "
                f"{receipt.node_id}, which was released before or is not this tree's"
            )
            raise StaleHandleError(msg)

    def take(self, receipt: IncLockRefResult) -> None:
        """Take a receipt back; see `check`."""
        self.check(receipt)
        del self._out[receipt.receipt_id]

    def out(self) -> tuple[IncLockRefResult, ...]:
        """Those that are out, oldest first."""
        return tuple(self._out.values())

    def clear(self) -> None:
        """All are void."""
        self._out.clear()
