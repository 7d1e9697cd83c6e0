"""Slots that a rank never lets go of: named by rank, and past a cap the cache goes on without a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
from tests.integration.linker.layer_wise import ask_for
from tests.integration.linker.models import KINDS

from radixlink_contracts import (
    ExternalMatch,
    LoadMiss,
    LoadWaiting,
    Outcome,
    PoolName,
    RequestId,
    StepReport,
)
from radixlink_contracts.errors import AgreementError, ContractError, InvalidTransitionError
from radixlink_linker import LinkerSettings

if TYPE_CHECKING:
    from tests.integration.linker.conftest import MakeReplica
    from tests.integration.linker.replica import Replica

    from radixlink_contracts import OperationId

TOKENS = range(1, 9)
"""Four pages: eight of 64 slots."""
SEQUENCES = [range(100 * n, 100 * n + 8) for n in range(1, 5)]

several = pytest.mark.parametrize("num_ranks", [1, 2, 4])


def settings(percent: int, **others: float) -> LinkerSettings:
    return LinkerSettings(
        write_off_steps=5,
        written_off_percent=percent,
        step_timeout_s=20.0,
        **others,  # type: ignore[arg-type]
    )


def fail(replica: Replica, operation: OperationId, *busy: int) -> None:
    """A load fails on all ranks; some do not let go of it."""
    for rank in replica.ranks:
        rank.by_hand.complete(operation, Outcome.FAILED, quiesced=rank.rank not in busy)


def wait_for_it(replica: Replica) -> StepReport:
    """Step until what was decided a step ago is written off."""
    for _ in range(4):
        assert replica.step() == StepReport()
    for rank in replica.ranks:
        rank.calls.clear()
    return replica.step()


def in_use(replica: Replica) -> int:
    return replica.alike(lambda rank: len(rank.device.full.in_use))


@several
@pytest.mark.parametrize("kind", KINDS)
def test_the_ranks_that_did_not_let_go_are_named_on_all(
    make_replica: MakeReplica, num_ranks: int, kind: str
) -> None:
    model = KINDS[kind]
    replica = make_replica(num_ranks, model=model, by_hand=True, settings=settings(100))
    replica.store(TOKENS)
    replica.store(SEQUENCES[0])
    operation = replica.queue("a", TOKENS).operation_id
    replica.start()
    busy = sorted({0, num_ranks - 1})
    fail(replica, operation, *busy)
    assert replica.step().failed == ("a",)
    assert not replica.alike(lambda rank: rank.cache.holders().written_off)
    assert wait_for_it(replica) == StepReport()
    # The frame names them: nothing more is asked.
    expected = [] if num_ranks == 1 else ["all_and"]
    assert replica.alike(lambda rank: rank.calls) == expected
    slots = {PoolName.KV: 8}
    if model.window:
        slots[PoolName.SWA] = 4
    if model.states:
        slots[PoolName.MAMBA] = 1
    for rank in replica.ranks:
        (lost,) = rank.cache.holders().written_off
        assert (lost.operation.op, lost.ranks) == (operation, tuple(busy))
        assert lost.operation.slots == slots
        assert lost.operation.quiesced == (rank.rank not in busy)
        assert f"not let go of by ranks {busy}" in str(rank.cache.holders())
        assert rank.cache.counters is not None
        assert rank.cache.counters.slots_written_off == sum(slots.values())
        assert f"ranks {busy}" in rank.cache.counters.last_error
    # The store goes on: this is below the cap.
    replica.evict()
    assert in_use(replica) == 8
    assert replica.restore("b", SEQUENCES[0]).landed == ("b",)
    replica.reset()
    assert in_use(replica) == 0
    assert not replica.alike(lambda rank: rank.cache.holders().written_off)


@several
def test_who_waits_for_room_is_told_when_the_store_is_given_up(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    # Staged loads may hold 8 of 64 slots.
    late = attrs.evolve(settings(0), write_off_steps=9, staged_percent=13)
    replica = make_replica(num_ranks, by_hand=True, settings=late)
    replica.store(TOKENS)
    replica.store(SEQUENCES[0])
    # An offload that is written off before the load is, for whose room somebody waits.
    replica.compute(SEQUENCES[1])
    for rank in replica.ranks:
        (offload,) = rank.by_hand.started
        rank.by_hand.complete(offload, Outcome.FAILED, quiesced=rank.rank > 0)
    replica.step()
    operation = replica.queue("a", TOKENS).operation_id
    replica.start()
    fail(replica, operation, 0)
    assert replica.step().failed == ("a",)
    assert replica.ask("w", SEQUENCES[0]).external is ExternalMatch.HIT
    assert replica.load_back("w", SEQUENCES[0]) == LoadWaiting(operation_id=operation)
    report = replica.step()
    while report == StepReport():
        report = replica.step()
    assert report == StepReport(ready=(RequestId("w"),), detached=True)
    assert replica.match("w", SEQUENCES[0]).external is ExternalMatch.NOT_ASKED
    replica.reset()


def test_many_at_once_are_named_by_one_frame(make_replica: MakeReplica) -> None:
    replica = make_replica(
        2, by_hand=True, num_pages=64, settings=settings(100, staged_percent=100)
    )
    for tokens in SEQUENCES:
        replica.store(tokens)
    operations = [replica.queue(str(n), tokens).operation_id for n, tokens in enumerate(SEQUENCES)]
    replica.start()
    fail(replica, operations[0], 0)
    fail(replica, operations[1])
    fail(replica, operations[2], 1)
    fail(replica, operations[3], 0, 1)
    assert replica.step().failed == ("0", "1", "2", "3")
    wait_for_it(replica)
    assert replica.alike(lambda rank: rank.calls) == ["all_and"]
    lost = replica.alike(
        lambda rank: [(one.operation.op, one.ranks) for one in rank.cache.holders().written_off]
    )
    assert lost == [(operations[0], (0,)), (operations[2], (1,)), (operations[3], (0, 1))]
    replica.reset()


def test_an_offload_that_a_rank_never_lets_go_of_keeps_its_node(make_replica: MakeReplica) -> None:
    replica = make_replica(2, by_hand=True, settings=settings(100))
    replica.compute(TOKENS)
    (operation,) = replica.ranks[0].by_hand.started
    for rank in replica.ranks:
        rank.by_hand.complete(operation, Outcome.FAILED, quiesced=rank.rank == 0)
    assert replica.step().num_offloads_failed == 1
    wait_for_it(replica)
    for rank in replica.ranks:
        (lost,) = rank.cache.holders().written_off
        assert (lost.operation.op, lost.ranks) == (operation, (1,))
        assert rank.cache.counters is not None
        assert rank.cache.counters.slots_written_off == 8
    assert replica.evict() == 0
    replica.reset()
    assert in_use(replica) == 0


# -- past the cap ----------------------------------------------------------------------------------


@several
def test_what_lands_as_the_store_is_given_up_stays_for_its_request(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    locked = attrs.evolve(settings(0), publish_lock_steps=3)
    replica = make_replica(num_ranks, by_hand=True, settings=locked)
    replica.store(TOKENS)
    replica.store(SEQUENCES[0])
    lost = replica.queue("a", TOKENS).operation_id
    kept = replica.queue("b", SEQUENCES[0]).operation_id
    replica.start()
    fail(replica, lost, 0)
    assert replica.step().failed == ("a",)
    for _ in range(4):
        assert replica.step() == StepReport()
    for rank in replica.ranks:
        rank.by_hand.run(kept)
    assert replica.step() == StepReport(landed=(RequestId("b"),), detached=True)
    # Nobody locks it but the promise.
    replica.evict()
    assert replica.match("b", SEQUENCES[0]).device_prefix_len == 8
    for _ in range(3):
        replica.step()
    assert replica.evict() == 8
    replica.reset()
    assert in_use(replica) == 0


@pytest.mark.parametrize(("percent", "detached"), [(12, True), (13, False), (0, True)])
def test_the_cap_is_so_much_of_a_pool(
    make_replica: MakeReplica, percent: int, *, detached: bool
) -> None:
    """Eight of 64 slots are 12.5 percent."""
    replica = make_replica(2, by_hand=True, settings=settings(percent))
    replica.store(TOKENS)
    operation = replica.queue("a", TOKENS).operation_id
    replica.start()
    fail(replica, operation, 1)
    replica.step()
    assert wait_for_it(replica).detached is detached
    external = ExternalMatch.NOT_ASKED if detached else ExternalMatch.UNKNOWN
    assert replica.match("b", range(501, 509)).external is external
    replica.reset()


def test_the_smallest_pool_counts(make_replica: MakeReplica) -> None:
    """One of 16 states is more than five percent, eight of 1024 full slots are not."""
    replica = make_replica(
        2, model=KINDS["full+mamba"], num_pages=512, by_hand=True, settings=settings(5)
    )
    replica.store(TOKENS)
    operation = replica.queue("a", TOKENS).operation_id
    replica.start()
    fail(replica, operation, 0)
    replica.step()
    assert wait_for_it(replica).detached
    replica.reset()


@several
@pytest.mark.parametrize("kind", KINDS)
def test_past_the_cap_all_ranks_go_on_without_a_store_from_the_same_step(
    make_replica: MakeReplica, num_ranks: int, kind: str
) -> None:
    replica = make_replica(
        num_ranks,
        model=KINDS[kind],
        by_hand=True,
        num_pages=64,
        settings=settings(5, staged_percent=100),
    )
    for tokens in SEQUENCES:
        replica.store(tokens)
    replica.restore("kept", SEQUENCES[0])
    replica.ask("started", SEQUENCES[2])
    replica.ask("queued", SEQUENCES[3])
    operation = replica.queue("a", SEQUENCES[1]).operation_id
    replica.start()
    fail(replica, operation, num_ranks - 1)
    assert replica.step().failed == ("a",)
    for _ in range(4):
        assert replica.step() == StepReport()
    # By then there is one of everything: a load that was started, one that was not, somebody who
    # waits, an offload, a lookup.
    started = replica.alike(lambda rank: rank.load_back("started", SEQUENCES[2]))
    assert isinstance(started, LoadWaiting)
    replica.match("waits", SEQUENCES[2])
    replica.start()
    replica.load_back("queued", SEQUENCES[3])
    replica.compute(range(901, 909))
    replica.match("asks", range(701, 709))
    num_offloads = len(replica.ranks[0].cache.holders().operations) - 3
    assert num_offloads >= 1
    report = replica.step()
    assert report.detached
    assert report.failed == ("started", "queued")
    assert report.num_offloads_failed == num_offloads
    assert report.ready == ("waits", "asks")
    # Requests compute; nothing is asked, loaded or stored any more.
    for name, tokens in (("kept", SEQUENCES[0]), ("waits", SEQUENCES[2]), ("new", SEQUENCES[1])):
        assert replica.match(name, tokens).external is ExternalMatch.NOT_ASKED
        assert isinstance(ask_for(replica, name, tokens)[0], LoadMiss)
    calls = [list(rank.by_hand.calls) for rank in replica.ranks]
    assert replica.compute(SEQUENCES[2])
    # What other loads held goes back as soon as their ranks let go; what was written off does not.
    assert started.operation_id in replica.ranks[0].by_hand.started
    replica.settle()
    assert [rank.by_hand.calls.count("offload") for rank in replica.ranks] == [
        one.count("offload") for one in calls
    ]
    # What was restored stays locked for its request, until that goes.
    replica.release("kept")
    replica.evict()
    assert in_use(replica) == 8
    for rank in replica.ranks:
        rank.calls.clear()
    for _ in range(130):
        assert replica.step() == StepReport()
    assert replica.alike(lambda rank: rank.calls) == []
    # The linker is there until it is taken off, which gives the slots back.
    for rank in replica.ranks:
        with pytest.raises(InvalidTransitionError):
            rank.cache.init_cache_linker(rank.linker)
    replica.alike(lambda rank: rank.cache.detach())
    assert in_use(replica) == 0
    replica.attach()
    replica.store(range(801, 809))
    assert replica.restore("again", range(801, 809)).landed == ("again",)


def test_past_the_cap_nothing_begins_that_waited_for_its_turn(make_replica: MakeReplica) -> None:
    """What is written off makes room in the frame, and an offload waits for that: it waits no more."""
    replica = make_replica(
        2, by_hand=True, num_pages=64, settings=settings(5, staged_percent=100, max_operations=3)
    )
    replica.store(TOKENS)
    replica.store(SEQUENCES[0])
    replica.ask("b", SEQUENCES[0])
    operation = replica.queue("a", TOKENS).operation_id
    replica.start()
    fail(replica, operation, 1)
    assert replica.step().failed == ("a",)
    for _ in range(4):
        assert replica.step() == StepReport()
    assert isinstance(replica.load_back("b", SEQUENCES[0]), LoadWaiting)
    replica.start()
    replica.compute(SEQUENCES[1])
    replica.compute(SEQUENCES[2])
    assert len(replica.ranks[0].cache.holders().due_offloads) == 1
    report = replica.step()
    assert (report.detached, report.failed, report.num_offloads_failed) == (True, ("b",), 1)
    assert replica.alike(lambda rank: rank.by_hand.calls.count("offload")) == 3
    replica.settle()
    replica.reset()


def test_a_reset_after_the_cap_gives_all_back_and_the_store_too(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(2, by_hand=True, settings=settings(5))
    replica.store(TOKENS)
    operation = replica.queue("a", TOKENS).operation_id
    replica.start()
    fail(replica, operation, 1)
    replica.step()
    assert wait_for_it(replica).detached
    replica.reset()
    assert in_use(replica) == 0
    assert replica.restore("b", TOKENS).landed == ("b",)
    replica.store(SEQUENCES[0])


def test_a_frame_past_the_cap_that_one_rank_alone_got_leaves_equal_ranks_behind_a_reset(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = make_replica(2, by_hand=True, settings=settings(5))
    replica.store(TOKENS)
    operation = replica.queue("a", TOKENS).operation_id
    replica.start()
    fail(replica, operation, 1)
    replica.step()
    for _ in range(4):
        assert replica.step() == StepReport()
    late = replica.ranks[1].group
    exchange = late.inner.all_and

    def too_late(words: bytearray, timeout_s: float) -> None:
        exchange(words, timeout_s)
        message = "all_and: its end came behind the deadline"
        raise AgreementError(message, by_rank={}, rank=1)

    with monkeypatch.context() as patched:
        patched.setattr(late.inner, "all_and", too_late)
        there, gone = replica.outcomes(lambda rank: rank.cache.step())
    assert isinstance(there, StepReport)
    assert there.detached
    assert isinstance(gone, AgreementError)
    replica.reset()
    assert in_use(replica) == 0
    assert replica.restore("b", TOKENS).landed == ("b",)


def test_a_request_that_goes_after_the_cap_is_nobodys_concern(make_replica: MakeReplica) -> None:
    replica = make_replica(2, by_hand=True, settings=settings(5, staged_percent=100))
    replica.store(TOKENS)
    replica.store(SEQUENCES[0])
    operation = replica.queue("a", TOKENS).operation_id
    replica.start()
    replica.queue("b", SEQUENCES[0])
    fail(replica, operation, 1)
    replica.step()
    report = wait_for_it(replica)
    assert (report.detached, report.failed) == (True, ("b",))
    for name in ("a", "b", "c"):
        replica.release(name)
    replica.step()
    assert replica.alike(lambda rank: rank.cache.num_outstanding) == 0
    assert in_use(replica) == 8
    assert replica.alike(lambda rank: rank.cache.explain(RequestId("b"))) is None
    replica.reset()


def test_what_a_small_frame_cannot_name_is_named_by_the_next(make_replica: MakeReplica) -> None:
    """A frame with a single word behind what every frame has names one operation, and no lookup."""
    small = settings(100, staged_percent=100, frame_words=7, max_lookups=64)
    replica = make_replica(2, by_hand=True, num_pages=64, settings=small)
    for tokens in SEQUENCES[:3]:
        replica.store(tokens)
    operations = [
        replica.queue(str(n), tokens).operation_id for n, tokens in enumerate(SEQUENCES[:2])
    ]
    replica.start()
    for operation in operations:
        fail(replica, operation, 1)
    assert replica.step().failed == ("0", "1")
    for _ in range(4):
        assert replica.step() == StepReport()
    replica.match("asks", SEQUENCES[2])
    written_off = []
    for _ in range(3):
        replica.step()
        written_off.append(len(replica.ranks[0].cache.holders().written_off))
    assert written_off == [1, 2, 2]
    lost = replica.alike(lambda rank: [one.ranks for one in rank.cache.holders().written_off])
    assert lost == [(1,), (1,)]
    assert replica.match("asks", SEQUENCES[2]).external is ExternalMatch.HIT
    replica.reset()


def test_a_frame_without_a_bit_for_each_rank_is_refused(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = settings(100, frame_words=7, max_lookups=64)
    replica = make_replica(attach=False, settings=small)
    (rank,) = replica.ranks
    with monkeypatch.context() as patched:
        patched.setattr(type(rank.group), "size", 129)
        patched.setattr(rank.group, "all_gather", lambda value, timeout_s: (value,) * 129)
        with pytest.raises(ContractError, match="at least 9 for 129 ranks, got 7"):
            rank.cache.init_cache_linker(rank.linker)
    replica.attach()
