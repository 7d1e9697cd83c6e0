"""Several ranks: what one of them lacks, none of them uses; what one of them breaks, all of them hear."""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import TYPE_CHECKING, cast

import attrs
import pytest

from radixlink_contracts import (
    ExternalMatch,
    InsertParams,
    PageBits,
    PoolName,
    PoolTransferResult,
    RequestId,
    StepReport,
)
from radixlink_contracts.errors import AgreementError, ContractError
from radixlink_linker import LinkerSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.linker.conftest import MakeReplica
    from tests.integration.linker.counting_group import CountingGroup
    from tests.integration.linker.rank import Rank
    from tests.integration.linker.replica import Replica

TOKENS = range(1, 9)
"""Four pages."""

HASTY = LinkerSettings(step_timeout_s=1.0)
several = pytest.mark.parametrize("num_ranks", [2, 4])


def errors(outcomes: list[object]) -> list[AgreementError]:
    """The errors of all ranks, which there must be."""
    found = [outcome for outcome in outcomes if isinstance(outcome, AgreementError)]
    assert len(found) == len(outcomes), outcomes
    return found


def recovers(replica: Replica) -> None:
    """After `reset` by all ranks everything works again."""
    replica.reset()
    replica.store(TOKENS)
    assert replica.restore("anew", TOKENS).landed == ("anew",)
    assert replica.match("anew", TOKENS).device_prefix_len == 8


@several
def test_a_page_lost_on_one_rank_shortens_the_hit_of_all(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks)
    replica.store(TOKENS)
    replica.ranks[1].lose(TOKENS, 2)
    assert replica.ask("a", TOKENS).host_hit_length == 4
    assert replica.restore("a", TOKENS).landed == ("a",)
    assert replica.match("a", TOKENS).device_prefix_len == 4


def test_disjoint_losses_leave_the_common_prefix(make_replica: MakeReplica) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    replica.ranks[0].lose(TOKENS, 3)
    replica.ranks[1].lose(TOKENS, 0)
    assert replica.ask("a", TOKENS).external is ExternalMatch.MISS


@several
def test_a_lookup_that_raises_on_one_rank_is_a_miss_on_all(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks)
    replica.store(TOKENS)
    replica.ranks[1].store.raising.add("contains")
    assert replica.ask("a", TOKENS).external is ExternalMatch.MISS
    counted = [rank.cache.counters.lookup_errors for rank in replica.ranks if rank.cache.counters]
    assert counted == [0, 1, *[0] * (num_ranks - 2)]
    # A miss of one request is no miss of the next.
    replica.ranks[1].store.raising.clear()
    assert replica.ask("b", TOKENS).external is ExternalMatch.HIT


