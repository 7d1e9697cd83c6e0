"""Offloads: a node is stored when every rank says so, whatever became of it meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from radixlink_contracts import Outcome
from radixlink_linker import LinkerSettings

if TYPE_CHECKING:
    from tests.integration.linker.conftest import MakeReplica
    from tests.integration.linker.rank import Rank
    from tests.integration.linker.replica import Replica

TOKENS = range(1, 9)
"""Four pages."""

both = pytest.mark.parametrize("num_ranks", [1, 2])


def stored(rank: Rank) -> dict[int, bool]:
    """Of each node with tokens: is it stored?"""
    return {node.node_id: node.stored for node in rank.nodes()}


def pending(replica: Replica) -> list[int | None]:
    return [node.pending_operation for rank in replica.ranks for node in rank.nodes()]


@both
def test_a_node_is_stored_once_every_rank_has_stored_it(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, by_hand=True)
    replica.compute(TOKENS)
    (operation,) = replica.ranks[0].by_hand.started
    assert set(pending(replica)) == {operation}
    assert replica.evict() == 0
    for rank in replica.ranks:
        assert replica.step().num_offloads_stored == 0
        rank.by_hand.run(operation)
    assert replica.step().num_offloads_stored == 1
    for rank in replica.ranks:
        assert stored(rank) == {1: True}
    assert replica.evict() == 8


@both
@pytest.mark.parametrize("success", [False, True])
def test_a_split_in_between_is_followed(
    make_replica: MakeReplica, num_ranks: int, *, success: bool
) -> None:
    replica = make_replica(num_ranks, by_hand=True)
    replica.compute(TOKENS)
    (operation,) = replica.ranks[0].by_hand.started
    # A fork in the middle: its own part is another offload.
    fork = [*TOKENS[:4], 11, 12]
    replica.compute(fork)
    assert pending(replica).count(operation) == 2 * num_ranks
    assert replica.evict() == 0
    for rank in replica.ranks:
        if success:
            rank.by_hand.run(operation)
        else:
            rank.by_hand.complete(operation, Outcome.FAILED)
    report = replica.step()
    assert (report.num_offloads_stored, report.num_offloads_failed) == (success, not success)
    for rank in replica.ranks:
        halves = [node.stored for node in rank.nodes() if node.pending_operation is None]
        assert halves == [success, success]
    replica.settle()
    if success:
        replica.compute(TOKENS)
        assert replica.ranks[0].cache.num_outstanding == 0


@both
def test_the_halves_of_a_failed_offload_are_offered_again(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, by_hand=True)
    replica.compute(TOKENS)
    (operation,) = replica.ranks[0].by_hand.started
    assert replica.ranks[0].device_pages(TOKENS[:4]) == 2
    replica.alike(lambda rank: rank.device_pages(TOKENS[:4]))
    for rank in replica.ranks:
        rank.by_hand.complete(operation, Outcome.FAILED)
    assert replica.step().num_offloads_failed == 1
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_stored == 2
    assert replica.alike(lambda rank: rank.stored_pages(TOKENS)) == 4


@both
@pytest.mark.parametrize("fault", ["refusing", "raising"])
def test_a_refused_or_raising_offload_stays_eligible(
    make_replica: MakeReplica, num_ranks: int, fault: str
) -> None:
    replica = make_replica(num_ranks, by_hand=True)
    faults = getattr(replica.ranks[-1].by_hand, fault)
    faults.add("offload")
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_failed == 1
    assert set(pending(replica)) == {None}
    for rank in replica.ranks:
        rank.check_idle()
    faults.clear()
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_stored == 1


@both
def test_a_node_waits_for_its_threshold(make_replica: MakeReplica, num_ranks: int) -> None:
    replica = make_replica(num_ranks, by_hand=True, settings=LinkerSettings(backup_threshold=3))
    for expected in (0, 0, 1):
        replica.compute(TOKENS)
        assert replica.ranks[0].cache.num_outstanding == expected


@both
def test_a_store_that_is_full_is_a_failure_and_no_loop(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks)
    rank = replica.ranks[-1]
    rank.store.unwelcome.add(rank.page_keys(TOKENS)[2])
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_failed == 1
    assert rank.store.calls.count("put") == 1
    # What was put is harmless: a lookup ends before the hole.
    replica.evict()
    assert replica.ask("a", TOKENS).host_hit_length == 4


@both
def test_a_store_that_stays_full_is_asked_ever_less_and_is_used_once_it_has_room(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    """One rank's store is full, so all hash and gather as seldom."""
    settings = LinkerSettings(retry_after_uses=4, staged_percent=100)
    replica = make_replica(num_ranks, settings=settings)
    full = replica.ranks[-1].store
    full.unwelcome.add(replica.ranks[-1].page_keys(TOKENS)[0])
    tried: list[int] = []
    whole = list(TOKENS)
    for turn in range(64):
        if turn % 10 == 9:
            # What is new behind pages that the store lacks is not tried for itself.
            whole += [20 + turn, 21 + turn]
        replica.compute(whole)
        report = replica.settle()
        if report.num_offloads_failed or report.num_offloads_stored:
            tried.append(turn)
    # A turn is a match and an insert, so these are 4, 8, 16, 32 and 64 uses of the tree.
    assert tried == [0, 2, 6, 14, 30, 62]
    full.unwelcome.clear()
    for _ in range(64):
        replica.compute(whole)
        replica.settle()
    replica.evict()
    assert replica.restore("a", whole).landed == ("a",)
    assert replica.match("a", whole).device_prefix_len == len(whole)


