"""`UnifiedCacheLinkerWrapper`: the tree side of external caching, on every rank alike.

Theory of operation. The wrapper keeps three lists that are equal on all ranks: requests, lookups
and operations. What only this rank knows (what its store answered, whether its bytes have landed)
waits in those objects until the next frame; `step` exchanges one and carries out what it agreed on.
Between two frames nothing is decided.

Rules of the file, and of those that it joins:
1. No branch on a local fact. A refusal, an exception or a deadline here is this rank's verdict,
   written into a frame.
2. Nobody can name the slots of a load before COMMIT, and COMMIT needs every rank's done.
3. Slots and locks go back when every rank is quiesced, those of one frame in the order in which
   the operations were minted.
4. One load for a page at a time: a request whose first missing page is being loaded waits for that
   operation.
5. A miss is a value: everything that cannot be restored is computed, and nothing of the attempt
   stays.
6. A call that is left in its middle, by a signal's exception or one of the engine's, is the last
   before `reset`: the others may have carried out what it did not.

What a match says is `ExternalMatcher`'s, when the store is asked `Prober`'s; how a load begins and
what it leaves is `Loads`', which nodes are stored `Offloads`', which are kept in the store `Touches`'.
Here is what they have in common: the frame, and the end of things.
"""

from __future__ import annotations

from functools import update_wrapper
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, assert_never

