"""A fork while another thread counts."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from radixlink_store._locks import SlotLocks
from radixlink_store._tally import Tally
from radixlink_store._tier_tally import TierTally

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from radixlink_store._process_mutex import ProcessMutex

#: After so many seconds a child that waits for ever is ended.
PATIENCE_S = 20


def in_a_child_while_held(mutex: ProcessMutex, work: Callable[[], int]) -> int:
    """The exit status, by `work`, of a child that is forked while another thread holds a mutex."""
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with mutex.lock:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(PATIENCE_S)
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)
        os._exit(work())
    leave.set()
    thread.join()
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status), "the child waited for a thread that it does not have"
    return os.WEXITSTATUS(status)


@pytest.mark.parametrize(("tally", "name"), [(Tally(None), "put"), (TierTally(), "written")])
def test_child_counts_though_another_thread_was_counting(
    tally: Tally | TierTally, name: str
) -> None:
    def count() -> int:
        tally.add(**{name: 2})
        counted: int = getattr(tally.counters, name)
        return counted

    assert in_a_child_while_held(tally._mutex, count) == 2
    tally.add(**{name: 1})
    assert getattr(tally.counters, name) == 1


def test_child_closes_locks_that_another_thread_was_adding_to(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    path.touch()
    locks = SlotLocks(os.open(path, os.O_RDWR))

    def close() -> int:
        locks.close()
        return 0

    assert in_a_child_while_held(locks._mutex, close) == 0
    locks.close()
