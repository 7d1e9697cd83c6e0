"""One load for a page at a time: who needs it too waits, holds nothing, and is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.integration.linker.models import FULL_MAMBA

from radixlink_contracts import ExternalMatch, LoadMiss, LoadWaiting, Outcome, StepReport
from radixlink_linker import LinkerSettings

if TYPE_CHECKING:
    from tests.integration.linker.conftest import MakeReplica

TOKENS = range(1, 9)
"""Four pages."""


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("started", [False, True])
def test_a_second_request_waits_and_then_matches_on_the_device(
    make_replica: MakeReplica, num_ranks: int, *, started: bool
) -> None:
    replica = make_replica(num_ranks, by_hand=True)
    replica.store(TOKENS)
    operation = replica.queue("a", TOKENS).operation_id
    if started:
        replica.start()
    used = set(replica.ranks[0].allocator.in_use)
    longer = [*TOKENS, 9, 10, 11, 12]
    for _ in range(2):
        waiting = replica.match("b", longer)
        assert waiting.external is ExternalMatch.UNKNOWN
        assert waiting.waiting_on == operation
    assert replica.ranks[0].allocator.in_use == used
    replica.start()
    report = replica.settle()
    assert (report.landed, report.ready) == (("a",), ("b",))
    assert replica.match("b", longer).device_prefix_len == 8
    assert [rank.by_hand.calls.count("load") for rank in replica.ranks] == [1] * num_ranks


def test_a_request_that_had_its_own_hit_waits_too(make_replica: MakeReplica) -> None:
    replica = make_replica(by_hand=True)
    replica.store(TOKENS)
    for name in ("a", "b"):
        assert replica.ask(name, TOKENS).external is ExternalMatch.HIT
    first = replica.load_back("a", TOKENS)
    assert isinstance(first, LoadWaiting)
    assert replica.load_back("b", TOKENS) == first
    assert replica.load_back("a", TOKENS) == first
    replica.start()
    report = replica.settle()
    assert (report.landed, report.ready) == (("a",), ("b",))
    assert replica.match("b", TOKENS).device_prefix_len == 8


def test_when_the_load_fails_both_compute(make_replica: MakeReplica) -> None:
    replica = make_replica(2, by_hand=True)
    replica.store(TOKENS)
    replica.queue("a", TOKENS)
    replica.match("b", TOKENS)
    replica.ranks[1].lose(TOKENS, 3)
    replica.start()
    report = replica.settle()
    assert (report.failed, report.ready) == (("a",), ("b",))
    for name in ("a", "b"):
        assert replica.match(name, TOKENS).external is ExternalMatch.MISS
        assert isinstance(replica.load_back(name, TOKENS), LoadMiss)
    replica.compute(TOKENS)
    for name in ("a", "b"):
        assert replica.match(name, TOKENS).device_prefix_len == 8


def test_a_failed_page_is_a_miss_for_some_steps_only(make_replica: MakeReplica) -> None:
    replica = make_replica(2, settings=LinkerSettings(miss_steps=5))
    replica.store(TOKENS)
    replica.queue("a", TOKENS)
    for rank in replica.ranks:
        rank.store.raising.add("open")
    replica.start()
    assert replica.settle().failed == ("a",)
    for rank in replica.ranks:
        rank.store.raising.clear()
    for _ in range(4):
        assert replica.match("b", TOKENS).external is ExternalMatch.MISS
        replica.step()
    replica.step()
    # The request that saw it computes; who comes later may try.
    assert replica.match("a", TOKENS).external is ExternalMatch.MISS
    assert replica.ask("c", TOKENS).external is ExternalMatch.HIT
    assert replica.restore("b", TOKENS).landed == ("b",)


def test_who_shares_a_prefix_but_not_the_first_missing_page_does_not_wait(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(by_hand=True, settings=LinkerSettings(staged_percent=100))
    fork = [*TOKENS[:4], 11, 12, 13, 14]
    replica.store(TOKENS)
    replica.store(fork)
    replica.compute(TOKENS[:4])
    replica.settle()
    replica.ask("b", fork)
    replica.queue("a", TOKENS)
    assert replica.match("b", fork).external is ExternalMatch.HIT
    replica.load_back("b", fork)
    replica.start()
    assert replica.settle().landed == ("a", "b")
    assert replica.match("b", fork).device_prefix_len == 8
    assert replica.match("a", TOKENS).device_prefix_len == 8


def test_equal_pages_behind_another_prefix_are_not_the_same_page(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(by_hand=True, settings=LinkerSettings(staged_percent=100))
    other = [21, 22, *TOKENS[2:]]
    for tokens in (TOKENS, other):
        replica.store(tokens)
    for tokens in (TOKENS, other):
        replica.compute(tokens[:2])
        replica.settle()
    replica.ask("b", other)
    replica.queue("a", TOKENS)
    assert replica.match("b", other).external is ExternalMatch.HIT


def test_staged_loads_hold_no_more_than_their_share(make_replica: MakeReplica) -> None:
    # 25 % of 32 pages: two loads of four pages.
    replica = make_replica(2, by_hand=True)
    sequences = {
        name: range(start, start + 8) for name, start in zip("abc", (1, 21, 41), strict=True)
    }
    for tokens in sequences.values():
        replica.store(tokens)
    for name, tokens in sequences.items():
        assert replica.ask(name, tokens).external is ExternalMatch.HIT
    loads = [replica.load_back(name, tokens) for name, tokens in sequences.items()]
    # The third waits for the room of the oldest.
    assert loads[2] == loads[0]
    assert len(replica.ranks[0].allocator.in_use) == 16
    replica.start()
    report = replica.settle()
    assert report.landed == ("a", "b")
    assert report.ready == ("c",)
    assert replica.match("c", sequences["c"]).external is ExternalMatch.HIT
    replica.load_back("c", sequences["c"])
    replica.start()
    assert replica.settle().landed == ("c",)


def test_who_waits_for_room_is_told_when_it_is_there(make_replica: MakeReplica) -> None:
    replica = make_replica(2, by_hand=True, settings=LinkerSettings(staged_percent=13))
    replica.store(TOKENS)
    replica.store(range(21, 29))
    operation = replica.queue("a", TOKENS).operation_id
    replica.ask("b", range(21, 29))
    replica.start()
    replica.ranks[0].lose(TOKENS, 0)
    replica.ranks[0].by_hand.run(operation)
    # Decided, but one rank still holds the slots.
    assert replica.step().failed == ("a",)
    assert isinstance(replica.load_back("b", range(21, 29)), LoadWaiting)
    assert replica.step() == StepReport()
    replica.ranks[1].by_hand.run(operation)
    assert replica.step().ready == ("b",)
    assert isinstance(replica.load_back("b", range(21, 29)), LoadWaiting)
    replica.start()
    assert replica.settle().landed == ("b",)


@pytest.mark.parametrize("staged_percent", [13, 26])
def test_who_waits_for_the_room_of_a_load_that_hangs_computes_after_some_steps(
    make_replica: MakeReplica, staged_percent: int
) -> None:
    """Room for one load, or for two of which one ends: it is not kept until the other is written off."""
    settings = LinkerSettings(staged_percent=staged_percent, miss_steps=5)
    replica = make_replica(2, by_hand=True, settings=settings)
    sequences = {name: range(20 * n + 1, 20 * n + 9) for n, name in enumerate("abc")}
    for tokens in sequences.values():
        replica.store(tokens)
    hangs = replica.queue("a", sequences["a"]).operation_id
    replica.start()
    replica.clock.advance(settings.transfer_timeout_s)
    assert replica.step().failed == ("a",)
    other = None
    if staged_percent == 26:
        other = replica.queue("b", sequences["b"]).operation_id
        replica.start()
    assert replica.ask("c", sequences["c"]).external is ExternalMatch.HIT
    assert replica.load_back("c", sequences["c"]) == LoadWaiting(operation_id=hangs)
    told = [replica.step().ready for _ in range(settings.miss_steps)]
    assert sum(ready == ("c",) for ready in told) == 1
    if other is None:
        assert isinstance(replica.load_back("c", sequences["c"]), LoadMiss)
        return
    # For the one that goes on it waits until that has ended.
    assert replica.load_back("c", sequences["c"]) == LoadWaiting(operation_id=other)
    for rank in replica.ranks:
        rank.by_hand.run(other)
    report = replica.step()
    assert (report.landed, report.ready) == (("b",), ("c",))
    assert isinstance(replica.load_back("c", sequences["c"]), LoadWaiting)
    assert replica.ranks[0].by_hand.queued


@pytest.mark.parametrize("outcome", Outcome)
def test_nobody_waits_for_a_load_that_is_decided_but_not_quiesced(
    make_replica: MakeReplica, outcome: Outcome
) -> None:
    replica = make_replica(2, by_hand=True)
    replica.store(TOKENS)
    operation = replica.queue("a", TOKENS).operation_id
    replica.start()
    replica.ranks[0].by_hand.run(operation)
    if outcome is Outcome.LANDED:
        replica.ranks[1].by_hand._load(replica.ranks[1].by_hand._held[operation].transfers[0])
    replica.ranks[1].by_hand.complete(operation, outcome, quiesced=False)
    replica.step()
    assert replica.ranks[0].cache.num_outstanding == 1
    for name in ("a", "b"):
        match = replica.match(name, TOKENS)
        assert match.waiting_on is None
        if outcome is Outcome.LANDED:
            assert match.device_prefix_len == 8
        else:
            assert match.external is ExternalMatch.MISS


def test_a_load_takes_what_its_share_has_room_for(make_replica: MakeReplica) -> None:
    replica = make_replica(2, settings=LinkerSettings(staged_percent=10))
    replica.store(TOKENS)
    # 10 % of 32 pages are three.
    assert replica.restore("a", TOKENS).landed == ("a",)
    assert replica.match("a", TOKENS).device_prefix_len == 6
    assert replica.match("a", TOKENS).host_hit_length == 2
    assert replica.restore("a", TOKENS).landed == ("a",)
    assert replica.match("a", TOKENS).device_prefix_len == 8


def test_a_share_of_less_than_a_page_is_a_miss(make_replica: MakeReplica) -> None:
    replica = make_replica(2, settings=LinkerSettings(staged_percent=1))
    replica.store(TOKENS)
    replica.ask("a", TOKENS)
    assert isinstance(replica.load_back("a", TOKENS), LoadMiss)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_who_needs_more_than_all_room_waits_for_no_load(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    """There is always some load on its way: whoever waited for room that never comes, would for ever."""
    replica = make_replica(num_ranks, model=FULL_MAMBA, by_hand=True)
    # The only state is at its end, so that it cannot be restored in part; staged are 16 tokens at most.
    whole, fits, small = range(1, 41), range(101, 117), range(201, 205)
    for tokens in (whole, fits, small):
        replica.store(tokens)
    waiting = replica.queue("a", small)
    replica.start()
    assert replica.ask("b", whole).host_hit_length == 40
    assert isinstance(replica.load_back("b", whole), LoadMiss)
    # One that fits when the other is over waits for it.
    assert replica.ask("c", fits).host_hit_length == 16
    assert replica.load_back("c", fits) == waiting
    assert replica.settle().ready == ("c",)
    replica.queue("c", fits)
    replica.start()
    assert replica.settle().landed == ("c",)


def test_a_load_that_nobody_starts_ends_at_its_deadline(make_replica: MakeReplica) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    replica.queue("a", TOKENS)
    replica.match("b", TOKENS)
    replica.clock.advance(29.0)
    assert replica.step() == StepReport()
    replica.clock.advance(1.0)
    report = replica.settle()
    assert (report.failed, report.ready) == (("a",), ("b",))


def test_a_published_path_is_locked_for_its_request_for_some_steps(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(2, settings=LinkerSettings(publish_lock_steps=5))
    replica.store(TOKENS)
    replica.restore("a", TOKENS)
    for _ in range(4):
        assert replica.evict() == 0
        replica.step()
    replica.step()
    assert replica.evict() == 8


def test_a_request_that_waits_for_two_things_hears_of_both(make_replica: MakeReplica) -> None:
    replica = make_replica(2, by_hand=True)
    replica.store(TOKENS)
    replica.ask("a", TOKENS)
    replica.match("b", TOKENS)
    replica.load_back("a", TOKENS)
    # Its lookup is on its way, and now its first page is too.
    assert replica.match("b", TOKENS).waiting_on is not None
    replica.step()
    assert replica.step().ready == ("b",)
    assert replica.match("b", TOKENS).external is ExternalMatch.UNKNOWN
    replica.start()
    assert replica.settle().ready == ("b",)
