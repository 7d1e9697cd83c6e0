"""`UnifiedCacheLinkerWrapper`: the tree side of external caching, on every rank alike.

Theory of operation. The wrapper keeps three lists that are equal on all ranks: requests, lookups
and operations. What only this rank knows (what its store answered, whether its bytes have landed)
waits in those objects until the next frame; `step` exchanges one and carries out what it agreed on.
Between two frames nothing is decided.

Rules of the file:
1. No branch on a local fact. A refusal, an exception or a deadline here is this rank's verdict,
   written into a frame.
2. Nobody can name the slots of a load before COMMIT, and COMMIT needs every rank's done.
3. Slots and locks go back when every rank is quiesced, in the order in which the operations were
   minted.
4. One load for a page at a time: a request whose first missing page is being loaded waits for that
   operation.
5. A miss is a value: everything that cannot be restored is computed, and nothing of the attempt
   stays.

It is long because each call changes the same three lists, and in one order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from radixlink_contracts import (
    NOTHING_HAPPENED,
    POOL_OF,
    ComponentType,
    ExternalMatch,
    HitCause,
    Holders,
    IncLockRefParams,
    LoadAdmitted,
    LoadMiss,
    LoadMode,
    LoadWaiting,
    MatchPrefixParams,
    Outcome,
    StepReport,
    WrittenOff,
)
from radixlink_contracts.errors import ContractError, StaleHandleError
from radixlink_linker._commit import commit_load
from radixlink_linker._component_transfers import ComponentTransfers
from radixlink_linker._counters import LinkerCounters
from radixlink_linker._explain import explanation_of, locks_of, status_of
from radixlink_linker._frame import Agenda, FrameKind, check_room
from radixlink_linker._operation import LoadOperation, OffloadOperation, Verdict
from radixlink_linker._report import ReportBuilder
from radixlink_linker._requests import FailedLoad, RequestTable
from radixlink_linker._staging_room import StagingRoom
from radixlink_linker._write_offs import WriteOffs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import (
        BatchIndex,
        Clock,
        Completion,
        Executor,
        Explanation,
        LinkedTreeCore,
        LinkerComponent,
        LoadBack,
        MatchResult,
        NodeId,
        OperationId,
        RadixKey,
        RequestId,
        RequestKV,
        TreeNodeView,
        UnifiedCacheLinker,
    )
    from radixlink_linker._frame import AgreedFrame
    from radixlink_linker._lookup import Lookup
    from radixlink_linker._operation import Operation
    from radixlink_linker._ranks import FrameExchange
    from radixlink_linker._requests import Request
    from radixlink_linker._settings import LinkerSettings
    from radixlink_linker._slots import DeviceSlots


_EXTERNAL_OF: Final = {
    HitCause.OWN_LOAD: ExternalMatch.UNKNOWN,
    HitCause.OTHER_LOAD: ExternalMatch.UNKNOWN,
    HitCause.ASKED: ExternalMatch.UNKNOWN,
    HitCause.FAILED_LATELY: ExternalMatch.MISS,
    HitCause.LOAD_FAILED: ExternalMatch.MISS,
    HitCause.PREFIX_SHRANK: ExternalMatch.MISS,
    HitCause.NOT_STORED: ExternalMatch.MISS,
    HitCause.RESTORABLE: ExternalMatch.HIT,
}


class UnifiedCacheLinkerWrapper:
    """Drives one `UnifiedCacheLinker` for one tree.

    Ranks: all, the same calls in the same order with the same arguments.
    Thread: the scheduler's.
    """

    def __init__(
        self,
        *,
        tree: LinkedTreeCore,
        slots: DeviceSlots,
        components: Sequence[LinkerComponent],
        linker: UnifiedCacheLinker,
        frames: FrameExchange,
        executor: Executor,
        clock: Clock,
        settings: LinkerSettings,
    ) -> None:
        """Join the parts and attach the tree.

        Raises:
            AgreementError: Ranks attach with different settings or pools. Nothing is attached then,
                nor after any of the others.
            ContractError: The linker lacks the pool of a component, or has one that the tree lacks;
                or a frame has no room for a bit of each rank.
            InvalidTransitionError: The tree has a linker already.
        """
        self.linker = linker
        self.counters = LinkerCounters()
        self._tree = tree
        self._slots = slots
        self._transfers = ComponentTransfers(components)
        self._frames = frames
        self._executor = executor
        self._clock = clock
        self._settings = settings
        #: Steps since attach or reset.
        self._step = 0
        self._requests = RequestTable(tree, settings)
        #: Operations that are not over, oldest first.
        self._operations: dict[OperationId, Operation] = {}
        #: Nodes whose offload waits for the cap of operations, oldest first.
        self._due: dict[NodeId, None] = {}
        #: What loads hold.
        self._room = StagingRoom(tree, slots.sizes, settings.staged_percent)
        kinds = [component.component_type for component in components]
        #: The pools that components' transfers name, in their order.
        self._pools = tuple(POOL_OF[kind] for kind in kinds)
        sizes = dict(zip(self._pools, slots.sizes, strict=True))
        #: Operations whose slots some rank never let go of.
        self._written_off = WriteOffs(sizes, settings.written_off_percent)
        #: There are too many of those: no store any more; what is left only ends. Replicated.
        self._given_up = False
        #: Loads may be layer-wise. A state is one object of all its layers, so a tree with states
        #: has none; otherwise a replicated fact, since attaching compares it.
        self._offers_layer_wise = (
            linker.layer_done_counter is not None and ComponentType.MAMBA not in kinds
        )
        # What linkers can hold is local, so it is agreed before anything is refused because of it.
        frames.agree_on_settings(
            f"{settings.fingerprint} page_size={tree.page_size} slots={slots.sizes} window={tree.sliding_window} "
            f"components={[kind.name for kind in kinds]} pools={sorted(linker.pools)} "
            f"layer_wise={self._offers_layer_wise}"
        )
        check_room(settings, frames.group.size)
        needed = {POOL_OF[kind] for kind in kinds}
        if needed != linker.pools.intersection(POOL_OF.values()):
            # A window that no tree keeps track of would be restored by nobody, or wrongly.
            msg = (
                f"attach: expected a linker with the pools of {[kind.name for kind in kinds]} and "
                f"of no other component, got one with {sorted(linker.pools)}"
            )
            raise ContractError(msg)
        tree.attach_linker(backup_threshold=settings.backup_threshold)

    @property
    def num_outstanding(self) -> int:
        """Lookups, operations and offloads to come that are not over."""
        return len(self._requests.lookups) + len(self._operations) + len(self._due)

    # -- match -------------------------------------------------------------------------------------

    def match(self, key: RadixKey, request_id: RequestId, device: MatchResult) -> MatchResult:
        """Say what is agreed about the part of a key behind its device prefix.

        Mutates: the first match of a request submits its lookup. Twice without a `step` between
        gives the same answer.
        """
        self._frames.check()
        if self._given_up:
            return device
        start = device.device_prefix_len
        cause, operation = self._cause(key, request_id, device)
        hit_length = 0
        request = self._requests.get(request_id)
        if request is not None:
            if cause is HitCause.RESTORABLE:
                assert request.lookup is not None, "an answer is what it is restorable by"
                hit_length = self._hit_end(request.lookup) - start
            request.cause, request.device_len, request.hit_len = cause, start, hit_length
            request.waiting_on = operation
        if cause is HitCause.NOTHING_MISSING:
            return device
        return attrs.evolve(
            device,
            external=_EXTERNAL_OF[cause],
            host_hit_length=hit_length,
            waiting_on=operation,
        )

    def _cause(
        self, key: RadixKey, request_id: RequestId, device: MatchResult
    ) -> tuple[HitCause, OperationId | None]:
        """What a match has to say, and the operation that it waits for."""
        start = device.device_prefix_len
        request = self._requests.get(request_id)
        if request is not None and request.load is not None:
            return HitCause.OWN_LOAD, request.load.op
        if len(key) - start < self._tree.page_size:
            return HitCause.NOTHING_MISSING, None
        other = self._load_of(key, start)
        if other is not None:
            self._wait_for(other, request_id)
            return HitCause.OTHER_LOAD, other.op
        if self._requests.is_missing(key, start):
            return HitCause.FAILED_LATELY, None
        if request is None or request.num_tokens != len(key):
            self._ask(key, request_id, device)
            return HitCause.ASKED, None
        if request.lookup is None:
            return HitCause.LOAD_FAILED, None
        if not request.answered:
            return HitCause.ASKED, None
        if start < request.lookup.start:
            return HitCause.PREFIX_SHRANK, None
        if self._hit_end(request.lookup) <= start:
            return HitCause.NOT_STORED, None
        return HitCause.RESTORABLE, None

    def _ask(self, key: RadixKey, request_id: RequestId, device: MatchResult) -> None:
        """Submit the lookup of a request."""
        deadline = self._clock.now() + self._settings.lookup_timeout_s
        lookup = self._requests.ask(key, request_id, device, deadline)
        self.counters.lookups += 1
        try:
            self._executor.submit(lambda: lookup.probe(self.linker, self._transfers))
        except Exception as error:  # noqa: BLE001 -- an executor that refuses is this rank's miss
            lookup.fail(repr(error))

    def _hit_end(self, lookup: Lookup) -> int:
        """Token behind the longest agreed prefix."""
        return lookup.start + lookup.longest(lookup.num_pages) * self._tree.page_size

    def _load_of(self, key: RadixKey, start: int) -> LoadOperation | None:
        """The load that brings the page at a token of a key, if there is one.

        Cost: O(operations).
        """
        for operation in self._operations.values():
            if (
                isinstance(operation, LoadOperation)
                and operation.verdict is Verdict.PENDING
                and not operation.cancelled
                and operation.covers(key, start, self._tree.page_size)
            ):
                return operation
        return None

    def _wait_for(self, operation: LoadOperation, request_id: RequestId) -> None:
        """Tell a request when an operation ends; one that is new here is remembered for that."""
        if request_id not in operation.waiters:
            operation.waiters.append(request_id)
        self._requests.remember(request_id)

    # -- load --------------------------------------------------------------------------------------

    def load_back(self, request: RequestKV, mode: LoadMode) -> LoadBack:
        """Queue the load of what a HIT promised; see `PrefixCache.init_load_back`."""
        answer = self._load_back(request, mode)
        entry = self._requests.get(request.request_id)
        if entry is not None and isinstance(answer, LoadMiss):
            entry.load_miss = answer.reason
        return answer

    def _load_back(self, request: RequestKV, mode: LoadMode) -> LoadBack:
        """Answer without a note of it."""
        self._frames.check()
        if self._given_up:
            return LoadMiss(reason="the linker was given up: too many slots are written off")
        entry = self._requests.get(request.request_id)
        if entry is None or entry.lookup is None or not entry.answered:
            return LoadMiss(reason="no match of this request said HIT")
        if entry.load is not None:
            return _queued(entry.load)
        lookup, key = entry.lookup, request.key
        if len(key) != entry.num_tokens or key != lookup.key:
            return LoadMiss(reason="the key changed since the match")
        device = self._tree.match(MatchPrefixParams(key=key))
        start = device.device_prefix_len
        if start < lookup.start:
            return LoadMiss(reason="the device prefix became shorter since the lookup")
        if len(key) - start >= self._tree.page_size:
            other = self._load_of(key, start)
            if other is not None:
                self._wait_for(other, request.request_id)
                return LoadWaiting(operation_id=other.op)
            if self._requests.is_missing(key, start):
                return LoadMiss(reason="its first page failed to load a moment ago")
        if entry.num_stagings >= self._settings.max_stagings:
            return LoadMiss(reason=f"it was staged {entry.num_stagings} times already")
        if not self._offers_layer_wise:
            mode = LoadMode.STAGED
        return self._begin_load(request, entry, device, mode)

    def _begin_load(
        self, request: RequestKV, entry: Request, device: MatchResult, mode: LoadMode
    ) -> LoadBack:
        """Lock, allocate, mint, and hand the load to the linker."""
        lookup = entry.lookup
        assert lookup is not None
        page_size, start = self._tree.page_size, device.device_prefix_len
        skipped = (start - lookup.start) // page_size
        room = lookup.num_pages
        if mode is LoadMode.STAGED:
            room = self._room.tokens_left() // page_size
        elif len(self._running_loads()) == self._settings.max_operations:
            room = 0
        fitting = lookup.longest(skipped + room)
        if lookup.longest(lookup.num_pages) <= skipped:
            return LoadMiss(reason="the device has what the store has")
        if fitting <= skipped:
            return self._wait_for_room(request.request_id)
        receipt = self._tree.inc_lock_ref(IncLockRefParams(node_id=device.last_device_node))
        keys = lookup.keys.span(skipped, fitting)
        end = lookup.start + fitting * page_size
        transfers = self._transfers.load(keys, request, end)
        if transfers is None:
            self._tree.dec_lock_ref(receipt.to_dec_params())
            return LoadMiss(reason=f"no room for {len(keys)} pages, all else is locked")
        operation = LoadOperation(
            self._frames.mint(),
            receipt,
            self._clock.now() + self._settings.transfer_timeout_s,
            request=request,
            mode=mode,
            key=request.key,
            start=start,
            end=end,
            transfers=transfers,
        )
        operation.minted_step = self._step
        self._operations[operation.op] = operation
        if mode is LoadMode.STAGED:
            self._room.take(end - start)
        entry.load = operation
        entry.num_stagings += 1
        try:
            accepted = self.linker.load(operation.ticket, transfers, mode)
        except Exception as error:  # noqa: BLE001 -- whatever a backend raises is this rank's verdict
            self._count_error(error)
            accepted, operation.why = False, repr(error)
        if not accepted:
            operation.note(Outcome.FAILED, quiesced=True, why=operation.why or "it was refused")
        self._transfers.prepare(transfers, request, end)
        if operation.running is not None:
            operation.running.repoint(start, operation.full_slots)
        return _queued(operation)

    def _wait_for_room(self, request_id: RequestId) -> LoadBack:
        """Staged loads hold all that they may: wait for the oldest of them, else compute."""
        for operation in self._operations.values():
            if isinstance(operation, LoadOperation):
                self._wait_for(operation, request_id)
                return LoadWaiting(operation_id=operation.op)
        return LoadMiss(
            reason=f"staged loads may hold {self._room.cap} tokens, less than what is stored of it"
        )

    def start_loads(self) -> BatchIndex | None:
        """Start everything queued; see `PrefixCache.ready_to_load_host_cache`."""
        self._frames.check()
        queued = [
            operation
            for operation in self._operations.values()
            if isinstance(operation, LoadOperation) and operation.queued
        ]
        if not queued:
            return None
        for operation in queued:
            operation.queued = False
        try:
            return self.linker.start_layer_wise_loading()
        except Exception as error:  # noqa: BLE001 -- whatever a backend raises is this rank's verdict
            self._count_error(error)
            for operation in queued:
                self._fail_queued(operation, repr(error))
            return None

    def _fail_queued(self, operation: LoadOperation, why: str) -> None:
        """Give a load up on this rank before it moved.

        It is quiesced only if the linker says that it had not begun.
        """
        operation.queued = False
        try:
            cancelled = self.linker.cancel_queued_load(operation.op)
        except Exception as error:  # noqa: BLE001 -- whatever a backend raises is this rank's verdict
            self._count_error(error)
            cancelled = False
        operation.note(Outcome.FAILED, quiesced=cancelled, why=why)

    # -- offload -----------------------------------------------------------------------------------

    def offload(self, node_ids: Sequence[NodeId]) -> None:
        """Offload nodes, root first; what is over the cap of operations waits for its turn."""
        self._frames.check()
        self._due.update(dict.fromkeys(node_ids))
        self._start_offloads()

    def _start_offloads(self) -> None:
        """Start what is due, as far as the cap allows; what was evicted meanwhile is due no more.

        A node that is being offloaded stays due for what came to it since.
        """
        over: list[NodeId] = []
        for node_id in self._due:
            if len(self._operations) >= self._settings.max_operations:
                break
            try:
                node = self._tree.node(node_id)
            except StaleHandleError:
                over.append(node_id)
                continue
            waits = node.pending_operation is not None
            # A split since has left a part of it above.
            for part in self._tree.backup_path(node_id):
                if len(self._operations) >= self._settings.max_operations:
                    waits = True
                    break
                self._offload_node(self._tree.node(part))
            if not waits:
                over.append(node_id)
        for node_id in over:
            del self._due[node_id]

    def _offload_node(self, node: TreeNodeView) -> None:
        """One node is one operation."""
        node_id = node.node_id
        transfers = self._transfers.offload(node)
        if not transfers:
            return
        receipt = self._tree.inc_lock_ref(IncLockRefParams(node_id=node_id))
        deadline = self._clock.now() + self._settings.transfer_timeout_s
        operation = OffloadOperation(self._frames.mint(), receipt, deadline, transfers)
        operation.minted_step = self._step
        self._operations[operation.op] = operation
        self._tree.mark_offload_pending(node_id, operation.op)
        try:
            accepted = self.linker.offload(operation.ticket, transfers)
        except Exception as error:  # noqa: BLE001 -- whatever a backend raises is this rank's verdict
            self._count_error(error)
            accepted = False
        if not accepted:
            operation.note(Outcome.FAILED, quiesced=True)

    # -- step --------------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Exchange a frame where there is need, and act on it; see `LinkedPrefixCache.step`."""
        self._frames.check()
        self._step += 1
        self._requests.expire(self._step)
        if not self.num_outstanding and (
            self._given_up or self._frames.alone or self._step % self._settings.heartbeat_steps
        ):
            return NOTHING_HAPPENED
        now = self._clock.now()
        self._read_local_facts(now)
        agenda = Agenda.of(
            list(self._operations.values()),
            self._requests.lookups,
            self._settings,
            step=self._step,
            num_ranks=self._frames.group.size,
        )
        report = ReportBuilder()
        agreed = self._exchange(FrameKind.STEP, agenda, now, report)
        if not self._given_up:
            self._follow_lookups(agenda, agreed, report)
            self._start_offloads()
        return report.build()

    def _follow_lookups(self, agenda: Agenda, agreed: AgreedFrame, report: ReportBuilder) -> None:
        """Take in what a frame said of lookups."""
        for lookup, ready in zip(agenda.asking, agreed.ready, strict=True):
            lookup.agreed_ready = ready
        for (lookup, _), words in zip(agenda.masks, agreed.masks, strict=True):
            if lookup.take(words):
                self._requests.answered(lookup)
                if lookup.error is not None:
                    self.counters.lookup_errors += 1
                    self.counters.last_error = f"lookup of {lookup.request_id}: {lookup.error}"
                report.ready.append(lookup.request_id)

    def finish_loads(self, batch: BatchIndex | None) -> StepReport:
        """Decide the layer-wise loads that run; see `LinkedPrefixCache.finish_loads`."""
        self._frames.check()
        if batch is not None:
            # Also where a step decided all of its loads before: the linker has to forget it.
            try:
                self.linker.finish_layer_wise_loading(batch)
            except Exception as error:  # noqa: BLE001 -- what has not ended by now counts as failed
                self._count_error(error)
        running = [operation for operation in self._running_loads() if not operation.queued]
        if not running:
            return NOTHING_HAPPENED
        now = self._clock.now()
        self._read_local_facts(now)
        for operation in running:
            operation.give_up("not all layers had come when its batch was launched and waited for")
        report = ReportBuilder()
        agenda = Agenda(operations=running, asking=(), masks=())
        self._exchange(FrameKind.LAUNCH, agenda, now, report)
        return report.build()

    def _running_loads(self) -> list[LoadOperation]:
        """The layer-wise loads that some batch waits for or will, oldest first.

        Cost: O(operations).
        """
        return [
            operation
            for operation in self._operations.values()
            if isinstance(operation, LoadOperation)
            and operation.mode is LoadMode.LAYER_WISE
            and operation.verdict is Verdict.PENDING
            and not operation.cancelled
        ]

    def _exchange(
        self, kind: FrameKind, agenda: Agenda, now: float, report: ReportBuilder
    ) -> AgreedFrame:
        """Send one frame and carry out what it says of operations."""
        agreed = self._frames.exchange(kind, agenda, self._facts(), now)
        self.counters.frames += 1
        for operation, verdict, quiesced in zip(
            agenda.operations, agreed.verdicts, agreed.quiesced, strict=True
        ):
            self._follow(operation, verdict, quiesced=quiesced, report=report)
        for operation, ranks in zip(agenda.overdue, agreed.busy, strict=True):
            if ranks:
                self._write_off(operation, ranks, report)
        if self._written_off.too_many and not self._given_up:
            self._give_up(report)
        return agreed

    def _count_error(self, error: Exception) -> None:
        """Remember what a backend raised, by its text: an exception would keep its frames alive."""
        self.counters.backend_errors += 1
        self.counters.last_error = repr(error)

    def _read_local_facts(self, now: float) -> None:
        """Take in what this rank's linker has completed and what is late, once for each frame."""
        try:
            for _ in range(self.linker.num_completed_loads()):
                self._note(self.linker.pop_completed_load())
            for _ in range(self.linker.num_completed_offloads()):
                self._note(self.linker.pop_completed_offload())
        except Exception as error:  # noqa: BLE001 -- the deadlines turn what is missing into failures
            self._count_error(error)
        for operation in self._operations.values():
            if now >= operation.deadline:
                operation.give_up("its deadline passed")

    def _note(self, completion: Completion) -> None:
        """Take in one completion; one of an operation that is over says nothing."""
        operation = self._operations.get(completion.op)
        if operation is None or not operation.note(
            completion.outcome, quiesced=completion.quiesced, why=completion.why
        ):
            self.counters.late_completions += 1

    def _facts(self) -> list[int]:
        """What the digest of a frame is made of: replicated numbers only."""
        facts = [
            self._step,
            self._tree.mutation_digest,
            *self._slots.available_sizes,
            self._slots.num_retired,
            *self._room.held,
            len(self._operations),
            len(self._due),
            len(self._written_off),
        ]
        facts += [
            operation.op << 2 | operation.verdict.value for operation in self._operations.values()
        ]
        facts += [lookup.num_pages for lookup in self._requests.lookups]
        return facts

    def _follow(
        self, operation: Operation, verdict: Verdict, *, quiesced: bool, report: ReportBuilder
    ) -> None:
        """Carry out what a frame said of one operation."""
        self._decide(operation, verdict, report)
        if quiesced and operation.verdict is not Verdict.PENDING:
            self._retire(operation)
            if isinstance(operation, LoadOperation):
                # Who came after the verdict waits for the room.
                self._tell_waiters(operation, report)

    def _decide(self, operation: Operation, verdict: Verdict, report: ReportBuilder) -> None:
        """Carry out what a frame said of how an operation ended."""
        if operation.verdict is Verdict.PENDING and verdict is not Verdict.PENDING:
            operation.decide(verdict, self._step)
            if isinstance(operation, LoadOperation):
                self._decide_load(operation, report)
            else:
                self._decide_offload(operation, report)

    def _decide_load(self, operation: LoadOperation, report: ReportBuilder) -> None:
        """The ranks agreed: publish what landed, or remember that it is missing; tell who waits."""
        landed = operation.verdict is Verdict.DONE
        if landed:
            self.counters.loads_landed += 1
            self._commit(operation)
        else:
            self.counters.loads_failed += 1
            if operation.queued:
                # No start call need come any more.
                self._fail_queued(operation, "it was not started")
            if not operation.cancelled:
                self._requests.mark_missing(operation.key, operation.start, self._step)
        if operation.request_id is not None:
            (report.landed if landed else report.failed).append(operation.request_id)
            entry = self._requests.remember(operation.request_id)
            entry.load = operation.running = None
            if not landed:
                entry.lookup = None
                entry.failures.append(
                    FailedLoad(
                        op=operation.op,
                        step=self._step,
                        here=operation.local_verdict is Verdict.FAILED,
                        why=operation.why,
                    )
                )
        self._tell_waiters(operation, report)

    def _tell_waiters(self, operation: LoadOperation, report: ReportBuilder) -> None:
        """Who waits for an operation may match again."""
        report.ready.extend(waiter for waiter in operation.waiters if waiter in self._requests)
        operation.waiters.clear()

    def _commit(self, operation: LoadOperation) -> None:
        """Publish a load, for its request if that is there still."""
        offloads = commit_load(operation, self._tree, self._slots, self._transfers)
        if operation.request_id is not None:
            self._requests.publish(operation.request_id, operation.receipt.node_id, self._step)
        self.offload(offloads)

    def _decide_offload(self, operation: Operation, report: ReportBuilder) -> None:
        """The ranks agreed: the node is stored, or is as before."""
        stored = operation.verdict is Verdict.DONE
        self._tree.finish_offload(operation.op, stored=stored)
        if stored:
            self.counters.offloads_stored += 1
            report.num_offloads_stored += 1
        else:
            self.counters.offloads_failed += 1
            report.num_offloads_failed += 1

    def _retire(self, operation: Operation) -> None:
        """No rank touches the slots any more: the operation is over."""
        del self._operations[operation.op]
        if isinstance(operation, LoadOperation) and operation.mode is LoadMode.STAGED:
            self._room.give_back(operation.end - operation.start)
        self._give_back(operation)

    def _give_back(self, operation: Operation) -> None:
        """Give back slots and lock."""
        if isinstance(operation, LoadOperation):
            if operation.verdict is Verdict.DONE:
                for action in operation.surplus:
                    self._slots.retire_action(action)
            else:
                self._transfers.abort(operation.transfers, None, operation.end)
        self._tree.dec_lock_ref(operation.receipt.to_dec_params())

    def _write_off(
        self, operation: Operation, ranks: tuple[int, ...], report: ReportBuilder
    ) -> None:
        """Some ranks never let go: nobody gets these slots before `reset`.

        The lock stays for the same reason, and so does the room that a staged load takes.
        """
        del self._operations[operation.op]
        self._written_off.add(operation, ranks)
        self.counters.slots_written_off += operation.num_slots
        self.counters.last_error = (
            f"operation {operation.op}: {operation.num_slots} slots written off, "
            f"not let go of by ranks {list(ranks)}"
        )
        if isinstance(operation, LoadOperation):
            self._tell_waiters(operation, report)

    def _give_up(self, report: ReportBuilder) -> None:
        """Go on without a store: fail what is pending, and only wait for its end."""
        report.detached = self._given_up = True
        for operation in list(self._operations.values()):
            self._decide(operation, Verdict.FAILED, report)
            if isinstance(operation, LoadOperation):
                # Also those that came after the verdict, and wait for the room.
                self._tell_waiters(operation, report)
        report.ready.extend(lookup.request_id for lookup in self._requests.lookups)
        self._requests.clear()
        self._due.clear()
        self._tree.detach_linker()

    # -- for people --------------------------------------------------------------------------------

    def explain(self, request_id: RequestId) -> Explanation | None:
        """Why a request's hit was what it was; see `LinkedPrefixCache.explain`."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        waits_for: Operation | None = request.load
        if waits_for is None and request.waiting_on is not None:
            waits_for = self._operations.get(request.waiting_on)
        return explanation_of(
            request_id,
            request,
            page_size=self._tree.page_size,
            max_loads=self._settings.max_stagings,
            rank=self._frames.group.rank,
            num_ranks=self._frames.group.size,
            step=self._step,
            waits_for=waits_for,
        )

    def holders(self) -> Holders:
        """Who holds a lock, a slot or an operation; see `LinkedPrefixCache.holders`."""
        return Holders(
            operations=tuple(
                status_of(operation, self._step) for operation in self._operations.values()
            ),
            written_off=tuple(
                WrittenOff(
                    operation=status_of(operation, self._step),
                    ranks=self._written_off.ranks_of(operation),
                )
                for operation in self._written_off
            ),
            locks=locks_of(
                self._tree.receipts(),
                (*self._operations.values(), *self._written_off),
                self._requests.published(),
            ),
            due_offloads=tuple(self._due),
            lookups=tuple(lookup.request_id for lookup in self._requests.lookups),
            staged=dict(zip(self._pools, self._room.held, strict=True)),
            num_retired=self._slots.num_retired,
        )

    # -- the end of things -------------------------------------------------------------------------

    def release_request(self, request_id: RequestId) -> None:
        """Forget a request; see `PrefixCache.release_aborted_request`."""
        entry = self._requests.release(request_id)
        operation = None if entry is None else entry.load
        if operation is None:
            return
        operation.request_id = operation.running = None
        waited_for = any(waiter in self._requests for waiter in operation.waiters)
        if operation.queued and not waited_for:
            operation.cancelled = True
            self._fail_queued(operation, "it was cancelled")

    def drop_everything(self) -> None:
        """End every operation and forget every request, without a frame.

        For reset and detach, which all ranks call. Returns when this rank's linker touches no slot
        any more. Steps are counted from 0 again: ranks that differed may have made unlike many.
        Idempotent.

        Raises:
            LinkError: The linker could not be quiesced; nothing is given back then.
        """
        for operation in self._operations.values():
            operation.ticket.decided = True
        self.linker.reset()
        self._requests.clear()
        left = [*self._written_off, *self._operations.values()]
        self._written_off.clear()
        self._operations.clear()
        self._due.clear()
        self._room.clear()
        self._step = 0
        for operation in reversed(left):
            if operation.verdict is Verdict.PENDING:
                operation.verdict = Verdict.FAILED
                if isinstance(operation, OffloadOperation):
                    self._tree.finish_offload(operation.op, stored=False)
            self._give_back(operation)


def _queued(operation: LoadOperation) -> LoadBack:
    """The answer about a load that is not decided."""
    if operation.mode is LoadMode.STAGED:
        return LoadWaiting(operation_id=operation.op)
    num_tokens = operation.end - operation.start
    return LoadAdmitted(operation_id=operation.op, num_tokens=num_tokens)
