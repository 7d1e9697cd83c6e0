"""`SimulatedLinker`: a backend that moves only when the history says so, and fails when told to.

A load opens its pages, then for each layer range begins a copy and ends it; an offload the same, and
then puts. Each of these is one quantum of work, so that anything may happen between any two: the
ranks decide while a copy runs, the page that was opened is gone. As a backend must, it asks the
ticket before each copy, and says that it is quiesced when none runs any more.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import attrs
from typing_extensions import override

from radixlink_contracts import (
    BatchingLinker,
    Completion,
    Executor,
    LoadMode,
    Outcome,
    PageBits,
    PoolName,
    PoolTransferResult,
    TouchingLinker,
    UnifiedCacheLinker,
)
from radixlink_contracts.errors import (
    ContractError,
    InvalidTransitionError,
    StorageError,
    TransferTimeoutError,
)
from radixlink_testing.simulator._faults import Fault
from radixlink_testing.simulator._rules import Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from radixlink_contracts import (
        BatchIndex,
        LayerCounter,
        OperationId,
        OperationTicket,
        PageKeys,
        PoolTransfer,
        RequestId,
    )
    from radixlink_testing.simulator._operations import Share
    from radixlink_testing.simulator._watch import Watch

_OF_CALLS: Final = {
    "load": Fault.LOAD_RAISES,
    "start_layer_wise_loading": Fault.START_RAISES,
    "cancel_queued_load": Fault.CANCEL_RAISES,
    "offload": Fault.OFFLOAD_RAISES,
    "touch": Fault.TOUCH_RAISES,
    "pop_completed": Fault.POP_RAISES,
    "reset": Fault.RESET_RAISES,
}
_OF_LOADS: Final = (
    Fault.LOAD_FAILS,
    Fault.LOAD_HANGS,
    Fault.LATE_WRITER,
    Fault.LOAD_DOUBLED,
    Fault.LOAD_CONTRADICTS,
    Fault.LOAD_LOST,
)
_OF_OFFLOADS: Final = (
    Fault.OFFLOAD_FAILS,
    Fault.OFFLOAD_HANGS,
    Fault.OFFLOAD_CONTRADICTS,
    Fault.OFFLOAD_LOST,
)
_OF_TOUCHES: Final = (Fault.TOUCH_FAILS, Fault.TOUCH_LOST)
_FAILING: Final = (Fault.LOAD_FAILS, Fault.OFFLOAD_FAILS)
_HANGING: Final = (Fault.LOAD_HANGS, Fault.OFFLOAD_HANGS)
_LOST: Final = (Fault.LOAD_LOST, Fault.OFFLOAD_LOST, Fault.TOUCH_LOST)
_CONTRADICTING: Final = (Fault.LOAD_CONTRADICTS, Fault.OFFLOAD_CONTRADICTS)
#: Quanta for which a late writer's copy goes on after it said that it failed.
_LATE_QUANTA: Final = 6


@attrs.define(kw_only=True, eq=False)
class _Job:
    """One operation on its way.

    Attributes:
        ticket: The operation.
        transfer: Its pages' keys.
        pages: Its pages on the device.
        share: What is known of it.
        load: True for a load.
        touch: True for a touch, which has no pages on the device.
        fault: What goes wrong with it.
        keys: The keys, once they are hashed.
        layer: The layer range that is copied now, or next.
        copying: A copy touches its pages.
        delay: Quanta that the copy still takes.
        gathered: What an offload has read, by page.
    """

    ticket: OperationTicket
    transfer: PoolTransfer
    pages: list[int]
    share: Share
    load: bool
    fault: Fault | None
    touch: bool = False
    keys: PageKeys | None = None
    layer: int = 0
    copying: bool = False
    delay: int = 0
    gathered: list[list[bytes]] = attrs.field(factory=list)

    @property
    def what(self) -> str:
        """What it is, for a story."""
        kind = "load" if self.load else "touch" if self.touch else "offload"
        return f"{kind} {self.ticket.op}"


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


class SimulatedLinker(UnifiedCacheLinker, TouchingLinker, BatchingLinker):
    """One rank's backend.

    Thread: one at a time.
    """

    def __init__(self, watch: Watch, *, verify: bool = True, prompt: bool = True) -> None:
        """Move pages between a rank's device and its shelf.

        Args:
            watch: The rank.
            verify: Compare what is read with its checksum.
            prompt: Let go of what is decided at the wrapper's next question, not only when the
                thread comes to it.
        """
        self._watch = watch
        self._verify = verify
        self._prompt = prompt
        self._queued: list[_Job] = []
        self._jobs: list[_Job] = []
        self._loads: deque[Completion] = deque()
        self._offloads: deque[Completion] = deque()
        #: How operations ended, for completions that come again: what was never said, as it was.
        self._ended: deque[Completion] = deque(maxlen=8)
        #: Nothing moves.
        self.dead = False
        #: It says that it can hold more than it can.
        self.more_pools = False

    # -- what the history does ---------------------------------------------------------------------

    @property
    def num_jobs(self) -> int:
        """Operations that can move on."""
        return len(self._jobs)

    def advance(self, which: int) -> None:
        """One quantum of one operation."""
        job = self._jobs[which % len(self._jobs)]
        if job.copying:
            self._go_on(job)
        elif job.ticket.decided:
            self._end(job, Outcome.FAILED)
        elif job.keys is None:
            self._open(job)
        elif job.fault in _FAILING and job.layer == self._watch.failing_layer:
            self._end(job, Outcome.FAILED)
        else:
            job.copying = True
            if job.fault is Fault.LATE_WRITER and job.layer == self._watch.num_layers - 1:
                job.delay = _LATE_QUANTA
                self._say(job, Outcome.FAILED, quiesced=False)

    def recover(self) -> None:
        """What hung goes on, as if nothing had been."""
        self.dead = False
        for job in self._jobs:
            if job.fault in _HANGING:
                job.fault = None

    def complete_again(self) -> bool:
        """An operation that is over completes once more. False where there is none."""
        if not self._ended:
            return False
        completion = self._ended.popleft()
        self._watch.note(f"operation {completion.op} completes again: {completion.outcome.name}")
        self._loads.append(completion)
        return True

    def _open(self, job: _Job) -> None:
        """Hash the keys, and find the pages of a load; with that a touch ends."""
        keys = job.keys = job.transfer.keys.resolve()
        whole = self._watch.shelf.leading(keys) == len(keys)
        if job.touch:
            fails = not whole or job.fault is Fault.TOUCH_FAILS
            self._end(job, Outcome.FAILED if fails else Outcome.LANDED)
        elif job.load and not whole:
            self._end(job, Outcome.FAILED)

    def _go_on(self, job: _Job) -> None:
        """A copy ends, unless it hangs; after the last one the operation does."""
        if job.fault in _HANGING:
            return
        if job.delay:
            job.delay -= 1
            return
        job.copying = False
        whole = self._scatter(job) if job.load else self._gather(job)
        job.layer += 1
        last = job.layer == self._watch.num_layers
        if not whole or job.ticket.decided or (last and job.fault is Fault.LATE_WRITER):
            self._end(job, Outcome.FAILED)
        elif last:
            self._end(job, Outcome.LANDED if job.load or self._put(job) else Outcome.FAILED)

    def _scatter(self, job: _Job) -> bool:
        """Write one layer range of all pages; False where one cannot be had."""
        assert job.keys is not None
        shelf, device = self._watch.shelf, self._watch.pages
        for page, key in zip(job.pages, job.keys, strict=True):
            data = shelf.read(key, job.layer, verify=self._verify)
            if data is None:
                return False
            device.write(job.ticket.op, page, job.layer, data)
        return True

    def _gather(self, job: _Job) -> bool:
        """Read one layer range of all pages."""
        device = self._watch.pages
        job.gathered.append([device.gather(page, job.layer, job.ticket.op) for page in job.pages])
        return True

    def _put(self, job: _Job) -> bool:
        """Store what was gathered, all or nothing."""
        assert job.keys is not None
        columns = zip(*job.gathered, strict=True)
        stored = [
            self._watch.shelf.put(key, layers)
            for key, layers in zip(job.keys, columns, strict=True)
        ]
        return all(stored)

    def _end(self, job: _Job, outcome: Outcome) -> None:
        """The operation ended here."""
        self._jobs.remove(job)
        lost = job.fault in _LOST
        again = outcome if lost else Outcome.LANDED
        self._ended.append(Completion(op=job.ticket.op, outcome=again, quiesced=True))
        if lost:
            self._watch.note(f"{job.what}: {outcome.name}, which nobody is told")
            return
        if job.fault in _CONTRADICTING:
            self._say(job, Outcome.FAILED, quiesced=False)
        self._say(job, outcome, quiesced=True)
        if job.fault is Fault.LOAD_DOUBLED:
            other = Outcome.FAILED if outcome is Outcome.LANDED else Outcome.LANDED
            self._say(job, other, quiesced=True)

    def _say(self, job: _Job, outcome: Outcome, *, quiesced: bool) -> None:
        """Tell a completion."""
        self._watch.note(f"{job.what}: {outcome.name}{'' if quiesced else ', still copying'}")
        completion = Completion(op=job.ticket.op, outcome=outcome, quiesced=quiesced)
        (self._loads if job.load else self._offloads).append(completion)

    def _let_go(self) -> None:
        """Say that what is decided is quiesced, where no copy runs."""
        if self._prompt and not self.dead:
            for job in list(self._jobs):
                if job.ticket.decided and not job.copying and job.fault not in _LOST:
                    self._end(job, Outcome.FAILED)

    # -- what the wrapper calls --------------------------------------------------------------------

    @property
    @override
    def pools(self) -> frozenset[PoolName]:
        """The pool of full attention."""
        return frozenset(PoolName) if self.more_pools else frozenset({PoolName.KV})

    @property
    @override
    def layer_done_counter(self) -> LayerCounter | None:
        """None: it takes staged loads only."""
        return None

    @override
    def lookup(
        self, request_id: RequestId, transfers: Sequence[PoolTransfer]
    ) -> PoolTransferResult:
        """The prefixes that the shelf holds without a hole."""
        watch = self._watch
        watch.seen("lookup")
        if not watch.working:
            watch.breach(Rule.MATCH, f"the store was asked for {request_id} within {watch.acting}")
        if watch.strikes(Fault.LOOKUP_RAISES):
            raise StorageError("lookup: a fault", transient=True)
        keys = transfers[0].keys.resolve()
        count = len(keys)
        found = count if watch.strikes(Fault.LOOKUP_LIES) else watch.shelf.leading(keys)
        if watch.strikes(Fault.LOOKUP_TORN):
            found, count = min(found, count - 1), count - 1
        bits = PageBits((1 << found) - 1, count)
        watch.answered(request_id, bits)
        return PoolTransferResult(restorable_prefix_pages=bits)

    @override
    def lookup_batch(
        self, questions: Sequence[tuple[RequestId, Sequence[PoolTransfer]]]
    ) -> Sequence[PoolTransferResult]:
        """`lookup` of several requests: what is raised for one is raised for all."""
        return [self.lookup(request_id, transfers) for request_id, transfers in questions]

    @override
    def load(
        self, ticket: OperationTicket, transfers: Sequence[PoolTransfer], mode: LoadMode
    ) -> bool:
        """Queue a staged load."""
        share = self._watch.load_handed_over(ticket, transfers)
        if self._refuses("load", Fault.LOAD_REFUSED, share):
            return False
        job = self._job(ticket, transfers, share, load=True)
        self._queued.append(job)
        return True

    @override
    def start_layer_wise_loading(self) -> BatchIndex | None:
        """Start what is queued."""
        self._enter("start_layer_wise_loading")
        self._jobs.extend(self._queued)
        self._queued.clear()
        return None

    @override
    def finish_layer_wise_loading(self, batch: BatchIndex | None) -> bool:
        """True for no batch: there are none."""
        return batch is None

    @override
    def cancel_queued_load(self, op: OperationId) -> bool:
        """Take back a load that was not started."""
        self._watch.cancel_asked(op)
        self._enter("cancel_queued_load")
        for job in self._queued:
            if job.ticket.op == op:
                self._queued.remove(job)
                job.share.say(Outcome.FAILED, quiesced=True)
                return True
        return False

    @override
    def num_completed_loads(self) -> int:
        """How many load completions wait."""
        self._let_go()
        return len(self._loads)

    @override
    def pop_completed_load(self) -> Completion:
        """The oldest load completion."""
        return self._pop(self._loads)

    @override
    def offload(self, ticket: OperationTicket, transfers: Sequence[PoolTransfer]) -> bool:
        """Take the storing of a node."""
        share = self._watch.offload_handed_over(ticket, transfers)
        if self._refuses("offload", Fault.OFFLOAD_REFUSED, share):
            return False
        self._jobs.append(self._job(ticket, transfers, share, load=False))
        return True

    @override
    def touch(self, ticket: OperationTicket, transfers: Sequence[PoolTransfer]) -> bool:
        """Take the touching of a node."""
        share = self._watch.touch_handed_over(ticket)
        if self._refuses("touch", Fault.TOUCH_REFUSED, share):
            return False
        (transfer,) = transfers
        fault = next((one for one in _OF_TOUCHES if self._watch.strikes(one)), None)
        self._jobs.append(
            _Job(
                ticket=ticket,
                transfer=transfer,
                pages=[],
                share=share,
                load=False,
                touch=True,
                fault=fault,
            )
        )
        return True

    @override
    def num_completed_offloads(self) -> int:
        """How many offload completions wait."""
        self._let_go()
        return len(self._offloads)

    @override
    def pop_completed_offload(self) -> Completion:
        """The oldest offload completion."""
        return self._pop(self._offloads)

    @override
    def reset(self) -> None:
        """End the copies that run, and drop everything.

        Raises:
            TransferTimeoutError: A copy does not end.
        """
        self._watch.seen("reset")
        if self._watch.strikes(Fault.RESET_RAISES):
            raise TransferTimeoutError("reset: a copy does not end", direction="load", pages=1)
        for job in self._jobs:
            if job.copying and job.load:
                self._scatter(job)
            late = Completion(op=job.ticket.op, outcome=Outcome.LANDED, quiesced=True)
            self._ended.append(late)
        self._queued.clear()
        self._jobs.clear()
        self._loads.clear()
        self._offloads.clear()
        self._watch.backend_was_reset()

    @override
    def close(self) -> None:
        """`reset`."""
        self.reset()

    def _enter(self, call: str) -> None:
        """Be called, and raise if that goes wrong.

        Raises:
            StorageError: It does.
        """
        self._watch.seen(call)
        fault = _OF_CALLS.get(call)
        if fault is not None and self._watch.strikes(fault):
            raise StorageError(f"{call}: a fault", transient=True)

    def _refuses(self, call: str, refusal: Fault, share: Share) -> bool:
        """Be handed an operation: take it, refuse it, or raise.

        Raises:
            StorageError: It goes wrong.
        """
        try:
            self._enter(call)
        except StorageError:
            share.say(Outcome.FAILED, quiesced=True)
            raise
        if self._watch.strikes(refusal):
            share.say(Outcome.FAILED, quiesced=True)
            return True
        return False

    def _job(
        self,
        ticket: OperationTicket,
        transfers: Sequence[PoolTransfer],
        share: Share,
        *,
        load: bool,
    ) -> _Job:
        """An operation that was accepted."""
        (transfer,) = transfers
        faults = _OF_LOADS if load else _OF_OFFLOADS
        fault = next((one for one in faults if self._watch.strikes(one)), None)
        return _Job(
            ticket=ticket,
            transfer=transfer,
            pages=self._watch.pages_of(transfer),
            share=share,
            load=load,
            fault=fault,
        )

    def _pop(self, completions: deque[Completion]) -> Completion:
        self._enter("pop_completed")
        if not completions:
            raise ContractError("pop_completed: expected a completion, got none")
        completion = completions.popleft()
        self._watch.told(completion)
        return completion
