"""`SimulatedExecutor`: tasks that run when the history says so."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from typing_extensions import override

from radixlink_contracts import Executor
from radixlink_contracts.errors import InvalidTransitionError
from radixlink_testing.simulator._faults import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_testing.simulator._watch import Watch


class SimulatedExecutor(Executor):
    """Keeps tasks until the history runs them."""

    def __init__(self, watch: Watch) -> None:
        """Start with nothing to do."""
        self._watch = watch
        self.tasks: deque[Callable[[], None]] = deque()
        #: Tasks that hang, or take long.
        self.held: deque[Callable[[], None]] = deque()
        self._closed = False

    @override
    def submit(self, task: Callable[[], None]) -> None:
        """Keep a task.

        Raises:
            InvalidTransitionError: The executor was closed, or refuses.
        """
        if self._closed or self._watch.strikes(Fault.EXECUTOR_REFUSES):
            msg = "SimulatedExecutor: expected an open executor, got a task after close"
            raise InvalidTransitionError(msg, state="closed", event="submit")
        if self._watch.strikes(Fault.LOOKUP_HANGS) or self._watch.strikes(Fault.LOOKUP_LATE):
            self.held.append(task)
        else:
            self.tasks.append(task)

    def release(self) -> None:
        """What hung comes back."""
        self.tasks.extend(self.held)
        self.held.clear()

    @override
    def close(self) -> None:
        """Drop what is kept and take no more. Idempotent."""
        self._closed = True
        self.tasks.clear()
        self.held.clear()
