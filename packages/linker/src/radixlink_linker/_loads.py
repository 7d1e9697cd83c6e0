"""`Loads`: who gets a load, with which slots and lock, and what it leaves behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixlink_contracts import (
    IncLockRefParams,
    LoadAdmitted,
    LoadMiss,
    LoadMode,
    LoadWaiting,
    MatchPrefixParams,
)
from radixlink_linker._commit import commit_load
from radixlink_linker._operation import LoadOperation, Verdict
from radixlink_linker._requests import FailedLoad

if TYPE_CHECKING:
    from radixlink_contracts import (
        BatchIndex,
        LinkedTreeCore,
        LoadBack,
        MatchResult,
        NodeId,
        RequestId,
        RequestKV,
    )
    from radixlink_linker._component_transfers import ComponentTransfers
    from radixlink_linker._counters import LinkerCounters
    from radixlink_linker._guarded_linker import GuardedLinker
    from radixlink_linker._operation_table import OperationTable
    from radixlink_linker._report import ReportBuilder
    from radixlink_linker._requests import Request, RequestTable
    from radixlink_linker._settings import LinkerSettings
    from radixlink_linker._slots import DeviceSlots
    from radixlink_linker._staging_room import StagingRoom


class Loads:
    """The loads of one replica.

    Ranks: all, the same calls in the same order with the same arguments.
    Thread: the scheduler's.
    """

    def __init__(
        self,
        *,
        tree: LinkedTreeCore,
        slots: DeviceSlots,
        requests: RequestTable,
        operations: OperationTable,
        room: StagingRoom,
        transfers: ComponentTransfers,
        linker: GuardedLinker,
        settings: LinkerSettings,
        counters: LinkerCounters,
        offers_layer_wise: bool,
    ) -> None:
        """Take what it works with.

        Args:
            tree: Where to.
            slots: Carries out what the tree decides.
            requests: Who may load what.
            operations: What else is on its way.
            room: What staged loads may hold.
            transfers: Allocates for all components.
            linker: Moves the bytes.
            settings: How often a request is loaded.
            counters: Of what happens.
            offers_layer_wise: A load may be so, on every rank.
        """
        self._tree = tree
        self._slots = slots
        self._requests = requests
        self._operations = operations
        self._room = room
        self._transfers = transfers
        self._linker = linker
        self._settings = settings
        self._counters = counters
        self._offers_layer_wise = offers_layer_wise

    # -- the beginning -----------------------------------------------------------------------------

    def load_back(self, request: RequestKV, mode: LoadMode) -> LoadBack:
        """Queue the load of what a HIT promised; see `PrefixCache.init_load_back`."""
        entry = self._requests.get(request.request_id)
        if entry is None:
            return LoadMiss(reason="no match of this request said HIT")
        answer = self._load_back(request, entry, mode)
        if isinstance(answer, LoadMiss):
            entry.load_miss = answer.reason
        return answer

    def _load_back(self, request: RequestKV, entry: Request, mode: LoadMode) -> LoadBack:
        """Answer without a note of it."""
        if entry.lookup is None or not entry.answered:
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
            other = self._operations.load_of(key, start)
            if other is not None:
                self._requests.wait_for(other, request.request_id)
                return LoadWaiting(operation_id=other.op)
            if self._requests.is_missing(key, start):
                return LoadMiss(reason="its first page failed to load a moment ago")
        if entry.num_loads >= self._settings.max_loads:
            return LoadMiss(reason=f"it was loaded {entry.num_loads} times already")
        if not self._offers_layer_wise:
            mode = LoadMode.STAGED
        return self._begin(request, entry, device, mode)

    def _begin(
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
        elif len(self._operations.running_loads()) == self._settings.max_operations:
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
        op, deadline = self._operations.mint()
        operation = LoadOperation(
            op,
            receipt,
            deadline,
            request=request,
            mode=mode,
            key=request.key,
            start=start,
            end=end,
            transfers=transfers,
        )
        self._operations.add(operation)
        if mode is LoadMode.STAGED:
            self._room.take(end - start)
        entry.load = operation
        entry.num_loads += 1
        self._linker.load(operation)
        self._transfers.prepare(transfers, request, end)
        if operation.running is not None:
            operation.running.repoint(start, operation.full_slots)
        return _queued(operation)

    def _wait_for_room(self, request_id: RequestId) -> LoadBack:
        """Staged loads hold all that they may: wait for the oldest of them, else compute."""
        for load in self._operations.loads():
            self._requests.wait_for(load, request_id)
            return LoadWaiting(operation_id=load.op)
        return LoadMiss(
            reason=f"staged loads may hold {self._room.cap} tokens, less than what is stored of it"
        )

    def start(self) -> BatchIndex | None:
        """Start everything queued; see `PrefixCache.ready_to_load_host_cache`."""
        queued = [load for load in self._operations.loads() if load.queued]
        if not queued:
            return None
        for load in queued:
            load.queued = False
        return self._linker.start_loads(queued)

    # -- the verdict -------------------------------------------------------------------------------

    def decide(self, operation: LoadOperation, report: ReportBuilder) -> list[NodeId]:
        """The ranks agreed: publish what landed, or remember that it is missing; tell who waits.

        Returns:
            The nodes that are to be offloaded.
        """
        landed = operation.verdict is Verdict.DONE
        offloads: list[NodeId] = []
        if landed:
            self._counters.loads_landed += 1
            offloads = self.commit(operation)
        else:
            self._counters.loads_failed += 1
            if operation.queued:
                # No start call need come any more.
                operation.queued = False
                self._linker.cancel(operation, "it was not started")
            if not operation.cancelled:
                self._requests.mark_missing(operation.key, operation.start, self._operations.step)
        if operation.request_id is not None:
            (report.landed if landed else report.failed).append(operation.request_id)
            entry = self._requests.remember(operation.request_id)
            entry.load = operation.running = None
            if not landed:
                entry.lookup = None
                entry.failures.append(
                    FailedLoad(
                        op=operation.op,
                        step=self._operations.step,
                        here=operation.local_verdict is Verdict.FAILED,
                        why=operation.why,
                    )
                )
        self.tell_waiters(operation, report)
        return offloads

    def commit(self, operation: LoadOperation) -> list[NodeId]:
        """Publish a load, for its request if that is there still.

        Returns:
            The nodes that are to be offloaded.
        """
        offloads = commit_load(operation, self._tree, self._slots, self._transfers)
        if operation.request_id is not None:
            self._requests.publish(
                operation.request_id, operation.receipt.node_id, self._operations.step
            )
        return offloads

    def tell_waiters(self, operation: LoadOperation, report: ReportBuilder) -> None:
        """Who waits for an operation may match again."""
        report.ready.extend(waiter for waiter in operation.waiters if waiter in self._requests)
        operation.waiters.clear()

    # -- the end -----------------------------------------------------------------------------------

    def release(self, request_id: RequestId) -> None:
        """Forget a request; its load goes on, unless it is queued and nobody else waits for it."""
        entry = self._requests.release(request_id)
        operation = None if entry is None else entry.load
        if operation is None:
            return
        operation.request_id = operation.running = None
        waited_for = any(waiter in self._requests for waiter in operation.waiters)
        if operation.queued and not waited_for:
            operation.cancelled = True
            operation.queued = False
            self._linker.cancel(operation, "it was cancelled")

    def retire(self, operation: LoadOperation) -> None:
        """It is over: what it took of the room is others'."""
        if operation.mode is LoadMode.STAGED:
            self._room.give_back(operation.end - operation.start)

    def give_back(self, operation: LoadOperation) -> None:
        """No rank touches its slots: those that the tree did not take go back."""
        if operation.verdict is Verdict.DONE:
            for action in operation.surplus:
                self._slots.retire_action(action)
        else:
            self._transfers.abort(operation.transfers, None, operation.end)


def _queued(operation: LoadOperation) -> LoadBack:
    """The answer about a load that is not decided."""
    if operation.mode is LoadMode.STAGED:
        return LoadWaiting(operation_id=operation.op)
    num_tokens = operation.end - operation.start
    return LoadAdmitted(operation_id=operation.op, num_tokens=num_tokens)
