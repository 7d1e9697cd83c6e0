from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from radixlink_contracts.errors import ContractError, InvalidTransitionError, StaleHandleError
from radixlink_linker import MonotonicClock, ThreadExecutor
from radixlink_testing.forks import in_a_child_while_held


def test_the_clock_only_goes_forward() -> None:
    clock = MonotonicClock()
    times = [clock.now() for _ in range(100)]
    assert times == sorted(times)


def test_a_task_runs_on_another_thread() -> None:
    executor = ThreadExecutor()
    ran_on: list[threading.Thread] = []
    ran = threading.Event()

    def task() -> None:
        ran_on.append(threading.current_thread())
        ran.set()

    executor.submit(task)
    assert ran.wait(10)
    assert ran_on[0] is not threading.current_thread()
    executor.close()


def test_a_task_that_raises_is_told_of_and_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_type))
    executor = ThreadExecutor(num_threads=1)
    threads: list[threading.Thread] = []
    ran = threading.Event()

    def cancelled() -> None:
        threads.append(threading.current_thread())
        # No `Exception`, and a store that waits for an event loop may let it out.
        raise asyncio.CancelledError

    def task() -> None:
        threads.append(threading.current_thread())
        ran.set()

    executor.submit(cancelled)
    executor.submit(task)
    assert ran.wait(10)
    executor.close()
    assert told == [asyncio.CancelledError]
    assert threads[0] is threads[1]


def test_a_hook_that_raises_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(args: threading.ExceptHookArgs) -> None:
        message = f"a hook that cannot tell of {args.exc_type}"
        raise RuntimeError(message)

    def bad() -> None:
        raise ValueError

    monkeypatch.setattr(threading, "excepthook", hook)
    executor = ThreadExecutor(num_threads=1)
    ran = threading.Event()
    executor.submit(bad)
    executor.submit(ran.set)
    assert ran.wait(10)
    executor.close()
    assert executor._num_running == 0


def test_an_executor_without_threads_is_refused() -> None:
    with pytest.raises(ContractError, match="num_threads of at least 1, got 0"):
        ThreadExecutor(num_threads=0)


def test_a_task_starts_a_thread_only_where_none_is_idle() -> None:
    executor = ThreadExecutor(num_threads=1 << 30, name="counted")
    gate, begun = threading.Event(), [threading.Event() for _ in range(3)]
    for event in begun:
        executor.submit(partial(_begin, event, gate))
    assert all(event.wait(10) for event in begun)
    assert _num_threads("counted-") == 3
    gate.set()
    deadline = time.monotonic() + 10
    while executor._num_running:
        assert time.monotonic() < deadline
    for _ in range(3):
        executor.submit(lambda: None)
    executor.close()
    assert len(executor._threads) == 3


def test_no_more_threads_are_started_than_there_may_be() -> None:
    executor = ThreadExecutor(num_threads=2, name="few")
    gate, begun = threading.Event(), [threading.Event() for _ in range(3)]
    for event in begun:
        executor.submit(partial(_begin, event, gate))
    assert _num_threads("few-") == 2
    gate.set()
    assert all(event.wait(10) for event in begun)
    executor.close()


def _begin(begun: threading.Event, gate: threading.Event) -> None:
    begun.set()
    gate.wait(10)


def _num_threads(prefix: str) -> int:
    return sum(thread.name.startswith(prefix) for thread in threading.enumerate())


def test_where_no_thread_can_be_started_the_next_task_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = ThreadExecutor(num_threads=2)
    gate, refused, ran = threading.Event(), threading.Event(), threading.Event()

    def start(thread: threading.Thread) -> None:
        message = f"can't start {thread.name}"
        raise RuntimeError(message)

    executor.submit(partial(_begin, threading.Event(), gate))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            executor.submit(refused.set)
    executor.submit(ran.set)
    assert ran.wait(10)
    gate.set()
    executor.close()
    # Who was told that its task is not taken counts on that.
    assert not refused.is_set()


def test_close_after_no_thread_could_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = ThreadExecutor()

    def start(thread: threading.Thread) -> None:
        message = f"can't start {thread.name}"
        raise RuntimeError(message)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        executor.submit(lambda: None)
    executor.close()


def refuses(executor: ThreadExecutor) -> bool:
    try:
        executor.submit(lambda: None)
    except InvalidTransitionError:
        return True
    return False


def test_close_waits_for_what_runs_and_drops_the_rest() -> None:
    executor = ThreadExecutor(num_threads=1)
    gate, begun, late = threading.Event(), threading.Event(), threading.Event()

    def task() -> None:
        begun.set()
        gate.wait(10)

    executor.submit(task)
    executor.submit(late.set)
    assert begun.wait(10)
    closing = threading.Thread(target=executor.close)
    closing.start()
    # What is submitted until then waits behind the first task, and is dropped with the second.
    while not refuses(executor):
        assert closing.is_alive()
    gate.set()
    closing.join(10)
    assert not closing.is_alive()
    assert not late.is_set()
    executor.close()
    with pytest.raises(InvalidTransitionError):
        executor.submit(late.set)


def test_close_gives_a_task_that_hangs_up_at_its_deadline() -> None:
    executor = ThreadExecutor(close_timeout_s=0.05)
    gate, begun = threading.Event(), threading.Event()

    def task() -> None:
        begun.set()
        gate.wait(10)

    executor.submit(task)
    assert begun.wait(10)
    executor.close()
    assert not gate.is_set()
    gate.set()


def test_a_task_that_hangs_keeps_no_process_alive() -> None:
    program = (
        "import threading\n"
        "from radixlink_linker import ThreadExecutor\n"
        "begun = threading.Event()\n"
        "ThreadExecutor().submit(lambda: (begun.set(), threading.Event().wait()))\n"
        "begun.wait()\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode == 0


def test_a_forked_child_has_none_of_the_threads_and_waits_for_none() -> None:
    executor = ThreadExecutor()
    ran = threading.Event()
    executor.submit(ran.set)
    assert ran.wait(10)

    def in_the_child() -> int:
        with pytest.raises(StaleHandleError, match="make another in the child"):
            executor.submit(ran.set)
        executor.close()
        with ThreadExecutor() as another:
            ran_here = threading.Event()
            another.submit(ran_here.set)
            assert ran_here.wait(10)
        return 0

    assert in_a_child_while_held(executor._changed, in_the_child) == 0
    # It is the parent's as ever.
    again = threading.Event()
    executor.submit(again.set)
    assert again.wait(10)
    executor.close()


def test_the_end_of_a_with_closes_it() -> None:
    with ThreadExecutor() as executor:
        ran = threading.Event()
        executor.submit(ran.set)
        assert ran.wait(10)
    with pytest.raises(InvalidTransitionError):
        executor.submit(ran.set)
