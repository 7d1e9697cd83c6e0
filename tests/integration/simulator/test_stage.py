"""The stage and its meetings: one rank at a time, and a deadline for whoever nobody comes to."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from radixlink_contracts.errors import AgreementError
from radixlink_testing.simulator._group import Meetings, SimulatedGroup, Time
from radixlink_testing.simulator._stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Ranks:
    """Some ranks that meet."""

    def __init__(self, count: int) -> None:
        self.time = Time()
        self.stage = Stage(count)
        self.meetings = Meetings(count, self.stage, self.time)
        self.calls: list[str] = []
        self.groups = [SimulatedGroup(rank, self.meetings, self.calls) for rank in range(count)]

    def together(
        self, call: Callable[[int], object], *, apart: bool
    ) -> list[object | AgreementError]:
        outcomes = self.stage.together(
            {rank: lambda rank=rank: call(rank) for rank in range(len(self.groups))},  # type: ignore[misc]
            lambda _: self.meetings.expire(),
            apart=apart,
        )
        return [outcome.error or outcome.value for _, outcome in sorted(outcomes.items())]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(3)
    yield made
    made.stage.close()
    assert not [one for one in threading.enumerate() if one.name == "simulated-rank"]


both = pytest.mark.parametrize("apart", [False, True])


@both
def test_all_ranks_get_the_and_of_all_words(ranks: Ranks, *, apart: bool) -> None:
    words = [bytearray(bytes([0b111 ^ 1 << rank] * 8)) for rank in range(3)]
    for _ in range(2):
        ranks.together(lambda rank: ranks.groups[rank].all_and(words[rank], 1.0), apart=apart)
    assert words == [bytearray(8)] * 3
    assert ranks.calls == ["all_and"] * 6
    assert ranks.time.seconds == 0


@both
def test_who_does_not_come_is_named_after_the_deadline(ranks: Ranks, *, apart: bool) -> None:
    def call(rank: int) -> object:
        return rank if rank == 1 else ranks.groups[rank].all_gather(b"here", 7.0)

    first, absent, last = ranks.together(call, apart=apart)
    assert absent == 1
    for error in (first, last):
        assert isinstance(error, AgreementError)
        assert error.by_rank == {0: "in all_gather", 1: "no answer", 2: "in all_gather"}
    assert ranks.time.seconds == 7.0
    # Who comes later hears of it at once, until all renew.
    with pytest.raises(AgreementError, match="no answer"):
        ranks.groups[1].all_gather(b"late", 7.0)
    ranks.together(lambda rank: ranks.groups[rank].renew(1.0), apart=apart)
    told = ranks.together(
        lambda rank: ranks.groups[rank].all_gather(b"%d" % rank, 1.0), apart=apart
    )
    assert told == [(b"0", b"1", b"2")] * 3


@both
def test_ranks_in_different_collectives_all_hear_of_it(ranks: Ranks, *, apart: bool) -> None:
    def call(rank: int) -> object:
        group = ranks.groups[rank]
        return group.broadcast(b"", 0, 1.0) if rank == 2 else group.all_gather(b"", 1.0)

    for error in ranks.together(call, apart=apart):
        assert isinstance(error, AgreementError)
        assert error.by_rank[2] == "in broadcast"


def test_ranks_apart_may_meet_more_than_once_in_a_call(ranks: Ranks) -> None:
    def call(rank: int) -> object:
        first = ranks.groups[rank].all_gather(b"%d" % rank, 1.0)
        return first, ranks.groups[rank].all_gather(b"%d" % -rank, 1.0)

    told = ranks.together(call, apart=True)
    assert told == [((b"0", b"1", b"2"), (b"0", b"-1", b"-2"))] * 3
