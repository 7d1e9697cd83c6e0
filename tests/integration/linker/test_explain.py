"""Why a request's hit was what it was, and who holds a lock, a slot or an operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.integration.linker.layer_wise import admit, ask_for, finish, launch
from tests.integration.linker.models import FULL_SWA, KINDS
from tests.integration.linker.sequences import key_of

from radixlink_contracts import (
    HitCause,
    LoadMiss,
    LoadWaiting,
    OperationKind,
    Outcome,
    PoolName,
    RequestId,
)
from radixlink_linker import LinkerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.integration.linker.conftest import MakeReplica
    from tests.integration.linker.rank import Rank
    from tests.integration.linker.replica import Replica

    from radixlink_contracts import Explanation, LookupAnswer

TOKENS = range(1, 9)
"""Four pages."""
OTHER = range(101, 109)


def explain(rank: Rank, name: str) -> Explanation:
    explanation = rank.cache.explain(RequestId(name))
    assert explanation is not None
    assert explanation.rank == rank.rank
    return explanation


def causes(replica: Replica, name: str) -> HitCause:
    return replica.alike(lambda rank: explain(rank, name).cause)


def asked(rank: Rank, name: str) -> LookupAnswer:
    answer = explain(rank, name).lookup
    assert answer is not None
    return answer


def gaps(rank: Rank, name: str) -> dict[PoolName, list[int]]:
    """Which pages of those asked for each pool lacks here."""
    answer = asked(rank, name)
    return {
        pool.pool: [page for page in range(answer.num_pages) if page not in pool.found]
        for pool in answer.pools
    }


# -- what of the device could not be stored --------------------------------------------------------


def test_what_could_not_be_stored_is_told_of_a_request_that_goes_on_from_it(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(2, settings=LinkerSettings(retry_after_uses=10))
    replica.ranks[-1].store.raising.add("put")
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_failed == 1
    # The rank whose store is well knows it too: it is what all of them do.
    replica.ask("a", [*TOKENS, 11, 12])
    (held,) = replica.alike(lambda rank: explain(rank, "a").held_back)
    # It was matched twice.
    assert (held.num_pages, held.failures, held.uses_left) == (4, 1, 8)
    assert str(held) in str(explain(replica.ranks[0], "a"))
    replica.evict()
    assert replica.alike(lambda rank: explain(rank, "a").held_back) == ()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_match_is_one_use_however_much_the_device_has_of_what_it_does_not_end_at(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, model=FULL_SWA, settings=LinkerSettings(retry_after_uses=50))
    replica.ranks[-1].store.raising.add("put")
    replica.compute(TOKENS)
    replica.compute([*TOKENS, 11, 12])
    assert replica.settle().num_offloads_failed == 3
    replica.evict_windows(len(TOKENS))
    left = uses_left(replica, TOKENS)
    found = replica.match("a", TOKENS)
    assert (found.device_prefix_len, found.full_kv_hit_length) == (0, 8)
    assert uses_left(replica, TOKENS) == left - 1


def test_a_load_uses_the_tree_when_it_begins_and_when_it_is_published(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(2, settings=LinkerSettings(retry_after_uses=50))
    replica.store(TOKENS)
    replica.ranks[-1].store.raising.add("put")
    replica.compute(OTHER)
    assert replica.settle().num_offloads_failed == 1
    assert replica.ask("a", TOKENS).host_hit_length == 8
    left = uses_left(replica, OTHER)
    assert isinstance(replica.load_back("a", TOKENS), LoadWaiting)
    assert uses_left(replica, OTHER) == left - 1
    replica.start()
    assert replica.settle().landed == ("a",)
    assert uses_left(replica, OTHER) == left - 2


def uses_left(replica: Replica, tokens: Sequence[int]) -> int:
    """For how long what stands at the end of a sequence is held back."""

    def left(rank: Rank) -> int:
        end = rank.tree.holdings(key_of(tokens)).last_node
        return rank.tree.held_back(end)[-1].uses_left

    return replica.alike(left)


# -- a request's life ------------------------------------------------------------------------------


def test_of_a_request_that_is_not_remembered_there_is_nothing_to_say(
    make_replica: MakeReplica,
) -> None:
    for replica in (make_replica(attach=False), make_replica()):
        (rank,) = replica.ranks
        assert rank.cache.explain(RequestId("a")) is None
        replica.match("a", TOKENS[:1])
        assert rank.cache.explain(RequestId("a")) is None
    replica = make_replica()
    (rank,) = replica.ranks
    replica.match("a", TOKENS)
    assert rank.cache.explain(RequestId("a")) is not None
    replica.release("a")
    assert rank.cache.explain(RequestId("a")) is None


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_match_leaves_its_cause(make_replica: MakeReplica, num_ranks: int) -> None:
    replica = make_replica(num_ranks, by_hand=False)
    replica.store(TOKENS)
    for rank in replica.ranks:
        rank.executor.held = True
    replica.match("a", TOKENS)
    replica.start()
    assert causes(replica, "a") is HitCause.ASKED
    for rank in replica.ranks:
        assert not asked(rank, "a").ready
        assert "this rank has no answer yet" in str(explain(rank, "a"))
        rank.executor.held = False
        rank.executor.release()
        assert asked(rank, "a").ready
        assert asked(rank, "a").agreed is None
    replica.ask("a", TOKENS)
    assert causes(replica, "a") is HitCause.RESTORABLE
    one = explain(replica.ranks[0], "a")
    assert (one.device_pages, one.hit_pages, one.num_loads, one.max_loads) == (0, 4, 0, 2)
    assert one.num_ranks == num_ranks

    operation = replica.queue("a", TOKENS).operation_id
    replica.match("a", TOKENS)
    assert causes(replica, "a") is HitCause.OWN_LOAD
    replica.match("b", TOKENS)
    assert causes(replica, "b") is HitCause.OTHER_LOAD
    for rank in replica.ranks:
        for name in "ab":
            waits_for = explain(rank, name).waits_for
            assert waits_for is not None
            assert (waits_for.op, waits_for.kind) == (operation, OperationKind.STAGED_LOAD)
            assert waits_for.queued
            assert waits_for.waiters == ("b",)
        assert f"waits for staged load {operation} for request a, queued" in str(explain(rank, "b"))
    replica.start()
    assert replica.settle().landed == ("a",)
    # What is waited for is over.
    assert explain(replica.ranks[0], "b").waits_for is None
    for rank in replica.ranks:
        assert explain(rank, "a").published
        assert "what was restored for it is locked" in str(explain(rank, "a"))
    replica.match("a", TOKENS)
    assert causes(replica, "a") is HitCause.NOTHING_MISSING
    assert explain(replica.ranks[0], "a").device_pages == 4


def test_a_request_that_only_waits_for_room_has_not_matched(make_replica: MakeReplica) -> None:
    replica = make_replica(settings=LinkerSettings(staged_percent=13))
    other = range(101, 109)
    replica.store(TOKENS)
    replica.store(other)
    replica.queue("a", TOKENS)
    replica.ask("b", other)
    assert not isinstance(replica.load_back("b", other), LoadMiss)
    assert causes(replica, "b") is HitCause.RESTORABLE
    replica.start()
    replica.settle()


def test_a_device_prefix_that_shrank_is_said(make_replica: MakeReplica) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    replica.compute(TOKENS[:4])
    replica.settle()
    replica.ask("a", TOKENS)
    assert asked(replica.ranks[0], "a").start_page == 2
    replica.evict()
    replica.match("a", TOKENS)
    assert causes(replica, "a") is HitCause.PREFIX_SHRANK
    replica.load_back("a", TOKENS)
    assert explain(replica.ranks[0], "a").load_miss is not None
    assert "the device prefix became shorter" in str(explain(replica.ranks[1], "a"))


# -- by page, pool and rank ------------------------------------------------------------------------


def test_a_page_that_one_rank_lacks_is_named_there_and_elsewhere_as_some_other_ranks(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(3)
    replica.store(TOKENS)
    replica.ranks[1].lose(TOKENS, 2)
    replica.ask("a", TOKENS)
    assert causes(replica, "a") is HitCause.RESTORABLE
    assert replica.alike(lambda rank: asked(rank, "a").agreed) == 2
    assert [asked(rank, "a").local for rank in replica.ranks] == [4, 2, 4]
    assert [gaps(rank, "a") for rank in replica.ranks] == [
        {PoolName.KV: []},
        {PoolName.KV: [2]},
        {PoolName.KV: []},
    ]
    assert [asked(rank, "a").missing_elsewhere for rank in replica.ranks] == [2, None, 2]
    texts = [str(explain(rank, "a")) for rank in replica.ranks]
    for text in texts:
        assert "agreed 2 of 4 pages" in text
    assert "page 2: KV missing here" in texts[1]
    for text in (texts[0], texts[2]):
        assert "missing here" not in text
        assert "some other rank lacks page 2, or could not answer" in text


def test_pages_are_counted_from_the_start_of_the_sequence(make_replica: MakeReplica) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    replica.compute(TOKENS[:2])
    replica.settle()
    replica.ranks[0].lose(TOKENS, 2, 3)
    replica.ask("a", TOKENS)
    here, there = (str(explain(rank, "a")) for rank in replica.ranks)
    assert "asked for pages 1-3" in here
    assert "pages 2-3: KV missing here, so that it lets 1 pages be restored" in here
    assert "some other rank lacks page 2" in there


@pytest.mark.parametrize(
    ("kind", "pool", "lost", "agreed"),
    [
        # A window of three tokens is two pages: length 4 needs pages 2 and 3, length 3 needs 1 and 2.
        ("full+swa", PoolName.SWA, (3,), 3),
        ("full+swa", PoolName.SWA, (2,), 2),
        # A state is needed at the end alone; a forward kept one at the end of what it computed.
        ("full+mamba", PoolName.MAMBA, (3,), 0),
        ("full+swa+mamba", PoolName.SWA, (0, 1, 2, 3), 0),
    ],
)
def test_a_window_or_a_state_that_one_rank_lacks_is_named_by_its_pool(
    make_replica: MakeReplica, kind: str, pool: PoolName, lost: tuple[int, ...], agreed: int
) -> None:
    replica = make_replica(2, model=KINDS[kind])
    replica.store(TOKENS)
    here, there = replica.ranks
    here.lose(TOKENS, *lost, pool=pool)
    replica.ask("a", TOKENS)
    assert replica.alike(lambda rank: asked(rank, "a").agreed) == agreed
    assert set(lost) <= set(gaps(here, "a")[pool])
    (answer,) = (one for one in asked(here, "a").pools if one.pool is pool)
    assert answer.restorable.mask.bit_length() == agreed
    assert f": {pool.value.upper()} missing here, so that it lets {agreed} pages" in str(
        explain(here, "a")
    )
    # The other rank has all that a load of four pages needs, and does not guess a page.
    assert asked(there, "a").local == 4
    assert asked(there, "a").missing_elsewhere is None
    text = str(explain(there, "a"))
    assert "this rank can restore 4; some other rank cannot, or could not answer" in text
    assert (causes(replica, "a") is HitCause.NOT_STORED) == (agreed == 0)


def test_what_a_pool_lacks_and_does_not_need_is_said_so(make_replica: MakeReplica) -> None:
    replica = make_replica(2, model=KINDS["full+swa"])
    replica.store(TOKENS)
    for rank in replica.ranks:
        rank.lose(TOKENS, 0, pool=PoolName.SWA)
    assert replica.ask("a", TOKENS).host_hit_length == 8
    for rank in replica.ranks:
        assert "page 0: SWA missing here, where it is not needed" in str(explain(rank, "a"))


def test_a_rank_that_could_not_answer_says_why_and_the_others_do_not_guess(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    replica.ranks[1].store.raising.add("contains")
    replica.ask("a", TOKENS)
    assert causes(replica, "a") is HitCause.NOT_STORED
    good, bad = replica.ranks
    assert "or could not answer" in str(explain(good, "a"))
    assert asked(bad, "a").local is None
    assert "this rank could not answer: StorageError" in str(explain(bad, "a"))


def test_a_rank_that_was_late_says_so(make_replica: MakeReplica) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    late = replica.ranks[0]
    late.executor.held = True
    replica.match("a", TOKENS)
    replica.clock.advance(5.0)
    replica.step()
    replica.step()
    late.executor.release()
    replica.match("a", TOKENS)
    assert (asked(late, "a").local, asked(late, "a").error) == (None, "no answer in time")
    assert asked(replica.ranks[1], "a").local == 4


# -- loads that failed -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["staged", "layer-wise"])
def test_a_failed_load_is_told_where_it_failed_and_as_some_other_ranks_elsewhere(
    make_replica: MakeReplica, mode: str
) -> None:
    replica = make_replica(2, settings=LinkerSettings(miss_steps=3))
    replica.store(TOKENS)
    if mode == "staged":
        replica.queue("a", TOKENS)
    else:
        admit(replica, "a", TOKENS)
    replica.ranks[1].lose(TOKENS, 2)
    batches = launch(replica)
    replica.transfer()
    if mode == "staged":
        assert replica.step().failed == ("a",)
    else:
        assert finish(replica, batches).failed == ("a",)
    replica.retire()
    replica.settle()
    (there,) = explain(replica.ranks[0], "a").failures
    (here,) = explain(replica.ranks[1], "a").failures
    assert (there.here, here.here) == (False, True)
    assert "1 of 4 pages of kv are gone" in here.why
    assert there.op == here.op
    assert f"load {here.op} failed" in str(explain(replica.ranks[0], "a"))
    assert "on some other rank" in str(explain(replica.ranks[0], "a"))
    assert "pages of kv are gone" in str(explain(replica.ranks[1], "a"))
    replica.match("a", TOKENS)
    assert causes(replica, "a") is HitCause.FAILED_LATELY
    before = explain(replica.ranks[0], "a").failures[0].age
    for _ in range(3):
        replica.step()
    replica.match("a", TOKENS)
    assert causes(replica, "a") is HitCause.LOAD_FAILED
    assert explain(replica.ranks[0], "a").failures[0].age == before + 3
    assert explain(replica.ranks[0], "a").num_loads == 1


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("refuses", "it was refused"),
        ("raises", "a fault that the test asked for"),
        ("start raises", "a fault that the test asked for"),
        ("deadline", "its deadline passed"),
    ],
)
def test_whatever_failed_here_says_what_it_was(
    make_replica: MakeReplica, fault: str, why: str
) -> None:
    replica = make_replica(2, by_hand=True)
    replica.store(TOKENS)
    replica.ask("a", TOKENS)
    bad = replica.ranks[0].by_hand
    match fault:
        case "refuses":
            bad.refusing.add("load")
        case "raises":
            bad.raising.add("load")
        case "start raises":
            bad.raising.add("start_layer_wise_loading")
        case _:
            pass
    replica.load_back("a", TOKENS)
    replica.start()
    if fault == "deadline":
        replica.clock.advance(30.0)
    assert replica.step().failed == ("a",)
    (failure,) = explain(replica.ranks[0], "a").failures
    assert failure.here
    assert why in failure.why
    replica.settle()


def test_why_it_was_not_loaded_is_kept(make_replica: MakeReplica) -> None:
    replica = make_replica()
    replica.store(TOKENS)
    (rank,) = replica.ranks
    for _ in range(2):
        replica.restore("a", TOKENS)
        for _ in range(257):
            rank.cache.step()
        assert replica.evict() == 8
    replica.match("a", TOKENS)
    answer, _ = ask_for(replica, "a", TOKENS)
    assert isinstance(answer, LoadMiss)
    explanation = explain(rank, "a")
    assert (explanation.num_loads, explanation.load_miss) == (2, answer.reason)
    assert "loaded 2 of at most 2 times" in str(explanation)


def test_to_explain_changes_nothing(make_replica: MakeReplica) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    replica.queue("a", TOKENS)
    for rank in replica.ranks:
        rank.calls.clear()
        calls = list(rank.store.calls)
        digest, wrapper = rank.tree.mutation_digest, rank.cache._wrapper
        assert wrapper is not None
        facts = wrapper._facts()
        assert explain(rank, "a") == explain(rank, "a")
        assert rank.cache.holders() == rank.cache.holders()
        assert (rank.tree.mutation_digest, wrapper._facts()) == (digest, facts)
        assert (rank.calls, rank.store.calls) == ([], calls)
    replica.start()
    assert replica.settle().landed == ("a",)


# -- who holds what --------------------------------------------------------------------------------


def test_holders_name_operations_locks_and_slots(make_replica: MakeReplica) -> None:
    replica = make_replica(2, model=KINDS["full+swa"], settings=LinkerSettings(max_operations=3))
    sequences = [range(100 * n, 100 * n + 8) for n in range(1, 5)]
    for tokens in sequences:
        replica.store(tokens)
    replica.restore("kept", sequences[0])
    waiting = replica.queue("staged", sequences[1])
    running = admit(replica, "running", sequences[2])
    replica.match("asks", sequences[3])
    # Three operations are all that may be: one offload is on its way, the others are due.
    for rank in replica.ranks:
        for store in rank.stores.values():
            store.hanging.add("put")
    forward = [rank.begin(TOKENS) for rank in replica.ranks]
    replica.compute(range(901, 903))
    replica.compute(range(911, 913))
    ages = [one.age for one in replica.ranks[0].cache.holders().operations]
    assert ages[-1] == 0
    for _ in range(2):
        replica.step()
    for rank, computation in zip(replica.ranks, forward, strict=True):
        assert computation is not None
        holders = rank.cache.holders()
        staged, layer_wise, offload = holders.operations
        assert (staged.op, staged.kind) == (waiting.operation_id, OperationKind.STAGED_LOAD)
        assert [one.age for one in holders.operations] == [age + 2 for age in ages]
        assert (staged.request_id, staged.queued) == ("staged", True)
        assert staged.slots == {PoolName.KV: 8, PoolName.SWA: 4}
        assert (layer_wise.kind, layer_wise.request_id) == (
            OperationKind.LAYER_WISE_LOAD,
            "running",
        )
        assert (offload.kind, offload.request_id, offload.queued) == (
            OperationKind.OFFLOAD,
            None,
            False,
        )
        assert {operation.verdict for operation in holders.operations} == {None}
        assert holders.staged == {PoolName.KV: 8, PoolName.SWA: 4}
        assert len(holders.due_offloads) == 1
        held_by = [(lock.op, lock.request_id) for lock in holders.locks]
        assert sorted(held_by, key=str) == sorted(
            [
                (None, "kept"),
                (None, None),
                (staged.op, None),
                (layer_wise.op, None),
                (offload.op, None),
            ],
            key=str,
        )
        (engine,) = (lock for lock in holders.locks if (lock.op, lock.request_id) == (None, None))
        assert engine.receipt_id == computation.receipt.receipt_id
        text = str(holders)
        assert "staged loads hold 8 kv slots, 4 swa slots" in text
        assert f"lock {engine.receipt_id} on node {engine.node_id}: the engine" in text
        assert f"staged load {staged.op} for request staged, queued: agreed pending" in text
        assert "what was restored for request kept" in text
    for rank in replica.ranks:
        for store in rank.stores.values():
            store.gate.set()
    finish(replica, launch(replica))
    running.check_bytes()
    replica.settle()
    replica.retire()


def test_holders_without_a_linker_are_the_engines_locks(make_replica: MakeReplica) -> None:
    replica = make_replica(attach=False)
    (rank,) = replica.ranks
    computation = rank.begin(TOKENS)
    assert computation is not None
    (lock,) = rank.cache.holders().locks
    assert lock.receipt_id == computation.receipt.receipt_id
    assert (lock.op, lock.request_id) == (None, None)
    rank.end(computation)
    assert rank.cache.holders().locks == ()


def test_holders_follow_an_operation_to_its_end(make_replica: MakeReplica) -> None:
    replica = make_replica(2, by_hand=True)
    replica.store(TOKENS)
    operation = replica.queue("a", TOKENS).operation_id
    replica.launch()
    replica.compute(TOKENS[:4])
    replica.ranks[0].by_hand.run(operation)
    replica.ranks[1].by_hand.run(operation)
    for rank in replica.ranks:
        rank.by_hand.run_all()
    assert replica.step().landed == ("a",)
    assert replica.alike(lambda rank: rank.cache.holders().num_retired) == 4
    assert replica.alike(lambda rank: rank.cache.holders().operations) == ()
    replica.retire()
    assert replica.alike(lambda rank: rank.cache.holders().num_retired) == 0
    # One that failed and is not quiesced is there, with both columns.
    replica.release("a")
    replica.evict()
    slow = replica.queue("b", TOKENS).operation_id
    replica.start()
    replica.ranks[0].by_hand.complete(slow, Outcome.FAILED)
    assert replica.step().failed == ("b",)
    for rank, local in zip(replica.ranks, (Outcome.FAILED, None), strict=True):
        (status,) = rank.cache.holders().operations
        assert (status.verdict, status.local) == (Outcome.FAILED, local)
        assert status.quiesced == (rank.rank == 0)
    replica.settle()
