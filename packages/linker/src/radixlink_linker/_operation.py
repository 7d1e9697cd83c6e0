"""`Operation`: a load, an offload or a touch, from its minting until no rank touches its slots.

Two columns. What this rank knows is local: a verdict and whether it is quiesced, each of which
changes once (pending to failed or done, busy to quiesced). What the ranks agreed on comes from
frames and is replicated. Code branches on the second column only; the first is just written into
the next frame.

    local verdict    PENDING -> FAILED | DONE   by the first completion, a refusal, an exception or
                                                the deadline
    local quiesced   False   -> True            by the completion that says so
    agreed verdict   PENDING -> FAILED | DONE   by a frame: FAILED when one rank failed, DONE when
                                                all are done
    agreed quiesced  False   -> True            by a frame: when all ranks are
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, TypeAlias

from radixlink_contracts import LoadMode, Outcome
from radixlink_linker._transfers import transfer_of

if TYPE_CHECKING:
    import torch

    from radixlink_contracts import (
        IncLockRefResult,
        NodeId,
        OperationId,
        PoolName,
        PoolTransfer,
        RadixKey,
        RequestId,
        RequestKV,
    )
    from radixlink_contracts.actions import CacheAction
    from radixlink_linker._load_plan import LoadPlan


class Verdict(enum.IntEnum):
    """How an operation stands.

    The values are the two bits of a frame, a chain under AND: the least of all ranks wins.
    """

    FAILED = 0b00
    PENDING = 0b01
    DONE = 0b11


class Ticket:
    """An operation, as a backend sees it. An `OperationTicket`."""

    __slots__ = ("_op", "decided")

    def __init__(self, op: OperationId) -> None:
        """An operation that is not decided."""
        self._op = op
        #: Set once by the scheduler thread; read by any.
        self.decided = False

    @property
    def op(self) -> OperationId:
        """The operation's id."""
        return self._op


class Operation:
    """What all operations have in common."""

    def __init__(
        self, op: OperationId, deadline: float, transfers: tuple[PoolTransfer, ...] = ()
    ) -> None:
        """An operation that all ranks have just minted.

        Args:
            op: Its id.
            deadline: This rank's own moment to give it up.
            transfers: One for each component that takes part, in the components' order.
        """
        self.op = op
        self.deadline = deadline
        self.transfers = transfers
        self.ticket = Ticket(op)
        self.local_verdict = Verdict.PENDING
        self.local_quiesced = False
        self.verdict = Verdict.PENDING
        #: The steps of its minting and of the agreed verdict.
        self.minted_step = 0
        self.decided_step = 0
        #: The step of its last turn in frames that had no room for all; of its minting before one.
        self.turn_step = 0
        #: Why this rank failed, for people.
        self.why = ""

    @property
    def slots(self) -> dict[PoolName, int]:
        """How many slots of each pool it moves bytes from or to."""
        return {
            transfer.name: len(transfer.device_indices)
            for transfer in self.transfers
            if transfer.device_indices is not None
        }

    @property
    def num_slots(self) -> int:
        """Those of all pools."""
        return sum(self.slots.values())

    def note(self, outcome: Outcome, *, quiesced: bool, why: str = "") -> bool:
        """Take in what this rank's backend says.

        Args:
            outcome: How this rank's part ended.
            quiesced: It touches the slots no more.
            why: What went wrong, for people.

        Returns:
            False when the verdict was given before, so that only the quiescence counts.
        """
        first = self.local_verdict is Verdict.PENDING
        if first:
            self.local_verdict = Verdict.DONE if outcome is Outcome.LANDED else Verdict.FAILED
            self.why = why
        self.local_quiesced = self.local_quiesced or quiesced
        return first

    def give_up(self, why: str = "") -> None:
        """This rank waits no longer: failed, and not quiesced by that."""
        if self.local_verdict is Verdict.PENDING:
            self.local_verdict = Verdict.FAILED
            self.why = why

    def decide(self, verdict: Verdict, step: int) -> None:
        """Take in the agreed verdict: it is final, and backends stop."""
        self.verdict = verdict
        self.decided_step = step
        self.ticket.decided = True


