"""`ThreadGroup`: ranks that are threads of one process.

Theory of operation: all ranks of a group share a `_Meeting`. A collective is one round of it: each
rank lays down an offer, and when all lie there, every rank takes all of them and works out the
result by itself. How a round ended is decided once, under the meeting's lock, so that all ranks see
the same.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

import attrs
from typing_extensions import override

from radixlink_comm._checked import CheckedGroup, MarkKind, agree_on_call, time_left
from radixlink_comm._health import LATE, NO_ANSWER, CollectiveError
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Mapping


@attrs.frozen(kw_only=True)
class _Offer:
    """What a rank lays down in a round."""

    #: The collective it is in, the same on all ranks.
    call: str
    #: Where it stands, for messages.
    mark: str
    #: Its value.
    value: bytes = b""
    #: A place for the group that this round makes; the first member's is taken.
    place: _Place | None = None


@attrs.frozen(kw_only=True)
class _Failure:
    """Why a meeting is over."""

    reason: str
    known: Mapping[int, str]


class _Round:
    """One collective of a meeting."""

    def __init__(self) -> None:
        #: By rank, until the round has ended.
        self.offers: dict[int, _Offer] = {}
        #: How it ended: set once, the same for all that wait in it.
        self.outcome: tuple[_Offer, ...] | _Failure | None = None


class _Meeting:
    """Rounds of offers between the ranks of a group.

    Args:
        size: How many ranks meet.
        lasting: A round that fails is followed by another; else the meeting is over.

    Thread: any.
    """

    def __init__(self, size: int, *, lasting: bool = False) -> None:
        self._size = size
        self._lasting = lasting
        #: Guards all below; notified when a round ends or a mark is left.
        # `with` enters a lock in C, a condition in Python, where a signal's exception would keep it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        #: The round that has not ended, or the one that was the last.
        self._round = _Round()
        self._marks: dict[int, str] = {}

    def exchange(self, rank: int, offer: _Offer, deadline: float) -> tuple[_Offer, ...]:
        """Every rank's offer of this round, by rank.

        Raises:
            CollectiveError: Not all ranks came in time; or not to an earlier round.
        """
        with self._lock:
            here = self._round
            if here.outcome is None:
                here.offers[rank] = offer
            if len(here.offers) == self._size:
                self._end(here, tuple(here.offers[other] for other in range(self._size)))
            try:
                self._changed.wait_for(lambda: here.outcome is not None, time_left(deadline))
            except BaseException:
                # Who was interrupted is not there: nobody is to go on as if it were.
                here.offers.pop(rank, None)
                raise
            outcome = here.outcome
            if outcome is None:
                outcome = self._end(here, self._failure(here))
        if isinstance(outcome, _Failure):
            raise CollectiveError(outcome.reason, outcome.known)
        return outcome

    def marks(self, rank: int, mark: str, deadline: float) -> dict[int, str]:
        """Leave a mark; return all as soon as they are there, else those there at the deadline."""
        with self._lock:
            self._marks[rank] = mark
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._marks) == self._size, time_left(deadline))
            return dict(self._marks)

    def _end(
        self, ended: _Round, outcome: tuple[_Offer, ...] | _Failure
    ) -> tuple[_Offer, ...] | _Failure:
        ended.outcome = outcome
        ended.offers = {}
        if self._lasting or not isinstance(outcome, _Failure):
            self._round = _Round()
        self._changed.notify_all()
        return outcome

    def _failure(self, late: _Round) -> _Failure:
        known = {
            other: late.offers[other].mark if other in late.offers else NO_ANSWER
            for other in range(self._size)
        }
        return _Failure(reason=LATE, known=known)


@attrs.frozen(kw_only=True)
class _Place:
    """Where the ranks of a group meet."""

    #: For collectives and marks; of one epoch.
    meeting: _Meeting
    #: For `renew` alone; of all epochs.
    renewals: _Meeting


class ThreadGroup(CheckedGroup):
    """One rank of a group whose ranks are threads of this process, for tests and simulations.

    Deadlines are exact, and a collective fails on all ranks or on none. Ranks that offer words of
    unequal length, or call different collectives, get the same `AgreementError`.

    Cost: one lock, and one AND of two integers for each rank.

    >>> first, second = ThreadGroup.create(2)
    >>> (first.rank, second.rank, first.size)
    (0, 1, 2)
    """

    def __init__(self, rank: int, size: int, epoch: int, place: _Place) -> None:
        super().__init__(rank, size, epoch)
        self._place = place

    @classmethod
    def create(cls, size: int) -> tuple[Self, ...]:
        """The ranks of a new group, to be handed to a thread each.

        Raises:
            ContractError: `size` is less than 1.

        Ranks: called once for all.
        """
        if size < 1:
            raise ContractError(f"ThreadGroup: expected at least one rank, got {size}")
        place = _Place(meeting=_Meeting(size), renewals=_Meeting(size, lasting=True))
        return tuple(cls(rank, size, 0, place) for rank in range(size))

    @override
    def _and(self, words: bytearray, deadline: float) -> None:
        offers = self._meet(
            _Offer(call=self._call, mark=self._mark(), value=bytes(words)), deadline
        )
        lengths = {rank: f"{len(offer.value)} bytes" for rank, offer in enumerate(offers)}
        if len(set(lengths.values())) > 1:
            raise CollectiveError("the ranks' words are of unequal length", lengths)
        agreed = int.from_bytes(words, "little")
        for offer in offers:
            agreed &= int.from_bytes(offer.value, "little")
        words[:] = agreed.to_bytes(len(words), "little")

    @override
    def _subgroup(self, members: tuple[int, ...], deadline: float) -> Self:
        size = len(members)
        place = _Place(meeting=_Meeting(size), renewals=_Meeting(size, lasting=True))
        offer = _Offer(call=self._call, mark=self._mark(), place=place)
        chosen = self._meet(offer, deadline)[members[0]].place
        assert chosen is not None, "every offer of this round has a place"
        return type(self)(members.index(self._rank), size, 0, chosen)

    @override
    def _renewed(self, deadline: float) -> Self:
        renewals = self._place.renewals
        place = _Place(meeting=_Meeting(self._size), renewals=renewals)
        call = f"renew of epoch {self._epoch}"
        offer = _Offer(call=call, mark=self._mark(), place=place)
        offers = renewals.exchange(self._rank, offer, deadline)
        agree_on_call([other.call for other in offers])
        chosen = offers[0].place
        assert chosen is not None, "every offer of this round has a place"
        return type(self)(self._rank, self._size, self._epoch + 1, chosen)

    @override
    def _marks(self, kind: MarkKind, mark: str, deadline: float) -> dict[int, str]:
        # A failed meeting knows of every rank, so only the caller's own roll calls come here.
        assert kind is MarkKind.CALLED, kind
        return self._place.meeting.marks(self._rank, mark, deadline)

    @override
    def _release(self) -> None:
        pass

    def _meet(self, offer: _Offer, deadline: float) -> tuple[_Offer, ...]:
        offers = self._place.meeting.exchange(self._rank, offer, deadline)
        agree_on_call([other.call for other in offers])
        return offers