from radixlink_contracts import (
    NOTHING_HAPPENED,
    POOL_OF,
    ComponentType,
    Holders,
    LoadMiss,
    StepReport,
    TouchingLinker,
    WrittenOff,
)
from radixlink_contracts.errors import AgreementError, ContractError, StaleHandleError
from radixlink_linker._breaker import Breaker
from radixlink_linker._component_transfers import ComponentTransfers
from radixlink_linker._counters import LinkerCounters
from radixlink_linker._explain import explanation_of, locks_of, status_of
from radixlink_linker._frame import Agenda, FrameKind, check_room
from radixlink_linker._guarded_linker import GuardedLinker
from radixlink_linker._loads import Loads
from radixlink_linker._matcher import ExternalMatcher
from radixlink_linker._offloads import Offloads
from radixlink_linker._operation import (
    LoadOperation,
    LockingOperation,
    OffloadOperation,
    TouchOperation,
    Verdict,
)
from radixlink_linker._operation_table import OperationTable
from radixlink_linker._prober import Prober
from radixlink_linker._report import ReportBuilder
from radixlink_linker._requests import RequestTable
from radixlink_linker._staging_room import StagingRoom
from radixlink_linker._touches import Touches
from radixlink_linker._write_offs import WriteOffs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from radixlink_contracts import (
        BatchIndex,
        Clock,
        Executor,
        Explanation,
        HeldBack,
        LinkedTreeCore,
        LinkerComponent,
        LoadBack,
        LoadMode,
        MatchResult,
        NodeId,
        RadixKey,
        RequestId,
        RequestKV,
        UnifiedCacheLinker,
    )
    from radixlink_linker._frame import AgreedFrame
    from radixlink_linker._operation import AnyOperation
    from radixlink_linker._ranks import FrameExchange
    from radixlink_linker._requests import Request
    from radixlink_linker._settings import LinkerSettings
    from radixlink_linker._slots import DeviceSlots

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def _whole(
    method: Callable[Concatenate[UnifiedCacheLinkerWrapper, _Parameters], _Result],
) -> Callable[Concatenate[UnifiedCacheLinkerWrapper, _Parameters], _Result]:
    """A call that is gone through with, or is the last before `reset`."""

    def call(
        self: UnifiedCacheLinkerWrapper, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> _Result:
        try:
            return method(self, *args, **kwargs)
        except AgreementError:
            raise
        except BaseException as error:
            self._frames.leave(method.__name__, error)
            raise

    update_wrapper(call, method)
    return call


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
                a frame has no room for a bit of each rank; or the storing ranks are not this group's.
            InvalidTransitionError: The tree has a linker already.
        """
        kinds = [component.component_type for component in components]
        # A state is one object of all its layers, so a tree with states loads none layer by layer;
        # otherwise that is a replicated fact, since attaching compares it.
        layer_wise = linker.layer_done_counter is not None and ComponentType.MAMBA not in kinds
        # What linkers can hold is local, so it is agreed before anything is refused because of it.
        frames.agree_on_settings(
            f"{settings.fingerprint} page_size={tree.page_size} slots={slots.sizes} window={tree.sliding_window} "
            f"components={[kind.name for kind in kinds]} pools={sorted(linker.pools)} "
            f"layer_wise={layer_wise} touches={isinstance(linker, TouchingLinker)}"
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
        self.linker = linker
        self.counters = LinkerCounters()
        self._tree = tree
        self._slots = slots
        self._transfers = ComponentTransfers(components)
        self._frames = frames
        self._clock = clock
        self._settings = settings
        self._requests = RequestTable(tree, settings)
        self._operations = OperationTable(frames, clock, settings, tree.page_size)
        self._room = StagingRoom(tree, slots.sizes, settings.staged_percent)
        #: The pools that components' transfers name, in their order.
        self._pools = tuple(POOL_OF[kind] for kind in kinds)
        sizes = dict(zip(self._pools, slots.sizes, strict=True))
        #: Operations whose slots some rank never let go of.
        self._written_off = WriteOffs(sizes, settings.written_off_percent)
        #: There are too many of those: no store any more; what is left only ends. Replicated.
        self._given_up = False
        elsewhere = settings.stored_elsewhere(frames.group.rank, frames.group.size)
        self._guarded = GuardedLinker(linker, self.counters, elsewhere=elsewhere)
        breaker = Breaker(
            clock, patience_s=settings.lookup_timeout_s, max_hanging=settings.max_hanging_lookups
        )
        self._prober = Prober(linker, self._transfers, executor, breaker, self.counters)
        self._matcher = ExternalMatcher(
            tree=tree,
            requests=self._requests,
            operations=self._operations,
            prober=self._prober,
            clock=clock,
            settings=settings,
            counters=self.counters,
        )
        self._loads = Loads(
            tree=tree,
            slots=slots,
            requests=self._requests,
            operations=self._operations,
            room=self._room,
            transfers=self._transfers,
            linker=self._guarded,
            settings=settings,
            counters=self.counters,
            offers_layer_wise=layer_wise,
        )
        self._offloads = Offloads(
            tree=tree,
            operations=self._operations,
            transfers=self._transfers,
            linker=self._guarded,
            counters=self.counters,
        )
        self._touches = Touches(
            tree=tree,
            operations=self._operations,
            transfers=self._transfers,
            linker=self._guarded,
            max_touches=settings.max_touches,
            counters=self.counters,
        )
        self._attach_tree()

    def _attach_tree(self) -> None:
        """The tree offers its nodes, and says which are hot where there is somebody to touch them."""
        settings = self._settings
        after = settings.touch_after_uses if self._guarded.touches else None
        self._tree.attach_linker(
            backup_threshold=settings.backup_threshold,
            touch_after=after,
            retry_after=settings.retry_after_uses,
        )

    @property
    def num_outstanding(self) -> int:
        """Lookups, operations and offloads to come that are not over."""
        return len(self._requests.lookups) + len(self._operations) + len(self._offloads.due)

    # -- what an engine calls ----------------------------------------------------------------------

    @_whole
    def match(self, key: RadixKey, request_id: RequestId, device: MatchResult) -> MatchResult:
        """Say what is agreed about the part of a key behind its device prefix.

        Mutates: the first match of a request opens its lookup. Twice without a `step` between
        gives the same answer.
        """
        self._frames.check()
        return device if self._given_up else self._matcher.match(key, request_id, device)

    @_whole
    def load_back(self, request: RequestKV, mode: LoadMode) -> LoadBack:
        """Queue the load of what a HIT promised; see `PrefixCache.init_load_back`."""
        self._frames.check()
        if self._given_up:
            return LoadMiss(reason="the linker was given up: too many slots are written off")
        return self._loads.load_back(request, mode)

    @_whole
    def start_loads(self) -> BatchIndex | None:
        """Start everything queued; see `PrefixCache.ready_to_load_host_cache`.

        It ends an iteration's matches: the store is asked for all of them.
        """
        self._frames.check()
        self._prober.submit()
        return self._loads.start()

    @_whole
    def offload(self, node_ids: Sequence[NodeId]) -> None:
        """Offload nodes, root first; what is over the cap of operations waits for its turn."""
        self._frames.check()
        self._offloads.add(node_ids)

    @_whole
    def touch(self, node_ids: Sequence[NodeId]) -> None:
        """Touch nodes in the store, root first; what is over the cap of touches is left out.

        Cost: O(nodes); nothing is hashed.
        """
        self._frames.check()
        if not self._given_up:
            self._touches.begin(node_ids)

    @_whole
    def release_request(self, request_id: RequestId) -> None:
        """Forget a request; see `PrefixCache.release_aborted_request`."""
        self._loads.release(request_id)

    # -- step --------------------------------------------------------------------------------------

    @_whole
    def step(self) -> StepReport:
        """Exchange a frame where there is need, and act on it; see `LinkedPrefixCache.step`."""
        self._frames.check()
        operations = self._operations
        operations.step = step = operations.step + 1
        self._requests.expire(step)
        if not (self._requests.lookups or operations.live or self._offloads.due) and (
            self._given_up or self._frames.alone or step % self._settings.heartbeat_steps
        ):
            return NOTHING_HAPPENED
        # Of an engine that launched no batch since.
        self._prober.submit()
        now = self._clock.now()
        self._read_local_facts(now)
        agenda = Agenda.of(
            operations.of_next_frame(),
            self._requests.lookups,
            self._settings,
            step=step,
            num_ranks=self._frames.group.size,
        )
        report = ReportBuilder()
        agreed = self._exchange(FrameKind.STEP, agenda, now, report)
        if not self._given_up:
            if agenda.asking or agenda.masks:
                self._follow_lookups(agenda, agreed, report)
            self._offloads.start()
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

    @_whole
    def finish_loads(self, batch: BatchIndex | None) -> StepReport:
        """Decide the layer-wise loads that run; see `LinkedPrefixCache.finish_loads`."""
        self._frames.check()
        # Also where a step decided all of its loads before: the linker has to forget it.
        in_time = batch is None or self._guarded.finish_loads(batch)
        running = [load for load in self._operations.running_loads() if not load.queued]
        if not running:
            return NOTHING_HAPPENED
        now = self._clock.now()
        if not in_time:
            # The forward stopped waiting, so it may have gone on without a layer that came later.
            for load in running:
                load.give_up("a layer of its batch came too late")
        self._read_local_facts(now)
        for load in running:
            load.give_up("not all layers had come when its batch was launched and waited for")
        report = ReportBuilder()
        agenda = Agenda(operations=running, asking=(), masks=())
        self._exchange(FrameKind.LAUNCH, agenda, now, report)
        return report.build()

    def _exchange(
        self, kind: FrameKind, agenda: Agenda, now: float, report: ReportBuilder
    ) -> AgreedFrame:
        """Send one frame and carry out what it says of operations."""
        agreed = self._frames.exchange(kind, agenda, self._facts(), now)
        self.counters.frames += 1
        # By number, and by no `zip`: that takes longer than the frame of an operation to be read.
        verdicts, quiesced = agreed.verdicts, agreed.quiesced
        for place, operation in enumerate(agenda.operations):
            self._follow(operation, verdicts[place], quiesced=quiesced[place], report=report)
        for place, operation in enumerate(agenda.overdue):
            if agreed.busy[place]:
                self._write_off(operation, agreed.busy[place], report)
        if self._written_off.too_many and not self._given_up:
            self._give_up(report)
        return agreed

    def _read_local_facts(self, now: float) -> None:
        """Take in what this rank's linker has completed and what is late, once for each frame."""
        self._guarded.read_completions(self._operations)
        self._operations.expire(now)

    def _facts(self) -> list[int]:
        """What the digest of a frame is made of: replicated numbers only."""
        facts = [
            self._operations.step,
            self._tree.mutation_digest,
            *self._slots.available_sizes,
            self._slots.num_retired,
            *self._room.held,
            len(self._operations),
            len(self._offloads.due),
            len(self._written_off),
        ]
        live = self._operations.live.values()
        facts += [operation.op << 2 | operation.verdict for operation in live]
        if self._requests.lookups:
            facts += [lookup.num_pages for lookup in self._requests.lookups]
        return facts

    def _follow(
        self, operation: AnyOperation, verdict: Verdict, *, quiesced: bool, report: ReportBuilder
    ) -> None:
        """Carry out what a frame said of one operation."""
        if operation.verdict is Verdict.PENDING:
            if verdict is Verdict.PENDING:
                return
            self._decide(operation, verdict, report)
        if quiesced:
            self._retire(operation)
        if isinstance(operation, LoadOperation):
            # Who came after the verdict waits for the room.
            if quiesced:
                self._loads.tell_waiters(operation, report)
            else:
                self._loads.give_waiters_up(operation, report)

    def _decide(self, operation: AnyOperation, verdict: Verdict, report: ReportBuilder) -> None:
        """Carry out how an operation ended that was not decided before."""
        operation.decide(verdict, self._operations.step)
        match operation:
            case LoadOperation():
                self._offloads.add(self._loads.decide(operation, report))
            case OffloadOperation():
                self._offloads.decide(operation, report)
            case TouchOperation():
                self._touches.decide(operation)
            case _:
                assert_never(operation)

    def _retire(self, operation: AnyOperation) -> None:
        """No rank touches the slots any more: the operation is over."""
        if isinstance(operation, LoadOperation):
            self._loads.retire(operation)
        self._give_back(operation)
        # Last, so that where this is left in its middle, `drop_everything` finds the rest.
        self._operations.remove(operation)

    def _give_back(self, operation: AnyOperation) -> None:
        """Give back slots and lock; called again, what it was left before."""
        if isinstance(operation, LoadOperation):
            self._loads.give_back(operation)
            if operation.anchor is not None:
                self._tree.dec_lock_ref(operation.anchor.to_dec_params())
                operation.anchor = None
            if operation.lends:
                # The batch of its request may read what only this lock keeps.
                self._slots.retire_lock(operation.receipt)
                return
        if isinstance(operation, LockingOperation):
            self._tree.dec_lock_ref(operation.receipt.to_dec_params())

    def _write_off(
        self, operation: AnyOperation, ranks: tuple[int, ...], report: ReportBuilder
    ) -> None:
        """Some ranks never let go: nobody gets these slots before `reset`.

        The lock stays for the same reason, and so does the room that a staged load takes.
        """
        self._operations.remove(operation)
        self._written_off.add(operation, ranks)
        self.counters.slots_written_off += operation.num_slots
        self.counters.last_error = (
            f"operation {operation.op}: {operation.num_slots} slots written off, "
            f"not let go of by ranks {list(ranks)}"
        )
        if isinstance(operation, LoadOperation):
            self._loads.tell_waiters(operation, report)

    def _give_up(self, report: ReportBuilder) -> None:
        """Go on without a store: fail what is pending, and only wait for its end."""
        report.detached = self._given_up = True
        # Before a verdict makes room for one that is due, whose end nobody could tell the tree.
        self._offloads.clear()
        for operation in list(self._operations):
            if operation.verdict is Verdict.PENDING:
                self._decide(operation, Verdict.FAILED, report)
            if isinstance(operation, LoadOperation):
                # Also those that came after the verdict, and wait for the room.
                self._loads.tell_waiters(operation, report)
        report.ready.extend(lookup.request_id for lookup in self._requests.lookups)
        self._prober.clear()
        self._requests.give_up()
        self._tree.detach_linker()

    # -- for people --------------------------------------------------------------------------------

    def explain(self, request_id: RequestId) -> Explanation | None:
        """Why a request's hit was what it was; see `LinkedPrefixCache.explain`."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        waits_for: AnyOperation | None = request.load
        if waits_for is None and request.waiting_on is not None:
            waits_for = self._operations.get(request.waiting_on)
        return explanation_of(
            request_id,
            request,
            page_size=self._tree.page_size,
            max_loads=self._settings.max_loads,
            rank=self._frames.group.rank,
            num_ranks=self._frames.group.size,
            step=self._operations.step,
            waits_for=waits_for,
            held_back=self._held_back(request),
        )

    def _held_back(self, request: Request) -> tuple[HeldBack, ...]:
        """What the device had of a request when the store was asked, and could not be stored lately."""
        try:
            return () if request.device_end is None else self._tree.held_back(request.device_end)
        except StaleHandleError:
            return ()

    def holders(self) -> Holders:
        """Who holds a lock, a slot or an operation; see `LinkedPrefixCache.holders`."""
        step = self._operations.step
        return Holders(
            operations=tuple(status_of(one, step) for one in self._operations),
            written_off=tuple(
                WrittenOff(operation=status_of(one, step), ranks=self._written_off.ranks_of(one))
                for one in self._written_off
            ),
            locks=locks_of(
                self._tree.receipts(),
                (*self._operations, *self._written_off),
                self._requests.published(),
            ),
            due_offloads=tuple(self._offloads.due),
            lookups=tuple(lookup.request_id for lookup in self._requests.lookups),
            staged=dict(zip(self._pools, self._room.held, strict=True)),
            num_retired=self._slots.num_retired,
        )

    # -- the end of things -------------------------------------------------------------------------

    def drop_everything(self) -> None:
        """End every operation and forget every request, without a frame.

        For reset and detach, which all ranks call, and which make the tree forget what is on its way
        of its nodes. Returns when this rank's linker touches no slot any more. Steps are counted
        from 0 again: ranks that differed may have made unlike many. Idempotent, also where a
        signal's exception ended it.

        Raises:
            LinkError: The linker could not be quiesced; nothing is given back then.
        """
        for operation in self._operations:
            operation.ticket.decided = True
        self.linker.reset()
        self._prober.clear()
        self._requests.clear()
        self._offloads.clear()
        self._touches.clear()
        self._room.clear()
        self._operations.step = 0
        # What the tree decided comes before what its decisions go by.
        self._slots.carry_out()
        # One by one, the newest first, and each is here until it has given everything back: where
        # this is left in its middle, the next call goes on.
        while (left := self._operations.newest()) is not None:
            self._give_back(left)
            self._operations.remove(left)
        while (left := self._written_off.newest()) is not None:
            self._give_back(left)
            self._written_off.remove(left)

    def begin_again(self) -> None:
        """Behind a reset all ranks serve alike: not all may have got the frame that gave a linker up."""
        if self._given_up:
            self._given_up = False
            self._attach_tree()
