"""A request that goes leaves nothing behind, wherever it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from radixlink_contracts import ExternalMatch, StepReport

if TYPE_CHECKING:
    from tests.integration.linker.conftest import MakeReplica
    from tests.integration.linker.replica import Replica

TOKENS = range(1, 9)
"""Four pages."""


def bring_to(replica: Replica, state: str) -> None:
    """Bring request "a" to a state."""
    if state == "unknown":
        return
    replica.match("a", TOKENS)
    if state == "asked":
        return
    replica.step()
    if state == "agreed ready":
        return
    assert replica.ask("a", TOKENS).external is ExternalMatch.HIT
    if state == "matched":
        return
    replica.load_back("a", TOKENS)
    if state == "queued":
        return
    replica.start()
    if state == "started":
        return
    replica.transfer()
    if state == "completing":
        return
    assert replica.step().landed == ("a",)
    if state == "landed":
        return
    assert state == "matched again"
    assert replica.match("a", TOKENS).device_prefix_len == 8


STATES = [
    "unknown",
    "asked",
    "agreed ready",
    "matched",
    "queued",
    "started",
    "completing",
    "landed",
    "matched again",
]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("state", STATES)
def test_an_abort_in_any_state_leaves_nothing(
    make_replica: MakeReplica, num_ranks: int, state: str
) -> None:
    replica = make_replica(num_ranks, by_hand=True)
    replica.store(TOKENS)
    bring_to(replica, state)
    replica.release("a")
    replica.release("a")
    report = replica.settle()
    assert "a" not in (*report.landed, *report.failed, *report.ready)
    for rank in replica.ranks:
        rank.check_idle()
        assert rank.cache._wrapper is not None
        assert not rank.cache._wrapper._requests._requests
        assert rank.by_hand.queued == rank.by_hand.started == ()
    # Once started it is decided and committed like any other, for nobody.
    landed = state in {"started", "completing", "landed", "matched again"}
    assert replica.ranks[0].device_pages(TOKENS) == (4 if landed else 0)


@pytest.mark.parametrize("state", STATES)
def test_an_abort_in_any_state_harms_no_later_request(
    make_replica: MakeReplica, state: str
) -> None:
    replica = make_replica(2, by_hand=True)
    replica.store(TOKENS)
    bring_to(replica, state)
    replica.release("a")
    # At once, and under the same name too.
    for name in ("b", "a"):
        match = replica.match(name, TOKENS)
        if match.external is ExternalMatch.UNKNOWN:
            assert name in replica.settle().ready
            match = replica.match(name, TOKENS)
        if match.device_prefix_len < 8:
            assert match.external is ExternalMatch.HIT
            replica.load_back(name, TOKENS)
            replica.start()
            assert replica.settle().landed == (name,)
        assert replica.match(name, TOKENS).device_prefix_len == 8
        replica.release(name)
        replica.evict()


def test_nothing_is_transferred_for_a_load_that_was_never_started(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica()
    replica.store(TOKENS)
    calls = replica.ranks[0].store.calls
    replica.queue("a", TOKENS)
    calls.clear()
    replica.release("a")
    replica.start()
    replica.settle()
    assert calls == []


@pytest.mark.parametrize("started", [False, True])
def test_a_load_goes_on_for_who_waits_for_it(make_replica: MakeReplica, *, started: bool) -> None:
    replica = make_replica(2, by_hand=True)
    replica.store(TOKENS)
    replica.queue("a", TOKENS)
    if started:
        replica.start()
    waiting = replica.match("b", TOKENS)
    assert (waiting.external, waiting.waiting_on is None) == (ExternalMatch.UNKNOWN, False)
    replica.release("a")
    replica.start()
    report = replica.settle()
    assert (report.landed, report.ready) == ((), ("b",))
    assert replica.match("b", TOKENS).device_prefix_len == 8


def test_a_load_that_everybody_left_is_not_waited_for(make_replica: MakeReplica) -> None:
    replica = make_replica(2, by_hand=True)
    replica.store(TOKENS)
    replica.queue("a", TOKENS)
    replica.match("b", TOKENS)
    replica.release("b")
    replica.release("a")
    assert replica.settle() == StepReport()
    for rank in replica.ranks:
        rank.check_idle()


def test_a_cancel_that_raises_keeps_the_slots_until_the_linker_lets_go(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(2, by_hand=True)
    replica.store(TOKENS)
    operation = replica.queue("a", TOKENS).operation_id
    replica.ranks[1].by_hand.raising.add("cancel_queued_load")
    replica.release("a")
    replica.step()
    assert [len(rank.allocator.in_use) for rank in replica.ranks] == [8, 8]
    replica.start()
    replica.ranks[1].by_hand.run(operation)
    replica.step()
    assert [len(rank.allocator.in_use) for rank in replica.ranks] == [0, 0]


def test_a_cancel_that_one_thread_missed_is_decided_like_any_other(
    make_replica: MakeReplica,
) -> None:
    # One rank's thread has begun, the other's has not: the engine cannot see it, so it is no cancel.
    replica = make_replica(2, by_hand=True)
    replica.store(TOKENS)
    operation = replica.queue("a", TOKENS).operation_id
    replica.start()
    replica.ranks[0].by_hand.run(operation)
    replica.release("a")
    assert replica.step() == StepReport()
    replica.ranks[1].by_hand.run(operation)
    assert replica.step() == StepReport()
    assert [rank.device_pages(TOKENS) for rank in replica.ranks] == [4, 4]
