"""`TransferThread`: moves the bytes of a `StoreLinker`'s jobs, the most urgent first.

The loads that a forward waits for come first, then other loads, touches, offloads. Of an offload or a
staged load it moves a run of pages at a time, and looks between two runs whether a forward waits::

    layer-wise  open the pages of all loads of the batch, then for each layer, for each load:
                store.read into staging -> ask the ticket -> copier.scatter; then count the layer
    staged      the same, a run of pages after the other
    offload     for each layer range: ask the ticket -> copier.gather into staging
                then store.put
    touch       store.touch for all that wait, once for each store

Failures are values, whatever a store raised: also what is no `Exception`, which would end the thread
with all that waits for it. No exception or traceback is kept. A load that fails takes no other load
of its batch with it.

A process that ends while a thread is within torch is aborted. So one that nobody closed is told to end
before the interpreter does, which waits for it a little.

A signal's exception may come between any two steps of Python in the thread that launches forwards.
So what two threads share is guarded by `with lock`, which is entered and left in C, and never by
`with condition`: its `__enter__` and `__exit__` are Python, and one that is left in its middle keeps
the lock for ever.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never

from radixlink_contracts import Outcome
from radixlink_contracts.texts import named
from radixlink_linker._jobs import GivenUpError, Job, LayerWiseBatch, TouchBatch
from radixlink_linker._page_mover import PageMover, writers_of
from radixlink_linker._runtime import give_way

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from radixlink_contracts import Copier, Fence
    from radixlink_linker._job_board import JobBoard
    from radixlink_linker._layer_counter import LayerDoneCounter
    from radixlink_linker._page_mover import OpenRun
    from radixlink_linker._pool_stores import PoolStores
    from radixlink_linker._store_linker_counters import StoreLinkerTally
    from radixlink_linker._store_linker_settings import StoreLinkerSettings

_ASK_AGAIN_S: Final = 0.01
"""How long a fence that raises is left alone."""


class TransferThread:
    """One thread, started with the first transfer.

    Thread: `ensure_started`, `ident` and `join` are the scheduler's, the rest is its own.
    """

    def __init__(
        self,
        board: JobBoard,
        stores: PoolStores,
        copier: Copier,
        layers: LayerDoneCounter,
        settings: StoreLinkerSettings,
        tally: StoreLinkerTally,
    ) -> None:
        """Take what it works with; no thread is started.

        Args:
            board: What there is to do.
            stores: Pools and their stores.
            copier: Between the device and staging.
            layers: Who waits for which layer.
            settings: How to work.
            tally: Of what is moved.
        """
        self._board = board
        self._stores = stores
        self._layers = layers
        self._copy_timeout_s = settings.copy_timeout_s
        self._close_timeout_s = settings.close_timeout_s
        self._mover = PageMover(
            stores,
            copier,
            self._copy,
            board.copying,
            tally,
            staging_bytes=settings.staging_bytes,
            lease_s=settings.lease_s,
        )
        self._tally = tally
        #: Guards the thread, and which one works.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._at_exit = partial(_end_with_process, weakref.ref(self))

    @property
    def ident(self) -> int | None:
        """Which thread it is; None before it was started."""
        return None if self._thread is None else self._thread.ident

    def ensure_started(self) -> None:
        """There is a thread that looks for work; another where the last one died.

        Raises:
            RuntimeError: There can be no more threads. Nothing may be handed to it before this.
        """
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            # Known before it runs: a signal's exception may leave `start` while the thread goes on.
            thread = self._thread = threading.Thread(
                target=self._work, name="radixlink-transfer", daemon=True
            )
            atexit.unregister(self._at_exit)
            atexit.register(self._at_exit)
        thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, for a while.

        Whenever that is, it lets its staging memory go: until then a copy may run in it.
        """
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return
        atexit.unregister(self._at_exit)

    def end(self) -> None:
        """Give all jobs up, and wait for the end of the thread, for a while."""
        # In a forked child there is none, and whoever held a lock at the fork holds it for ever.
        if self._thread is not None and self._thread.is_alive():
            self._board.end()
            self._thread.join(self._close_timeout_s)

    # -- on the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        """Run jobs until the board is closed, and let the staging memory go."""
        with self._lock:
            # One that was left in its start may come to run when another has its place already.
            if self._thread is not threading.current_thread():
                return
        try:
            self._run_all()
        finally:
            self._mover.release()

    def _run_all(self) -> None:
        """Run jobs until the board is closed."""
        while (work := self._board.next_work()) is not None:
            with self._board.running(work):
                match work:
                    case Job():
                        self._run(work)
                    case LayerWiseBatch():
                        self._run_batch(work)
                    case TouchBatch():
                        self._touch(work)
                    case _:
                        assert_never(work)
            # Nothing of it is kept while there is nothing to do.
            del work

    def _serve_forwards(self) -> None:
        """Run the batches that forwards wait for."""
        while (batch := self._board.next_batch()) is not None:
            with self._board.running(batch):
                self._run_batch(batch)
            del batch

    def _run(self, job: Job) -> None:
        """Run one job and say how it ended."""
        try:
            if job.direction == "load":
                self._load(job)
            else:
                self._offload(job)
        except BaseException as raised:  # noqa: BLE001 -- a failure is a value; its text is kept, no traceback
            self._fail(job, raised)
        else:
            self._board.tell(job, Outcome.LANDED, quiesced=True)

    def _run_batch(self, batch: LayerWiseBatch) -> None:
        """Bring the layers of all loads of a batch, and give back what was lent for them."""
        open_loads: dict[Job, list[OpenRun]] = {}
        try:
            self._bring(batch, open_loads)
        finally:
            for runs in open_loads.values():
                self._close(runs)

    def _bring(self, batch: LayerWiseBatch, open_loads: dict[Job, list[OpenRun]]) -> None:
        """Bring the layers of all loads of a batch, one layer after the other.

        Mutates: `open_loads`: the loads that have not failed.
        """
        for job in batch.jobs:
            with self._failing_alone(job, open_loads):
                job.ask()
                runs = open_loads[job] = []
                # One by one: those that were opened before one that cannot be are closed.
                for run in self._mover.open(job):
                    runs.append(run)  # noqa: PERF402
        last = self._stores.num_layers - 1
        for layer in range(last + 1):
            for job, runs in list(open_loads.items()):
                with self._failing_alone(job, open_loads):
                    for run in runs:
                        for layer_range in run.ranges_of(layer):
                            self._mover.load(job, run, layer_range)
            if layer < last:
                self._layers.complete(batch.index, layer)
        # Who waits for the last layer asks next how each load ended.
        with self._layers.landing(batch.index, last) as in_time:
            for job, runs in list(open_loads.items()):
                with self._failing_alone(job, open_loads):
                    if not in_time:
                        raise job.failed("a layer of its batch came too late")
                    self._count_loaded(runs)
                    self._board.tell(job, Outcome.LANDED, quiesced=True)

    @contextmanager
    def _failing_alone(self, job: Job, open_loads: dict[Job, list[OpenRun]]) -> Iterator[None]:
        """Whatever is raised meanwhile is one load's failure, and the others go on."""
        try:
            yield
        except BaseException as raised:  # noqa: BLE001 -- a failure is a value; its text is kept, no traceback
            self._close(open_loads.pop(job, []))
            self._fail(job, raised)

    def _close(self, runs: Iterable[OpenRun]) -> None:
        """Give back what was lent for some runs."""
        for run in runs:
            self._mover.close(run)

    def _fail(self, job: Job, raised: BaseException) -> None:
        """A job did not come through, and touches its slots no more."""
        why = named(raised)
        if not isinstance(raised, GivenUpError):
            # Of what was given up, the cause was told before, or is none of a transfer.
            self._tally.count_failure(f"operation {job.ticket.op}: {why}")
        self._board.tell(job, Outcome.FAILED, quiesced=True, why=why)

    def _load(self, job: Job) -> None:
        """Bring all pages of a load to the device.

        Raises:
            TransferError: Some page is not to be had, or the load was given up.
        """
        runs: list[OpenRun] = []
        job.ask()
        for run in self._mover.open(job):
            try:
                for layer_range in range(len(run.pool.range_bytes)):
                    self._mover.load(job, run, layer_range)
            finally:
                self._mover.close(run)
            runs.append(run)
            self._serve_forwards()
        self._count_loaded(runs)

    def _offload(self, job: Job) -> None:
        """Put all pages of a node into the stores.

        Raises:
            TransferError: Some page found no room, or the offload was given up.
        """
        pages = 0
        for stored in self._mover.offload(job):
            pages += stored
            self._serve_forwards()
        self._tally.count_stored(pages)

    def _touch(self, batch: TouchBatch) -> None:
        """Raise the recency of all that is touched, and say of each whether all of it is there."""
        asked: list[Job] = []
        for job in batch.jobs:
            try:
                job.ask()
                for transfer in job.transfers:
                    transfer.keys.resolve(give_way)
            except BaseException as raised:  # noqa: BLE001 -- a failure is a value; its text is kept, no traceback
                self._fail(job, raised)
            else:
                asked.append(job)
        try:
            there = self._stores.touch([job.transfers for job in asked])
        except BaseException as raised:  # noqa: BLE001 -- likewise, of all of them
            for job in asked:
                self._fail(job, raised)
            return
        for job, present in zip(asked, there, strict=True):
            if present:
                self._board.tell(job, Outcome.LANDED, quiesced=True)
            else:
                self._fail(job, job.failed("some page is gone"))
        self._tally.count_touched(
            sum(job.num_pages for job, present in zip(asked, there, strict=True) if present)
        )

    def _count_loaded(self, runs: list[OpenRun]) -> None:
        """These runs are on the device."""
        self._tally.count_loaded(sum(map(len, runs)), writers_of(runs))

    def _copy(self, job: Job, start: Callable[[], Fence]) -> None:
        """Ask, start one copy, and wait for its end, however late that is; see `GuardedCopy`.

        A fence that raises does not say that the copy has ended, so it is like one that is late: the
        operation has failed, and its slots and the memory on the host are kept until it does say so.
        """
        with self._board.copying(job):
            fence = start()
            first = late = self._waited(fence)
            if late is not None:
                self._board.tell(job, Outcome.FAILED, quiesced=False, why=late)
            while late is not None:
                late = self._waited(fence)
        if first is not None:
            raise job.failed(first)

    def _waited(self, fence: Fence) -> str | None:
        """Wait for the end of a copy, for a while: why it may still run; None where it has ended."""
        try:
            if fence.wait(self._copy_timeout_s):
                return None
        except BaseException as raised:  # noqa: BLE001 -- likewise
            time.sleep(_ASK_AGAIN_S)
            return f"the end of a copy cannot be told: {named(raised)}"
        return f"a copy took longer than {self._copy_timeout_s} s"


def _end_with_process(ref: weakref.ref[TransferThread]) -> None:
    """The process ends, and with it the thread, if there is one."""
    thread = ref()
    if thread is not None:
        thread.end()
