"""What is no argument of a call is refused before the group is entered, and breaks nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from radixlink_comm import SingleRank, ThreadGroup
from radixlink_contracts.errors import ContractError
from radixlink_testing.rank_groups import check_group_works, run_in_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import RankGroup

PATIENCE_S = 30.0

# Callers whose types nobody checks.
REFUSED: dict[str, Callable[[Any], object]] = {
    "all_and: expected words as a bytearray, got bytes b": lambda group: group.all_and(
        bytes(8), PATIENCE_S
    ),
    "all_and: expected words as a bytearray, got list": lambda group: group.all_and(
        [0] * 8, PATIENCE_S
    ),
    "all_gather: expected a value of bytes, got str 'x'": lambda group: group.all_gather(
        "x", PATIENCE_S
    ),
    "broadcast: expected a value of bytes, got str 'x'": lambda group: group.broadcast(
        "x", 0, PATIENCE_S
    ),
    "broadcast: expected a root of int, got float 0.0": lambda group: group.broadcast(
        b"x", 0.0, PATIENCE_S
    ),
    "split: expected a color of int, got float 1.5": lambda group: group.split(1.5, PATIENCE_S),
    "roll_call: expected a mark of str, got bytes b'here'": lambda group: group.roll_call(
        b"here", PATIENCE_S
    ),
    "all_and: expected a timeout in seconds, got NoneType None": lambda group: group.all_and(
        bytearray(8), None
    ),
    "split: expected a timeout in seconds, got str '1'": lambda group: group.split(0, "1"),
}
"""What is said, and the call that it is said of."""


@pytest.mark.parametrize("message", REFUSED)
def test_an_argument_of_another_type_is_refused_and_the_group_goes_on(message: str) -> None:
    def case(group: RankGroup) -> None:
        with pytest.raises(ContractError, match=message):
            REFUSED[message](group)
        check_group_works(group)

    run_in_threads(ThreadGroup.create(2), case)


def test_a_long_value_of_another_type_makes_no_long_message() -> None:
    with pytest.raises(ContractError) as caught:
        SingleRank().all_gather("x" * 10_000, PATIENCE_S)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


def test_a_color_that_is_a_bool_is_its_number() -> None:
    def case(group: RankGroup) -> None:
        assert group.split([True, 1][group.rank], PATIENCE_S).size == 2

    run_in_threads(ThreadGroup.create(2), case)