class LockingOperation(Operation):
    """An operation that moves bytes: it holds a lock until every rank is quiesced."""

    def __init__(
        self,
        op: OperationId,
        receipt: IncLockRefResult,
        deadline: float,
        transfers: tuple[PoolTransfer, ...] = (),
    ) -> None:
        """An operation with its lock."""
        super().__init__(op, deadline, transfers)
        self.receipt = receipt

    @property
    def node_id(self) -> NodeId:
        """The end of the path that it locks."""
        return self.receipt.node_id


class LoadOperation(LockingOperation):
    """A load: owns its slots until COMMIT."""

    def __init__(
        self,
        op: OperationId,
        receipt: IncLockRefResult,
        deadline: float,
        *,
        request: RequestKV,
        mode: LoadMode,
        key: RadixKey,
        plan: LoadPlan,
        transfers: tuple[PoolTransfer, ...],
    ) -> None:
        """A load of what the device lacks of a part of a key.

        Args:
            op: Its id.
            receipt: The lock on what the device has of full attention.
            deadline: This rank's own moment to give it up.
            request: Whom it is for.
            mode: How its request meets it.
            key: The request's sequence.
            plan: Which part, and what of it.
            transfers: One for each component that it brings something of, in the components' order.
        """
        super().__init__(op, receipt, deadline, transfers)
        #: None once the request is gone.
        self.request_id: RequestId | None = request.request_id
        #: The request that runs meanwhile: with a layer-wise load, until it is gone or decided.
        self.running: RequestKV | None = request if mode is LoadMode.LAYER_WISE else None
        self.mode = mode
        self.key = key
        self.plan = plan
        self.start = plan.start
        self.end = plan.end
        #: True until the engine's start call: a replicated fact.
        self.queued = True
        #: Taken back before it was started, so that it says nothing about its pages: replicated.
        self.cancelled = False
        #: Requests that wait for its end, or for the room that it takes, in the order in which
        #: they came; those that were told are gone from here.
        self.waiters: list[RequestId] = []
        #: The tree has taken its slots, but for what is surplus: set by COMMIT.
        self.committed = False
        #: The lock that it had before COMMIT, until that is released.
        self.anchor: IncLockRefResult | None = None
        #: What COMMIT has to free, held until every rank is quiesced.
        self.surplus: list[CacheAction] = []
        #: And window slots that stand beside none, likewise.
        self.surplus_windows: list[torch.Tensor] = []

    @property
    def lends(self) -> bool:
        """True where its request runs on slots of the tree that no lock of the request's own keeps."""
        return self.mode is LoadMode.LAYER_WISE and self.plan.start < self.plan.full_start

    def slots_of(self, pool: PoolName) -> torch.Tensor | None:
        """Its slots of a pool; None where it brings nothing of that.

        Shape: (tokens that it brings,) int64; (1,) for a state.
        """
        transfer = transfer_of(self.transfers, pool)
        return None if transfer is None else transfer.device_indices

    def covers(self, key: RadixKey, start: int, page_size: int) -> bool:
        """True when this load brings what a key lacks from token `start` on, or a part behind that.

        The latter is of a device prefix that became shorter since: the lock of a load keeps what its
        end needs, not all that its request matched.

        Cost: one comparison of a page, and of the prefix where that page is equal.
        """
        first = max(start, self.start)
        if first >= self.end or key.namespace != self.key.namespace:
            return False
        ours, theirs = self.key.token_ids, key.token_ids
        stop = first + page_size
        return ours[first:stop] == theirs[first:stop] and ours[:first] == theirs[:first]


class OffloadOperation(LockingOperation):
    """The storing of one node; the lock keeps its slots until every rank is quiesced."""


class TouchOperation(Operation):
    """The touching of one node in the store. It has no slots and no lock, so it is quiesced always."""

    def __init__(
        self,
        op: OperationId,
        node_id: NodeId,
        deadline: float,
        transfers: tuple[PoolTransfer, ...] = (),
    ) -> None:
        """A touch of what is stored of a node, which may be split or evicted since."""
        super().__init__(op, deadline, transfers)
        self.node_id = node_id
        self.local_quiesced = True


AnyOperation: TypeAlias = LoadOperation | OffloadOperation | TouchOperation
"""Every kind of operation."""
