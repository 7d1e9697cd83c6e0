"""What every rank group must do, as cases that all its ranks run.

A case is a function of this rank's group: every rank of a new group runs it, each with its own
group, and what any of them raises fails the test. So the same cases serve threads, processes and
MPI jobs. Subclass `RankGroupTests` (a group of one, too) or `ManyRanksTests` (two and more), and
give a fixture that runs a case:

```python
class TestThreads(ManyRanksTests):
    @pytest.fixture
    def run_case(self) -> RunCase:
        return lambda case: run_in_threads(ThreadGroup.create(3), case)
```

Where ranks are processes, a program gets a case by its name from `CASES`.

A case that your group cannot pass is overridden with `@pytest.mark.xfail(reason=...)` above it; any
other override fails `test_no_case_is_overridden`.
"""

from __future__ import annotations

import math
import random
import threading
import time
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, TypeAlias

import pytest
from typing_extensions import override

from radixlink_contracts.errors import AgreementError, ContractError, InvalidTransitionError
from radixlink_testing._overrides import unexplained_overrides

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from radixlink_contracts import RankGroup

Case: TypeAlias = "Callable[[RankGroup], None]"

PATIENCE_S: Final = 30.0
"""The deadline of what is expected to succeed: never reached on a machine that works."""

SHORT_S: Final = 0.2
"""The deadline of what is expected to fail for want of a rank."""

SLACK_S: Final = 5.0
"""By how much a failure may come after its deadline: a roll call, and other processes on the
cores."""

STEP_WORDS: Final = 480


class RunCase(Protocol):
    """The type of the fixture `run_case`."""

    def __call__(self, case: Case) -> None:
        """Run a case on every rank of a new group; raise what any of them raised."""
        ...


