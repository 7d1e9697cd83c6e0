"""Ranks as threads pass the suite, agree on what failed, and AND like the model."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlink_comm import ThreadGroup
from radixlink_comm._health import LATE, CollectiveError
from radixlink_contracts.errors import AgreementError, ContractError, InvalidTransitionError
from radixlink_testing.faults import Nameless
from radixlink_testing.rank_groups import (
    ManyRanksTests,
    RunCase,
    check_group_works,
    run_in_threads,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import RankGroup

PATIENCE_S = 30.0
SHORT_S = 0.05


@pytest.fixture
def two() -> tuple[ThreadGroup, ...]:
    return ThreadGroup.create(2)


class TestTwoThreads(ManyRanksTests):
    @pytest.fixture
    def run_case(self) -> RunCase:
        return lambda case: run_in_threads(ThreadGroup.create(2), case)


class TestFiveThreads(ManyRanksTests):
    @pytest.fixture
    def run_case(self) -> RunCase:
        return lambda case: run_in_threads(ThreadGroup.create(5), case)


@given(
    words_by_rank=st.integers(1, 20).flatmap(
        lambda num_words: st.lists(
            st.binary(min_size=8 * num_words, max_size=8 * num_words), min_size=1, max_size=4
        )
    )
)
def test_all_and_equals_the_model(words_by_rank: list[bytes]) -> None:
    expected = reduce(lambda a, b: bytes(x & y for x, y in zip(a, b, strict=True)), words_by_rank)

    def case(group: RankGroup) -> None:
        words = bytearray(words_by_rank[group.rank])
        group.all_and(words, PATIENCE_S)
        assert words == expected

    run_in_threads(ThreadGroup.create(len(words_by_rank)), case)


@given(values=st.lists(st.binary(max_size=40), min_size=1, max_size=4))
def test_gather_and_broadcast_give_back_any_bytes(values: list[bytes]) -> None:
    def case(group: RankGroup) -> None:
        mine = values[group.rank]
        assert group.all_gather(mine, PATIENCE_S) == tuple(values)
        for root, value in enumerate(values):
            assert group.broadcast(mine, root, PATIENCE_S) == value

    run_in_threads(ThreadGroup.create(len(values)), case)


def test_a_group_needs_a_rank() -> None:
    with pytest.raises(ContractError):
        ThreadGroup.create(0)


def test_a_deadline_is_exact() -> None:
    group, _, _ = ThreadGroup.create(3)
    begin = time.monotonic()
    with pytest.raises(AgreementError):
        group.all_and(bytearray(8), SHORT_S)
    # No roll call follows: the ranks share what is known.
    assert SHORT_S <= time.monotonic() - begin < SHORT_S + 0.4


def test_the_error_says_which_collective_when_and_who(two: tuple[ThreadGroup, ...]) -> None:
    errors: list[AgreementError] = []

    def case(group: RankGroup) -> None:
        for _ in range(3):
            group.all_and(bytearray(8), PATIENCE_S)
        if group.rank == 0:
            with pytest.raises(AgreementError) as caught:
                group.all_and(bytearray(8), SHORT_S)
            errors.append(caught.value)

    run_in_threads(two, case)
    (error,) = errors
    assert str(error) == (
        "all_and (collective 4 of epoch 0): not all ranks took part in time, deadline 0.05 s; "
        "rank 0: in all_and, collective 4 of epoch 0; rank 1: no answer"
    )
    assert error.rank == 0
    assert error.by_rank == {0: "in all_and, collective 4 of epoch 0", 1: "no answer"}


def test_a_late_rank_gets_the_same_verdict(two: tuple[ThreadGroup, ...]) -> None:
    with pytest.raises(AgreementError) as first:
        two[1].all_gather(b"", SHORT_S)
    with pytest.raises(AgreementError) as second:
        two[0].all_gather(b"", PATIENCE_S)
    assert first.value.by_rank == second.value.by_rank


def test_a_later_call_repeats_what_broke_the_group(two: tuple[ThreadGroup, ...]) -> None:
    with pytest.raises(AgreementError) as first:
        two[0].all_and(bytearray(8), SHORT_S)
    with pytest.raises(AgreementError, match="unusable until all ranks renew it") as second:
        two[0].split(0, PATIENCE_S)
    assert str(first.value) in str(second.value)
    assert second.value.by_rank == first.value.by_rank


def test_unequal_lengths_fail_on_all_ranks_alike() -> None:
    errors: list[AgreementError] = []

    def case(group: RankGroup) -> None:
        words = bytearray(b"\xff" * 8 * (1 + group.rank))
        with pytest.raises(AgreementError) as caught:
            group.all_and(words, PATIENCE_S)
        assert words == b"\xff" * 8 * (1 + group.rank)
        errors.append(caught.value)

    run_in_threads(ThreadGroup.create(3), case)
    said = {0: "8 bytes", 1: "16 bytes", 2: "24 bytes"}
    assert [error.by_rank for error in errors] == [said] * 3


def test_a_step_and_a_gather_do_not_mix(two: tuple[ThreadGroup, ...]) -> None:
    def call_step(group: RankGroup) -> None:
        group.all_and(bytearray(16), PATIENCE_S)

    def call_gather(group: RankGroup) -> None:
        group.all_gather(b"", PATIENCE_S)

    def case(group: RankGroup) -> None:
        call = [call_step, call_gather][group.rank]
        with pytest.raises(AgreementError, match="different collectives") as caught:
            call(group)
        assert caught.value.by_rank == {0: "in all_and", 1: "in all_gather"}

    run_in_threads(two, case)


def test_a_renewed_group_says_its_epoch(two: tuple[ThreadGroup, ...]) -> None:
    def case(group: RankGroup) -> None:
        renewed = group.renew(PATIENCE_S)
        with pytest.raises(InvalidTransitionError, match="it was renewed, epoch 1 follows"):
            group.renew(PATIENCE_S)
        with pytest.raises(AgreementError, match=r"collective 1 of epoch 1"):
            renewed.all_and(bytearray(8 * (1 + group.rank)), PATIENCE_S)

    run_in_threads(two, case)


CALLS: dict[str, tuple[str, Callable[[ThreadGroup], object]]] = {
    "all_and": ("_and", lambda group: group.all_and(bytearray(8), 1.0)),
    "all_gather": ("_and", lambda group: group.all_gather(b"", 1.0)),
    "split": ("_subgroup", lambda group: group.split(0, 1.0)),
    "renew": ("_renewed", lambda group: group.renew(1.0)),
}
"""Each call, and what a transport does for it."""


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def nameless(*_: object) -> None:
    raise Nameless


@pytest.mark.parametrize(
    ("leave", "kind"),
    [(interrupted, KeyboardInterrupt), (nameless, Nameless)],
    ids=["signal", "nameless"],
)
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_left_a_collective_by_an_exception_uses_it_no_more(
    call: str,
    leave: Callable[..., None],
    kind: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (group,) = ThreadGroup.create(1)
    method, ask = CALLS[call]
    with monkeypatch.context() as patched:
        patched.setattr(group, method, leave)
        with pytest.raises(kind):
            ask(group)
    with pytest.raises(AgreementError, match=rf"{call}: left by {kind.__name__}"):
        group.all_and(bytearray(8), 1.0)
    check_group_works(group.renew(1.0))


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_left_the_roll_call_of_a_failure_uses_the_group_no_more(
    call: str, two: tuple[ThreadGroup, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object) -> None:
        # Nothing is known of the other rank, so it is asked for.
        raise CollectiveError(LATE)

    group, _ = two
    method, ask = CALLS[call]
    # A split comes to its own part when the other rank's color is known.
    colors = {"_gather": lambda *_: (b"split\x000",) * 2} if call == "split" else {}
    with monkeypatch.context() as patched:
        for name, fake in {method: late, "_marks": interrupted, **colors}.items():
            patched.setattr(group, name, fake)
        with pytest.raises(KeyboardInterrupt):
            ask(group)
    with pytest.raises(AgreementError, match=rf"{call}: left by KeyboardInterrupt"):
        group.all_and(bytearray(8), 1.0)


@pytest.mark.parametrize("call", ["all_and", "renew"])
def test_nobody_goes_on_with_a_rank_that_was_interrupted(
    call: str, two: tuple[ThreadGroup, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    _, ask = CALLS[call]
    meeting = first._place.meeting if call == "all_and" else first._place.renewals
    with monkeypatch.context() as patched:
        patched.setattr(meeting._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ask(first)
    with pytest.raises(AgreementError, match="not all ranks took part in time") as caught:
        second.all_and(bytearray(8), SHORT_S) if call == "all_and" else second.renew(SHORT_S)
    assert caught.value.by_rank[0] == "no answer"
    run_in_threads(two, lambda group: check_group_works(group.renew(PATIENCE_S)))


def test_what_is_refused_leaves_the_group_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise ContractError("split: this transport cannot")

    (group,) = ThreadGroup.create(1)
    with monkeypatch.context() as patched:
        patched.setattr(group, "_subgroup", refused)
        with pytest.raises(ContractError, match="cannot"):
            group.split(0, 1.0)
    check_group_works(group)


def test_closing_says_so_afterwards(two: tuple[ThreadGroup, ...]) -> None:
    two[0].close()
    with pytest.raises(InvalidTransitionError) as caught:
        two[0].broadcast(b"", 0, PATIENCE_S)
    assert (caught.value.state, caught.value.event) == ("CLOSED", "broadcast from 0")
    assert caught.value.story == ("close was called",)


def test_many_steps_leave_no_rank_behind() -> None:
    """A fast rank may begin the next round before a slow one has taken the last."""
    counts = [0, 0, 0]

    def case(group: RankGroup) -> None:
        for step in range(300):
            words = bytearray(step.to_bytes(8, "little"))
            group.all_and(words, PATIENCE_S)
            assert int.from_bytes(words, "little") == step
            counts[group.rank] += 1

    run_in_threads(ThreadGroup.create(3), case)
    assert counts == [300, 300, 300]


def release_interrupted(
    two: tuple[ThreadGroup, ...], monkeypatch: pytest.MonkeyPatch
) -> tuple[ThreadGroup, ThreadGroup]:
    """The first rank of a pair that was renewed but for its release, and the other's new group."""
    first, second = two
    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as other:
        patched.setattr(first, "_release", interrupted)
        renewed = other.submit(second.renew, PATIENCE_S)
        with pytest.raises(KeyboardInterrupt):
            first.renew(PATIENCE_S)
        return first, renewed.result(PATIENCE_S)


