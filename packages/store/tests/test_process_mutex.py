"""A fork while another thread counts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from radixlink_store._locks import SlotLocks
from radixlink_store._tally import Tally
from radixlink_store._tier_tally import TierTally
from radixlink_testing.forks import in_a_child_while_held

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("tally", "name"), [(Tally(None), "put"), (TierTally(), "written")])
def test_child_counts_though_another_thread_was_counting(
    tally: Tally | TierTally, name: str
) -> None:
    def count() -> int:
        tally.add(**{name: 2})
        counted: int = getattr(tally.counters, name)
        return counted

    assert in_a_child_while_held(tally._mutex.lock, count) == 2
    tally.add(**{name: 1})
    assert getattr(tally.counters, name) == 1


def test_child_closes_locks_that_another_thread_was_adding_to(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    path.touch()
    locks = SlotLocks(os.open(path, os.O_RDWR))

    def close() -> int:
        locks.close()
        return 0

    assert in_a_child_while_held(locks._mutex.lock, close) == 0
    locks.close()