def run_in_threads(groups: Sequence[RankGroup], case: Case) -> None:
    """Run a case on every rank of a group, each in a thread of its own, then close the groups.

    Raises:
        ExceptionGroup: What the ranks raised, each with a note of its rank.
        TimeoutError: A rank did not end.
    """
    errors: list[Exception] = []

    def run(group: RankGroup) -> None:
        try:
            case(group)
        except Exception as error:  # noqa: BLE001  it is raised again in the test's thread
            error.add_note(f"on rank {group.rank} of {group.size}")
            errors.append(error)

    threads = [threading.Thread(target=run, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 2 * PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError("a rank did not end")
    for group in groups:
        group.close()
    if errors:
        raise ExceptionGroup("a case failed", errors)


def random_words(seed: int, rank: int, num_words: int = STEP_WORDS) -> bytearray:
    """Words that every rank can work out for every rank; most bits are set, so that ANDs differ."""
    source = random.Random(f"{seed} {rank}")  # noqa: S311  test data, not a secret
    words = num_words * 64
    mask = source.getrandbits(words) | source.getrandbits(words) if words else 0
    return bytearray(mask.to_bytes(num_words * 8, "little"))


def and_of_all(group: RankGroup, seed: int, num_words: int = STEP_WORDS) -> bytearray:
    """What `all_and` of the ranks' random words must give."""
    agreed = (1 << num_words * 64) - 1
    for rank in range(group.size):
        agreed &= int.from_bytes(random_words(seed, rank, num_words), "little")
    return bytearray(agreed.to_bytes(num_words * 8, "little"))


def check_group_works(group: RankGroup, seed: int = 0) -> None:
    """One AND of random words, compared."""
    words = random_words(seed, group.rank)
    group.all_and(words, PATIENCE_S)
    assert words == and_of_all(group, seed)


def and_is_the_and_of_all_ranks(group: RankGroup) -> None:
    """In place, for no words, one and many, step after step."""
    for step in range(20):
        for num_words in (0, 1, STEP_WORDS):
            words = random_words(step, group.rank, num_words)
            group.all_and(words, PATIENCE_S)
            assert words == and_of_all(group, step, num_words), (step, num_words)


def words_of_ones_and_zeros_stay(group: RankGroup) -> None:
    """What all ranks say alike is what they get."""
    for byte in (b"\x00", b"\xff"):
        words = bytearray(byte * 64)
        group.all_and(words, PATIENCE_S)
        assert words == byte * 64


def broadcast_gives_the_roots_value(group: RankGroup) -> None:
    """From each rank, also nothing, and values with zeros in them."""
    for root in range(group.size):
        for value in (b"", b"\0", f"from {root}\0\0".encode(), bytes(range(256)) * 400):
            mine = value if group.rank == root else b"not this"
            assert group.broadcast(mine, root, PATIENCE_S) == value


def gather_gives_every_value_by_rank(group: RankGroup) -> None:
    """Empty values, equal ones, and values of unequal length."""
    assert group.all_gather(b"", PATIENCE_S) == (b"",) * group.size
    assert group.all_gather(b"\0same", PATIENCE_S) == (b"\0same",) * group.size
    for factor in (1, 1000):
        expected = tuple(bytes([rank]) * (rank * factor) for rank in range(group.size))
        assert group.all_gather(expected[group.rank], PATIENCE_S) == expected


def split_gives_the_ranks_of_a_color(group: RankGroup) -> None:
    """In the order of their ranks; both groups work, and one says nothing to the other."""
    color = group.rank % 2 - 7
    part = group.split(color, PATIENCE_S)
    expected = [rank for rank in range(group.size) if rank % 2 == group.rank % 2]
    assert part.size == len(expected)
    assert expected[part.rank] == group.rank
    gathered = part.all_gather(str(group.rank).encode(), PATIENCE_S)
    assert gathered == tuple(str(rank).encode() for rank in expected)
    check_group_works(part, seed=color)
    check_group_works(group)
    part.close()
    check_group_works(group)


def split_of_one_color_is_another_group(group: RankGroup) -> None:
    """The same ranks; it lives longer than the group that it came from."""
    part = group.split(0, PATIENCE_S)
    assert (part.rank, part.size) == (group.rank, group.size)
    group.close()
    check_group_works(part)
    part.close()


def renew_gives_the_same_ranks(group: RankGroup) -> None:
    """Time after time; the old group is never used again, and closing it closes nothing new."""
    for epoch in range(3):
        renewed = group.renew(PATIENCE_S)
        assert (renewed.rank, renewed.size) == (group.rank, group.size)
        with pytest.raises(InvalidTransitionError):
            group.all_and(bytearray(8), PATIENCE_S)
        with pytest.raises(InvalidTransitionError):
            group.renew(PATIENCE_S)
        group.close()
        check_group_works(renewed, seed=epoch)
        group = renewed
    group.close()


def close_is_idempotent(group: RankGroup) -> None:
    """And nothing works afterwards."""
    group.all_gather(b"all are here", PATIENCE_S)
    group.close()
    group.close()
    with pytest.raises(InvalidTransitionError):
        group.all_and(bytearray(8), PATIENCE_S)
    with pytest.raises(InvalidTransitionError):
        group.all_gather(b"", PATIENCE_S)
    with pytest.raises(InvalidTransitionError):
        group.roll_call("", PATIENCE_S)


def a_callers_mistake_leaves_the_group_as_it_was(group: RankGroup) -> None:
    """No whole words, no such root, no such time: `ContractError`, and the group works."""
    with pytest.raises(ContractError):
        group.all_and(bytearray(12), PATIENCE_S)
    for root in (-1, group.size):
        with pytest.raises(ContractError):
            group.broadcast(b"", root, PATIENCE_S)
    for timeout_s in (-1.0, math.nan, math.inf):
        with pytest.raises(ContractError):
            group.all_and(bytearray(8), timeout_s)
        with pytest.raises(ContractError):
            group.all_gather(b"", timeout_s)
        with pytest.raises(ContractError):
            group.split(0, timeout_s)
        with pytest.raises(ContractError):
            group.renew(timeout_s)
        with pytest.raises(ContractError):
            group.roll_call("", timeout_s)
    check_group_works(group)


def roll_call_gives_every_mark(group: RankGroup) -> None:
    """All marks, as soon as they are there, and the group works as before."""
    marks = group.roll_call(f"mark of {group.rank}", PATIENCE_S)
    assert marks == {rank: f"mark of {rank}" for rank in range(group.size)}
    check_group_works(group)


def roll_call_lacks_who_is_missing(group: RankGroup) -> None:
    """It waits no longer than it was told; the group works as before."""
    last = group.size - 1
    if group.rank != last:
        marks = group.roll_call("here", SHORT_S)
        assert last not in marks
        assert marks[group.rank] == "here"
    check_group_works(group)


def a_rank_that_does_not_come_is_named(group: RankGroup) -> None:
    """The others fail in time, then at once, with their words as they were; `renew` heals it.

    The last rank comes late: it is told that the others failed by their roll call, the one way
    outside a collective.
    """
    check_group_works(group)
    last = group.size - 1
    if group.rank == last:
        group.roll_call("late", PATIENCE_S)
    else:
        words = random_words(1, group.rank)
        begin = time.monotonic()
        with pytest.raises(AgreementError) as caught:
            group.all_and(words, SHORT_S)
        assert time.monotonic() - begin < SHORT_S + SLACK_S
        assert words == random_words(1, group.rank)
        check_names_the_missing(caught.value, last, group.size)
        for said in ("all_and", f"{SHORT_S:g} s", f"rank {last}"):
            assert said in str(caught.value), said
        check_group_is_unusable(group)
        group.roll_call("failed", PATIENCE_S)
    check_group_works(group.renew(PATIENCE_S))


def check_names_the_missing(error: AgreementError, missing: int, size: int) -> None:
    """Something is said of every rank, and of the missing one what is said of no other."""
    assert set(error.by_rank) == set(range(size))
    said = [error.by_rank[rank] for rank in range(size) if rank != missing]
    assert error.by_rank[missing] not in said


def check_group_is_unusable(group: RankGroup) -> None:
    """Every collective fails at once, whatever its deadline."""
    begin = time.monotonic()
    for _ in range(2):
        with pytest.raises(AgreementError):
            group.all_and(bytearray(8), 2 * SLACK_S)
        with pytest.raises(AgreementError):
            group.broadcast(b"", 0, 2 * SLACK_S)
        with pytest.raises(AgreementError):
            group.all_gather(b"", 2 * SLACK_S)
        with pytest.raises(AgreementError) as caught:
            group.split(0, 2 * SLACK_S)
        assert set(caught.value.by_rank) == set(range(group.size))
    assert time.monotonic() - begin < SLACK_S


def a_late_rank_fails_too(group: RankGroup) -> None:
    """It may complete the collective that the others gave up, but no other."""
    if group.rank == group.size - 1:
        group.roll_call("late", PATIENCE_S)
        begin = time.monotonic()
        with pytest.raises(AgreementError):
            for _ in range(2):
                group.all_and(bytearray(8), PATIENCE_S)
        assert time.monotonic() - begin < SLACK_S
    else:
        with pytest.raises(AgreementError):
            group.all_and(bytearray(8), SHORT_S)
        group.roll_call("failed", PATIENCE_S)
    check_group_works(group.renew(PATIENCE_S))


def all_that_wait_fail_together(group: RankGroup) -> None:
    """One rank's deadline is short, others' are long, the last never comes: nobody waits long."""
    last = group.size - 1
    begin = time.monotonic()
    if group.rank == last:
        group.roll_call("late", PATIENCE_S)
    else:
        with pytest.raises(AgreementError) as caught:
            group.all_and(bytearray(8), SHORT_S if group.rank == 0 else PATIENCE_S)
        check_names_the_missing(caught.value, last, group.size)
        group.roll_call("failed", PATIENCE_S)
    assert time.monotonic() - begin < SHORT_S + SLACK_S
    check_group_works(group.renew(PATIENCE_S))


def a_renewal_can_be_tried_again(group: RankGroup) -> None:
    """Who comes late to `renew` meets what the others began."""
    last = group.size - 1
    if group.rank == last:
        group.roll_call("late", PATIENCE_S)
    else:
        with pytest.raises(AgreementError) as caught:
            group.renew(SHORT_S)
        check_names_the_missing(caught.value, last, group.size)
        check_group_is_unusable(group)
        group.roll_call("failed", PATIENCE_S)
    check_group_works(group.renew(PATIENCE_S))


def different_collectives_are_noticed(group: RankGroup) -> None:
    """On every rank alike, where each says its name; and `renew` heals that, too."""
    with pytest.raises(AgreementError) as caught:
        if group.rank == 0:
            group.broadcast(b"value", 0, PATIENCE_S)
        else:
            group.all_gather(b"value", PATIENCE_S)
    assert "broadcast" in caught.value.by_rank[0]
    assert "all_gather" in caught.value.by_rank[group.size - 1]
    check_group_is_unusable(group)
    check_group_works(group.renew(PATIENCE_S))


_CASES_OF_ANY_SIZE: Final[tuple[Case, ...]] = (
    and_is_the_and_of_all_ranks,
    words_of_ones_and_zeros_stay,
    broadcast_gives_the_roots_value,
    gather_gives_every_value_by_rank,
    split_gives_the_ranks_of_a_color,
    split_of_one_color_is_another_group,
    renew_gives_the_same_ranks,
    close_is_idempotent,
    a_callers_mistake_leaves_the_group_as_it_was,
    roll_call_gives_every_mark,
)
_CASES_OF_MANY_RANKS: Final[tuple[Case, ...]] = (
    roll_call_lacks_who_is_missing,
    a_rank_that_does_not_come_is_named,
    a_late_rank_fails_too,
    all_that_wait_fail_together,
    a_renewal_can_be_tried_again,
    different_collectives_are_noticed,
)

CASES: Final[Mapping[str, Case]] = {
    case.__name__: case for case in (*_CASES_OF_ANY_SIZE, *_CASES_OF_MANY_RANKS)
}
"""All cases by name, for a program that runs one rank."""


class RankGroupTests:
    """The contract of `RankGroup`, case by case, for a group of any size."""

    #: What the guard compares with; set by Python when a subclass is made.
    _overridden: ClassVar[tuple[str, ...]] = ()

    @override
    def __init_subclass__(cls) -> None:
        """Note which cases a subclass outside this module replaces without saying why it must."""
        super().__init_subclass__()
        suites = [suite for suite in cls.__mro__ if suite.__module__ == __name__]
        cls._overridden = unexplained_overrides(cls, suites)

    def test_no_case_is_overridden(self) -> None:
        """A case that is replaced proves nothing, unless it says why it cannot pass."""
        assert not self._overridden, f"overridden without xfail(reason=): {self._overridden}"

    def test_and_is_the_and_of_all_ranks(self, run_case: RunCase) -> None:
        """In place, for no words, one and many, step after step."""
        run_case(and_is_the_and_of_all_ranks)

    def test_words_of_ones_and_zeros_stay(self, run_case: RunCase) -> None:
        """What all ranks say alike is what they get."""
        run_case(words_of_ones_and_zeros_stay)

    def test_broadcast_gives_the_roots_value(self, run_case: RunCase) -> None:
        """From each rank, also nothing, and values with zeros in them."""
        run_case(broadcast_gives_the_roots_value)

    def test_gather_gives_every_value_by_rank(self, run_case: RunCase) -> None:
        """Empty values, equal ones, and values of unequal length."""
        run_case(gather_gives_every_value_by_rank)

    def test_split_gives_the_ranks_of_a_color(self, run_case: RunCase) -> None:
        """In the order of their ranks; both groups work, and one says nothing to the other."""
        run_case(split_gives_the_ranks_of_a_color)

    def test_split_of_one_color_is_another_group(self, run_case: RunCase) -> None:
        """The same ranks; it lives longer than the group that it came from."""
        run_case(split_of_one_color_is_another_group)

    def test_renew_gives_the_same_ranks(self, run_case: RunCase) -> None:
        """Time after time; the old group is never used again, and closing it closes nothing new."""
        run_case(renew_gives_the_same_ranks)

    def test_close_is_idempotent(self, run_case: RunCase) -> None:
        """And nothing works afterwards."""
        run_case(close_is_idempotent)

    def test_a_callers_mistake_leaves_the_group_as_it_was(self, run_case: RunCase) -> None:
        """No whole words, no such root, no such time: `ContractError`, and the group works."""
        run_case(a_callers_mistake_leaves_the_group_as_it_was)

    def test_roll_call_gives_every_mark(self, run_case: RunCase) -> None:
        """All marks, as soon as they are there, and the group works as before."""
        run_case(roll_call_gives_every_mark)


class ManyRanksTests(RankGroupTests):
    """The same, and what takes two ranks: somebody who does not come."""

    def test_roll_call_lacks_who_is_missing(self, run_case: RunCase) -> None:
        """It waits no longer than it was told; the group works as before."""
        run_case(roll_call_lacks_who_is_missing)

    def test_a_rank_that_does_not_come_is_named(self, run_case: RunCase) -> None:
        """The others fail in time, then at once, with their words as they were."""
        run_case(a_rank_that_does_not_come_is_named)

    def test_a_late_rank_fails_too(self, run_case: RunCase) -> None:
        """It may complete the collective that the others gave up, but no other."""
        run_case(a_late_rank_fails_too)

    def test_all_that_wait_fail_together(self, run_case: RunCase) -> None:
        """The shortest deadline among those that wait counts for all."""
        run_case(all_that_wait_fail_together)

    def test_a_renewal_can_be_tried_again(self, run_case: RunCase) -> None:
        """Who comes late to `renew` meets what the others began."""
        run_case(a_renewal_can_be_tried_again)

    def test_different_collectives_are_noticed(self, run_case: RunCase) -> None:
        """On every rank alike, where each says its name; and `renew` heals that, too."""
        run_case(different_collectives_are_noticed)