def test_a_renewal_that_was_left_as_the_old_group_was_released_is_had_by_the_next_call(
    two: tuple[ThreadGroup, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, other = release_interrupted(two, monkeypatch)
    with pytest.raises(AgreementError, match="renew: left by KeyboardInterrupt"):
        old.all_and(bytearray(8), SHORT_S)
    # It meets nobody.
    renewed = old.renew(SHORT_S)
    with pytest.raises(InvalidTransitionError, match="it was renewed, epoch 1 follows"):
        old.renew(SHORT_S)

    def case(group: RankGroup) -> None:
        check_group_works(group)
        check_group_works(group.renew(PATIENCE_S))

    run_in_threads((renewed, other), case)


def test_a_roll_call_behind_such_a_renewal_is_where_the_others_are(
    two: tuple[ThreadGroup, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, other = release_interrupted(two, monkeypatch)

    def case(group: RankGroup) -> None:
        marks = group.roll_call(f"mark {group.rank}", PATIENCE_S)
        assert marks == {0: "mark 0", 1: "mark 1"}

    run_in_threads((old, other), case)


def test_a_group_that_is_closed_behind_such_a_renewal_takes_the_new_one_with_it(
    two: tuple[ThreadGroup, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = release_interrupted(two, monkeypatch)
    successor = old._successor
    assert successor is not None
    old.close()
    for group in (old, successor):
        with pytest.raises(InvalidTransitionError, match="close was called"):
            group.renew(SHORT_S)
