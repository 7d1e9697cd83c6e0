"""Errands bring what their calls bring, and say so where they cannot be run."""

from __future__ import annotations

import threading

import pytest

from radixlink_comm._errand import Errands
from radixlink_comm._health import CollectiveError

PATIENCE_S = 30.0


def no_thread(thread: threading.Thread) -> None:
    message = "can't start new thread"
    raise RuntimeError(message)


def test_an_errand_brings_its_result_or_its_error() -> None:
    errands = Errands()
    assert errands.send(lambda: 7).result(PATIENCE_S) == 7
    with pytest.raises(ZeroDivisionError):
        errands.send(lambda: 1 // 0).result(PATIENCE_S)
    errands.settle(PATIENCE_S)


def test_an_errand_that_no_thread_can_run_is_a_failure_of_the_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errands, ran = Errands(), threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(CollectiveError, match="no thread can be had on this rank: can't start"):
            errands.send(ran.set)
        # Nothing is under way, so nothing is waited for.
        errands.settle(PATIENCE_S)
    assert not ran.is_set()
    errands.send(ran.set).result(PATIENCE_S)
    assert ran.is_set()
    errands.settle(PATIENCE_S)