def test_a_chain_is_offered_from_the_root_down(make_replica: MakeReplica) -> None:
    settings = LinkerSettings(max_operations=2, retry_after_uses=1)
    replica = make_replica(by_hand=True, settings=settings)
    replica.compute(TOKENS[:2])
    replica.settle()
    (rank,) = replica.ranks
    rank.by_hand.refusing.add("offload")
    replica.compute(TOKENS[:4])
    replica.compute(TOKENS[:6])
    replica.settle()
    rank.by_hand.refusing.clear()
    # Two nodes wait and a third comes; two at a time, those above first, the rest in its turn.
    replica.compute(TOKENS)
    assert [len(held.transfers[0].keys) for held in rank.by_hand._held.values()] == [1, 1]
    assert rank.cache.num_outstanding == 3
    assert replica.settle().num_offloads_stored == 3
    assert rank.stored_pages(TOKENS) == 4


@both
def test_a_chain_longer_than_the_cap_that_fails_is_not_tried_again_by_itself(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    """It waits for its next use, or an idle engine would try it for ever."""
    settings = LinkerSettings(max_operations=2, retry_after_uses=1)
    replica = make_replica(num_ranks, by_hand=True, settings=settings)
    replica.compute(TOKENS[:2])
    replica.settle()
    refusing = replica.ranks[-1].by_hand.refusing
    refusing.add("offload")
    for end in (4, 6):
        replica.compute(TOKENS[:end])
    replica.settle()
    replica.compute(TOKENS)
    # All ends although nothing is stored: those two once more, and what is behind them not at all.
    assert replica.settle().num_offloads_failed == 2
    refusing.clear()
    replica.compute(TOKENS)
    replica.settle()
    assert replica.alike(lambda rank: rank.stored_pages(TOKENS)) == 4


@both
def test_uses_of_other_paths_have_nothing_tried_again(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    """What is due behind a node that hangs would have it tried again, and its slots written off twice."""
    settings = LinkerSettings(
        max_operations=1, retry_after_uses=1, write_off_steps=8, written_off_percent=100
    )
    replica = make_replica(num_ranks, by_hand=True, settings=settings)
    replica.compute(TOKENS[:4])
    replica.compute(TOKENS)
    # One is on its way, one is due behind it.
    assert replica.ranks[0].cache.num_outstanding == 2
    for turn in range(4):
        replica.clock.advance(settings.transfer_timeout_s)
        replica.step()
        replica.match(f"other {turn}", range(100, 104))
        for _ in range(settings.write_off_steps):
            replica.step()
    for rank in replica.ranks:
        (lost,) = rank.cache.holders().written_off
        assert sum(lost.operation.slots.values()) == 4
    counters = replica.ranks[0].cache.counters
    assert counters is not None
    assert counters.offloads_failed == 1
    replica.reset()


@both
def test_operations_that_never_let_go_keep_no_load_from_its_verdict(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    """A frame has bits for one operation here, and one hangs for longer than the test."""
    settings = LinkerSettings(max_operations=1, staged_percent=100)
    replica = make_replica(num_ranks, by_hand=True, settings=settings)
    replica.store(TOKENS)
    replica.compute(range(31, 39))
    hangs = replica.ranks[0].by_hand.started
    replica.clock.advance(settings.transfer_timeout_s)
    assert replica.step().num_offloads_failed == 1
    waiting = replica.queue("a", TOKENS)
    replica.start()
    for rank in replica.ranks:
        assert rank.by_hand.started == (*hangs, waiting.operation_id)
        rank.by_hand.run(waiting.operation_id)
    assert ("a",) in [replica.step().landed for _ in range(3)]
    assert replica.alike(lambda rank: rank.device_pages(TOKENS)) == 4


@both
def test_what_is_over_the_cap_is_stored_in_its_turn(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, settings=LinkerSettings(max_operations=2))
    starts = range(1, 40, 10)
    for start in starts:
        replica.compute(range(start, start + 4))
    replica.settle()
    for rank in replica.ranks:
        assert all(rank.stored_pages(range(start, start + 4)) == 2 for start in starts)


def test_what_is_evicted_before_its_turn_is_not_offered_any_more(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(by_hand=True, settings=LinkerSettings(max_operations=1))
    replica.compute(range(1, 5))
    replica.compute(range(11, 15))
    (rank,) = replica.ranks
    # The first is locked by its offload; the second waits for its turn, and nothing holds it.
    assert replica.evict() == 4
    assert replica.settle().num_offloads_stored == 1
    assert rank.stored_pages(range(1, 5)) == 2
    assert rank.cache.num_outstanding == 0


def test_an_offload_without_an_answer_fails_at_its_deadline(make_replica: MakeReplica) -> None:
    replica = make_replica(2, by_hand=True)
    replica.compute(TOKENS)
    (operation,) = replica.ranks[0].by_hand.started
    replica.ranks[0].by_hand.run(operation)
    replica.clock.advance(30.0)
    # The first thing that a rank said is what counts, so the one that was done said so in time.
    assert replica.step().num_offloads_failed == 1
    # Its slots stay locked until the other has let go of them.
    assert replica.evict() == 0
    replica.ranks[1].by_hand.run(operation)
    assert replica.step().num_offloads_stored == 0
    assert replica.evict() == 8
    counters = replica.ranks[1].cache.counters
    assert counters is not None
    assert counters.late_completions == 1


def test_an_evicted_and_restored_node_keeps_its_bytes_when_it_is_split_and_grown(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    replica.restore("a", TOKENS)
    replica.compute([*TOKENS[:4], 11, 12, 13, 14])
    replica.compute([*TOKENS, 9, 10])
    assert replica.settle().num_offloads_stored == 2
    replica.release("a")
    replica.evict()
    assert replica.restore("b", [*TOKENS, 9, 10]).landed == ("b",)
    assert replica.restore("c", [*TOKENS[:4], 11, 12, 13, 14]).landed == ("c",)


@both
def test_a_node_that_is_split_while_it_waits_for_its_turn_is_stored_whole(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, settings=LinkerSettings(max_operations=1))
    replica.compute([21, 22])
    replica.compute(TOKENS)
    # It waits for the cap; a match parts it.
    replica.match("a", TOKENS[:4])
    replica.settle()
    for rank in replica.ranks:
        assert all(stored(rank).values())
    replica.evict()
    assert replica.restore("b", TOKENS).landed == ("b",)


def test_duplicates_are_free_once_the_batches_that_may_read_them_are_processed(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(1)
    (rank,) = replica.ranks
    first, second = rank.begin(TOKENS), rank.begin(TOKENS)
    assert first is not None
    assert second is not None
    rank.end(first)
    replica.settle()
    before = rank.slots.available_sizes
    replica.launch()
    rank.end(second)
    assert rank.slots.available_sizes == before
    replica.retire()
    assert rank.slots.available_sizes == (before[0] + len(TOKENS),)
