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
    from pathlib import Path

#: After so many seconds a child that waits for ever is ended.
PATIENCE_S = 20


@pytest.mark.parametrize(("tally", "name"), [(Tally(None), "put"), (TierTally(), "written")])
def test_child_counts_though_another_thread_was_counting(
    tally: Tally | TierTally, name: str
) -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        """Be where a thread adds."""
        with tally._mutex.lock:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(PATIENCE_S)
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)
        tally.add(**{name: 2})
        os._exit(getattr(tally.counters, name))
    leave.set()
    thread.join()
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status), "the child waited for a thread that it does not have"
    assert os.WEXITSTATUS(status) == 2
    tally.add(**{name: 1})
    assert getattr(tally.counters, name) == 1


def test_child_closes_locks_that_another_thread_was_adding_to(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    path.touch()
    locks = SlotLocks(os.open(path, os.O_RDWR))
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        """Be where a thread makes another descriptor."""
        with locks._mutex.lock:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(PATIENCE_S)
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)
        locks.close()
        os._exit(0)
    leave.set()
    thread.join()
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status), "the child waited for a thread that it does not have"
    locks.close()
