"""Layer-wise loads: admitted at once, decided behind the launch, one failure for one request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.integration.linker.layer_wise import (
    RunningRequest,
    admit,
    ask_for,
    finish,
    launch,
)
from tests.integration.linker.models import FULL, FULL_MAMBA, FULL_SWA, FULL_SWA_MAMBA, Model
from tests.integration.linker.sequences import key_of

from radixlink_contracts import (
    ExternalMatch,
    LoadAdmitted,
    LoadMiss,
    LoadMode,
    LoadWaiting,
    MatchPrefixParams,
    RequestId,
    StepReport,
)
from radixlink_contracts.errors import StorageError
from radixlink_linker import DeviceSlots, LinkerSettings, StoreLinker
from radixlink_tree import UnifiedTreeCore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.linker.conftest import MakeReplica
    from tests.integration.linker.rank import Rank
    from tests.integration.linker.replica import Replica

    from radixlink_contracts import BatchIndex

TOKENS = range(1, 9)
"""Four pages."""
OTHER = range(101, 109)

several = pytest.mark.parametrize("num_ranks", [1, 2, 4])
with_windows_too = pytest.mark.parametrize("model", [FULL, FULL_SWA], ids=["full", "full+swa"])


def of_store(rank: Rank) -> StoreLinker:
    assert isinstance(rank.linker, StoreLinker)
    return rank.linker


def forgotten(replica: Replica) -> bool:
    """No rank's linker or layer counter keeps anything of a batch."""
    return not any(
        of_store(rank)._started or of_store(rank)._counter._batches for rank in replica.ranks
    )


def never_in_time(rank: Rank) -> None:
    """The deadline of a batch is over as soon as it begins."""
    of_store(rank)._counter._timeout_s = 0.0  # type: ignore[misc]


def clear_calls(replica: Replica) -> None:
    for rank in replica.ranks:
        rank.calls.clear()


def calls(replica: Replica) -> list[str]:
    return replica.alike(lambda rank: list(rank.calls))


def in_use(replica: Replica) -> int:
    return replica.alike(lambda rank: len(rank.device.full.in_use))


# -- it lands --------------------------------------------------------------------------------------


@several
@with_windows_too
def test_an_admitted_request_has_its_slots_at_once_and_lands_behind_the_launch(
    make_replica: MakeReplica, num_ranks: int, model: Model
) -> None:
    replica = make_replica(num_ranks, model=model)
    replica.store(TOKENS)
    running = admit(replica, "a", TOKENS)
    assert running.times_told == 1
    assert [start for request in running.of_rank for start, _ in request.told] == [0] * num_ranks
    # Nobody else can name them before the verdict.
    assert replica.alike(lambda rank: rank.device_pages(TOKENS)) == 0
    batches = launch(replica)
    assert replica.match("a", TOKENS).external is ExternalMatch.UNKNOWN
    assert finish(replica, batches) == StepReport(landed=(RequestId("a"),))
    running.check_bytes()
    # It was told once: the tree took the very slots.
    assert running.times_told == 1
    for rank in replica.ranks:
        path = rank.tree.path_indices(rank.nodes()[-1].node_id)
        assert torch.equal(path, running.slots(rank))
    hit = replica.match("a", TOKENS)
    assert (hit.external, hit.device_prefix_len) == (ExternalMatch.NOT_ASKED, 8)
    # Kept for it until it locks them or goes.
    assert replica.evict() == 0
    replica.retire()
    replica.release("a")
    assert replica.evict() == 8
    assert forgotten(replica)


