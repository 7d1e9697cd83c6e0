"""Foreign calls with a deadline, for an engine whose own calls may not return.

Theory of operation. A call of Mooncake returns when its master and the owners answer, and a stopped
one never does. So each call is made on a daemon thread that is handed it, and the caller waits no
longer than it wants to. A call that is late keeps its thread, and the staging memory it was given,
until it returns, for it still writes there. After `max_late` of them further calls are refused at
once: a hung engine costs some deadlines, then nothing. And the engine is not closed under a call
that runs, however late: that ends the process. Whoever ends the last of them closes it, so that it
needs no further thread, which there may not be.
"""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from radixlink_store_mooncake.errors import UnansweredError

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


class Held(Protocol):
    """What a call uses until it returns."""

    def hold(self) -> None:
        """One more uses it."""
        ...

    def release(self) -> None:
        """One fewer uses it."""
        ...


class _Job:
    """One call, on its way to a thread and back."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run: Final = run
        #: Locked until the call has returned.
        self.returned: Final = threading.Lock()
        self.returned.acquire()
        #: These two are guarded by the mutex of `Calls`.
        self.over = False
        self.late = False

    def make(self) -> None:
        """It has returned. For the last call, which nobody takes for late."""
        try:
            self.run()
        finally:
            self.returned.release()


class Calls:
    """Runs calls on threads of its own, which grow with the number of calls at once.

    Thread: any.
    """

    def __init__(self, max_late: int) -> None:
        """No thread yet.

        Args:
            max_late: How many calls may be late before further ones are refused.
        """
        self._max_late: Final = max_late
        #: Guards all below.
        self._mutex: Final = threading.Lock()
        #: The queues of threads that wait for work; the one used last is used next.
        self._idle: Final[deque[SimpleQueue[_Job | None]]] = deque()
        self._num_running = 0
        self._num_late = 0
        self._closed = False
        #: What is made when nothing runs any more, until it is; of the closed only.
        self._last: _Job | None = None

    def run(self, work: Callable[[], _T], timeout_s: float, held: Held | None = None) -> _T:
        """What the call returns.

        Args:
            work: The call.
            timeout_s: How long to wait for it; below 0 is not at all.
            held: Is held until it has returned, however late that is.

        Raises:
            UnansweredError: It did not return in time, or was not made: too many are late, this was
                closed, or there is no thread for it. Its own exceptions pass.
        """
        values: list[_T] = []
        errors: list[Exception] = []

        def make() -> None:
            try:
                values.append(work())
            except Exception as error:  # noqa: BLE001 - raised again where the call was asked for
                errors.append(error)
            finally:
                if held is not None:
                    held.release()

        job = _Job(make)
        with self._mutex:
            if self._closed:
                raise UnansweredError("Mooncake: expected an open connection, got a closed one")
            if self._num_late >= self._max_late:
                raise UnansweredError(
                    f"Mooncake: {self._num_late} calls have not returned yet, so no other is made; "
                    f"is a master or an owner stopped?",
                    transient=True,
                )
            if held is not None:
                held.hold()
            self._num_running += 1
            queue = self._idle.pop() if self._idle else None
        try:
            self._hand_over(job, queue)
        except RuntimeError as error:
            if held is not None:
                held.release()
            self._end_one_here()
            raise UnansweredError(
                f"Mooncake: expected a thread for a call, got: {error}", transient=True
            ) from error
        if not job.returned.acquire(timeout=max(timeout_s, 0.0)):
            with self._mutex:
                job.late = not job.over
                self._num_late += job.late
            if job.late:
                raise UnansweredError(
                    f"Mooncake: expected an answer within {timeout_s:.3g} s, got none; is a master "
                    f"or an owner stopped?",
                    transient=True,
                )
        if errors:
            raise errors[0]
        return values[0]

    def close(self, last: Callable[[], None], timeout_s: float) -> None:
        """No call is made any more, and `last` is made once those that run have returned. Idempotent.

        Args:
            last: The last call: what it ends must not end under another. It is made by the thread
                of the call that returns last, or by one that waits; without either by a new one,
                and if there is none, here.
            timeout_s: How long to wait for it. After that it is left to its thread. It does not
                count where `last` is made here.
        """
        job = _Job(last)
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            idle = list(self._idle)
            self._idle.clear()
            self._last = job
            nothing_runs = not self._num_running
            self._num_running += nothing_runs
        queue = idle.pop() if idle and nothing_runs else None
        for waiting in idle:
            waiting.put(None)
        if nothing_runs:
            # A call that does nothing, for the end of a call is where the last one is made.
            try:
                self._hand_over(_Job(lambda: None), queue)
            except RuntimeError:
                self._end_one_here()
        job.returned.acquire(timeout=max(timeout_s, 0.0))

    def _end_one(self) -> _Job | None:
        """One call fewer runs. Under the mutex.

        Returns:
            The last call, which the caller makes without the mutex, if it is time for it.
        """
        self._num_running -= 1
        if self._num_running:
            return None
        last, self._last = self._last, None
        return last

    def _end_one_here(self) -> None:
        """One call fewer runs: one that got no thread."""
        with self._mutex:
            last = self._end_one()
        if last is not None:
            last.make()

    def _hand_over(self, job: _Job, queue: SimpleQueue[_Job | None] | None) -> None:
        """Give a call to a thread that waits, or to a new one.

        Raises:
            RuntimeError: The system has no more threads.
        """
        if queue is None:
            queue = SimpleQueue()
            threading.Thread(
                target=self._work, args=(queue,), name="radixlink-mooncake", daemon=True
            ).start()
        queue.put(job)

    def _work(self, queue: SimpleQueue[_Job | None]) -> None:
        """Run the calls of one queue, one at a time."""
        while (job := queue.get()) is not None:
            job.run()
            with self._mutex:
                job.over = True
                self._num_late -= job.late
                last = self._end_one()
                closed = self._closed
                if not closed:
                    self._idle.append(queue)
            job.returned.release()
            # Nothing of it is kept while there is nothing to do.
            del job
            if last is not None:
                last.make()
            if closed:
                return
