"""A store that hangs on one rank: lookups and loads fail at once, on all ranks alike, until it is back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from radixlink_contracts import ExternalMatch, RequestId
from radixlink_linker import LinkerSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.linker.conftest import MakeReplica
    from tests.integration.linker.replica import Replica

TOKENS = range(1, 9)
"""Four pages."""
SETTINGS = LinkerSettings(step_timeout_s=20.0, max_hanging_lookups=2)

both = pytest.mark.parametrize("num_ranks", [1, 2])


def hang(replica: Replica) -> None:
    """A lookup of the last rank does not return, and is a miss after its deadline."""
    executor = replica.ranks[-1].executor
    executor.held = True
    replica.match("slow", TOKENS)
    replica.launch()
    replica.retire()
    replica.step()
    assert replica.match("slow", TOKENS).external is ExternalMatch.UNKNOWN
    replica.clock.advance(SETTINGS.lookup_timeout_s)
    replica.settle()
    assert replica.match("slow", TOKENS).external is ExternalMatch.MISS


def tasks(replica: Replica) -> list[Callable[[], None]]:
    """What the last rank's executor keeps."""
    return replica.ranks[-1].executor._waiting


@both
def test_while_a_lookup_hangs_new_ones_are_a_miss_at_once(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, settings=SETTINGS)
    replica.store(TOKENS)
    hang(replica)
    for name in ("a", "b"):
        replica.match(name, TOKENS)
        steps = 0
        while replica.ranks[0].cache.num_outstanding:
            replica.step()
            steps += 1
        # Ready, and then its mask: no clock was moved.
        assert steps == 2
        assert replica.match(name, TOKENS).external is ExternalMatch.MISS
        explanation = replica.ranks[-1].cache.explain(RequestId(name))
        assert "the store hangs: lookup has not returned for 5.0 s" in str(explanation)
    assert len(tasks(replica)) == 1
    counters = replica.ranks[-1].cache.counters
    assert counters is not None
    assert (counters.lookups_refused, counters.lookup_errors) == (2, 3)


@both
def test_when_the_lookup_returns_the_store_is_asked_again(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, settings=SETTINGS)
    replica.store(TOKENS)
    hang(replica)
    replica.match("a", TOKENS)
    replica.settle()
    executor = replica.ranks[-1].executor
    executor.held = False
    executor.release()
    assert replica.match("a", TOKENS).external is ExternalMatch.MISS
    assert replica.ask("b", TOKENS).external is ExternalMatch.HIT


@both
def test_one_lookup_in_a_while_finds_out_that_the_store_is_back(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, settings=SETTINGS)
    replica.store(TOKENS)
    hang(replica)
    replica.match("a", TOKENS)
    replica.settle()
    # The thread that hangs never returns, and another one is there.
    (lost,) = tasks(replica)
    tasks(replica).clear()
    replica.ranks[-1].executor.held = False
    replica.match("b", TOKENS)
    replica.settle()
    assert replica.match("b", TOKENS).external is ExternalMatch.MISS
    replica.clock.advance(SETTINGS.lookup_timeout_s)
    for name in ("c", "d"):
        assert replica.ask(name, TOKENS).external is ExternalMatch.HIT
    lost()
    assert replica.match("slow", TOKENS).external is ExternalMatch.MISS


@both
def test_threads_that_hang_are_not_many(make_replica: MakeReplica, num_ranks: int) -> None:
    replica = make_replica(num_ranks, settings=SETTINGS)
    replica.store(TOKENS)
    hang(replica)
    for number in range(10):
        replica.clock.advance(100.0)
        replica.match(f"r{number}", TOKENS)
        replica.step()
        replica.clock.advance(SETTINGS.lookup_timeout_s)
        replica.settle()
        assert replica.match(f"r{number}", TOKENS).external is ExternalMatch.MISS
    assert len(tasks(replica)) == SETTINGS.max_hanging_lookups
    replica.ranks[-1].executor.held = False
    replica.ranks[-1].executor.release()
    assert replica.ask("after", TOKENS).external is ExternalMatch.HIT


@both
@pytest.mark.parametrize("by_hand", [False, True], ids=["batches", "one by one"])
def test_no_more_than_one_task_finds_out_whether_the_store_is_back(
    make_replica: MakeReplica, num_ranks: int, *, by_hand: bool
) -> None:
    replica = make_replica(num_ranks, settings=SETTINGS, by_hand=by_hand)
    replica.store(TOKENS)
    hang(replica)
    replica.match("a", TOKENS)
    replica.settle()
    replica.clock.advance(SETTINGS.lookup_timeout_s)
    for name in ("b", "c", "d"):
        replica.match(name, TOKENS)
    replica.step()
    assert len(tasks(replica)) == 2
    replica.clock.advance(SETTINGS.lookup_timeout_s)
    replica.settle()
    replica.ranks[-1].executor.held = False
    replica.ranks[-1].executor.release()
    assert replica.ask("after", TOKENS).external is ExternalMatch.HIT


@both
@pytest.mark.parametrize("call", ["open", "read"])
def test_while_a_load_hangs_on_one_rank_others_fail_at_once_on_all(
    make_replica: MakeReplica, num_ranks: int, call: str
) -> None:
    replica = make_replica(num_ranks, settings=SETTINGS, num_pages=64)
    behind, new, after = range(11, 19), range(21, 29), range(31, 39)
    for tokens in (TOKENS, behind, new, after):
        replica.store(tokens)
    store = replica.ranks[-1].store
    store.hanging.add(call)
    replica.queue("stuck", TOKENS)
    replica.queue("behind", behind)
    replica.start()
    assert store.waiting.wait(10)
    replica.clock.advance(5.0)
    assert replica.step().failed == ("behind",)
    # What comes new is refused by the rank whose store hangs; the verdict is that of all.
    replica.queue("new", new)
    replica.start()
    assert replica.step().failed == ("new",)
    explanation = replica.ranks[-1].cache.explain(RequestId("new"))
    assert f"the store hangs: {call} has not returned for 5.0 s" in str(explanation)
    replica.compute([41, 41])
    assert replica.step().num_offloads_failed == 1
    # The load whose call hangs is not given up before its deadline: the store comes back.
    store.hanging.clear()
    store.gate.set()
    assert replica.settle().landed == ("stuck",)
    assert replica.restore("after", after).landed == ("after",)
