"""Store a sequence, drop it from the device, bring it back, and find the same bytes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from radixlink_contracts import ExternalMatch, LoadMiss, LoadWaiting
from radixlink_linker import LinkerSettings, ThreadExecutor

if TYPE_CHECKING:
    from tests.integration.linker.conftest import MakeReplica

TOKENS = range(1, 9)
"""Four pages."""


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_stored_pages_come_back_with_their_bytes(
    make_replica: MakeReplica, num_ranks: int, *, by_hand: bool
) -> None:
    replica = make_replica(num_ranks, by_hand=by_hand)
    replica.store(TOKENS)
    for turn in ("first", "second"):
        assert replica.match(turn, TOKENS).external is ExternalMatch.UNKNOWN
        assert replica.match(turn, TOKENS).external is ExternalMatch.UNKNOWN
        hit = replica.ask(turn, TOKENS)
        assert (hit.external, hit.device_prefix_len, hit.host_hit_length) == (
            ExternalMatch.HIT,
            0,
            8,
        )
        assert isinstance(replica.load_back(turn, TOKENS), LoadWaiting)
        replica.start()
        waiting = replica.match(turn, TOKENS)
        assert waiting.external is ExternalMatch.UNKNOWN
        assert waiting.waiting_on is not None
        report = replica.settle()
        assert report.landed == (turn,)
        device = replica.match(turn, TOKENS)
        assert (device.external, device.device_prefix_len) == (ExternalMatch.NOT_ASKED, 8)
        replica.check()
        # Locked for its request, then not.
        assert replica.evict() == 0
        replica.release(turn)
        assert replica.evict() == 8


def test_restored_pages_are_not_offered_again(make_replica: MakeReplica) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    assert replica.restore("a", TOKENS).num_offloads_stored == 0
    replica.compute(TOKENS)
    assert replica.ranks[0].cache.num_outstanding == 0
    assert [rank.store.calls.count("put") for rank in replica.ranks] == [1, 1]
    # What is computed behind them is.
    replica.compute([*TOKENS, 9, 10])
    assert replica.settle().num_offloads_stored == 1
    assert replica.alike(lambda rank: rank.stored_pages([*TOKENS, 9, 10])) == 5


def test_only_the_missing_tail_is_loaded(make_replica: MakeReplica) -> None:
    replica = make_replica(by_hand=True)
    replica.store(TOKENS)
    replica.compute(TOKENS[:4])
    replica.settle()
    hit = replica.ask("a", TOKENS)
    assert (hit.device_prefix_len, hit.host_hit_length) == (4, 4)
    used = len(replica.ranks[0].allocator.in_use)
    replica.load_back("a", TOKENS)
    assert len(replica.ranks[0].allocator.in_use) == used + 4
    replica.start()
    assert replica.settle().landed == ("a",)
    assert replica.match("a", TOKENS).device_prefix_len == 8


def test_a_device_prefix_that_grew_drops_leading_pages(make_replica: MakeReplica) -> None:
    replica = make_replica()
    replica.store(TOKENS)
    assert replica.ask("a", TOKENS).host_hit_length == 8
    replica.compute(TOKENS[:6])
    replica.settle()
    assert isinstance(replica.load_back("a", TOKENS), LoadWaiting)
    assert len(replica.ranks[0].allocator.in_use) == 8
    replica.start()
    assert replica.settle().landed == ("a",)
    assert replica.match("a", TOKENS).device_prefix_len == 8


def test_a_device_prefix_that_covers_all_is_a_miss(make_replica: MakeReplica) -> None:
    replica = make_replica()
    replica.store(TOKENS)
    replica.ask("a", TOKENS)
    replica.compute(TOKENS)
    assert isinstance(replica.load_back("a", TOKENS), LoadMiss)


def test_a_device_prefix_that_shrank_is_a_miss(make_replica: MakeReplica) -> None:
    replica = make_replica()
    replica.store(TOKENS)
    replica.compute(TOKENS[:4])
    replica.settle()
    assert replica.ask("a", TOKENS).host_hit_length == 4
    replica.evict()
    assert replica.match("a", TOKENS).external is ExternalMatch.MISS
    assert isinstance(replica.load_back("a", TOKENS), LoadMiss)


def test_the_same_pages_computed_meanwhile_are_kept_once(make_replica: MakeReplica) -> None:
    replica = make_replica(2, by_hand=True)
    replica.store(TOKENS)
    replica.queue("a", TOKENS)
    replica.launch()
    replica.compute(TOKENS[:6])
    assert replica.settle().landed == ("a",)
    # The three pages that nobody took wait for the batch that may read them.
    assert [rank.slots.num_retired for rank in replica.ranks] == [6, 6]
    replica.retire()
    assert [len(rank.allocator.in_use) for rank in replica.ranks] == [8, 8]
    assert replica.match("a", TOKENS).device_prefix_len == 8


def test_a_load_without_room_is_a_miss_and_takes_nothing(make_replica: MakeReplica) -> None:
    replica = make_replica(num_pages=8, settings=LinkerSettings(staged_percent=100))
    replica.store(TOKENS)
    replica.ask("a", TOKENS)
    computations = replica.alike(lambda rank: rank.begin(range(101, 113)) is not None)
    assert computations
    before = set(replica.ranks[0].allocator.in_use)
    assert isinstance(replica.load_back("a", TOKENS), LoadMiss)
    assert replica.ranks[0].allocator.in_use == before
    assert replica.ranks[0].cache.num_outstanding == 0
    assert replica.ask("a", TOKENS).external is ExternalMatch.HIT


def test_a_load_evicts_for_its_room(make_replica: MakeReplica) -> None:
    replica = make_replica(num_pages=8, settings=LinkerSettings(staged_percent=100))
    replica.store(TOKENS)
    replica.compute(range(101, 113))
    replica.settle()
    assert replica.restore("a", TOKENS).landed == ("a",)
    assert replica.match("a", TOKENS).device_prefix_len == 8


def test_a_long_prefix_takes_several_frames(make_replica: MakeReplica) -> None:
    settings = LinkerSettings(frame_words=12, max_lookups=64, staged_percent=100)
    replica = make_replica(2, settings=settings, num_pages=512)
    tokens = range(1, 1 + 2 * 420)
    replica.store(tokens)
    replica.match("a", tokens)
    # One frame agrees that all are ready; 420 pages are seven words, of which a frame carries six.
    assert replica.step().ready == ()
    assert replica.step().ready == ()
    assert replica.step().ready == ("a",)
    assert replica.match("a", tokens).host_hit_length == 840
    replica.load_back("a", tokens)
    replica.start()
    assert replica.settle().landed == ("a",)


def test_match_asks_once_and_again_for_a_longer_key(make_replica: MakeReplica) -> None:
    replica = make_replica(by_hand=True)
    replica.store(TOKENS)
    calls = replica.ranks[0].by_hand.calls
    replica.ask("a", TOKENS)
    replica.match("a", TOKENS)
    assert calls.count("lookup") == 1
    assert replica.ask("a", [*TOKENS, 9, 10]).host_hit_length == 8
    assert calls.count("lookup") == 2
    replica.release("a")
    replica.match("a", TOKENS)
    replica.start()
    assert calls.count("lookup") == 3


@pytest.mark.parametrize("tokens", [[], [1]])
def test_less_than_a_page_is_not_asked(make_replica: MakeReplica, tokens: list[int]) -> None:
    replica = make_replica(by_hand=True)
    assert replica.match("a", tokens).external is ExternalMatch.NOT_ASKED
    assert replica.ranks[0].by_hand.calls == []


def test_another_key_of_equal_length_is_never_loaded_under_a_wrong_name(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica()
    replica.store(TOKENS)
    assert replica.ask("a", TOKENS).external is ExternalMatch.HIT
    assert isinstance(replica.load_back("a", range(11, 19)), LoadMiss)


def test_match_a_hundred_times_allocates_nothing(make_replica: MakeReplica) -> None:
    replica = make_replica()
    replica.store(TOKENS)
    for request in range(100):
        replica.match(str(request), TOKENS)
    replica.settle()
    for request in range(100):
        assert replica.match(str(request), TOKENS).external is ExternalMatch.HIT
    assert replica.ranks[0].allocator.in_use == set()


def test_what_the_cache_carried_out_it_asks_of_nobody(make_replica: MakeReplica) -> None:
    replica = make_replica()
    (rank,) = replica.ranks
    # Two requests compute the same pages, so one of them has duplicates to give back.
    first, second = (rank.begin(TOKENS) for _ in range(2))
    assert first is not None
    assert second is not None
    assert len(rank.allocator.in_use) == 16
    results = [rank.end(computation) for computation in (first, second)]
    assert len(rank.allocator.in_use) == 8
    replica.settle()
    evicted = rank.evict()
    assert rank.allocator.in_use == set()
    assert evicted.num_tokens_evicted == 8
    # Who freed them once more would free what another request may have by now.
    for result in (*results, evicted):
        assert result is not None
        assert result.cache_actions == ()


def test_a_request_is_staged_at_most_twice(make_replica: MakeReplica) -> None:
    replica = make_replica()
    replica.store(TOKENS)
    for _ in range(2):
        assert replica.restore("a", TOKENS).landed == ("a",)
        # Its lock ends at some time; then it may be evicted before the request gets to run.
        for _ in range(256):
            replica.ranks[0].cache.step()
        assert replica.evict() == 8
    assert replica.match("a", TOKENS).external is ExternalMatch.HIT
    assert isinstance(replica.load_back("a", TOKENS), LoadMiss)


def test_a_lookup_runs_off_the_scheduler_thread(make_replica: MakeReplica) -> None:
    replica = make_replica()
    replica.store(TOKENS)
    (rank,) = replica.ranks
    executor = ThreadExecutor(num_threads=1)
    rank.cache._wrapper._prober._executor = executor  # type: ignore[union-attr]
    rank.store.hanging.add("contains")
    rank.match("a", TOKENS)
    replica.start()
    assert rank.store.waiting.wait(10)
    assert threading.current_thread() is threading.main_thread()
    # A slow lookup keeps no step waiting.
    assert replica.step().ready == ()
    rank.store.gate.set()
    executor.close()
    replica.step()
    assert replica.step().ready == ("a",)
    assert replica.match("a", TOKENS).external is ExternalMatch.HIT


def test_a_late_lookup_is_a_counted_miss(make_replica: MakeReplica) -> None:
    replica = make_replica()
    replica.store(TOKENS)
    (rank,) = replica.ranks
    rank.executor.held = True
    rank.match("a", TOKENS)
    replica.step()
    replica.clock.advance(5.0)
    replica.step()
    assert replica.step().ready == ("a",)
    rank.executor.release()
    assert replica.match("a", TOKENS).external is ExternalMatch.MISS
    assert rank.cache.counters is not None
    assert rank.cache.counters.lookup_errors == 1
