"""The real clock and the real threads, for whoever does not bring a simulator's."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from radixlink_contracts.errors import InvalidTransitionError

if TYPE_CHECKING:
    from collections.abc import Callable


class MonotonicClock:
    """The machine's monotonic clock. A `Clock`."""

    def now(self) -> float:
        """Seconds since some fixed moment of this machine."""
        return time.monotonic()


class ThreadExecutor:
    """Threads of this process. An `Executor`."""

    def __init__(self, *, num_threads: int = 1, name: str = "radixlink-lookup") -> None:
        """Start with no thread; they start with the first tasks."""
        self._pool = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix=name)

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task on one of the threads; see `Executor.submit`."""
        try:
            self._pool.submit(task)
        except RuntimeError as error:
            msg = "ThreadExecutor: expected an open executor, got a task after close"
            raise InvalidTransitionError(msg, state="closed", event="submit") from error

    def close(self) -> None:
        """Drop the tasks that no thread has taken and wait for the others. Idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)
