"""Locks: a receipt for what was taken, and its return."""

from __future__ import annotations

from typing import TYPE_CHECKING, NewType

import attrs

if TYPE_CHECKING:
    from radixlink_contracts._ids import NodeId
    from radixlink_contracts._pools import ComponentType

ReceiptId = NewType("ReceiptId", int)
"""One acquisition of one tree. Never reused."""


@attrs.frozen(kw_only=True)
class IncLockRefParams:
    """What to lock.

    Attributes:
        node_id: The end of the path. Full attention is locked from here to the root, window slots as far up as one
            window reaches, the recurrent state at this node alone.
        skip_lock_components: Auxiliary components not to take.
    """

    node_id: NodeId
    skip_lock_components: tuple[ComponentType, ...] = ()


@attrs.frozen(kw_only=True)
class IncLockRefResult:
    """The receipt: names what was taken, so that a release gives back just that.

    Attributes:
        receipt_id: This acquisition.
        node_id: The end of the path, as it was locked.
        skipped_lock_components: What was not taken.
        swa_locked_len: Tokens at the end of the path whose window slots were taken: whole nodes, one window or, where
            the path is shorter, all of it. Splits do not move it.
        mamba_locked: The node's state was taken.
    """

    receipt_id: ReceiptId
    node_id: NodeId
    skipped_lock_components: tuple[ComponentType, ...] = ()
    swa_locked_len: int = 0
    mamba_locked: bool = False

    def to_dec_params(self) -> DecLockRefParams:
        """The release of just this acquisition."""
        return DecLockRefParams(receipt=self)


@attrs.frozen(kw_only=True)
class DecLockRefParams:
    """What to release.

    Attributes:
        receipt: What the acquisition returned. Good once.
    """

    receipt: IncLockRefResult
