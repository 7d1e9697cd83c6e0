"""What each rank was told of each operation, and what became of it: the verdicts, worked out apart.

An operation is seen where the code under test hands it to a backend, and ends where that code says
so: a load is done when its pages are inserted, an offload or a touch when the tree is told; each has
failed when its ticket is decided without that.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, TypeAlias

import attrs

from radixlink_contracts import Outcome
from radixlink_testing.simulator._rules import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radixlink_contracts import OperationId, OperationTicket, PoolName
    from radixlink_linker import LinkerSettings
    from radixlink_testing.simulator._rules import Referee


class Verdict(enum.Enum):
    """What the ranks agreed on."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


# A member of an enum takes longer to look up than to compare.
_PENDING: Final = Verdict.PENDING


@attrs.define(kw_only=True, eq=False)
class Share:
    """One rank's part of an operation.

    Attributes:
        ticket: As the backend got it.
        deadline: This rank's clock, at which it may give up.
        first: How its part ended, by the first that was said; None while nothing was.
        quiesced: Its backend said that it touches nothing any more, or never began.
        contradicted: It said landed after it had said failed.
        expired: Its clock passed the deadline before a step, while nothing was said.
        landed: The code under test took the operation for done.
        verdict: What is known to be agreed.
    """

    ticket: OperationTicket
    deadline: float
    first: Outcome | None = None
    quiesced: bool = False
    contradicted: bool = False
    expired: bool = False
    landed: bool = False
    verdict: Verdict = Verdict.PENDING

    def say(self, outcome: Outcome, *, quiesced: bool) -> None:
        """Its backend said something."""
        if self.first is None and not self.expired:
            self.first = outcome
        elif outcome is Outcome.LANDED and (self.expired or self.first is Outcome.FAILED):
            self.contradicted = True
        self.quiesced = self.quiesced or quiesced

    def give_up(self) -> None:
        """The wrapper gives it up on this rank."""
        self.say(Outcome.FAILED, quiesced=False)


Parts: TypeAlias = "tuple[tuple[PoolName, tuple[bytes, ...]], ...]"
"""The marks of an operation's pages, by pool."""


@attrs.define(kw_only=True, eq=False)
class Operation:
    """A load, an offload or a touch, on all ranks.

    Attributes:
        op: Its id.
        load: True for a load.
        touch: True for a touch.
        layer_wise: True for a load that a forward waits for, layer by layer.
        parts: Its pages, by pool, full attention first where it is there.
        request: Whom a load is for.
        first: The first page that the device prefix of a load's request lacks something of.
        end: The page behind the last that a load brings.
        shares: By rank.
        started: The engine's start call came.
        framed: It was there before the frame of the last step.
        passed_over: Frames that left it open though a rank had failed, or all had landed.
        turns: The most frames that it took to speak of all that was open, since it began.
        decided_step: The step of the verdict.
        cancelled: Taken back before it was started, so that it says nothing about its pages.
        written_off: Some rank did not let go in time, so its pages are nobody's until a reset.
        settled: Every rank that has it has its verdict, and it was judged: it does not change.
    """

    op: OperationId
    load: bool
    touch: bool
    layer_wise: bool
    parts: Parts
    request: str
    first: bytes
    end: int
    shares: dict[int, Share] = attrs.field(factory=dict)
    started: bool = False
    framed: bool = False
    passed_over: int = 0
    turns: int = 1
    decided_step: int | None = None
    cancelled: bool = False
    written_off: bool = False
    settled: bool = False

    @property
    def marks(self) -> set[tuple[PoolName, bytes]]:
        """Its pages, each with its pool."""
        return marks_in(self.parts)

    @property
    def undecided(self) -> bool:
        """True while no rank knows how it ends."""
        return all(share.verdict is _PENDING for share in self.shares.values())

    def holds_on(self, rank: int) -> bool:
        """True when a rank has not let go of its pages."""
        return not self.shares[rank].quiesced

    @property
    def quiesced(self) -> bool:
        """True when no rank touches its pages any more."""
        return all(share.quiesced for share in self.shares.values())


