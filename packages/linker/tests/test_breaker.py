from __future__ import annotations

import threading

import pytest

from radixlink_linker._breaker import Breaker
from radixlink_testing.linkers import ManualClock

PATIENCE_S = 5.0


class World:
    """A breaker and its clock."""

    def __init__(self, max_hanging: int = 8) -> None:
        self.clock = ManualClock()
        self.breaker = Breaker(self.clock, patience_s=PATIENCE_S, max_hanging=max_hanging)

    def hang(self, what: str = "read") -> int:
        """A call that has run for as long as the patience."""
        number = self.breaker.begin(what)
        self.clock.advance(PATIENCE_S)
        return number


@pytest.fixture
def world() -> World:
    return World()


def test_a_call_hangs_once_it_has_run_for_as_long_as_the_patience(world: World) -> None:
    number = world.breaker.begin("read")
    world.clock.advance(PATIENCE_S - 1)
    assert world.breaker.hanging() is None
    assert world.breaker.refusal() is None
    world.clock.advance(1)
    story = "the store hangs: read has not returned for 5.0 s"
    assert world.breaker.hanging() == story
    assert world.breaker.refusal() == story
    world.breaker.end(number)
    assert world.breaker.hanging() is None
    assert world.breaker.refusal() is None


def test_one_is_let_through_in_a_while_and_each_time_later(world: World) -> None:
    world.hang()
    waits = []
    assert world.breaker.refusal() is not None
    for _ in range(6):
        waited = 0
        while world.breaker.refusal() is not None:
            world.clock.advance(PATIENCE_S)
            waited += 1
        # Just one.
        assert world.breaker.refusal() is not None
        waits.append(waited)
    assert waits == [1, 2, 4, 8, 16, 16]


def test_after_it_was_back_a_store_is_waited_for_anew(world: World) -> None:
    first = world.hang()
    assert world.breaker.refusal() is not None
    world.clock.advance(PATIENCE_S)
    assert world.breaker.refusal() is None
    world.breaker.end(first)
    assert world.breaker.refusal() is None
    world.hang()
    assert world.breaker.refusal() is not None
    world.clock.advance(PATIENCE_S)
    assert world.breaker.refusal() is None


def test_a_later_call_of_the_same_kind_that_returns_says_that_the_store_is_back(
    world: World,
) -> None:
    world.hang("read")
    other = world.breaker.begin("put")
    world.breaker.end(other)
    assert world.breaker.hanging() is not None
    later = world.breaker.begin("read")
    world.breaker.end(later)
    assert world.breaker.hanging() is None


def test_an_earlier_call_that_returns_says_nothing_of_a_later_one(world: World) -> None:
    early = world.breaker.begin("read")
    world.hang("read")
    world.breaker.end(early)
    assert world.breaker.hanging() is not None


def test_with_too_many_that_hang_or_are_lost_none_is_let_through() -> None:
    world = World(max_hanging=2)
    lost = world.hang()
    world.breaker.end(world.breaker.begin("read"))
    world.hang()
    assert world.breaker.refusal() is not None
    world.clock.advance(100 * PATIENCE_S)
    assert world.breaker.refusal() is not None
    # One thread less is kept.
    world.breaker.end(lost)
    assert world.breaker.refusal() is None


def test_it_knows_on_which_thread_a_call_hangs(world: World) -> None:
    number = world.breaker.begin("read")
    me = threading.get_ident()
    assert not world.breaker.hangs_on(me)
    world.clock.advance(PATIENCE_S)
    assert world.breaker.hangs_on(me)
    assert not world.breaker.hangs_on(me + 1)
    assert not world.breaker.hangs_on(None)
    world.breaker.end(number)
    assert not world.breaker.hangs_on(me)
