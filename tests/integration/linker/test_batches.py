"""Many requests that probe at once: one question to each store, and one collective a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.integration.linker.models import KINDS
from tests.integration.linker.sequences import key_of

from radixlink_contracts import ExternalMatch, MatchPrefixParams, RequestId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.integration.linker.conftest import MakeReplica
    from tests.integration.linker.rank import Rank

    from radixlink_contracts import PoolTransfer, PoolTransferResult

TOKENS = range(1, 9)
"""Four pages."""
NUM_REQUESTS = 64

both = pytest.mark.parametrize("num_ranks", [1, 2])


def sequence(number: int) -> list[int]:
    """The tokens, and then the request's own."""
    return [*TOKENS, number + 100, number + 100]


def prefetch(rank: Rank) -> None:
    rank.cache.prefetch(
        *(
            MatchPrefixParams(key=key_of(sequence(number)), request_id=RequestId(f"r{number}"))
            for number in range(NUM_REQUESTS)
        )
    )


@both
@pytest.mark.parametrize("kind", KINDS)
def test_the_lookups_of_one_iteration_are_one_question_to_each_store(
    make_replica: MakeReplica, num_ranks: int, kind: str
) -> None:
    replica = make_replica(num_ranks, model=KINDS[kind])
    replica.store(TOKENS)
    for rank in replica.ranks:
        rank.calls.clear()
        for store in rank.stores.values():
            store.calls.clear()
    replica.alike(prefetch)
    for rank in replica.ranks:
        assert all(store.calls == [] for store in rank.stores.values())
    replica.launch()
    replica.retire()
    for rank in replica.ranks:
        assert all(store.calls == ["contains"] for store in rank.stores.values())
    steps = 0
    while replica.ranks[0].cache.num_outstanding:
        replica.step()
        steps += 1
    for rank in replica.ranks:
        assert rank.calls == ["all_and"] * (steps if num_ranks > 1 else 0)
        assert all(store.calls == ["contains"] for store in rank.stores.values())
    for number in range(NUM_REQUESTS):
        found = replica.match(f"r{number}", sequence(number))
        assert (found.external, found.host_hit_length) == (ExternalMatch.HIT, 8)


@both
def test_first_matches_of_one_iteration_are_one_question_too(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks)
    replica.store(TOKENS)
    for rank in replica.ranks:
        rank.store.calls.clear()
    for number in range(NUM_REQUESTS):
        assert replica.match(f"r{number}", sequence(number)).external is ExternalMatch.UNKNOWN
    # An engine that launches no batch asks with its next step.
    replica.step()
    assert [rank.store.calls for rank in replica.ranks] == [["contains"]] * num_ranks


@both
def test_a_question_that_raises_is_a_miss_of_all_that_were_in_it(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks)
    replica.store(TOKENS)
    replica.ranks[-1].store.raising.add("contains")
    for number in range(3):
        replica.match(f"r{number}", sequence(number))
    report = replica.settle()
    assert sorted(report.ready) == ["r0", "r1", "r2"]
    for number in range(3):
        assert replica.match(f"r{number}", sequence(number)).external is ExternalMatch.MISS
    counters = replica.ranks[-1].cache.counters
    assert counters is not None
    assert counters.lookup_errors == 3
    replica.ranks[-1].store.raising.clear()
    assert replica.ask("later", TOKENS).external is ExternalMatch.HIT


@both
@pytest.mark.parametrize("by_hand", [True, False], ids=["one by one", "together"])
def test_an_answer_that_is_none_is_one_miss_and_leaves_the_executor_alone(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch, num_ranks: int, *, by_hand: bool
) -> None:
    replica = make_replica(num_ranks, by_hand=by_hand)
    replica.store(TOKENS)
    rank = replica.ranks[-1]
    lookup = rank.linker.lookup

    def answer(
        request_id: RequestId, transfers: Sequence[PoolTransfer]
    ) -> PoolTransferResult | None:
        return None if request_id == "bad" else lookup(request_id, transfers)

    monkeypatch.setattr(rank.linker, "lookup", answer)
    if not by_hand:
        monkeypatch.setattr(
            rank.linker, "lookup_batch", lambda questions: [answer(*one) for one in questions]
        )
    rank.executor.held = True
    replica.match("bad", TOKENS)
    replica.match("good", TOKENS)
    replica.launch()
    replica.retire()
    rank.executor.held = False
    tasks, rank.executor._waiting = rank.executor._waiting, []
    for task in tasks:
        # What it let out would end the thread of an executor.
        task()
    replica.settle()
    assert replica.match("bad", TOKENS).external is ExternalMatch.MISS
    assert replica.match("good", TOKENS).external is ExternalMatch.HIT
    assert "'NoneType' object has no attribute" in str(rank.cache.explain(RequestId("bad")))


@both
def test_a_sequence_that_cannot_be_hashed_is_its_own_miss_alone(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks)
    replica.store(TOKENS)
    replica.match("bad", [*TOKENS[:4], -1, -1])
    replica.match("good", TOKENS)
    replica.settle()
    assert replica.match("bad", [*TOKENS[:4], -1, -1]).external is ExternalMatch.MISS
    assert replica.match("good", TOKENS).host_hit_length == 8


@both
def test_a_late_question_keeps_no_other_waiting(make_replica: MakeReplica, num_ranks: int) -> None:
    replica = make_replica(num_ranks)
    replica.store(TOKENS)
    executor = replica.ranks[-1].executor
    executor.held = True
    replica.match("slow", TOKENS)
    replica.launch()
    replica.retire()
    executor.held = False
    # Of the next iteration: `release` is what the executor does with the first task.
    late, executor._waiting = executor._waiting, []
    replica.match("quick", sequence(0))
    assert "quick" in replica.step().ready or "quick" in replica.step().ready
    assert replica.match("slow", TOKENS).external is ExternalMatch.UNKNOWN
    (task,) = late
    task()
    replica.settle()
    assert replica.match("slow", TOKENS).external is ExternalMatch.HIT


@both
def test_a_linker_without_batches_is_asked_for_each_request(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, by_hand=True)
    replica.store(TOKENS)
    for rank in replica.ranks:
        rank.by_hand.calls.clear()
    for number in range(3):
        replica.match(f"r{number}", sequence(number))
    replica.settle()
    for rank in replica.ranks:
        assert rank.by_hand.calls.count("lookup") == 3
