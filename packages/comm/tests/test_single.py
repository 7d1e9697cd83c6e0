"""The group of one passes the suite, and costs nothing."""

from __future__ import annotations

import pytest

from radixlink_comm import SingleRank
from radixlink_testing.rank_groups import RankGroupTests, RunCase, run_in_threads


class TestSingleRank(RankGroupTests):
    @pytest.fixture
    def run_case(self) -> RunCase:
        return lambda case: run_in_threads([SingleRank()], case)


def test_no_deadline_is_too_short() -> None:
    group = SingleRank()
    words = bytearray(b"\x5a" * 32)
    group.all_and(words, 0.0)
    assert words == b"\x5a" * 32
    assert group.all_gather(b"value", 0.0) == (b"value",)
    assert group.broadcast(b"value", 0, 0.0) == b"value"
    assert group.roll_call("here", 0.0) == {0: "here"}


def test_split_and_renew_are_groups_of_one() -> None:
    group = SingleRank()
    assert group.split(7, 0.0).size == 1
    renewed = group.renew(0.0)
    assert (renewed.rank, renewed.size) == (0, 1)