class Operations:
    """All operations of a history.

    Thread: any; one at a time.
    """

    def __init__(self, num_ranks: int, referee: Referee) -> None:
        """Start with none."""
        self._num_ranks = num_ranks
        self._referee = referee
        #: Those that are not over, oldest first.
        self.live: dict[OperationId, Operation] = {}
        #: Those that are over for the code under test, while a backend still says something.
        self._past: dict[OperationId, Operation] = {}
        #: The first pages of loads that failed, and the step until which they count as missing.
        self.missing: dict[bytes, int] = {}
        #: Ranks for which others store all of an offload or a touch: they say done at once.
        self._idle: set[tuple[int, OperationId]] = set()
        #: Touches that were begun, in the whole history.
        self.num_touches = 0

    def get(self, op: OperationId) -> Operation | None:
        """An operation, over or not."""
        return self.live.get(op) or self._past.get(op)

    def begin(
        self,
        rank: int,
        ticket: OperationTicket,
        deadline: float,
        *,
        load: bool,
        parts: Parts,
        touch: bool = False,
        layer_wise: bool = False,
        request: str = "",
        first: bytes = b"",
        end: int = 0,
    ) -> Share:
        """One rank's backend was handed an operation."""
        operation = self.live.get(ticket.op)
        if operation is None:
            if ticket.op in self._past:
                self._referee.breach(
                    Rule.DEADLINES, f"rank {rank}: operation {ticket.op} was minted before"
                )
            operation = Operation(
                op=ticket.op,
                load=load,
                touch=touch,
                layer_wise=layer_wise,
                parts=parts,
                request=request,
                first=first,
                end=end,
            )
            self.live[ticket.op] = operation
            self.num_touches += touch
        elif (
            operation.load,
            operation.touch,
            operation.layer_wise,
            operation.parts,
            operation.request,
        ) != (
            load,
            touch,
            layer_wise,
            parts,
            request,
        ):
            self._referee.breach(
                Rule.FRAMES, f"rank {rank}: operation {ticket.op} is another one on other ranks"
            )
        share = operation.shares[rank] = Share(ticket=ticket, deadline=deadline)
        operation.settled = False
        # A touch has no page of the device.
        share.quiesced = touch
        return share

    def nothing_to_do(self, rank: int, op: OperationId) -> None:
        """All that an operation would store, or touch, on a rank others store for it."""
        self._idle.add((rank, op))

    def landed(self, rank: int, op: OperationId) -> None:
        """The code under test takes an operation for done on a rank."""
        operation = self.live.get(op)
        if operation is None:
            self._referee.breach(
                Rule.FRAMES, f"rank {rank}: operation {op}, which is over, is done"
            )
            return
        share = operation.shares.get(rank)
        if share is not None:
            share.landed = True
        self._judge_done(rank, operation)

    def being_published(self, rank: int, end: int) -> set[OperationId]:
        """The load up to a page that a rank was just told the verdict of: the oldest not taken for done."""
        for op, operation in self.live.items():
            share = operation.shares.get(rank)
            if share is not None and operation.load and operation.end == end:
                decided = share.ticket.decided and share.verdict is Verdict.PENDING
                if decided and not share.landed:
                    return {op}
        return set()

    def _judge_done(self, rank: int, operation: Operation) -> None:
        """Done needs every rank's done, and the first that a rank said counts."""
        what = "load" if operation.load else "touch" if operation.touch else "offload"
        rule = Rule.LANDED if operation.load else Rule.STORED
        for other in range(self._num_ranks):
            share = operation.shares.get(other)
            if share is None and (other, operation.op) in self._idle:
                continue
            first = None if share is None else share.first
            if share is not None and (first is Outcome.FAILED or share.expired):
                self._referee.breach(
                    Rule.FRAMES if share.contradicted else rule,
                    f"rank {rank}: {what} {operation.op} is done, but rank {other} had said failed"
                    + (", and a verdict is written once" if share.contradicted else ""),
                )
            elif first is None:
                self._referee.breach(
                    rule,
                    f"rank {rank}: {what} {operation.op} is done, but rank {other} has not said so",
                )

    def before_step(self) -> None:
        """All ranks are about to step: the frame speaks of what there is now."""
        for operation in self.live.values():
            operation.framed = True

    def stepped(self, rank: int, now: float) -> None:
        """A rank has read its clock for a frame, after what its backend said."""
        for operation in self.live.values():
            share = operation.shares.get(rank)
            if share is not None and share.first is None and now >= share.deadline:
                share.expired = True

    def after_step(self, step: int, settings: LinkerSettings, *, given_up: bool) -> None:
        """All ranks have stepped: judge the verdicts.

        Args:
            step: Which step.
            settings: The linker's.
            given_up: There is no store any more, so that what was pending has failed.
        """
        # Where all that may be there fits, each frame speaks of each; else of each in its turn, and
        # these are as many frames as all need that are surely not over.
        fits = len(self.live) <= settings.max_operations
        open_ = sum(
            not (one.written_off or (one.settled and one.quiesced)) for one in self.live.values()
        )
        turns = -(-open_ // settings.max_operations)
        for operation in list(self.live.values()):
            if not operation.settled:
                self._judge_agreed(operation, step, settings, given_up=given_up)
            if not operation.settled and operation.undecided:
                operation.turns = max(operation.turns, turns)
                self._judge_turn(operation, fits=fits)
            elif (
                operation.decided_step is not None
                and step - operation.decided_step >= settings.write_off_steps
            ):
                operation.written_off = operation.written_off or not operation.quiesced
        if self.missing:
            self.missing = {mark: until for mark, until in self.missing.items() if until > step}

    def after_launch(self, step: int, settings: LinkerSettings) -> None:
        """All ranks came out of the frame after a launch: judge the verdicts."""
        for operation in list(self.live.values()):
            running = operation.layer_wise and operation.started
            self._judge_agreed(operation, step, settings, given_up=False)
            if running and operation.undecided:
                self._referee.breach(
                    Rule.DEADLINES,
                    f"operation {operation.op}: its batch was launched and waited for, and it is "
                    "pending",
                )

    def _judge_agreed(
        self, operation: Operation, step: int, settings: LinkerSettings, *, given_up: bool
    ) -> None:
        """The verdict is one, and as the backends gave it."""
        verdicts: list[Verdict] = []
        for rank, share in operation.shares.items():
            if share.verdict is _PENDING and share.ticket.decided:
                share.verdict = Verdict.DONE if share.landed else Verdict.FAILED
                if not given_up:
                    self._judge_failed(rank, operation)
            verdicts.append(share.verdict)
        if verdicts.count(verdicts[0]) < len(verdicts):
            by_rank = {rank: one.verdict.value for rank, one in operation.shares.items()}
            self._referee.breach(
                Rule.FRAMES, f"operation {operation.op}: ranks have the verdicts {by_rank}"
            )
        operation.settled = _PENDING not in verdicts
        if operation.decided_step is None and (operation.settled or not operation.undecided):
            operation.decided_step = step
            if operation.load and Verdict.FAILED in verdicts and not operation.cancelled:
                self.missing[operation.first] = step + settings.miss_steps

    def _judge_turn(self, operation: Operation, *, fits: bool) -> None:
        """An open verdict: of what all frames speak of, or what was passed over too often."""
        shares = operation.shares.values()
        landed = all(share.first is Outcome.LANDED for share in shares)
        too_often = operation.passed_over > operation.turns
        if operation.framed and (fits or too_often):
            self._judge_pending(operation)
            if landed and too_often:
                self._referee.breach(
                    Rule.FRAMES,
                    f"operation {operation.op}: all ranks had said landed before the last "
                    f"{operation.passed_over} frames, and it is pending",
                )
        operation.passed_over += landed or any(map(_has_failed, shares))

    def _judge_pending(self, operation: Operation) -> None:
        """Pending needs that no rank has failed: a failure is agreed in the next frame."""
        for rank, share in operation.shares.items():
            if share.expired and share.first is None:
                self._referee.breach(
                    Rule.DEADLINES,
                    f"operation {operation.op}: the deadline of rank {rank} passed, and it is pending",
                )
            elif share.first is Outcome.FAILED:
                self._referee.breach(
                    Rule.FRAMES,
                    f"operation {operation.op}: rank {rank} said failed before this frame, "
                    "which did not decide it",
                )

    def _judge_failed(self, rank: int, operation: Operation) -> None:
        """Failed needs a rank that failed, or whose deadline passed."""
        if operation.shares[rank].verdict is Verdict.FAILED and not any(
            _has_failed(share) for share in operation.shares.values()
        ):
            self._referee.breach(
                Rule.FRAMES, f"rank {rank}: operation {operation.op} failed, but no rank has failed"
            )

    def forget_quiesced(self) -> None:
        """Nothing is outstanding: what is quiesced is over."""
        for op in [op for op, one in self.live.items() if one.quiesced and not one.written_off]:
            self._past[op] = self.live.pop(op)

    def forget_all(self) -> None:
        """A new epoch: nothing of the old one counts."""
        self._past.update(self.live)
        self.live.clear()
        self.missing.clear()

    def start(self) -> None:
        """The engine's start call came on all ranks."""
        for operation in self.live.values():
            if operation.load and not operation.cancelled:
                operation.started = True

    def running(self) -> list[Operation]:
        """The layer-wise loads that the frame after a launch must decide."""
        return [
            one
            for one in self.undecided_loads()
            if one.layer_wise and one.started and not one.cancelled
        ]

    def waited_for(self, rank: int, running: list[Operation]) -> None:
        """A rank's batch was launched and waited for: what it has not said by then has failed."""
        for operation in running:
            operation.shares[rank].give_up()

    def undecided_loads(self) -> Iterator[Operation]:
        """Loads whose verdict is open."""
        return (one for one in self.live.values() if one.load and one.undecided)


def marks_in(parts: Parts) -> set[tuple[PoolName, bytes]]:
    """The pages of an operation, each with its pool."""
    return {(pool, mark) for pool, marks in parts for mark in marks}


def _has_failed(share: Share) -> bool:
    """True when a rank's own verdict is failed."""
    return share.first is Outcome.FAILED or (share.expired and share.first is None)
