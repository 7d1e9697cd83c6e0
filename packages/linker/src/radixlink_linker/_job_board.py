"""`JobBoard`: what a scheduler thread handed to a transfer thread, what runs, and how it ended."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from radixlink_contracts import Completion, Outcome
from radixlink_contracts.errors import ContractError, TransferTimeoutError
from radixlink_linker._jobs import Job, LayerWiseBatch, TouchBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class JobBoard:
    """Jobs of two threads, with one lock.

    Thread: any; each method says which.
    """

    def __init__(
        self,
        completed_loads: deque[Completion] | None = None,
        completed_offloads: deque[Completion] | None = None,
    ) -> None:
        """Start with nothing to do.

        Args:
            completed_loads: What is still to be told of a board before this.
            completed_offloads: Likewise.
        """
        #: Guards all below. Entered itself, and not by its condition: see `_transfer_thread`.
        self._lock = threading.RLock()
        #: Tells the thread of work and whoever resets of its end.
        self._changed = threading.Condition(self._lock)
        self._batches: deque[LayerWiseBatch] = deque()
        self._loads: deque[Job] = deque()
        self._offloads: deque[Job] = deque()
        self._touches: deque[Job] = deque()
        #: What the thread works at; what it left for a forward that waits comes first.
        self._running: tuple[Job, ...] = ()
        self._closed = False
        self._completed_loads = deque() if completed_loads is None else completed_loads
        self._completed_offloads = deque() if completed_offloads is None else completed_offloads

    @property
    def closed(self) -> bool:
        """True once no more jobs are taken."""
        return self._closed

    # -- on the scheduler thread -------------------------------------------------------------------

    def add_loads(self, batch: LayerWiseBatch | None, staged: Sequence[Job]) -> None:
        """Hand over a batch, and loads for which no forward waits."""
        with self._lock:
            if batch is not None:
                self._batches.append(batch)
            self._loads.extend(staged)
            self._changed.notify_all()

    def add_offload(self, job: Job) -> None:
        """Hand over an offload."""
        with self._lock:
            self._offloads.append(job)
            self._changed.notify_all()

    def add_touch(self, job: Job) -> None:
        """Hand over a touch. It ends among the offloads."""
        with self._lock:
            self._touches.append(job)
            self._changed.notify_all()

    def num_completed_loads(self) -> int:
        """How many load completions wait."""
        with self._lock:
            self._let_go(self._running)
            self._let_go(job for batch in self._batches for job in batch.jobs)
            self._let_go(self._loads)
            return len(self._completed_loads)

    def pop_completed_load(self) -> Completion:
        """The oldest load completion.

        Raises:
            ContractError: There is none.
        """
        return _pop(self._completed_loads)

    def num_completed_offloads(self) -> int:
        """How many offload completions wait."""
        with self._lock:
            self._let_go(self._running)
            self._let_go(self._offloads)
            self._let_go(self._touches)
            return len(self._completed_offloads)

    def pop_completed_offload(self) -> Completion:
        """The oldest offload completion.

        Raises:
            ContractError: There is none.
        """
        return _pop(self._completed_offloads)

    def _let_go(self, jobs: Iterable[Job]) -> None:
        """Tell the quiescence of what of these the ranks decided and no copy touches."""
        for job in jobs:
            if job.ticket.decided and not job.copying:
                self.tell(job, Outcome.FAILED, quiesced=True)

    def fail_waiting(self, why: str) -> list[Job]:
        """What waits for the thread has failed, and touched nothing. Returns it."""
        with self._lock:
            waiting = [
                *(job for batch in self._batches for job in batch.jobs),
                *self._loads,
                *self._offloads,
                *self._touches,
            ]
            for job in waiting:
                self.tell(job, Outcome.FAILED, quiesced=True, why=why)
            self._batches.clear()
            self._loads.clear()
            self._offloads.clear()
            self._touches.clear()
            return waiting

    def abandon(self, why: str) -> tuple[JobBoard, list[Job]] | None:
        """Leave the board to a thread that hangs: all that is on it has failed, and it takes no more.

        When the thread comes back, it finds that it may touch no slot, and ends.

        Returns:
            A board for another thread, and what failed. None where a copy runs: nothing is changed.
        """
        with self._lock:
            if any(job.copying for job in self._running):
                return None
            failed = [*self._running, *self.fail_waiting(why)]
            for job in self._running:
                self.tell(job, Outcome.FAILED, quiesced=True, why=why)
            self.close()
            return JobBoard(self._completed_loads, self._completed_offloads), failed

    def clear(self, timeout_s: float) -> None:
        """Drop everything, and wait for the copy that runs. Idempotent.

        Raises:
            TransferTimeoutError: The copy did not end in time. It is the last of its operation.
        """
        with self._lock:
            running = self._running
            self._drop()
            ended = self._changed.wait_for(
                lambda: not any(job.copying for job in running), timeout_s
            )
            copying = [job for job in running if job.copying]
            self._completed_loads.clear()
            self._completed_offloads.clear()
        if not ended:
            (job,) = copying
            msg = (
                f"reset: expected the copy of operation {job.ticket.op} to end within "
                f"{timeout_s} s, but it still runs"
            )
            raise TransferTimeoutError(
                msg, direction=job.direction, pages=job.num_pages, operation=job.ticket.op
            )

    def close(self) -> None:
        """Take no more jobs; the thread ends behind what it is at. Idempotent."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def end(self) -> None:
        """Take no more jobs and drop everything, with no word of it. Thread: any. Idempotent.

        The thread ends behind the copy, or the call of a store, that it is in.
        """
        with self._lock:
            self._drop()
            self.close()

    def _drop(self) -> None:
        """Nobody wants to know any more of what is queued or runs. The lock is held."""
        for job in self._running:
            job.over = True
        self._batches.clear()
        self._loads.clear()
        self._offloads.clear()
        self._touches.clear()

    # -- on the transfer thread --------------------------------------------------------------------

    def next_work(self) -> Job | LayerWiseBatch | TouchBatch | None:
        """Wait for what is most urgent, which runs from now on; None once the board is closed.

        Touches, which are one short question, go before offloads: late, they would be offloads more.
        """
        with self._lock:
            self._changed.wait_for(
                lambda: (
                    self._batches or self._loads or self._touches or self._offloads or self._closed
                )
            )
            if self._closed:
                return None
            if self._batches:
                return self._take_batch()
            if self._touches and not self._loads:
                touches = TouchBatch(jobs=tuple(self._touches))
                self._touches.clear()
                self._running = touches.jobs
                return touches
            job = (self._loads or self._offloads).popleft()
            self._running = (job,)
            return job

    def next_batch(self) -> LayerWiseBatch | None:
        """The next batch, beside what runs; None where no forward waits."""
        with self._lock:
            return None if self._closed or not self._batches else self._take_batch()

    def _take_batch(self) -> LayerWiseBatch:
        """The oldest batch. What leaves a queue runs, with nothing between: a reset must find it."""
        batch = self._batches.popleft()
        self._running = (*self._running, *batch.jobs)
        return batch

    @contextmanager
    def running(self, work: Job | LayerWiseBatch | TouchBatch) -> Iterator[None]:
        """What was taken runs no more when this is over; what ran before it does again."""
        num_jobs = 1 if isinstance(work, Job) else len(work.jobs)
        try:
            yield
        finally:
            with self._lock:
                self._running = self._running[: len(self._running) - num_jobs]
                self._changed.notify_all()

    @contextmanager
    def copying(self, job: Job) -> Iterator[None]:
        """A copy touches the slots of a job meanwhile.

        Raises:
            TransferError: They may not be touched any more.
        """
        with self._lock:
            job.ask()
            job.copying = True
        try:
            yield
        finally:
            with self._lock:
                job.copying = False
                self._changed.notify_all()

    def tell(self, job: Job, outcome: Outcome, *, quiesced: bool, why: str = "") -> None:
        """Say how an operation ended, unless its end was told or nobody wants to know it.

        Thread: any.
        """
        with self._lock:
            if not job.over:
                job.over = quiesced
                load = job.direction == "load"
                (self._completed_loads if load else self._completed_offloads).append(
                    Completion(op=job.ticket.op, outcome=outcome, quiesced=quiesced, why=why)
                )


def _pop(completions: deque[Completion]) -> Completion:
    """The oldest completion.

    Raises:
        ContractError: There is none.
    """
    if not completions:
        msg = "pop_completed: expected a completion, got none"
        raise ContractError(msg)
    return completions.popleft()
