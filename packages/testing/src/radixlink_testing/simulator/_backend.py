"""`SimulatedLinker`: a backend that moves only when the history says so, and fails when told to.

A load opens its pages, then for each layer range begins a copy and ends it; an offload the same, and
then puts; a touch opens its pages, and that is all. Each of these is one quantum of work, so that
anything may happen between any two: the ranks decide while a copy runs, the page that was opened is
gone. As a backend must, it asks the ticket before each copy, and says that it is quiesced when none
runs any more.

A layer-wise load moves likewise; what is waited for besides is moved by whoever waits.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from radixlink_contracts import (
    BatchingLinker,
    Completion,
    LoadMode,
    Outcome,
    PageBits,
    PoolName,
    PoolTransferResult,
    TouchingLinker,
    UnifiedCacheLinker,
)
from radixlink_contracts.errors import ContractError, StorageError, TransferTimeoutError
from radixlink_testing.simulator._faults import Fault
from radixlink_testing.simulator._job import Job, JobKind, Run
from radixlink_testing.simulator._layers import SimulatedLayerCounter
from radixlink_testing.simulator._rules import Rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
    "finish_layer_wise_loading": Fault.FINISH_RAISES,
    "cancel_queued_load": Fault.CANCEL_RAISES,
    "offload": Fault.OFFLOAD_RAISES,
    "touch": Fault.TOUCH_RAISES,
    "pop_completed": Fault.POP_RAISES,
    "reset": Fault.RESET_RAISES,
}
_OF_LOADS: Final = (
    Fault.LOAD_FAILS,
    Fault.LOAD_HANGS,
    Fault.LOAD_SLOW,
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
_FAULTS_OF: Final = {
    JobKind.LOAD: _OF_LOADS,
    JobKind.OFFLOAD: _OF_OFFLOADS,
    JobKind.TOUCH: _OF_TOUCHES,
}
_FAILING: Final = (Fault.LOAD_FAILS, Fault.OFFLOAD_FAILS)
_HANGING: Final = (Fault.LOAD_HANGS, Fault.OFFLOAD_HANGS)
_LOST: Final = (Fault.LOAD_LOST, Fault.OFFLOAD_LOST, Fault.TOUCH_LOST)
_CONTRADICTING: Final = (Fault.LOAD_CONTRADICTS, Fault.OFFLOAD_CONTRADICTS)
#: Quanta for which a late writer's copy goes on after it said that it failed, and a slow one's.
_LATE_QUANTA: Final = 6


class SimulatedLinker(UnifiedCacheLinker, TouchingLinker, BatchingLinker):
    """One rank's backend.

    Thread: one at a time.
    """

    def __init__(
        self,
        watch: Watch,
        *,
        pools: Iterable[PoolName],
        layer_wise: bool = True,
        verify: bool = True,
        prompt: bool = True,
    ) -> None:
        """Move pages between a rank's device and its shelf.

        Args:
            watch: The rank.
            pools: What it can hold.
            layer_wise: It offers layer-wise loads.
            verify: Compare what is read with its checksum.
            prompt: Let go of what is decided at the wrapper's next question, not only when the
                thread comes to it.
        """
        self._watch = watch
        self._pools = frozenset(pools)
        self._verify = verify
        self._prompt = prompt
        self._queued: list[Job] = []
        self._jobs: list[Job] = []
        self._loads: deque[Completion] = deque()
        self._offloads: deque[Completion] = deque()
        #: How operations ended, for completions that come again: what was never said, as it was.
        self._ended: deque[Completion] = deque(maxlen=8)
        #: The layer-wise loads of batches that were not waited for.
        self._batches: dict[BatchIndex, list[Job]] = {}
        self.counter = SimulatedLayerCounter(watch.num_layers, self._go_on_with)
        self._layer_wise = layer_wise
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
        self._advance(self._jobs[which % len(self._jobs)])

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

    # -- the thread --------------------------------------------------------------------------------

    def _advance(self, job: Job) -> None:
        """One quantum."""
        if job.copying:
            self._go_on(job)
        elif job.ticket.decided:
            self._end(job, Outcome.FAILED)
        elif not job.opened:
            self._open(job)
        elif job.fault in _FAILING and job.layer == self._watch.failing_layer:
            self._end(job, Outcome.FAILED)
        else:
            job.copying = True
            if job.fault is Fault.LOAD_SLOW and not job.layer:
                job.delay = _LATE_QUANTA
            if job.fault is Fault.LATE_WRITER and job.layer == self._watch.num_layers - 1:
                job.delay = _LATE_QUANTA
                self._say(job, Outcome.FAILED, quiesced=False)

    def _go_on_with(self, batch: BatchIndex) -> bool:
        """One quantum of the first job of a batch that moves. False where none does."""
        if self.dead:
            return False
        for job in self._batches.get(batch, ()):
            if job in self._jobs and not (job.copying and (job.fault in _HANGING or job.delay)):
                was_working, self._watch.working = self._watch.working, True
                self._advance(job)
                self._watch.working = was_working
                return True
        return False

    def _open(self, job: Job) -> None:
        """Hash the keys, and find the pages of a load; with that a touch ends."""
        job.opened = True
        whole = True
        for run in job.runs:
            run.keys = run.transfer.keys.resolve()
            whole = whole and all(self._watch.shelf_of(run.pool).found(run.pool, list(run.keys)))
        if job.kind is JobKind.TOUCH:
            fails = not whole or job.fault is Fault.TOUCH_FAILS
            self._end(job, Outcome.FAILED if fails else Outcome.LANDED)
        elif job.load and not whole:
            self._end(job, Outcome.FAILED)

    def _go_on(self, job: Job) -> None:
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
        elif job.batch is not None:
            self._complete_layers(job.batch)

    def _scatter(self, job: Job) -> bool:
        """Write one layer range of all pages; False where one cannot be had."""
        for run in job.runs:
            assert run.keys is not None
            shelf = self._watch.shelf_of(run.pool)
            device = self._watch.device.pools[run.pool]
            for page, key in zip(run.pages, run.keys, strict=True):
                data = shelf.read(run.pool, key, job.layer, verify=self._verify)
                if data is None:
                    return False
                device.write(job.ticket.op, page, job.layer, data)
        return True

    def _gather(self, job: Job) -> bool:
        """Read one layer range of all pages."""
        for run in job.runs:
            device = self._watch.device.pools[run.pool]
            run.gathered.append(
                [device.gather(page, job.layer, job.ticket.op) for page in run.pages]
            )
        return True

    def _put(self, job: Job) -> bool:
        """Store what was gathered, windows and states first; all or nothing."""
        stored: list[bool] = []
        for run in reversed(job.runs):
            assert run.keys is not None
            columns = zip(*run.gathered, strict=True)
            stored += [
                self._watch.shelf_of(run.pool).put(run.pool, key, layers)
                for key, layers in zip(run.keys, columns, strict=True)
            ]
        return all(stored)

    def _end(self, job: Job, outcome: Outcome) -> None:
        """The operation ended here."""
        self._jobs.remove(job)
        if job.batch is not None:
            self._complete_layers(job.batch)
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

    def _complete_layers(self, batch: BatchIndex) -> None:
        """A layer of a batch has come when every load of it that goes on has it."""
        going_on = [job for job in self._batches.get(batch, ()) if job in self._jobs]
        done = min((job.layer for job in going_on), default=self._watch.num_layers)
        for layer in range(done):
            self.counter.complete(batch, layer)

    def _say(self, job: Job, outcome: Outcome, *, quiesced: bool) -> None:
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
        """The pools of its rank."""
        return frozenset(PoolName) if self.more_pools else self._pools

    @property
    @override
    def layer_done_counter(self) -> LayerCounter | None:
        """What a forward waits on; None where it takes staged loads only."""
        return self.counter if self._layer_wise else None

    @override
    def lookup(
        self, request_id: RequestId, transfers: Sequence[PoolTransfer]
    ) -> PoolTransferResult:
        """The prefixes that the shelf can restore."""
        watch = self._watch
        watch.seen("lookup")
        if not watch.working:
            watch.breach(Rule.MATCH, f"the store was asked for {request_id} within {watch.acting}")
        if watch.strikes(Fault.LOOKUP_RAISES):
            raise StorageError("lookup: a fault", transient=True)
        keys = transfers[0].keys.resolve()
        count = len(keys)
        mask = self._restorable(keys, transfers)
        if watch.strikes(Fault.LOOKUP_LIES):
            mask = (1 << count) - 1
        if watch.strikes(Fault.LOOKUP_TORN):
            count -= 1
        bits = PageBits(mask & ((1 << count) - 1), count)
        watch.answered(request_id, bits)
        return PoolTransferResult(restorable_prefix_pages=bits)

    def _restorable(self, keys: PageKeys, transfers: Sequence[PoolTransfer]) -> int:
        """Bit L - 1 is set where every pool, or the device, has what a prefix of L pages needs."""
        there: dict[PoolName, list[bool]] = {}
        for transfer in transfers:
            found = self._watch.shelf_of(transfer.name).found(transfer.name, list(keys))
            held = () if transfer.held is None else transfer.held
            there[transfer.name] = [one or page in held for page, one in enumerate(found)]
        trails = {
            transfer.name: len(transfer.keys)
            for transfer in transfers
            if transfer.name is not PoolName.KV
        }
        mask = 0
        for end in range(1, len(keys) + 1):
            if not there[PoolName.KV][end - 1]:
                break
            if all(all(there[name][max(0, end - trail) : end]) for name, trail in trails.items()):
                mask |= 1 << (end - 1)
        return mask

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
        """Queue a load."""
        share = self._watch.load_handed_over(ticket, transfers, mode)
        if self._refuses("load", Fault.LOAD_REFUSED, share):
            return False
        job = self._job(
            ticket, transfers, share, JobKind.LOAD, layer_wise=mode is LoadMode.LAYER_WISE
        )
        self._queued.append(job)
        return True

    @override
    def start_layer_wise_loading(self) -> BatchIndex | None:
        """Start what is queued; what is layer-wise is one batch."""
        self._enter("start_layer_wise_loading")
        waited_for = [job for job in self._queued if job.layer_wise]
        batch: BatchIndex | None = None
        if waited_for:
            batch = self.counter.update_producer()
            self._batches[batch] = waited_for
            for job in waited_for:
                job.batch = batch
        self._jobs.extend(self._queued)
        self._queued.clear()
        return batch

    @override
    def finish_layer_wise_loading(self, batch: BatchIndex | None) -> bool:
        """Go on with a batch until all its layers are decided, or nothing of it moves."""
        if batch is None:
            return True
        try:
            self._enter("finish_layer_wise_loading")
        except StorageError:
            self._watch.stopped_waiting()
            raise
        if all(job.ticket.decided for job in self._batches.get(batch, ())):
            self.counter.fail(batch)
        whole = self.counter.finish(batch)
        for job in self._batches.pop(batch, ()):
            job.batch = None
        if not whole:
            self._watch.stopped_waiting()
        return whole

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
        self._jobs.append(self._job(ticket, transfers, share, JobKind.OFFLOAD))
        return True

    @override
    def touch(self, ticket: OperationTicket, transfers: Sequence[PoolTransfer]) -> bool:
        """Take the touching of a node."""
        share = self._watch.touch_handed_over(ticket, transfers)
        if self._refuses("touch", Fault.TOUCH_REFUSED, share):
            return False
        self._jobs.append(self._job(ticket, transfers, share, JobKind.TOUCH))
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
        self._batches.clear()
        self.counter.reset()
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
        kind: JobKind,
        *,
        layer_wise: bool = False,
    ) -> Job:
        """An operation that was accepted."""
        fault = next((one for one in _FAULTS_OF[kind] if self._watch.strikes(one)), None)
        return Job(
            ticket=ticket,
            runs=[
                Run(
                    transfer=transfer,
                    pages=[] if kind is JobKind.TOUCH else self._watch.pages_of(transfer),
                )
                for transfer in transfers
            ],
            share=share,
            kind=kind,
            layer_wise=layer_wise,
            fault=fault,
        )

    def _pop(self, completions: deque[Completion]) -> Completion:
        self._enter("pop_completed")
        if not completions:
            raise ContractError("pop_completed: expected a completion, got none")
        completion = completions.popleft()
        self._watch.told(completion)
        return completion
