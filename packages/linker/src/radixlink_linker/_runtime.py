"""The real clock and the real threads, for whoever does not bring a simulator's."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

from typing_extensions import override

from radixlink_contracts import MAX_TIMEOUT_S, Clock, Executor
from radixlink_contracts.errors import ContractError, InvalidTransitionError
from radixlink_linker._home_process import HomeProcess
from radixlink_linker._settings import HANGING_LOOKUPS

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

#: Longer than another thread takes to wake up; less, and this one would have the lock again first.
_GIVE_WAY_S: Final = 50e-6


def give_way() -> None:
    """Another thread that waits for Python's lock gets it: the `pause` of `PageKeySource.resolve`."""
    time.sleep(_GIVE_WAY_S)


class MonotonicClock(Clock):
    """The machine's monotonic clock."""

    @override
    def now(self) -> float:
        """Seconds since some fixed moment of this machine."""
        return time.monotonic()


class ThreadExecutor(Executor):
    """Threads of this process, which end with it: a task that hangs keeps no process alive."""

    def __init__(
        self,
        *,
        num_threads: int = HANGING_LOOKUPS,
        name: str = "radixlink-lookup",
        close_timeout_s: float = 5.0,
    ) -> None:
        """Start with no thread; a task for which none is idle starts one.

        Args:
            num_threads: How many tasks run at once: at least `LinkerSettings.max_hanging_lookups`,
                as the defaults are. A lookup that never returns keeps its thread, and whether the
                store is back another one finds out; with fewer threads that waits behind those that
                hang, and all lookups stay misses. Lookups come one at a time mostly, and then one
                thread runs all of them.
            name: Of the threads.
            close_timeout_s: Seconds that `close` waits for the tasks that run.

        Raises:
            ContractError: There would be no thread, or `close_timeout_s` is no time.
        """
        if num_threads < 1:
            msg = f"ThreadExecutor: expected num_threads of at least 1, got {num_threads}"
            raise ContractError(msg)
        if not 0 <= close_timeout_s <= MAX_TIMEOUT_S:
            msg = (
                f"ThreadExecutor: expected close_timeout_s in 0..{MAX_TIMEOUT_S:g}, "
                f"got {close_timeout_s}"
            )
            raise ContractError(msg)
        self._home = HomeProcess("ThreadExecutor")
        self._close_timeout_s = close_timeout_s
        #: Guards the tasks. Entered itself, and not by its condition: see `_transfer_thread`.
        self._lock = threading.RLock()
        #: Tells the threads of tasks.
        self._changed = threading.Condition(self._lock)
        self._tasks: deque[Callable[[], None]] = deque()
        self._closed = False
        self._num_threads = num_threads
        self._name = name
        #: Those that were started.
        self._threads: list[threading.Thread] = []
        #: Tasks that were taken and have not returned.
        self._num_running = 0

    @override
    def submit(self, task: Callable[[], None]) -> None:
        """Run a task on one of the threads; see `Executor.submit`.

        Raises:
            RuntimeError: No thread is idle and there can be no more; the task is not taken.
            StaleHandleError: This is a forked child, which has none of the threads.
        """
        self._home.check()
        with self._lock:
            if self._closed:
                msg = "ThreadExecutor: expected an open executor, got a task after close"
                raise InvalidTransitionError(msg, state="closed", event="submit")
            num_threads = len(self._threads)
            all_busy = self._num_running + len(self._tasks) >= num_threads
            if all_busy and num_threads < self._num_threads:
                name = f"{self._name}-{num_threads}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
            self._tasks.append(task)
            self._changed.notify()

    @override
    def close(self) -> None:
        """Drop the tasks that no thread has taken and wait for the others, for a while. Idempotent.

        In a forked child, nothing: all of it is its parent's.
        """
        if not self._home.is_here:
            return
        with self._lock:
            self._closed = True
            self._tasks.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + self._close_timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        """Closed at the end of the `with`."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """`close`."""
        self.close()

    def _work(self) -> None:
        """Run tasks until the executor is closed. One that raises, which it may not, ends no thread."""
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._tasks or self._closed)
                if self._closed:
                    return
                task = self._tasks.popleft()
                self._num_running += 1
            try:
                task()
            except BaseException:  # noqa: BLE001 -- the thread is there for the other tasks too
                _tell()
            finally:
                # Nothing of it is kept while there is nothing to do.
                del task
                with self._lock:
                    self._num_running -= 1


def _tell() -> None:
    """Tell of what is being handled, as a thread does that ends by it; a hook that raises tells nobody."""
    args = threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
    with suppress(BaseException):
        threading.excepthook(args)