def test_only_the_tail_is_brought_and_the_request_told_from_there(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    replica.compute(TOKENS[:4])
    replica.settle()
    running = admit(replica, "a", TOKENS)
    assert [start for request in running.of_rank for start, _ in request.told] == [4, 4]
    assert finish(replica, launch(replica)).landed == ("a",)
    running.check_bytes()
    replica.retire()


@several
def test_pages_that_the_tree_had_by_then_are_told_again_and_kept_once(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks)
    replica.store(TOKENS)
    running = admit(replica, "a", TOKENS)
    batches = launch(replica)
    # Another insert of three of the four pages, between start and verdict.
    replica.compute(TOKENS[:6])
    before = [running.slots(rank) for rank in replica.ranks]
    assert finish(replica, batches).landed == ("a",)
    assert running.times_told == 2
    for rank, own in zip(replica.ranks, before, strict=True):
        start, slots = running.of_rank[rank.rank].told[-1]
        device = rank.tree.match(MatchPrefixParams(key=key_of(TOKENS)))
        assert start == 0
        assert torch.equal(slots, rank.tree.path_indices(device.last_device_node))
        assert not set(slots[:6].tolist()) & set(own.tolist())
        assert torch.equal(slots[6:], own[6:])
    running.check_bytes()
    # What nobody took may be read by the forward that runs: it goes back when that was processed.
    assert [rank.slots.num_retired for rank in replica.ranks] == [6] * num_ranks
    replica.settle()
    assert in_use(replica) == 14
    replica.retire()
    assert in_use(replica) == 8


def test_commit_inserts_then_tells_the_request_then_moves_its_lock_then_retires(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = make_replica()
    replica.store(TOKENS)
    running = admit(replica, "a", TOKENS)
    batches = launch(replica)
    replica.compute(TOKENS[:6])
    order: list[str] = []
    for owner, name in (
        (UnifiedTreeCore, "insert"),
        (RunningRequest, "repoint"),
        (UnifiedTreeCore, "inc_lock_ref"),
        (UnifiedTreeCore, "dec_lock_ref"),
        (DeviceSlots, "retire_action"),
    ):
        monkeypatch.setattr(owner, name, noted(order, name, getattr(owner, name)))
    assert finish(replica, batches).landed == ("a",)
    # The second lock is the one that keeps what was restored until the request matches.
    assert order == [
        *("insert", "repoint", "inc_lock_ref", "dec_lock_ref", "inc_lock_ref"),
        *("retire_action", "dec_lock_ref"),
    ]
    assert running.times_told == 2
    replica.settle()
    replica.retire()


def noted(order: list[str], name: str, call: Callable[..., object]) -> Callable[..., object]:
    """A call that notes its name first."""

    def wrapped(*args: object, **kwargs: object) -> object:
        order.append(name)
        return call(*args, **kwargs)

    return wrapped


def test_windows_that_the_tree_lacks_are_taken_over_by_its_own_pages(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(2, model=FULL_SWA)
    replica.store(TOKENS)
    running = admit(replica, "a", TOKENS)
    batches = launch(replica)
    # By then the tree has all full pages, without the window that a request would need.
    replica.alike(lambda rank: rank.compute([*TOKENS, *range(9, 17)], slide=True))
    assert replica.alike(lambda rank: rank.device_pages(TOKENS)) == 0
    assert finish(replica, batches).landed == ("a",)
    assert running.times_told == 2
    running.check_bytes()
    assert replica.match("a", TOKENS).device_prefix_len == 8
    replica.settle()
    replica.retire()
    assert in_use(replica) == 16


def test_of_a_window_the_last_is_there_and_no_other(make_replica: MakeReplica) -> None:
    replica = make_replica(model=FULL_SWA)
    replica.store(TOKENS)
    running = admit(replica, "a", TOKENS)
    (rank,) = replica.ranks
    assert rank.device.pair is not None
    partners = rank.device.pair.swa_indices(running.slots(rank))
    # Three tokens of window are two pages of four.
    assert (partners[:4] == -1).all()
    assert (partners[4:] >= 0).all()
    assert finish(replica, launch(replica)).landed == ("a",)
    replica.retire()


@pytest.mark.parametrize("fails", [False, True])
def test_pages_of_the_tree_that_a_load_lends_stay_until_the_batch_is_processed(
    make_replica: MakeReplica, *, fails: bool
) -> None:
    """The tree has the first pages without a window: no lock of the request's own keeps them."""
    replica = make_replica(2, model=FULL_SWA)
    replica.store(TOKENS)
    replica.compute(TOKENS[:4])
    replica.compute([*TOKENS[:4], 91, 92])
    replica.settle()
    replica.evict_windows()
    assert replica.alike(lambda rank: rank.device_pages(TOKENS)) == 0
    running = admit(replica, "a", TOKENS)
    assert [start for request in running.of_rank for start, _ in request.told] == [0, 0]
    batches = launch(replica)
    if fails:
        replica.ranks[-1].store.raising.add("read")
    report = finish(replica, batches)
    assert (report.landed, report.failed) == (((), ("a",)) if fails else (("a",), ()))
    replica.ranks[-1].store.raising.clear()
    replica.release("a")
    replica.settle()
    replica.evict()
    replica.retire()
    assert replica.evict() == (4 if fails else 8)


def test_staged_and_layer_wise_loads_of_one_start_are_each_decided_in_their_frame(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    replica.store(OTHER)
    replica.queue("staged", OTHER)
    admit(replica, "a", TOKENS)
    batches = launch(replica)
    replica.transfer()
    assert finish(replica, batches).landed == ("a",)
    assert replica.step().landed == ("staged",)
    replica.retire()


# -- it fails --------------------------------------------------------------------------------------

FAULTS = ["lost", "read raises", "open raises", "refused", "load raises", "start raises"]


def break_load(rank: Rank, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next load on a rank does not come through."""

    def raising(*args: object) -> bool:
        raise StorageError("a fault that the test asked for")

    match fault:
        case "lost":
            rank.lose(TOKENS, 2)
        case "read raises":
            rank.store.raising.add("read")
        case "open raises":
            rank.store.raising.add("open")
        case "refused":
            monkeypatch.setattr(rank.linker, "load", lambda *args: False)
        case "load raises":
            monkeypatch.setattr(rank.linker, "load", raising)
        case _:
            monkeypatch.setattr(rank.linker, "start_layer_wise_loading", raising)


@several
@pytest.mark.parametrize("fault", FAULTS)
def test_what_one_rank_lacks_fails_on_all(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch, num_ranks: int, fault: str
) -> None:
    replica = make_replica(num_ranks)
    replica.store(TOKENS)
    replica.ask("a", TOKENS)
    bad = replica.ranks[-1]
    break_load(bad, fault, monkeypatch)
    # It is admitted on all ranks: a refusal is a verdict, not another branch.
    answer, running = ask_for(replica, "a", TOKENS)
    assert isinstance(answer, LoadAdmitted)
    assert running.times_told == 1
    batches = launch(replica)
    assert (batches[-1] is None) == (fault in {"refused", "load raises", "start raises"})
    assert finish(replica, batches) == StepReport(failed=(RequestId("a"),))
    monkeypatch.undo()
    bad.store.raising.clear()
    # The forward that runs may read them still.
    replica.settle()
    assert in_use(replica) == 8
    replica.retire()
    assert in_use(replica) == 0
    assert replica.alike(lambda rank: rank.device_pages(TOKENS)) == 0
    assert running.times_told == 1
    # It is run again without the store, and ends.
    assert replica.match("a", TOKENS).external is ExternalMatch.MISS
    assert isinstance(ask_for(replica, "a", TOKENS)[0], LoadMiss)
    assert replica.compute(TOKENS)
    assert replica.settle().num_offloads_failed == 0
    assert forgotten(replica)


def test_after_a_failure_the_request_asks_no_more_and_others_do_later(
    make_replica: MakeReplica,
) -> None:
    settings = LinkerSettings(miss_steps=4)
    replica = make_replica(2, settings=settings)
    replica.store(TOKENS)
    admit(replica, "a", TOKENS)
    replica.ranks[1].store.raising.add("read")
    assert finish(replica, launch(replica)).failed == ("a",)
    replica.retire()
    replica.ranks[1].store.raising.clear()
    assert replica.match("b", TOKENS).external is ExternalMatch.MISS
    for _ in range(5):
        replica.step()
    assert replica.match("a", TOKENS).external is ExternalMatch.MISS
    assert replica.ask("b", TOKENS).external is ExternalMatch.HIT


@several
def test_one_failure_is_one_requests_and_the_others_of_the_batch_land(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks)
    sequences = [range(100 * n, 100 * n + 4) for n in range(1, 5)]
    for tokens in sequences:
        replica.store(tokens)
    running = [admit(replica, str(n), tokens) for n, tokens in enumerate(sequences)]
    replica.ranks[0].lose(sequences[1], 1)
    replica.ranks[-1].lose(sequences[3], 0)
    assert finish(replica, launch(replica)) == StepReport(
        landed=(RequestId("0"), RequestId("2")), failed=(RequestId("1"), RequestId("3"))
    )
    for n in (0, 2):
        running[n].check_bytes()
    replica.retire()
    assert in_use(replica) == 8


def test_what_is_missing_when_the_launch_is_over_has_failed(make_replica: MakeReplica) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    admit(replica, "a", TOKENS)
    slow = replica.ranks[1]
    slow.store.hanging.add("read")
    never_in_time(slow)
    batches = launch(replica)
    assert slow.store.waiting.wait(10)
    assert finish(replica, batches).failed == ("a",)
    # No copy runs, so the slots are let go in the next step although the store hangs.
    assert replica.alike(lambda rank: rank.cache.num_outstanding) == 1
    replica.step()
    assert replica.alike(lambda rank: rank.cache.num_outstanding) == 0
    replica.retire()
    assert in_use(replica) == 0
    # A late writer: the slots are somebody else's by then.
    assert replica.compute(OTHER)
    slow.store.gate.set()
    slow.transfer()
    replica.check()
    counters = slow.cache.counters
    assert counters is not None
    assert (counters.loads_failed, counters.slots_written_off) == (1, 0)


def test_a_load_that_is_never_started_fails_by_its_deadline(make_replica: MakeReplica) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    running = admit(replica, "a", TOKENS)
    assert replica.step() == StepReport()
    replica.clock.advance(30.0)
    assert replica.step().failed == ("a",)
    replica.step()
    assert in_use(replica) == 0
    assert launch(replica) == [None, None]
    assert finish(replica, [None, None]) == StepReport()
    assert running.times_told == 1
    replica.retire()


# -- a step comes first ----------------------------------------------------------------------------


@several
def test_a_step_before_the_finish_may_tell_the_verdict(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks)
    replica.store(TOKENS)
    running = admit(replica, "a", TOKENS)
    batches = launch(replica)
    replica.transfer()
    assert replica.step().landed == ("a",)
    clear_calls(replica)
    assert finish(replica, batches) == StepReport()
    assert calls(replica) == []
    running.check_bytes()
    assert forgotten(replica)
    replica.retire()


def test_a_step_before_the_finish_does_not_take_late_layers_for_landed(
    make_replica: MakeReplica,
) -> None:
    """The forward went on without them, whatever came later: the load has failed, for every caller."""
    replica = make_replica(2)
    replica.store(TOKENS)
    admit(replica, "a", TOKENS)
    slow = replica.ranks[0]
    never_in_time(slow)
    slow.store.hanging.add("read")
    batches = launch(replica)
    assert slow.store.waiting.wait(10)
    counter = of_store(slow)._counter
    counter.set_consumer(batches[0])
    counter.wait_until(0)
    slow.store.gate.set()
    replica.transfer()
    assert replica.step().failed == ("a",)
    assert finish(replica, batches) == StepReport()
    assert forgotten(replica)
    replica.retire()
    assert in_use(replica) == 0


def test_a_failure_that_a_step_told_is_not_waited_for(make_replica: MakeReplica) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    admit(replica, "a", TOKENS)
    good, bad = replica.ranks
    bad.store.raising.add("read")
    good.store.hanging.add("read")
    # Nobody is to wait for this: the deadline is beyond any test's.
    of_store(good)._counter._timeout_s = 1e6  # type: ignore[misc]
    batches = launch(replica)
    assert good.store.waiting.wait(10)
    bad.transfer()
    assert replica.step().failed == ("a",)
    assert finish(replica, batches) == StepReport()
    assert forgotten(replica)
    replica.step()
    replica.retire()
    assert in_use(replica) == 0
    good.store.gate.set()


def test_a_step_that_comes_first_leaves_what_is_pending_to_the_finish(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    admit(replica, "a", TOKENS)
    slow = replica.ranks[0]
    slow.store.hanging.add("read")
    batches = launch(replica)
    assert slow.store.waiting.wait(10)
    assert replica.step() == StepReport()
    slow.store.gate.set()
    assert finish(replica, batches).landed == ("a",)
    replica.retire()


# -- collectives -----------------------------------------------------------------------------------


def test_an_iteration_has_two_collectives_with_layer_wise_loads_and_one_without(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(2, num_pages=128)
    sequences = [range(100 * n, 100 * n + 4) for n in range(1, 21)]
    for tokens in sequences:
        replica.store(tokens)
    for n, tokens in enumerate(sequences[:10]):
        replica.ask(str(n), tokens)
    clear_calls(replica)
    for n, tokens in enumerate(sequences[:10]):
        assert isinstance(ask_for(replica, str(n), tokens)[0], LoadAdmitted)
    for n, tokens in enumerate(sequences[10:]):
        replica.match(f"probe {n}", tokens)
    replica.compute(OTHER)
    assert calls(replica) == []
    replica.step()
    assert calls(replica) == ["all_and"]
    batches = launch(replica)
    assert calls(replica) == ["all_and"]
    assert len(finish(replica, batches).landed) == 10
    assert calls(replica) == ["all_and"] * 2
    # Without a layer-wise load in the batch the launch has none.
    clear_calls(replica)
    replica.retire()
    assert finish(replica, launch(replica)) == StepReport()
    assert calls(replica) == []
    replica.retire()


def test_a_cancelled_load_asks_for_no_frame_of_the_launch(make_replica: MakeReplica) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    admit(replica, "a", TOKENS)
    replica.release("a")
    clear_calls(replica)
    assert launch(replica) == [None, None]
    assert finish(replica, [None, None]) == StepReport()
    assert calls(replica) == []
    replica.step()
    assert calls(replica) == ["all_and"]
    replica.retire()
    assert in_use(replica) == 0


def test_one_rank_enters_no_collective(make_replica: MakeReplica) -> None:
    replica = make_replica(1)
    replica.store(TOKENS)
    admit(replica, "a", TOKENS)
    assert finish(replica, launch(replica)).landed == ("a",)
    replica.retire()
    assert calls(replica) == []


def test_without_a_linker_there_is_nothing_to_finish(make_replica: MakeReplica) -> None:
    replica = make_replica(2, attach=False)
    answer, running = ask_for(replica, "a", TOKENS)
    assert isinstance(answer, LoadMiss)
    assert running.times_told == 0
    assert finish(replica, launch(replica)) == StepReport()
    assert calls(replica) == []
    replica.retire()


# -- aborts and waiters ----------------------------------------------------------------------------


@several
@pytest.mark.parametrize("state", ["queued", "started", "ended", "decided", "processed"])
def test_an_abort_leaves_nothing_behind_and_may_come_twice(
    make_replica: MakeReplica, num_ranks: int, state: str
) -> None:
    replica = make_replica(num_ranks)
    replica.store(TOKENS)
    running = admit(replica, "a", TOKENS)
    batches = None
    if state != "queued":
        batches = launch(replica)
    if state == "ended":
        replica.transfer()
    if state in {"decided", "processed"}:
        assert batches is not None
        assert finish(replica, batches).landed == ("a",)
    if state == "processed":
        replica.retire()
    for _ in range(2):
        replica.release("a")
        replica.check()
    if batches is None:
        batches = launch(replica)
        assert batches == [None] * num_ranks
    if state not in {"decided", "processed"}:
        # Nobody is told; what was started is decided like any other.
        assert finish(replica, batches) == StepReport()
    replica.settle()
    if state != "processed":
        replica.retire()
    assert running.times_told == 1
    expected = 0 if state == "queued" else 8
    assert in_use(replica) == expected
    assert replica.evict() == expected
    for rank in replica.ranks:
        rank.check_idle()


def test_an_abort_between_start_and_verdict_is_not_told_of_other_slots(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    running = admit(replica, "a", TOKENS)
    batches = launch(replica)
    replica.compute(TOKENS[:6])
    replica.release("a")
    assert finish(replica, batches) == StepReport()
    assert running.times_told == 1
    replica.settle()
    replica.retire()
    assert in_use(replica) == 8


@pytest.mark.parametrize("failing", [False, True])
def test_another_request_waits_for_a_layer_wise_load_and_is_told(
    make_replica: MakeReplica, *, failing: bool
) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    admit(replica, "a", TOKENS)
    waiting = replica.match("b", TOKENS)
    assert waiting.external is ExternalMatch.UNKNOWN
    assert waiting.waiting_on == replica.match("a", TOKENS).waiting_on
    if failing:
        replica.ranks[0].store.raising.add("read")
    report = finish(replica, launch(replica))
    told = (RequestId("a"),)
    assert (report.landed, report.failed, report.ready) == (
        () if failing else told,
        told if failing else (),
        ("b",),
    )
    after = replica.match("b", TOKENS)
    assert after.device_prefix_len == (0 if failing else 8)
    assert after.external is (ExternalMatch.MISS if failing else ExternalMatch.NOT_ASKED)
    replica.retire()


@several
def test_a_load_that_another_waits_for_goes_on_for_nobody(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks)
    replica.store(TOKENS)
    running = admit(replica, "a", TOKENS)
    replica.match("b", TOKENS)
    replica.release("a")
    batches = launch(replica)
    assert None not in batches
    assert finish(replica, batches) == StepReport(ready=(RequestId("b"),))
    assert running.times_told == 1
    assert replica.match("b", TOKENS).device_prefix_len == 8
    replica.retire()


# -- how many --------------------------------------------------------------------------------------


def test_more_layer_wise_loads_than_a_frame_has_operations_wait_for_their_turn(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(2, settings=LinkerSettings(max_operations=2))
    sequences = [range(100 * n, 100 * n + 4) for n in range(1, 5)]
    for tokens in sequences:
        replica.store(tokens)
    for n in range(2):
        admit(replica, str(n), sequences[n])
    for n in (2, 3):
        replica.ask(str(n), sequences[n])
        answer, running = ask_for(replica, str(n), sequences[n])
        assert isinstance(answer, LoadWaiting)
        assert running.times_told == 0
    report = finish(replica, launch(replica))
    assert (report.landed, report.ready) == (("0", "1"), ("2", "3"))
    replica.retire()
    for n in (2, 3):
        admit(replica, str(n), sequences[n])
    assert finish(replica, launch(replica)).landed == ("2", "3")
    replica.retire()


def test_layer_wise_loads_take_nothing_of_the_room_of_staged_ones(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(settings=LinkerSettings(staged_percent=13))
    replica.store(TOKENS)
    replica.store(OTHER)
    admit(replica, "a", TOKENS)
    replica.queue("b", OTHER)
    assert finish(replica, launch(replica)).landed == ("a",)
    assert replica.settle().landed == ("b",)
    replica.retire()


def test_a_request_is_brought_back_at_most_twice(make_replica: MakeReplica) -> None:
    replica = make_replica()
    replica.store(TOKENS)
    for _ in range(2):
        admit(replica, "a", TOKENS)
        assert finish(replica, launch(replica)).landed == ("a",)
        replica.retire()
        for _ in range(257):
            replica.step()
        assert replica.evict() == 8
    assert replica.match("a", TOKENS).external is ExternalMatch.HIT
    assert isinstance(ask_for(replica, "a", TOKENS)[0], LoadMiss)


def test_asked_twice_it_is_the_same_load(make_replica: MakeReplica) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    replica.ask("a", TOKENS)
    first, _ = ask_for(replica, "a", TOKENS)
    second, running = ask_for(replica, "a", TOKENS)
    assert isinstance(first, LoadAdmitted)
    assert first == second
    assert running.times_told == 0
    finish(replica, launch(replica))
    replica.retire()


# -- what is staged all the same -------------------------------------------------------------------


@pytest.mark.parametrize("model", [FULL_MAMBA, FULL_SWA_MAMBA], ids=["full+mamba", "all three"])
def test_a_tree_with_states_stages(make_replica: MakeReplica, model: Model) -> None:
    replica = make_replica(2, model=model)
    replica.store(TOKENS)
    replica.ask("a", TOKENS)
    answer, running = ask_for(replica, "a", TOKENS)
    assert isinstance(answer, LoadWaiting)
    assert launch(replica) == [None, None]
    assert finish(replica, [None, None]) == StepReport()
    assert replica.settle().landed == ("a",)
    assert running.times_told == 0
    assert replica.match("a", TOKENS).device_prefix_len == 8
    replica.retire()


def test_a_linker_without_a_layer_counter_stages(make_replica: MakeReplica) -> None:
    replica = make_replica(2, by_hand=True)
    replica.store(TOKENS)
    replica.ask("a", TOKENS)
    assert isinstance(ask_for(replica, "a", TOKENS)[0], LoadWaiting)
    replica.start()
    assert replica.settle().landed == ("a",)


def test_staged_is_what_nobody_asked_otherwise(make_replica: MakeReplica) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    replica.ask("a", TOKENS)
    answer, running = ask_for(replica, "a", TOKENS, LoadMode.STAGED)
    assert isinstance(answer, LoadWaiting)
    replica.start()
    assert replica.settle().landed == ("a",)
    assert running.times_told == 0


# -- reset and detach ------------------------------------------------------------------------------


@several
@pytest.mark.parametrize("state", ["queued", "started", "hanging", "failed"])
@pytest.mark.parametrize("end", ["reset", "detach"])
def test_the_end_in_the_middle_leaves_nothing(
    make_replica: MakeReplica, num_ranks: int, state: str, end: str
) -> None:
    replica = make_replica(num_ranks)
    replica.store(TOKENS)
    running = admit(replica, "a", TOKENS)
    batches = None
    if state == "hanging":
        replica.ranks[0].store.hanging.add("read")
    if state == "failed":
        replica.ranks[0].store.raising.add("read")
    if state != "queued":
        batches = launch(replica)
    if state == "hanging":
        assert replica.ranks[0].store.waiting.wait(10)
    if state == "failed":
        assert batches is not None
        assert finish(replica, batches).failed == ("a",)
    if end == "reset":
        replica.reset()
    else:
        replica.alike(lambda rank: rank.cache.detach())
        assert in_use(replica) == (0 if state == "queued" else 8)
        if batches is not None:
            replica.retire()
    assert in_use(replica) == 0
    # Nothing is left to finish, and what the store does now touches nothing.
    assert finish(replica, batches or [None] * num_ranks) == StepReport()
    assert replica.step() == StepReport()
    replica.ranks[0].store.gate.set()
    replica.transfer()
    assert forgotten(replica)
    assert running.times_told == 1
    for rank in replica.ranks:
        rank.check_idle()
        rank.store.raising.clear()
        rank.store.hanging.clear()
    if end == "detach":
        assert replica.match("a", TOKENS).external is ExternalMatch.NOT_ASKED
        replica.attach()
    admit(replica, "again", TOKENS)
    assert finish(replica, launch(replica)).landed == ("again",)
    replica.retire()


def test_what_landed_after_its_forward_went_on_has_failed(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = make_replica(2)
    replica.store(TOKENS)
    admit(replica, "a", TOKENS)
    batches = launch(replica)
    late = of_store(replica.ranks[0])
    wait_for_all = late.finish_layer_wise_loading

    def too_late(batch: BatchIndex | None) -> bool:
        # All layers are there by now, but one wait for them had ended before.
        assert wait_for_all(batch)
        return False

    monkeypatch.setattr(late, "finish_layer_wise_loading", too_late)
    assert finish(replica, batches).failed == ("a",)
    replica.settle()
    replica.retire()
    for rank in replica.ranks:
        rank.check_idle()


def test_a_linker_whose_finish_raises_fails_what_has_not_landed(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(batch: object) -> bool:
        raise StorageError("a fault that the test asked for")

    replica = make_replica(2)
    replica.store(TOKENS)
    admit(replica, "a", TOKENS)
    slow = replica.ranks[0]
    slow.store.hanging.add("read")
    batches = launch(replica)
    assert slow.store.waiting.wait(10)
    monkeypatch.setattr(slow.linker, "finish_layer_wise_loading", raising)
    assert finish(replica, batches).failed == ("a",)
    assert slow.cache.counters is not None
    assert slow.cache.counters.backend_errors == 1
    monkeypatch.undo()
    assert of_store(slow).finish_layer_wise_loading(batches[0]) is False
    slow.store.gate.set()
    replica.settle()
    replica.retire()
