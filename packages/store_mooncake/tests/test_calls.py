"""Calls with deadlines, without Mooncake: the engine is an event that a test sets."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Final

import pytest

from radixlink_store_mooncake._calls import Calls
from radixlink_store_mooncake.errors import UnansweredError

LONG_S: Final = 30.0
SHORT_S: Final = 0.01


class Memory:
    """Counts who holds it."""

    def __init__(self) -> None:
        self.holders = 0
        self.free = threading.Event()

    def hold(self) -> None:
        self.holders += 1

    def release(self) -> None:
        self.holders -= 1
        if not self.holders:
            self.free.set()


def test_what_a_call_returns_and_raises_passes() -> None:
    calls = Calls(max_late=1)
    assert calls.run(lambda: 7, LONG_S) == 7

    def fail() -> None:
        raise KeyError(7)

    with pytest.raises(KeyError):
        calls.run(fail, LONG_S)
    assert calls.run(lambda: 8, LONG_S) == 8


def test_calls_one_after_the_other_use_one_thread() -> None:
    calls = Calls(max_late=1)
    assert len({calls.run(threading.get_ident, LONG_S) for _ in range(20)}) == 1


def test_calls_at_once_do_not_wait_for_each_other() -> None:
    calls, barrier = Calls(max_late=1), threading.Barrier(4)
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda: results.append(calls.run(barrier.wait, LONG_S)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 1, 2, 3]


def test_late_call_keeps_its_memory_until_it_returns() -> None:
    calls, answer, memory = Calls(max_late=2), threading.Event(), Memory()
    with pytest.raises(UnansweredError, match=r"within 0\.01 s"):
        calls.run(lambda: answer.wait(LONG_S), SHORT_S, memory)
    assert memory.holders == 1
    answer.set()
    assert memory.free.wait(LONG_S)


def test_call_that_has_no_time_left_is_late_at_once() -> None:
    calls, answer, memory = Calls(max_late=2), threading.Event(), Memory()
    with pytest.raises(UnansweredError):
        calls.run(lambda: answer.wait(LONG_S), -0.5, memory)
    assert memory.holders == 1
    answer.set()
    assert memory.free.wait(LONG_S)


def _refuse(_: threading.Thread) -> None:
    """As Python does where the system has no more threads."""
    raise RuntimeError("can't start new thread")


def test_call_without_a_thread_is_not_made_and_holds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, memory, made = Calls(max_late=1), Memory(), list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse)
        with pytest.raises(UnansweredError, match="can't start new thread"):
            calls.run(lambda: made.append(1), LONG_S, memory)
    assert memory.free.is_set()
    assert calls.run(lambda: 7, LONG_S, memory) == 7
    # Nothing runs any more, so that the end does not wait.
    calls.close(lambda: made.append(2), LONG_S)
    assert made == [2]


def test_calls_are_refused_while_too_many_are_late_and_made_again_after() -> None:
    calls, answer, memory = Calls(max_late=2), threading.Event(), Memory()
    for _ in range(2):
        with pytest.raises(UnansweredError):
            calls.run(lambda: answer.wait(LONG_S), SHORT_S)
    made = []
    with pytest.raises(UnansweredError, match="2 calls have not returned"):
        calls.run(lambda: made.append(1), LONG_S, memory)
    assert made == []
    assert memory.holders == 0
    answer.set()
    assert _eventually_made(calls)


def test_closing_waits_for_late_calls_but_not_for_long() -> None:
    calls, answer = Calls(max_late=1), threading.Event()
    order: list[str] = []
    ended = threading.Event()

    def late() -> None:
        answer.wait(LONG_S)
        order.append("late")

    def last() -> None:
        order.append("last")
        ended.set()

    with pytest.raises(UnansweredError):
        calls.run(late, SHORT_S)
    calls.close(last, SHORT_S)
    calls.close(last, SHORT_S)
    assert order == []
    with pytest.raises(UnansweredError, match="closed"):
        calls.run(lambda: None, LONG_S)
    answer.set()
    assert ended.wait(LONG_S)
    assert order == ["late", "last"]


def test_end_without_a_new_thread_is_made_by_one_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, made = Calls(max_late=1), list[int]()
    waiting = calls.run(threading.get_ident, LONG_S)
    monkeypatch.setattr(threading.Thread, "start", _refuse)
    for _ in range(2):
        calls.close(lambda: made.append(threading.get_ident()), LONG_S)
    assert made == [waiting]


def test_end_without_any_thread_is_made_by_who_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, made = Calls(max_late=1), list[int]()
    monkeypatch.setattr(threading.Thread, "start", _refuse)
    for _ in range(2):
        calls.close(lambda: made.append(threading.get_ident()), LONG_S)
    assert made == [threading.get_ident()]


def test_end_without_a_new_thread_is_made_by_that_of_the_late_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, answer, ended = Calls(max_late=1), threading.Event(), threading.Event()
    threads: list[int] = []

    def late() -> None:
        answer.wait(LONG_S)
        threads.append(threading.get_ident())

    def last() -> None:
        threads.append(threading.get_ident())
        ended.set()

    with pytest.raises(UnansweredError):
        calls.run(late, SHORT_S)
    monkeypatch.setattr(threading.Thread, "start", _refuse)
    calls.close(last, SHORT_S)
    assert threads == []
    answer.set()
    assert ended.wait(LONG_S)
    assert threads[0] == threads[1] != threading.get_ident()


def test_end_asked_for_while_a_call_gets_no_thread_is_made_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, memory = Calls(max_late=1), Memory()
    holders: list[int] = []

    def close_and_refuse(thread: threading.Thread) -> None:
        calls.close(lambda: holders.append(memory.holders), SHORT_S)
        assert holders == []
        _refuse(thread)

    monkeypatch.setattr(threading.Thread, "start", close_and_refuse)
    with pytest.raises(UnansweredError, match="can't start new thread"):
        calls.run(lambda: None, LONG_S, memory)
    assert holders == [0]


def test_end_that_fails_is_waited_for_no_longer_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, told = Calls(max_late=1), SimpleQueue[type[BaseException]]()
    monkeypatch.setattr(threading, "excepthook", lambda failure: told.put(failure.exc_type))

    def fail() -> None:
        raise KeyError(7)

    # It would be for ever.
    calls.close(fail, threading.TIMEOUT_MAX)
    assert told.get(timeout=LONG_S) is KeyError


def _eventually_made(calls: Calls) -> bool:
    """Late calls have a moment to return after they were answered."""
    for _ in range(1000):
        try:
            return calls.run(lambda: True, LONG_S)
        except UnansweredError:
            threading.Event().wait(0.01)
    return False
