"""`Offloads`: what a tree keeps for an attached linker: marks, what is on its way, and the digest.

Without a linker it keeps nothing, and nothing of it is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from radixlink_contracts import ComponentType, HeldBack, InsertOrigin
from radixlink_contracts.errors import ContractError, InvalidTransitionError
from radixlink_tree._node import FULL_BIT, MAMBA_BIT, SWA_BIT

if TYPE_CHECKING:
    from radixlink_contracts import InsertParams, NodeId, OperationId
    from radixlink_tree._node import Node, StoreMarks

_DIGEST_MASK: Final = (1 << 64) - 1
_DIGEST_PRIME: Final = 0x100000001B3
#: So many failures of a node in a row double the time until it is offered again; more do not.
_MAX_DOUBLINGS: Final = 6


class Offloads:
    """The store's side of one tree."""

    def __init__(self) -> None:
        """No linker."""
        #: How often a node is used before it is offered; None without a linker.
        self.threshold: int | None = None
        #: How many ticks after the store was last known to have used a stored node another use
        #: makes it hot; None where nobody touches.
        self.touch_after: int | None = None
        #: How many ticks after the failure of its offload a node is offered again; twice as many
        #: after each further one in a row.
        self.retry_after = 1
        #: 64 bits over the changes since the linker was attached.
        self.digest = 0
        #: The nodes that each offload on its way speaks of: one, or more after splits. Some may be
        #: evicted by now: an offload that is copied out needs no lock any more.
        self.pending: dict[OperationId, list[Node]] = {}
        #: The nodes that each touch on its way speaks of, likewise. It needs no lock.
        self.touching: dict[OperationId, list[Node]] = {}

    def attach(self, threshold: int, touch_after: int | None, retry_after: int) -> None:
        """Start; see `LinkedTreeCore.attach_linker`."""
        if self.threshold is not None:
            msg = "attach_linker: expected no linker, got a second one"
            raise InvalidTransitionError(msg, state="linked", event="attach")
        if threshold < 1:
            msg = f"attach_linker: expected a backup_threshold of at least 1, got {threshold}"
            raise ContractError(msg)
        if touch_after is not None and touch_after < 1:
            msg = f"attach_linker: expected touch_after of at least 1, or None, got {touch_after}"
            raise ContractError(msg)
        if retry_after < 1:
            msg = f"attach_linker: expected retry_after of at least 1, got {retry_after}"
            raise ContractError(msg)
        self.threshold = threshold
        self.touch_after = touch_after
        self.retry_after = retry_after
        self.digest = 0

    def detach(self) -> None:
        """Stop; the nodes' marks are the caller's to drop."""
        self.threshold = self.touch_after = None
        self.clear()

    def clear(self) -> None:
        """The tree is empty: ranks whose trees differed are equal again."""
        self.digest = 0
        self.pending.clear()
        self.touching.clear()

    def note(self, node_number: int, what: int) -> None:
        """Mix a change into the digest, while there is somebody to compare it.

        Args:
            node_number: Which node, counted from the root.
            what: What happened to it.
        """
        if self.threshold is not None:
            mixed = (self.digest ^ node_number) * _DIGEST_PRIME
            self.digest = ((mixed ^ (what & _DIGEST_MASK)) * _DIGEST_PRIME) & _DIGEST_MASK

    def split(self, lower: StoreMarks, upper: Node, num_pages: int) -> None:
        """The upper half of a node gets its part of the marks.

        What is being offloaded or touched is so in both halves; a state, which is at the lower's
        end, is not.
        """
        marks = upper.mark()
        marks.hit_count = lower.hit_count
        marks.failures, marks.retry_at = lower.failures, lower.retry_at
        marks.stored = lower.stored & ~MAMBA_BIT
        if lower.chain is not None:
            marks.chain, lower.chain = lower.chain.split(num_pages)
        pending_bits = lower.pending_bits & ~MAMBA_BIT
        if lower.pending is not None and pending_bits:
            marks.pending, marks.pending_bits = lower.pending, pending_bits
            self.pending[lower.pending].append(upper)
        marks.touched = lower.touched
        touching_bits = lower.touching_bits & ~MAMBA_BIT
        if lower.touching is not None and touching_bits:
            marks.touching, marks.touching_bits = lower.touching, touching_bits
            self.touching[lower.touching].append(upper)

    def mark_pending(self, node: Node, operation_id: OperationId) -> None:
        """What is unstored of a node is being offloaded."""
        if self.threshold is None:
            msg = (
                f"mark_offload_pending: expected a linker, got operation {operation_id} "
                f"on node {node.node_id} without one"
            )
            raise InvalidTransitionError(
                msg, state="detached", event="offload", operation=operation_id
            )
        unstored = node.unstored
        pending = None if node.marks is None else node.marks.pending
        if not unstored or pending is not None:
            state = f"offloaded by {pending}" if unstored else "stored"
            msg = (
                f"mark_offload_pending: expected node {node.node_id} unstored and idle, "
                f"got it {state}"
            )
            raise InvalidTransitionError(msg, state=state, event="offload", operation=operation_id)
        marks = node.mark()
        marks.pending, marks.pending_bits = operation_id, unstored
        self.pending.setdefault(operation_id, []).append(node)

    @staticmethod
    def backup_path(end: Node, tick: int) -> tuple[NodeId, ...]:
        """What is unstored, idle and not held back on the path to a node at a tick, root first."""
        path: list[NodeId] = []
        node = end
        while node.parent is not None:
            marks, unstored = node.marks, node.unstored
            if unstored and marks is not None and tick < marks.retry_at:
                if unstored & FULL_BIT:
                    path.clear()
            elif unstored and (marks is None or marks.pending is None):
                path.append(node.node_id)
            node = node.parent
        path.reverse()
        return tuple(path)

    @staticmethod
    def held_back(end: Node, tick: int, page_size: int) -> tuple[HeldBack, ...]:
        """The nodes of a path whose offload failed and that are not offered at a tick, root first."""
        path: list[HeldBack] = []
        node = end
        while node.parent is not None:
            marks = node.marks
            if node.unstored and marks is not None and tick < marks.retry_at:
                held = HeldBack(
                    node_id=node.node_id,
                    num_pages=node.num_tokens // page_size,
                    failures=marks.failures,
                    uses_left=marks.retry_at - tick,
                )
                path.append(held)
            node = node.parent
        path.reverse()
        return tuple(path)

    def finish(self, operation_id: OperationId, tick: int, *, stored: bool) -> None:
        """An offload ended at a tick: what it took is stored, or is as before and waits for a while."""
        nodes = self.pending.pop(operation_id, None)
        if nodes is None:
            msg = f"finish_offload: expected an offload on its way, got operation {operation_id}"
            raise InvalidTransitionError(msg, state="idle", event="finish", operation=operation_id)
        for node in nodes:
            marks = node.mark()
            if stored:
                marks.used_in_store(marks.pending_bits, node.held, tick)
                marks.failures = 0
            else:
                marks.retry_at = tick + (self.retry_after << min(marks.failures, _MAX_DOUBLINGS))
                marks.failures += 1
            marks.pending, marks.pending_bits = None, 0

    def mark_touching(self, node: Node, operation_id: OperationId) -> None:
        """What the node holds and the store is known to hold is being touched."""
        bits = node.held_stored
        touching = None if node.marks is None else node.marks.touching
        if not bits or touching is not None:
            state = f"touched by {touching}" if bits else "unstored"
            msg = (
                f"mark_touch_pending: expected node {node.node_id} stored and idle, got it {state}"
            )
            raise InvalidTransitionError(msg, state=state, event="touch", operation=operation_id)
        marks = node.mark()
        marks.touching, marks.touching_bits = operation_id, bits
        self.touching.setdefault(operation_id, []).append(node)

    def finish_touch(self, operation_id: OperationId, tick: int, *, present: bool) -> None:
        """A touch ended: what it spoke of was used in the store at a tick, or is unstored."""
        nodes = self.touching.pop(operation_id, None)
        if nodes is None:
            msg = f"finish_touch: expected a touch on its way, got operation {operation_id}"
            raise InvalidTransitionError(msg, state="idle", event="finish", operation=operation_id)
        for node in nodes:
            marks = node.mark()
            if present:
                marks.used_in_store(marks.touching_bits, node.held, tick)
            else:
                marks.stored &= ~marks.touching_bits
            marks.touching, marks.touching_bits = None, 0

    def count_insert(
        self, end: Node, total: int, params: InsertParams, threshold: int, tick: int
    ) -> tuple[tuple[NodeId, ...], tuple[NodeId, ...]]:
        """Count an insert's use of its path at a tick, or mark what a load restored.

        Returns:
            What is due, root first: what is above a node that is due goes with it, so that its
            prefix is stored too. What failed lately waits, and so does what is behind pages of
            such a node: they would serve nobody. And what is hot, root first: stored, and used again so long after
            the store was last known to have used it.
        """
        restored = params.origin is InsertOrigin.RESTORED
        floor = params.component_evicted_seqlens.get(ComponentType.SWA, 0)
        # At or before this tick the store's last use is long ago; before all of them where nobody
        # touches.
        long_ago = -1 if restored or self.touch_after is None else tick - self.touch_after
        due: list[NodeId] = []
        hot: list[NodeId] = []
        node, at = end, total
        while node.parent is not None:
            start = at - node.num_tokens
            marks = node.mark()
            if not restored:
                marks.hit_count += at > params.inserted_len
            elif marks.pending is None:
                brought = _brought(params, start, floor, at_end=node is end) & node.held
                if brought:
                    marks.used_in_store(brought, node.held, tick)
            # What came to a node since its offload began is due for itself, behind that.
            lacking = node.held & ~(marks.stored | marks.pending_bits)
            if lacking and tick < marks.retry_at:
                if lacking & FULL_BIT:
                    due.clear()
            elif lacking and (due or marks.hit_count >= threshold):
                due.append(node.node_id)
            if marks.touched <= long_ago and marks.touching is None and node.held & marks.stored:
                hot.append(node.node_id)
            node, at = node.parent, start
        due.reverse()
        hot.reverse()
        return tuple(due), tuple(hot)


def _brought(params: InsertParams, start: int, floor: int, *, at_end: bool) -> int:
    """What a load brought of the node that begins at a token, a bit each component.

    That is the full pages that the tree lacked and the window above the floor; windows that came to
    nodes that were there; and the state at the end.
    """
    brought = 0
    if start >= params.prev_prefix_len:
        brought = FULL_BIT if start < floor else FULL_BIT | SWA_BIT
    elif any(first <= start < last for first, last in params.late_windows):
        brought = SWA_BIT
    if at_end and params.mamba_value is not None:
        brought |= MAMBA_BIT
    return brought
