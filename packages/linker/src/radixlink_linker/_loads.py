"""`Loads`: who gets a load, with which slots and lock, and what it leaves behind."""

from __future__ import annotations

from contextlib import ExitStack
from operator import attrgetter
from typing import TYPE_CHECKING

import attrs
import torch

from radixlink_contracts import (
    POOL_OF,
    ComponentType,
    IncLockRefParams,
    LoadAdmitted,
    LoadMiss,
    LoadMode,
    LoadWaiting,
    MatchPrefixParams,
    PageBits,
    PoolName,
    PrefixHoldings,
)
from radixlink_linker._commit import commit_load
from radixlink_linker._load_plan import LoadPlan, held_pages, keys_of, missing_pages
from radixlink_linker._lookup import is_shorter
from radixlink_linker._operation import LoadOperation, Verdict
from radixlink_linker._requests import FailedLoad

if TYPE_CHECKING:
    from radixlink_contracts import (
        BatchIndex,
        LinkedTreeCore,
        LoadBack,
        MatchResult,
        NodeId,
        PoolTransfer,
        RequestId,
        RequestKV,
    )
    from radixlink_linker._component_transfers import ComponentTransfers
    from radixlink_linker._counters import LinkerCounters
    from radixlink_linker._guarded_linker import GuardedLinker
    from radixlink_linker._lookup import Lookup
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
        if is_shorter(device, lookup, self._tree.page_size):
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
        """Lock, allocate, mint, and hand the load to the linker.

        What raises in between, the engine's `repoint` for one, leaves nothing of it behind.
        """
        lookup = entry.lookup
        assert lookup is not None
        page_size, start = self._tree.page_size, device.device_prefix_len
        if lookup.start + lookup.longest(lookup.num_pages) * page_size <= start:
            return LoadMiss(reason="the device has what the store has")
        plan = self._plan(lookup, device, mode)
        if plan is not None and plan.late_windows and mode is LoadMode.LAYER_WISE:
            # They are the tree's to name, so they stand beside its slots only when all of them
            # have landed.
            mode = LoadMode.STAGED
            plan = self._plan(lookup, device, mode)
        if plan is None:
            return self._wait_for_room(request.request_id, lookup, device, mode)
        if not plan.missing:
            return LoadMiss(reason="the device has what the store has")
        for kind, pages in plan.missing.items():
            if (pages & lookup.held_of(POOL_OF[kind])).total:
                return LoadMiss(reason=f"the device lost {kind.name} that it had at the lookup")
        with ExitStack() as undo:
            receipt = self._tree.inc_lock_ref(IncLockRefParams(node_id=plan.node_id))
            undo.callback(self._tree.dec_lock_ref, receipt.to_dec_params())
            transfers = self._allocate(request, lookup, device, plan)
            if transfers is None:
                num_pages = max(pages.total for pages in plan.missing.values())
                return LoadMiss(reason=f"no room for {num_pages} pages, all else is locked")
            undo.callback(self._transfers.abort, transfers, request, plan.end)
            op, deadline = self._operations.mint()
            operation = LoadOperation(
                op,
                receipt,
                deadline,
                request=request,
                mode=mode,
                key=request.key,
                plan=plan,
                transfers=transfers,
            )
            self._operations.add(operation)
            undo.callback(self._operations.remove, operation)
            if mode is LoadMode.STAGED:
                self._room.take(operation.slots)
                undo.callback(self._room.give_back, operation.slots)
            undo.callback(self._linker.cancel, operation, "its beginning was left in its middle")
            self._linker.load(operation)
            self._transfers.prepare(transfers, request, plan.end)
            if operation.running is not None:
                loaded = operation.slots_of(PoolName.KV)
                assert loaded is not None, (
                    "what a layer-wise load brings lies behind the device's part"
                )
                if start < plan.full_start:
                    loaded = torch.cat([self._tree.path_indices(plan.node_id)[start:], loaded])
                operation.running.repoint(start, loaded)
            entry.load = operation
            entry.num_loads += 1
            undo.pop_all()
        return _queued(operation)

    def _allocate(
        self, request: RequestKV, lookup: Lookup, device: MatchResult, plan: LoadPlan
    ) -> tuple[PoolTransfer, ...] | None:
        """Slots for what a load brings; None where there is no room.

        What the match ended at stays while room is made: after a miss its request goes on from it.
        """
        keys = {kind: keys_of(lookup.keys, pages) for kind, pages in plan.missing.items()}
        matched = self._tree.inc_lock_ref(IncLockRefParams(node_id=device.last_device_node))
        try:
            return self._transfers.load(keys, request, plan.end)
        finally:
            self._tree.dec_lock_ref(matched.to_dec_params())

    def _plan(self, lookup: Lookup, device: MatchResult, mode: LoadMode) -> LoadPlan | None:
        """What the longest load brings that there is room for; None for none.

        Mutates: splits, where the load ends inside what the device has of full attention.
        """
        tree, key, start = self._tree, lookup.key, device.device_prefix_len
        page_size, num_pages = tree.page_size, lookup.num_pages
        holdings = PrefixHoldings(full_len=start, last_node=device.last_device_node)
        if device.full_kv_hit_length > start:
            holdings = tree.holdings(key)
        held = held_pages(
            holdings, tree.components, start=lookup.start, num_pages=num_pages, page_size=page_size
        )
        stop = self._longest(lookup, (holdings.full_len - lookup.start) // page_size, mode)
        end = lookup.start + stop * page_size
        if end <= start:
            return None
        missing = missing_pages(
            held,
            skipped=(start - lookup.start) // page_size,
            stop=stop,
            window_pages=-(-tree.sliding_window // page_size),
        )
        if end < holdings.full_len:
            # A load ends at the end of a node.
            holdings = tree.holdings(attrs.evolve(key, token_ids=key.token_ids[:end]))
        windows = missing.get(ComponentType.SWA, PageBits.none(num_pages))
        return LoadPlan(
            start=start,
            full_start=holdings.full_len,
            end=end,
            node_id=holdings.last_node,
            missing=missing,
            late_windows=tuple(
                (lookup.start + first * page_size, lookup.start + last * page_size)
                for first, last in (windows & held[ComponentType.FULL]).runs()
            ),
        )

    def _longest(self, lookup: Lookup, full_pages: int, mode: LoadMode) -> int:
        """Pages of the lookup up to the end of the longest load that there is room for.

        Args:
            lookup: What is restorable.
            full_pages: Pages of it of which the device has full attention.
            mode: Of the load.
        """
        if mode is LoadMode.STAGED:
            return self._longest_in(self._room.tokens_left(), lookup, full_pages)
        if len(self._operations.running_loads()) == self._settings.max_operations:
            return 0
        return lookup.longest(lookup.num_pages)

    def _longest_in(self, room: int | None, lookup: Lookup, full_pages: int) -> int:
        """`_longest` of a staged load in so many tokens of room; None for none."""
        return 0 if room is None else lookup.longest(full_pages + room // self._tree.page_size)

    def _wait_for_room(
        self, request_id: RequestId, lookup: Lookup, device: MatchResult, mode: LoadMode
    ) -> LoadBack:
        """Loads hold all that they may: wait for one of them if that can help, else compute.

        It cannot where a load needs more at once than there will be when all of them are over: under
        way there is always some load, so that its request would wait for ever. Nor where those that
        are decided do not let go: one that was so `miss_steps` ago counts as never over.
        """
        if mode is LoadMode.LAYER_WISE:
            # The frame after their launch decides them.
            over, open_ = [], self._operations.running_loads()
        else:
            staged = [load for load in self._operations.loads() if load.mode is LoadMode.STAGED]
            over = [load for load in staged if self._lets_go_soon(load)]
            open_ = [load for load in staged if load.verdict is Verdict.PENDING]
            page_size, start = self._tree.page_size, device.device_prefix_len
            full_pages = (max(start, device.full_kv_hit_length) - lookup.start) // page_size
            room = self._room.tokens_left([load.slots for load in (*over, *open_)])
            most = self._longest_in(room, lookup, full_pages)
            if lookup.start + most * page_size <= start:
                over, open_ = [], []
        # Who was decided last lets go next; of the others the oldest.
        for load in (*sorted(over, key=attrgetter("decided_step"), reverse=True), *open_):
            self._requests.wait_for(load, request_id)
            return LoadWaiting(operation_id=load.op)
        return LoadMiss(
            reason=f"staged loads may hold {self._room.cap} tokens; less than what is stored of it "
            f"will be left of them"
        )

    def _lets_go_soon(self, load: LoadOperation) -> bool:
        """A decided load is not one that hangs, as far as can be told."""
        decided_for = self._operations.step - load.decided_step
        return load.verdict is not Verdict.PENDING and decided_for < self._settings.miss_steps

    def give_waiters_up(self, operation: LoadOperation, report: ReportBuilder) -> None:
        """Who waits for the room of a load that hangs may match again."""
        if operation.waiters and not self._lets_go_soon(operation):
            self.tell_waiters(operation, report)

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
            self._room.give_back(operation.slots)

    def give_back(self, operation: LoadOperation) -> None:
        """No rank touches its slots: those that the tree did not take go back.

        Each part is the operation's until it is given back, so that a call that is left in its
        middle is made again for the rest.
        """
        if operation.committed:
            while operation.surplus:
                self._slots.retire_action(operation.surplus[0])
                del operation.surplus[0]
            while operation.surplus_windows:
                self._slots.retire_swa(operation.surplus_windows[0])
                del operation.surplus_windows[0]
            return
        while operation.transfers:
            self._transfers.abort_last(operation.transfers, None, operation.end)
            operation.transfers = operation.transfers[:-1]


def _queued(operation: LoadOperation) -> LoadBack:
    """The answer about a load that is not decided."""
    if operation.mode is LoadMode.STAGED:
        return LoadWaiting(operation_id=operation.op)
    num_tokens = operation.end - operation.start
    return LoadAdmitted(operation_id=operation.op, num_tokens=num_tokens)
