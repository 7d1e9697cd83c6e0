"""`SimulatedGroup`: a rank group whose meetings happen on a stage; `SimulatedClock`: its time.

A collective that not all ranks can come to any more ends by its deadline: time moves on to that
moment, those who wait are told who is missing, and whoever comes later is told at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from radixlink_contracts import Clock, RankGroup
from radixlink_contracts.errors import AgreementError, ContractError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from radixlink_testing.simulator._stage import Stage


class Time:
    """The time of a whole history."""

    def __init__(self) -> None:
        """Start at 0 seconds."""
        self.seconds = 0.0


class SimulatedClock(Clock):
    """One rank's clock: the history's time, and this machine's distance from it."""

    def __init__(self, time: Time, offset_s: float) -> None:
        """Be ahead by some seconds."""
        self._time = time
        self._offset_s = offset_s

    @override
    def now(self) -> float:
        """Seconds since some moment of this machine."""
        return self._time.seconds + self._offset_s


class _Round:
    """One meeting of all ranks.

    Attributes:
        offers: What each rank that came offered, and in which call.
        over: All came, or nobody comes any more.
    """

    def __init__(self) -> None:
        self.offers: dict[int, tuple[str, bytes]] = {}
        self.over = False


class Meetings:
    """What the groups of all ranks share.

    Thread: the one that holds the stage's baton.
    """

    def __init__(self, size: int, stage: Stage, time: Time) -> None:
        """Meetings of so many ranks."""
        self.size = size
        self.time = time
        self._stage = stage
        self._round = _Round()
        #: Renewals are apart from what they renew.
        self._renewals = _Round()
        #: Why this epoch's meetings are over, by rank; None while they are not.
        self._broken: Mapping[int, str] | None = None
        #: The deadline of whoever waits.
        self._timeout_s = 0.0

    def exchange(self, rank: int, call: str, value: bytes, timeout_s: float) -> tuple[bytes, ...]:
        """Every rank's value, by rank.

        Raises:
            AgreementError: Not all came, or not to the same call.
        """
        if self._broken is not None:
            raise self._error(rank, call, self._broken)
        meeting = self._round
        if self._attend(meeting, rank, call, value, timeout_s):
            self._round = _Round()
        if len(meeting.offers) < self.size:
            raise self._error(rank, call, self._absence(meeting))
        calls = {which: named for which, (named, _) in meeting.offers.items()}
        if len(set(calls.values())) > 1:
            self._broken = {which: f"in {named}" for which, named in calls.items()}
            raise self._error(rank, call, self._broken)
        return tuple(meeting.offers[which][1] for which in range(self.size))

    def renew(self, rank: int, timeout_s: float) -> None:
        """Begin anew once all ranks are here.

        Raises:
            AgreementError: Not all came.
        """
        meeting = self._renewals
        if self._attend(meeting, rank, "renew", b"", timeout_s):
            self._renewals = _Round()
            self._round = _Round()
            self._broken = None
        if len(meeting.offers) < self.size:
            raise self._error(rank, "renew", self._absence(meeting))

    def expire(self) -> None:
        """Nobody comes any more: the deadline of whoever waits is now."""
        self.time.seconds += self._timeout_s
        for meeting in (self._round, self._renewals):
            if meeting.offers:
                meeting.over = True
                for rank in meeting.offers:
                    self._stage.wake(rank)
        if self._renewals.over:
            self._renewals = _Round()
        if self._round.over:
            self._broken = self._absence(self._round)
            self._round = _Round()

    def _attend(
        self, meeting: _Round, rank: int, call: str, value: bytes, timeout_s: float
    ) -> bool:
        """Offer, and wait for the others. True for the last to come."""
        self._timeout_s = timeout_s
        meeting.offers[rank] = (call, value)
        if len(meeting.offers) == self.size:
            meeting.over = True
            for other in meeting.offers:
                self._stage.wake(other)
            return True
        if self._stage.running:
            self._stage.wait(rank, lambda: meeting.over)
        else:
            self.expire()
        return False

    def _absence(self, meeting: _Round) -> dict[int, str]:
        """Who is where, for an error."""
        return {
            rank: f"in {meeting.offers[rank][0]}" if rank in meeting.offers else "no answer"
            for rank in range(self.size)
        }

    def _error(self, rank: int, call: str, by_rank: Mapping[int, str]) -> AgreementError:
        """The error of one rank."""
        msg = f"{call}: expected all {self.size} ranks to take part, got {dict(by_rank)}"
        return AgreementError(msg, by_rank=by_rank, rank=rank)


class SimulatedGroup(RankGroup):
    """One rank's side of the meetings; counts what is called."""

    def __init__(self, rank: int, meetings: Meetings, calls: list[str]) -> None:
        """Be one of the ranks.

        Args:
            rank: Which.
            meetings: What the ranks share.
            calls: Gets the name of each collective that this rank enters.
        """
        self._rank = rank
        self._meetings = meetings
        self._calls = calls

    @property
    @override
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    @override
    def size(self) -> int:
        """How many ranks there are."""
        return self._meetings.size

    @override
    def all_and(self, words: bytearray, timeout_s: float) -> None:
        """Replace `words` by the bitwise AND of all ranks' words."""
        told = self._exchange("all_and", bytes(words), timeout_s)
        if {len(one) for one in told} != {len(words)}:
            msg = f"all_and: expected frames of one size, got {[len(one) for one in told]}"
            raise ContractError(msg)
        result = int.from_bytes(told[0], "little")
        for one in told[1:]:
            result &= int.from_bytes(one, "little")
        words[:] = result.to_bytes(len(words), "little")

    @override
    def broadcast(self, value: bytes, root: int, timeout_s: float) -> bytes:
        """The value of `root`, on every rank."""
        return self._exchange("broadcast", value, timeout_s)[root]

    @override
    def all_gather(self, value: bytes, timeout_s: float) -> tuple[bytes, ...]:
        """Every rank's value, by rank."""
        return self._exchange("all_gather", value, timeout_s)

    @override
    def split(self, color: int, timeout_s: float) -> RankGroup:
        """Refused: a history has one group.

        Raises:
            ContractError: Always.
        """
        raise ContractError(f"split: expected one group in a history, got color {color}")

    @override
    def renew(self, timeout_s: float) -> RankGroup:
        """A new group of the same ranks."""
        self._calls.append("renew")
        self._meetings.renew(self._rank, timeout_s)
        return SimulatedGroup(self._rank, self._meetings, self._calls)

    @override
    def roll_call(self, mark: str, timeout_s: float) -> Mapping[int, str]:
        """This rank's own mark: the others' are in the errors of the meetings."""
        return {self._rank: mark}

    @override
    def close(self) -> None:
        """Nothing is to be released."""

    def _exchange(self, call: str, value: bytes, timeout_s: float) -> tuple[bytes, ...]:
        self._calls.append(call)
        if self.size == 1:
            return (value,)
        return self._meetings.exchange(self._rank, call, value, timeout_s)
