"""Reset, detach and close: afterwards nothing is locked, pending or leaked, however often."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest
from tests.integration.linker import ownership
from tests.integration.linker.models import FULL_SWA_MAMBA

from radixlink_contracts import (
    Completion,
    DecLockRefParams,
    ExternalMatch,
    OperationKind,
    Outcome,
    StepReport,
)
from radixlink_contracts.errors import InvalidTransitionError
from radixlink_linker import LinkerSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.linker.conftest import MakeReplica
    from tests.integration.linker.replica import Replica

TOKENS = range(1, 9)
"""Four pages."""

both = pytest.mark.parametrize("num_ranks", [1, 2])


def fill(replica: Replica) -> None:
    """Have something of every kind outstanding."""
    replica.store(TOKENS)
    replica.store(range(21, 29))
    replica.queue("queued", TOKENS)
    replica.queue("started", range(21, 29))
    replica.match("waits", TOKENS)
    replica.launch()
    replica.launch()
    replica.compute(range(31, 35))
    replica.compute(TOKENS[:2])
    replica.match("asks", range(41, 49))


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def start_load(replica: Replica) -> None:
    replica.store(TOKENS)
    replica.queue("a", TOKENS)
    replica.start()


def start_offload(replica: Replica) -> None:
    replica.compute(TOKENS)


def write_off(replica: Replica) -> None:
    replica.store(TOKENS)
    operation = replica.queue("a", TOKENS).operation_id
    replica.start()
    (rank,) = replica.ranks
    rank.by_hand.complete(operation, Outcome.FAILED, quiesced=False)
    while not rank.cache.holders().written_off:
        replica.step()


@pytest.mark.parametrize("end", ["reset", "detach"])
@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (start_load, "slots"),
        (start_load, "lock"),
        (start_offload, "lock"),
        (write_off, "slots"),
        (write_off, "lock"),
        (fill, "slots"),
        (fill, "lock"),
        (fill, "tree"),
    ],
)
def test_an_end_that_was_left_in_its_middle_goes_on_when_it_is_called_again(
    make_replica: MakeReplica,
    monkeypatch: pytest.MonkeyPatch,
    begin: Callable[[Replica], None],
    part: str,
    end: str,
) -> None:
    settings = LinkerSettings(step_timeout_s=20.0, write_off_steps=2, written_off_percent=100)
    replica = make_replica(by_hand=True, settings=settings)
    begin(replica)
    (rank,) = replica.ranks
    # What was launched is processed, so that slots go back at once.
    rank.slots.release_all()
    assert rank.tree._receipts.out()
    call = rank.cache.reset if end == "reset" else rank.cache.detach
    with monkeypatch.context() as patched:
        match part:
            case "slots":
                patched.setattr(rank.allocator, "free", interrupted)
            case "lock":
                patched.setattr(rank.tree, "dec_lock_ref", interrupted)
            case _:
                patched.setattr(rank.tree, "reset", interrupted)
                patched.setattr(rank.tree, "detach_linker", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call()
    call()
    rank.check_idle()
    assert rank.cache.holders().locks == ()
    assert rank.cache.holders().num_retired == 0
    if end == "detach":
        replica.evict()
    assert rank.allocator.in_use == set()
    rank.cache.reset()
    if end == "detach":
        replica.attach()
    replica.store(TOKENS)
    assert replica.restore("anew", TOKENS).landed == ("anew",)


@pytest.mark.parametrize("end", ["reset", "detach"])
def test_touches_that_an_end_drops_are_not_counted_any_more(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    settings = LinkerSettings(step_timeout_s=20.0, touch_after_uses=1, max_touches=1)
    replica = make_replica(by_hand=True, settings=settings)
    (rank,) = replica.ranks
    replica.compute(TOKENS)
    replica.settle()
    replica.compute(TOKENS)
    (status,) = rank.cache.holders().operations
    assert status.kind is OperationKind.TOUCH
    name = "reset" if end == "reset" else "detach_linker"
    call = rank.cache.reset if end == "reset" else rank.cache.detach
    with monkeypatch.context() as patched:
        patched.setattr(rank.tree, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            call()
    call()
    rank.check_idle()
    assert rank.cache.holders().operations == ()
    rank.cache.reset()
    if end == "detach":
        replica.attach()
    replica.compute(TOKENS)
    replica.settle()
    replica.compute(TOKENS)
    (status,) = rank.cache.holders().operations
    assert status.kind is OperationKind.TOUCH


def test_what_a_reset_has_still_to_free_is_free_after_the_next(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = make_replica(model=FULL_SWA_MAMBA)
    replica.compute(TOKENS)
    replica.compute(range(21, 29))
    replica.settle()
    (rank,) = replica.ranks
    states = rank.device.states
    assert states is not None
    for owner in (rank.allocator, states):
        with monkeypatch.context() as patched:
            patched.setattr(owner, "free", interrupted)
            with pytest.raises(KeyboardInterrupt):
                rank.cache.reset()
    rank.cache.reset()
    assert rank.slots.available_sizes == rank.slots.sizes


@both
def test_reset_with_everything_in_flight(make_replica: MakeReplica, num_ranks: int) -> None:
    replica = make_replica(num_ranks, by_hand=True)
    fill(replica)
    old = [op for rank in replica.ranks for op in rank.by_hand.started]
    assert len(old) == 4 * num_ranks
    for _ in range(2):
        replica.reset()
        for rank in replica.ranks:
            rank.check_idle()
            assert rank.allocator.in_use == set()
    # What an old transfer says now is of nothing that lives.
    for rank in replica.ranks:
        for op in old:
            late = Completion(op=op, outcome=Outcome.LANDED, quiesced=True)
            rank.by_hand._completed_loads.append(late)
    replica.queue("anew", TOKENS)
    assert replica.step() == StepReport()
    for rank in replica.ranks:
        assert rank.cache.counters is not None
        assert rank.cache.counters.late_completions == 4 * num_ranks
    replica.start()
    assert replica.settle().landed == ("anew",)


@both
def test_reset_with_the_real_linker_at_work(make_replica: MakeReplica, num_ranks: int) -> None:
    replica = make_replica(num_ranks)
    replica.store(TOKENS)
    replica.queue("a", TOKENS)
    for rank in replica.ranks:
        rank.store.hanging.add("read")
    replica.start()
    for rank in replica.ranks:
        assert rank.store.waiting.wait(10)
    replica.compute(range(31, 39))
    # A store that hangs has no slots, so nobody waits for it.
    replica.reset()
    for rank in replica.ranks:
        rank.check_idle()
        rank.store.hanging.clear()
        rank.store.gate.set()
    replica.transfer()
    assert replica.restore("b", TOKENS).landed == ("b",)
    assert replica.match("b", TOKENS).device_prefix_len == 8


def test_the_linker_is_reset_before_any_lock_is_released(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = make_replica(by_hand=True)
    fill(replica)
    (rank,) = replica.ranks
    calls = rank.by_hand.calls
    release = rank.tree.dec_lock_ref

    def watched(params: DecLockRefParams) -> None:
        calls.append("unlock")
        release(params)

    monkeypatch.setattr(rank.tree, "dec_lock_ref", watched)
    calls.clear()
    replica.reset()
    # Two loads and two offloads.
    assert calls == ["reset", *["unlock"] * 4]


@pytest.mark.parametrize("how", ["reset", "detach"])
def test_every_ticket_is_decided_before_the_linker_is_reset(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    replica = make_replica(by_hand=True)
    fill(replica)
    (rank,) = replica.ranks
    tickets = [held.ticket for held in rank.by_hand._held.values()]
    assert not any(ticket.decided for ticket in tickets)
    seen: list[bool] = []
    monkeypatch.setattr(
        rank.by_hand, "reset", lambda: seen.extend(ticket.decided for ticket in tickets)
    )
    if how == "reset":
        replica.reset()
    else:
        rank.cache.detach()
    assert seen == [True] * 4
    rank.by_hand._held.clear()
    replica.ranks[0].slots.release_all()


def test_a_reset_that_fails_gives_nothing_back_and_can_be_repeated(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(by_hand=True)
    replica.store(TOKENS)
    replica.queue("a", TOKENS)
    (rank,) = replica.ranks
    rank.by_hand.raising.add("reset")
    with pytest.raises(Exception, match="a fault that the test asked for"):
        rank.cache.reset()
    rank.check()
    assert len(rank.allocator.in_use) == 8
    rank.by_hand.raising.clear()
    replica.reset()
    rank.check_idle()


@both
def test_detach_drops_what_is_outstanding_and_keeps_the_tree(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, by_hand=True)
    replica.compute(range(51, 55))
    replica.settle()
    fill(replica)
    replica.compute(range(51, 55))
    computed = [ownership.live(rank).sets() for rank in replica.ranks]
    for _ in range(2):
        replica.alike(lambda rank: rank.cache.detach())
        for rank in replica.ranks:
            assert rank.cache.num_outstanding == 0
            assert ownership.live(rank).sets() == computed[rank.rank]
            assert not rank.tree._receipts.out()
            assert rank.cache.counters is None
            for node in rank.nodes():
                assert (node.stored, node.pending_operation) == (False, None)
        replica.check()
    replica.retire()
    replica.retire()
    calls = [len(rank.calls) for rank in replica.ranks]
    assert replica.match("a", TOKENS).external is ExternalMatch.NOT_ASKED
    replica.compute(range(61, 65))
    for _ in range(130):
        assert replica.step() == StepReport()
    assert [len(rank.calls) for rank in replica.ranks] == calls


@both
def test_what_was_in_the_tree_takes_part_after_attaching_again(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, attach=False)
    replica.compute(TOKENS)
    replica.attach()
    assert replica.alike(lambda rank: rank.cache.num_outstanding) == 0
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_stored == 1
    replica.alike(lambda rank: rank.cache.detach())
    replica.attach()
    replica.evict()
    assert replica.restore("a", TOKENS).landed == ("a",)


def test_ids_are_not_used_again_after_attaching_again(make_replica: MakeReplica) -> None:
    replica = make_replica(2, by_hand=True)
    replica.compute(TOKENS)
    seen = set(replica.ranks[0].by_hand.started)
    for again in ("detach", "reset"):
        if again == "detach":
            replica.alike(lambda rank: rank.cache.detach())
            replica.attach()
        else:
            replica.reset()
        replica.compute(TOKENS)
        fresh = set(replica.ranks[0].by_hand.started)
        assert len(fresh) == 1
        assert not fresh & seen
        seen |= fresh


def test_a_second_linker_is_refused(make_replica: MakeReplica) -> None:
    replica = make_replica()
    with pytest.raises(InvalidTransitionError):
        replica.attach()
    replica.store(TOKENS)


@both
@pytest.mark.parametrize("by_hand", [False, True])
def test_close_twice_with_everything_in_flight(
    make_replica: MakeReplica, num_ranks: int, *, by_hand: bool
) -> None:
    replica = make_replica(num_ranks, by_hand=by_hand)
    fill(replica)
    for _ in range(2):
        replica.alike(lambda rank: rank.cache.release_host_resources())
        replica.check()
        for rank in replica.ranks:
            assert not rank.tree._receipts.out()
            assert rank.cache.num_outstanding == 0
    if by_hand:
        assert [rank.by_hand.calls.count("close") for rank in replica.ranks] == [1] * num_ranks
    replica.retire()
    replica.retire()
    replica.reset()
    replica.reset()


def test_a_closed_cache_holds_no_linker(make_replica: MakeReplica) -> None:
    replica = make_replica(by_hand=True)
    fill(replica)
    (rank,) = replica.ranks
    wrapper = weakref.ref(rank.cache._wrapper)
    rank.cache.release_host_resources()
    replica.retire()
    replica.retire()
    gc.collect()
    assert wrapper() is None


def test_slots_retired_before_a_reset_are_free_after_it(make_replica: MakeReplica) -> None:
    replica = make_replica(by_hand=True, settings=LinkerSettings(staged_percent=100))
    replica.store(TOKENS)
    replica.queue("a", TOKENS)
    replica.launch()
    replica.compute(TOKENS)
    replica.settle()
    assert replica.ranks[0].slots.num_retired == 8
    replica.reset()
    assert replica.ranks[0].slots.num_retired == 0
    assert replica.ranks[0].allocator.in_use == set()