def test_an_answer_of_the_wrong_length_is_a_miss(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = make_replica(2, by_hand=True)
    replica.store(TOKENS)
    linker = replica.ranks[1].by_hand
    lookup = linker.lookup
    monkeypatch.setattr(
        linker,
        "lookup",
        lambda name, transfers: lookup(
            name, [attrs.evolve(transfer, keys=transfer.keys.span(0, 1)) for transfer in transfers]
        ),
    )
    assert replica.ask("a", TOKENS).external is ExternalMatch.MISS


def test_an_answer_about_too_few_pages_of_a_pool_says_so(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = make_replica(2, by_hand=True)
    replica.store(TOKENS)
    answer = PoolTransferResult(
        restorable_prefix_pages=PageBits.all(4), found={PoolName.KV: PageBits.all(3)}
    )
    monkeypatch.setattr(replica.ranks[1].by_hand, "lookup", lambda *_: answer)
    assert replica.ask("a", TOKENS).external is ExternalMatch.MISS
    explained = replica.ranks[1].cache.explain(RequestId("a"))
    assert explained is not None
    assert explained.lookup is not None
    assert explained.lookup.error == "expected an answer for 4 pages, got [3, 4]"


@pytest.mark.parametrize(
    "answer",
    [
        None,
        PoolTransferResult(restorable_prefix_pages=cast("PageBits", [True] * 4)),
        PoolTransferResult(
            restorable_prefix_pages=PageBits.all(4),
            found={PoolName.KV: cast("PageBits", [True] * 4)},
        ),
    ],
)
def test_an_answer_of_another_kind_is_a_miss(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    """Found when it is given: in the next step it would be an error of this rank alone."""
    replica = make_replica(2, by_hand=True)
    replica.store(TOKENS)
    monkeypatch.setattr(replica.ranks[1].by_hand, "lookup", lambda *_: answer)
    assert replica.ask("a", TOKENS).external is ExternalMatch.MISS
    explained = replica.ranks[1].cache.explain(RequestId("a"))
    assert explained is not None
    assert explained.lookup is not None
    assert "expected a PoolTransferResult" in str(explained.lookup.error)


@several
@pytest.mark.parametrize("fault", ["refusing", "raising"])
@pytest.mark.parametrize("start", [False, True])
def test_a_load_that_one_rank_does_not_take_fails_on_all(
    make_replica: MakeReplica, num_ranks: int, fault: str, *, start: bool
) -> None:
    replica = make_replica(num_ranks, by_hand=True)
    replica.store(TOKENS)
    replica.ask("a", TOKENS)
    getattr(replica.ranks[1].by_hand, fault).add("load")
    replica.load_back("a", TOKENS)
    if start:
        replica.start()
    assert replica.settle().failed == ("a",)
    # Nothing of it is left although the request is still there.
    for rank in replica.ranks:
        rank.check_idle()
        assert rank.allocator.in_use == set()
        assert rank.by_hand.queued == rank.by_hand.started == ()
    assert replica.match("a", TOKENS).external is ExternalMatch.MISS


@several
def test_a_page_lost_between_lookup_and_load_fails_on_all(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks)
    replica.store(TOKENS)
    replica.queue("a", TOKENS)
    replica.ranks[-1].lose(TOKENS, 1)
    replica.start()
    assert replica.settle().failed == ("a",)
    assert [rank.device_pages(TOKENS) for rank in replica.ranks] == [0] * num_ranks
    assert replica.match("a", TOKENS).external is ExternalMatch.MISS
    # One attempt, then a miss for everybody, and nothing was poisoned: it is computed.
    assert replica.match("b", TOKENS).external is ExternalMatch.MISS
    replica.compute(TOKENS)


def test_a_start_that_raises_on_one_rank_fails_on_all(make_replica: MakeReplica) -> None:
    replica = make_replica(2, by_hand=True)
    replica.store(TOKENS)
    replica.queue("a", TOKENS)
    replica.ranks[0].by_hand.raising.add("start_layer_wise_loading")
    replica.start()
    assert replica.settle().failed == ("a",)


def test_no_slot_goes_back_before_the_slowest_rank_is_quiesced(make_replica: MakeReplica) -> None:
    replica = make_replica(2, by_hand=True)
    replica.store(TOKENS)
    operation = replica.queue("a", TOKENS).operation_id
    replica.start()
    replica.ranks[0].lose(TOKENS, 0)
    replica.ranks[0].by_hand.run(operation)
    assert replica.step().failed == ("a",)
    for _ in range(10):
        assert replica.step() == StepReport()
    assert [len(rank.allocator.in_use) for rank in replica.ranks] == [8, 8]
    # The slower one asks, learns that it is decided, and writes nothing.
    replica.ranks[1].by_hand.run(operation)
    assert replica.step() == StepReport()
    assert [len(rank.allocator.in_use) for rank in replica.ranks] == [0, 0]


def test_slots_of_a_rank_that_never_lets_go_are_not_handed_out(make_replica: MakeReplica) -> None:
    replica = make_replica(
        2, by_hand=True, settings=LinkerSettings(write_off_steps=5, written_off_percent=100)
    )
    replica.store(TOKENS)
    operation = replica.queue("a", TOKENS).operation_id
    replica.start()
    replica.clock.advance(30.0)
    for rank in replica.ranks:
        rank.by_hand.raising.add("pop_completed_load")
    assert replica.step().failed == ("a",)
    for _ in range(5):
        replica.step()
    assert replica.ranks[0].cache.num_outstanding == 0
    assert [len(rank.allocator.in_use) for rank in replica.ranks] == [8, 8]
    replica.evict()
    counters = replica.ranks[1].cache.counters
    assert counters is not None
    assert counters.slots_written_off == 8
    for rank in replica.ranks:
        rank.by_hand.raising.clear()
        rank.by_hand.run(operation)
    replica.compute(TOKENS)
    replica.settle()
    assert counters.late_completions == 1
    replica.reset()
    assert [len(rank.allocator.in_use) for rank in replica.ranks] == [0, 0]


@several
def test_an_offload_that_one_rank_fails_is_stored_on_none(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks)
    replica.ranks[1].store.raising.add("put")
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_failed == 1
    for rank in replica.ranks:
        assert not any(node.stored for node in rank.nodes())
    replica.ranks[1].store.raising.clear()
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_stored == 1


# -- the ranks do not do the same ------------------------------------------------------------------


@several
def test_a_rank_that_does_not_step_is_named_in_time(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, settings=HASTY)
    replica.compute(TOKENS)
    started = time.monotonic()
    outcomes = replica.outcomes(lambda rank: rank.cache.step() if rank.rank != 1 else StepReport())
    assert time.monotonic() - started < 2
    absent = outcomes.pop(1)
    assert absent == StepReport()
    for error in errors(outcomes):
        assert "no answer" in error.by_rank[1]
        assert all("no answer" not in error.by_rank[rank] for rank in range(num_ranks) if rank != 1)
    # The late one hears of it when it comes.
    assert isinstance(replica.outcomes(lambda rank: rank.cache.step())[1], AgreementError)
    # Then every call that would change something fails at once, and the message says why.
    rank = replica.ranks[0]
    for call in (
        rank.cache.step,
        rank.cache.ready_to_load_host_cache,
        partial(rank.match, "a", TOKENS),
        partial(rank.load_back, "a", TOKENS),
        partial(rank.compute, range(11, 19)),
    ):
        with pytest.raises(AgreementError, match="rank 1"):
            call()
    recovers(replica)


def interrupted_behind(
    monkeypatch: pytest.MonkeyPatch, group: CountingGroup, call: str, after: int = 1
) -> None:
    """Have a signal's exception come when a collective of one rank has ended, the last of some."""
    method = getattr(group, call)
    calls = itertools.count(1)

    def interrupted(*args: object) -> object:
        result = method(*args)
        if next(calls) == after:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(group, call, interrupted)


def test_a_rank_that_left_a_step_in_its_middle_goes_on_behind_a_reset_only(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have carried out a frame of which it knows nothing: it must not guess."""
    replica = make_replica(2, settings=HASTY)
    replica.store(TOKENS)
    assert replica.match("a", TOKENS).external is ExternalMatch.UNKNOWN

    def step(rank: Rank) -> object:
        try:
            return rank.cache.step()
        except KeyboardInterrupt:
            return "left"

    with monkeypatch.context() as patched:
        interrupted_behind(patched, replica.ranks[0].group, "all_and")
        assert replica.together(step)[0] == "left"
    left, other = replica.ranks
    with pytest.raises(AgreementError, match="left step by KeyboardInterrupt") as caught:
        left.match("a", TOKENS)
    assert caught.value.by_rank == {0: "left step by KeyboardInterrupt()"}
    # The other one names who does not come, in time.
    assert other.match("b", TOKENS).external is ExternalMatch.UNKNOWN
    first, second = errors(replica.outcomes(lambda rank: rank.cache.step()))
    assert "left step" in str(first)
    assert second.by_rank[0] == "no answer"
    recovers(replica)


@pytest.mark.parametrize("call", ["step", "load_back"])
def test_one_rank_too_goes_on_behind_a_reset_only(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """What the call had not done yet, nobody would ever do: a request would wait without an end."""
    replica = make_replica(by_hand=True)
    replica.store(TOKENS)
    (rank,) = replica.ranks
    ask: Callable[[], object]

    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    if call == "step":
        replica.queue("a", TOKENS)
        replica.start()
        method, ask = "num_completed_loads", rank.cache.step
    else:
        assert replica.ask("a", TOKENS).external is ExternalMatch.HIT
        method, ask = "load", partial(rank.load_back, "a", TOKENS)
    with monkeypatch.context() as patched:
        patched.setattr(rank.linker, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            ask()
    for later in (
        rank.cache.step,
        partial(rank.match, "a", TOKENS),
        partial(rank.load_back, "a", TOKENS),
        rank.cache.ready_to_load_host_cache,
    ):
        with pytest.raises(AgreementError, match=f"left {call} by KeyboardInterrupt"):
            later()
    recovers(replica)


def test_a_rank_that_left_the_attach_leaves_its_tree_as_it_was(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = make_replica(2, settings=HASTY, attach=False)

    def attach(rank: Rank) -> object:
        try:
            return rank.cache.init_cache_linker(rank.linker)
        except KeyboardInterrupt:
            return "left"

    with monkeypatch.context() as patched:
        # The second is by which the ranks tell that they could.
        interrupted_behind(patched, replica.ranks[0].group, "all_gather", after=2)
        assert replica.together(attach) == ["left", None]
    replica.together(lambda rank: rank.cache.detach())
    replica.reset()
    replica.attach()
    recovers(replica)


@several
def test_a_rank_that_steps_once_more_is_an_error_on_all(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, settings=HASTY)
    replica.ranks[0].cache.step()
    replica.compute(TOKENS)
    errors(replica.outcomes(lambda rank: rank.cache.step()))
    recovers(replica)


@several
def test_a_diverging_insert_is_an_error_on_all_in_the_same_frame(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, settings=HASTY)
    replica.compute(TOKENS)
    replica.ranks[-1].compute(range(11, 15))
    before = [rank.calls.count("all_and") for rank in replica.ranks]
    found = errors(replica.outcomes(lambda rank: rank.cache.step()))
    assert [rank.calls.count("all_and") for rank in replica.ranks] == [n + 1 for n in before]
    for error in found:
        assert set(error.by_rank) == set(range(num_ranks))
        assert error.by_rank[0] != error.by_rank[num_ranks - 1]
    replica.reset()


def test_a_diverging_insert_is_noticed_by_the_heartbeat_or_the_deadline(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(2, settings=attrs.evolve(HASTY, heartbeat_steps=4))
    # Only this rank believes that something is outstanding: it waits for the others' heartbeat.
    replica.ranks[1].compute(TOKENS)

    def steps(num_steps: int) -> list[object]:
        return replica.outcomes(lambda rank: [rank.cache.step() for _ in range(num_steps)][-1])

    errors(steps(8))
    replica.reset()


def test_a_diverging_eviction_is_an_error_on_all(make_replica: MakeReplica) -> None:
    replica = make_replica(2, settings=HASTY)
    replica.compute(TOKENS)
    replica.settle()
    replica.ranks[0].evict(2)
    replica.compute(range(11, 15))
    errors(replica.outcomes(lambda rank: rank.cache.step()))
    replica.reset()


def test_an_abort_on_one_rank_only_is_an_error_on_all(make_replica: MakeReplica) -> None:
    replica = make_replica(2, settings=HASTY)
    replica.compute(TOKENS)
    replica.match("a", range(11, 15))
    replica.ranks[1].cache.release_aborted_request(RequestId("a"))
    errors(replica.outcomes(lambda rank: rank.cache.step()))
    recovers(replica)


def test_inserts_of_unlike_tokens_are_an_error_on_all(make_replica: MakeReplica) -> None:
    replica = make_replica(2, settings=HASTY)
    for rank, tokens in zip(replica.ranks, (range(1, 9), range(2, 10)), strict=True):
        rank.compute(tokens)
    errors(replica.outcomes(lambda rank: rank.cache.step()))
    replica.reset()


def test_reset_recovers_from_trees_that_differed(make_replica: MakeReplica) -> None:
    replica = make_replica(2, settings=HASTY)
    replica.compute(TOKENS)
    replica.ranks[1].compute(range(11, 15))
    errors(replica.outcomes(lambda rank: rank.cache.step()))
    recovers(replica)


# -- attaching -------------------------------------------------------------------------------------


def test_unlike_settings_are_refused_on_all_ranks(make_replica: MakeReplica) -> None:
    replica = make_replica(2, attach=False)
    replica.ranks[0].cache._settings = LinkerSettings(max_loads=3)
    found = errors(replica.outcomes(lambda rank: rank.cache.init_cache_linker(rank.linker)))
    assert "max_loads=3" in found[1].by_rank[0]
    for rank in replica.ranks:
        assert rank.cache.counters is None
        assert rank.tree._offloads.threshold is None
    replica.ranks[0].cache._settings = replica.ranks[1].cache._settings
    replica.attach()
    recovers(replica)


@pytest.mark.parametrize("lacking", [{0}, {0, 1}])
def test_a_linker_without_the_pool_is_refused_on_all_ranks(
    make_replica: MakeReplica, lacking: set[int]
) -> None:
    replica = make_replica(2, attach=False, by_hand=True)
    for number in lacking:
        replica.ranks[number].by_hand._pools.clear()
    outcomes = replica.outcomes(lambda rank: rank.cache.init_cache_linker(rank.linker))
    assert all(isinstance(error, AgreementError | ContractError) for error in outcomes), outcomes
    for rank in replica.ranks:
        assert rank.cache.counters is None
        assert rank.tree._offloads.threshold is None


@pytest.mark.parametrize("having", [{0}, {0, 1}])
def test_a_linker_with_a_pool_that_the_tree_lacks_is_refused_on_all_ranks(
    make_replica: MakeReplica, having: set[int]
) -> None:
    replica = make_replica(2, attach=False, by_hand=True)
    for number in having:
        pools = replica.ranks[number].by_hand._pools
        pools[PoolName.SWA] = pools[PoolName.KV]
    outcomes = replica.outcomes(lambda rank: rank.cache.init_cache_linker(rank.linker))
    assert all(isinstance(error, AgreementError | ContractError) for error in outcomes), outcomes
    for rank in replica.ranks:
        assert rank.cache.counters is None
        assert rank.tree._offloads.threshold is None


# -- collectives -----------------------------------------------------------------------------------


def test_one_rank_enters_no_collective(make_replica: MakeReplica) -> None:
    replica = make_replica(1)
    replica.store(TOKENS)
    replica.restore("a", TOKENS)
    replica.reset()
    assert [call for call in replica.ranks[0].calls if call != "renew"] == []


def test_a_step_enters_one_collective_and_an_idle_one_only_every_64th(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(2)
    calls = [rank.calls for rank in replica.ranks]
    assert calls == [["all_gather"] * 2] * 2
    for call in calls:
        call.clear()
    for _ in range(64 * 3):
        replica.step()
    assert calls == [["all_and"] * 3] * 2
    for call in calls:
        call.clear()
    # However much is outstanding.
    for request in range(20):
        replica.match(f"{request}", range(100 * request, 100 * request + 50))
    replica.compute(TOKENS)
    replica.compute(range(11, 19))
    before = replica.ranks[0].cache.num_outstanding
    assert before == 22
    replica.step()
    replica.step()
    assert calls == [["all_and"] * 2] * 2
    replica.match("other", TOKENS)
    replica.load_back("other", TOKENS)
    assert calls == [["all_and"] * 2] * 2


def test_without_a_linker_nothing_is_hashed_or_exchanged(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> bytes:
        raise AssertionError(args)

    monkeypatch.setattr("radixlink_tree._chain.hash_pages", refuse)
    monkeypatch.setattr("radixlink_linker._frame.blake2b", refuse)
    replica = make_replica(2, attach=False)
    for rank in replica.ranks:
        for tokens in (TOKENS, [*TOKENS, 9, 10], TOKENS[:4]):
            assert rank.match("a", tokens).external is ExternalMatch.NOT_ASKED
            rank.compute(tokens)
            rank.cache.ready_to_load_host_cache()
            rank.cache.batch_retired(1)
            assert rank.cache.step() == StepReport()
        assert all(node.marks is None for node in rank.tree._nodes.values())
        assert rank.tree.mutation_digest == 0
        rank.cache.release_aborted_request(RequestId("a"))
        rank.evict()
        rank.cache.reset()
        rank.cache.detach()
        assert rank.calls == []
        assert rank.store.calls == []


def test_many_requests_and_operations_take_turns_in_frames(make_replica: MakeReplica) -> None:
    settings = LinkerSettings(
        max_operations=2, max_lookups=3, frame_words=8, staged_percent=100, backup_threshold=2
    )
    replica = make_replica(2, settings=settings, num_pages=64)
    sequences = [range(100 * n, 100 * n + 4) for n in range(1, 11)]
    # Used once: not offered yet. Then two at a time; what is over the cap waits for its next use.
    for tokens in sequences:
        replica.compute(tokens)
    for _ in range(5):
        for tokens in sequences:
            replica.compute(tokens)
        replica.settle()
    assert all(rank.stored_pages(tokens) == 2 for rank in replica.ranks for tokens in sequences)
    replica.evict()
    for n, tokens in enumerate(sequences):
        replica.match(str(n), tokens)
    assert sorted(replica.settle().ready) == sorted(str(n) for n in range(10))
    for n, tokens in enumerate(sequences):
        assert replica.match(str(n), tokens).host_hit_length == 4
        replica.load_back(str(n), tokens)
    replica.start()
    assert sorted(replica.settle().landed) == sorted(str(n) for n in range(10))
    assert all(rank.device_pages(tokens) == 2 for rank in replica.ranks for tokens in sequences)


def test_a_contract_error_of_one_call_leaves_the_replica_usable(make_replica: MakeReplica) -> None:
    replica = make_replica(2)
    for rank in replica.ranks:
        computation = rank.begin(TOKENS)
        assert computation is not None
        with pytest.raises(ContractError):
            rank.cache.insert(InsertParams(key=computation.key, value=computation.value[:4]))
        rank.end(computation)
    assert replica.settle().num_offloads_stored == 1
