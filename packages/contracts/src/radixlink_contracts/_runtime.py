"""Time and threads, handed in: the simulator owns both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_TIMEOUT_S: Final = 1e6
"""Eleven days: the longest that anybody may be told to wait. What threads and transports cannot add to
now would raise where it is waited, in the middle of a match or a forward."""


class Clock(Protocol):
    """A clock that only goes forward. Local: no replicated decision is made of it."""

    def now(self) -> float:
        """Seconds since some fixed moment of this process."""
        ...


class Executor(Protocol):
    """Runs work off the scheduler thread."""

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task, at some time, on some other thread. The task lets no exception out.

        Raises:
            InvalidTransitionError: The executor was closed.
        """
        ...

    def close(self) -> None:
        """Take no more tasks and return when those that run have ended, or a deadline has passed. Idempotent."""
        ...
