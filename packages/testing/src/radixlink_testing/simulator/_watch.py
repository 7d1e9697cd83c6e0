"""`Watch`: what is seen of one rank at its seams: its tree, its allocator and its backend.

Nothing of the code under test is looked into: each seam is a part of it that reports what it is asked
for, so that whose each page and each lock is follows from the calls alone.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import attrs
from typing_extensions import override

from radixlink_contracts import SlotAllocator
from radixlink_contracts.actions import FreeDeviceKV
from radixlink_contracts.errors import StaleHandleError
from radixlink_testing.simulator._faults import Fault
from radixlink_testing.simulator._pages import DevicePages, Holder, Shelf, marks_of
from radixlink_testing.simulator._rules import Rule
from radixlink_tree import UnifiedTreeCore

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from radixlink_contracts import (
        Completion,
        DecLockRefParams,
        EvictParams,
        EvictResult,
        IncLockRefParams,
        IncLockRefResult,
        InsertParams,
        InsertResult,
        NodeId,
        OperationId,
        OperationTicket,
        PageBits,
        PoolTransfer,
        ReceiptId,
        RequestId,
    )
    from radixlink_contracts.actions import CacheAction
    from radixlink_linker import LinkerSettings
    from radixlink_pools import PagedAllocator
    from radixlink_testing.simulator._group import SimulatedClock
    from radixlink_testing.simulator._operations import Operations, Share
    from radixlink_testing.simulator._rules import Referee

#: An allocation, among the locks of a call.
_ALLOCATION: Final = -1


@attrs.frozen(kw_only=True)
class _Lock:
    """A receipt that is out.

    Attributes:
        receipt: The receipt.
        engine: The engine took it; else the cache did.
        step: When.
    """

    receipt: IncLockRefResult
    engine: bool
    step: int


@attrs.frozen(kw_only=True)
class Wanted:
    """A request, as far as its load is to be judged.

    Attributes:
        name: The request.
        marks: Its whole pages.
        promised: The page behind the last that a HIT promised.
    """

    name: str
    marks: Sequence[bytes]
    promised: int


class Watch:
    """One rank, as it is seen from outside.

    Thread: any; one at a time.
    """

    def __init__(
        self,
        rank: int,
        *,
        page_size: int,
        num_pages: int,
        num_layers: int,
        settings: LinkerSettings,
        clock: SimulatedClock,
        operations: Operations,
        referee: Referee,
    ) -> None:
        """Begin to watch a rank that has done nothing."""
        self.rank = rank
        self.page_size = page_size
        self.num_layers = num_layers
        self.settings = settings
        self.pages = DevicePages(rank, num_pages, num_layers, referee)
        self.shelf = Shelf()
        self.clock = clock
        self._operations = operations
        self._referee = referee
        #: Faults that wait for something to strike. A set is asked, never walked.
        self._armed: set[Fault] = set()
        #: The layer in which transfers fail that are to fail.
        self.failing_layer = 0
        #: The call that the engine makes now.
        self.acting = ""
        #: A thread of the backend works now.
        self.working = False
        #: Steps since attach or reset.
        self.step = 0
        #: A linker is attached.
        self.attached = False
        #: The names of the collectives that this rank entered.
        self.collectives: list[str] = []
        self.locks: dict[ReceiptId, _Lock] = {}
        #: Whose load is being queued.
        self.wanted: Wanted | None = None
        #: Within the engine's call: where each lock ended, in pages, and each allocation.
        self._within: list[int] = []
        #: What the store answered for a request, whenever it was asked.
        self.answers: dict[str, list[PageBits]] = {}
        #: How often a request was staged.
        self._stagings: Counter[str] = Counter()
        #: The pages of the nodes that touches on their way speak of.
        self._touching: dict[OperationId, list[int]] = {}

    def begin(self, call: str) -> None:
        """The engine makes a call."""
        self.acting = call
        self._within.clear()

    def note(self, what: str) -> None:
        """Go on with the story."""
        self._referee.note(f"rank {self.rank}", what)

    def breach(self, rule: Rule, detail: str) -> None:
        """A rule is broken on this rank."""
        self._referee.breach(rule, f"rank {self.rank}: {detail}")

    def pages_in(self, slots: torch.Tensor) -> list[int]:
        """The pages of whole slots."""
        return pages_of(slots, self.page_size)

    # -- faults ------------------------------------------------------------------------------------

    def arm(self, fault: Fault, which: int) -> None:
        """The next that this can strike, it will."""
        self._armed.add(fault)
        if fault in {Fault.LOAD_FAILS, Fault.OFFLOAD_FAILS}:
            self.failing_layer = which % self.num_layers

    def strikes(self, fault: Fault) -> bool:
        """True when a fault was armed for this; it strikes once."""
        if fault not in self._armed:
            return False
        self._armed.remove(fault)
        self.note(f"fault: {fault.value}")
        return True

    def disarm(self) -> None:
        """Nothing goes wrong any more."""
        self._armed.clear()

    # -- the backend -------------------------------------------------------------------------------

    def seen(self, call: str) -> None:
        """The backend was called."""
        # A lookup that an executor runs late, and the last reset, may come behind a detach.
        if not self.attached and call not in {"lookup", "reset"}:
            self.breach(Rule.ATTACH, f"{call} was called although no linker is attached")

    def answered(self, request_id: RequestId, bits: PageBits) -> None:
        """The store answered a lookup."""
        self.answers.setdefault(str(request_id), []).append(bits)
        self.note(f"lookup of {request_id}: {bits.total} of {bits.count} pages")

    def pages_of(self, transfer: PoolTransfer) -> list[int]:
        """The pages of a transfer."""
        assert transfer.device_indices is not None
        return pages_of(transfer.device_indices, self.page_size)

    def told(self, completion: Completion) -> None:
        """The wrapper took a completion."""
        operation = self._operations.get(completion.op)
        share = None if operation is None else operation.shares.get(self.rank)
        if share is not None:
            share.say(completion.outcome, quiesced=completion.quiesced)

    def cancel_asked(self, op: OperationId) -> None:
        """The wrapper gives a queued load up on this rank."""
        operation = self._operations.get(op)
        if operation is not None and self.rank in operation.shares:
            operation.shares[self.rank].give_up()
            if self.acting == "release_aborted_request":
                operation.cancelled = True

    def backend_was_reset(self) -> None:
        """The backend touches nothing any more."""
        for operation in self._operations.live.values():
            if self.rank in operation.shares:
                operation.shares[self.rank].quiesced = True

    def load_handed_over(self, ticket: OperationTicket, transfers: Sequence[PoolTransfer]) -> Share:
        """The wrapper queues a load: everything that must hold before."""
        (transfer,) = transfers
        pages, wanted = self.pages_of(transfer), self.wanted
        if wanted is None:
            self.breach(Rule.LOAD_BACK, f"load {ticket.op} is queued within {self.acting}")
            wanted = Wanted(name="nobody", marks=(), promised=0)
        start = self._locked_end(ticket)
        marks = list(wanted.marks[start : start + len(pages)])
        self._check_range(ticket, wanted, start, len(pages))
        marks += [b""] * (len(pages) - len(marks))
        self.pages.staged(ticket.op, pages, marks)
        self._check_alone(ticket, marks)
        self._check_cap(ticket)
        self._stagings[wanted.name] += 1
        if self._stagings[wanted.name] > self.settings.max_loads:
            self.breach(
                Rule.LANDED,
                f"{wanted.name} is staged more often than {self.settings.max_loads} times",
            )
        return self._operations.begin(
            self.rank,
            ticket,
            self.clock.now() + self.settings.transfer_timeout_s,
            load=True,
            marks=marks,
            request=wanted.name,
            end=start + len(pages),
        )

    def _locked_end(self, ticket: OperationTicket) -> int:
        """The page where the lock that this call took ends."""
        first = self._within[0] if self._within else _ALLOCATION
        if first == _ALLOCATION:
            self.breach(Rule.LOAD_BACK, f"load {ticket.op} allocated before it took its lock")
            return 0
        return first

    def _check_range(
        self, ticket: OperationTicket, wanted: Wanted, start: int, num_pages: int
    ) -> None:
        """A load brings what a lookup of its request promised."""
        answers = self.answers.get(wanted.name, [])
        asked = min((len(wanted.marks) - bits.count for bits in answers), default=0)
        if not asked <= start < start + num_pages <= wanted.promised:
            self.breach(
                Rule.LOAD_BACK,
                f"load {ticket.op} brings pages {start} to {start + num_pages} of {wanted.name}, "
                f"which was promised {asked} to {wanted.promised}",
            )

    def _check_alone(self, ticket: OperationTicket, marks: Sequence[bytes]) -> None:
        """No other load brings these pages, and none of them failed a moment ago."""
        for other in self._operations.undecided_loads():
            if other.op != ticket.op and not other.cancelled and set(other.marks) & set(marks):
                self.breach(
                    Rule.ONE_LOAD, f"load {ticket.op} brings pages that load {other.op} brings"
                )
        if marks[0] in self._operations.missing:
            self.breach(Rule.ONE_LOAD, f"load {ticket.op} begins with a page that has just failed")

    def _check_cap(self, ticket: OperationTicket) -> None:
        """Loads that are not over hold no more pages than they may."""
        cap = self.settings.staged_percent * len(self.pages.holds) // 100
        staged = 0
        for op, num_pages in self.pages.staged_by().items():
            operation = self._operations.get(op)
            # What every rank let go of may still wait for the batches that run.
            if operation is None or not operation.quiesced:
                staged += num_pages
        if staged > cap:
            self.breach(
                Rule.LANDED, f"load {ticket.op}: staged loads hold {staged} pages, at most {cap}"
            )

    def offload_handed_over(
        self, ticket: OperationTicket, transfers: Sequence[PoolTransfer]
    ) -> Share:
        """The wrapper offers a node."""
        (transfer,) = transfers
        holds = [self.pages.holds[page] for page in self.pages_of(transfer)]
        if any(hold.holder is not Holder.TREE for hold in holds):
            self.breach(Rule.LANDED, f"offload {ticket.op} is of pages that are not in the tree")
        if all(hold.operation is not None for hold in holds):
            self.breach(Rule.STORED, f"offload {ticket.op} is of pages that were all restored")
        if all(what == _ALLOCATION for what in self._within):
            self.breach(Rule.LOAD_BACK, f"offload {ticket.op} holds no lock")
        return self._operations.begin(
            self.rank,
            ticket,
            self.clock.now() + self.settings.transfer_timeout_s,
            load=False,
            marks=[hold.mark for hold in holds],
            fresh=self.acting == "step",
        )

    def touch_begun(self, op: OperationId, slots: torch.Tensor) -> None:
        """The tree was told of a touch of these slots' node."""
        self._touching[op] = self.pages_in(slots)

    def touch_handed_over(self, ticket: OperationTicket) -> Share:
        """The wrapper touches a node, of which the tree was told before."""
        pages = self._touching.get(ticket.op)
        if pages is None:
            self.breach(Rule.STORED, f"touch {ticket.op} is of no node")
            pages = []
        if self.acting != "insert":
            self.breach(Rule.MATCH, f"touch {ticket.op} begins within {self.acting}")
        return self._operations.begin(
            self.rank,
            ticket,
            self.clock.now() + self.settings.transfer_timeout_s,
            load=False,
            touch=True,
            marks=[self.pages.holds[page].mark for page in pages],
        )

    def touch_ended(self, op: OperationId, *, present: bool) -> None:
        """The tree was told how a touch ended; what is not there may be offered, restored or not."""
        self._touching.pop(op, None)
        operation = self._operations.get(op)
        if present:
            self._operations.landed(self.rank, op)
        elif operation is not None:
            self.pages.forget_restored(set(operation.marks))

    def released(self, request: str) -> None:
        """The engine released a request."""
        self._stagings.pop(request, None)

    def forget_requests(self) -> None:
        """No request is remembered any more."""
        self._stagings.clear()
        self.answers.clear()

    # -- the tree ----------------------------------------------------------------------------------

    def inserted(self, params: InsertParams, result: InsertResult) -> None:
        """The tree took a sequence."""
        size = self.page_size
        total, old = result.total_len // size, result.prefix_len // size
        before = params.prev_prefix_len // size
        pages = pages_of(params.value[: total * size], size)
        marks = marks_of(params.key, size)
        holds = [self.pages.holds[page] for page in pages[before:]]
        for op in {hold.operation for hold in holds if hold.holder is Holder.LOAD}:
            if op is not None:
                self._operations.landed(self.rank, op)
        self.pages.adopted(pages[old:], marks[old:total])
        self.pages.unadopted(pages[before:old])

    def gave_up(self, actions: Iterable[CacheAction]) -> None:
        """The tree gave pages up."""
        for action in actions:
            if isinstance(action, FreeDeviceKV):
                self.pages.left_tree(pages_of(action.indices, self.page_size))

    def locked(self, receipt: IncLockRefResult, num_tokens: int) -> None:
        """A path was locked."""
        engine = self.acting == "inc_lock_ref"
        self.locks[receipt.receipt_id] = _Lock(receipt=receipt, engine=engine, step=self.step)
        self._within.append(num_tokens // self.page_size)

    def unlocked(self, receipt: IncLockRefResult) -> None:
        """A path was released."""
        lock = self.locks.pop(receipt.receipt_id, None)
        if lock is not None and lock.engine and self.acting != "dec_lock_ref":
            self.breach(Rule.RECEIPTS, f"{self.acting} released a lock of the engine")

    def offload_ended(self, op: OperationId, *, stored: bool) -> None:
        """The tree was told how an offload ended."""
        if stored:
            self._operations.landed(self.rank, op)

    def forget_restored(self) -> None:
        """Without a linker nothing counts as stored."""
        self.pages.forget_restored(None)

    # -- the allocator -----------------------------------------------------------------------------

    def allocated(self, indices: torch.Tensor) -> None:
        """Slots were dealt out."""
        if self.acting == "match_prefix":
            self.breach(Rule.MATCH, "a match allocated")
        self._within.append(_ALLOCATION)
        self.pages.allocated(pages_of(indices, self.page_size))

    def freed(self, indices: torch.Tensor) -> None:
        """Slots came back."""
        pages = pages_of(indices, self.page_size)
        for op in {self.pages.holds[page].operation for page in pages}:
            if op is not None:
                self._check_quiesced(op, pages)
        self.pages.freed(pages)

    def _check_quiesced(self, op: OperationId, pages: Sequence[int]) -> None:
        """The slots of a load go back when no rank touches them any more."""
        operation = self._operations.live.get(op)
        holders = {self.pages.holds[page].holder for page in pages}
        if operation is None or not holders & {Holder.LOAD, Holder.UNADOPTED}:
            return
        alone = self.acting in {"reset", "detach"}
        busy = [
            rank
            for rank, share in operation.shares.items()
            if not share.quiesced and (rank == self.rank or not alone)
        ]
        if busy:
            self.breach(
                Rule.FRAMES,
                f"slots of load {op} went back before rank {busy[0]} was quiesced",
            )


class WatchedTree(UnifiedTreeCore):
    """The real tree; what it decides is seen."""

    def __init__(self, watch: Watch, *, page_size: int) -> None:
        """Be the tree of a rank."""
        super().__init__(page_size=page_size)
        self._watch = watch

    @override
    def insert(self, params: InsertParams) -> InsertResult:
        """Add a sequence."""
        result = super().insert(params)
        self._watch.inserted(params, result)
        return result

    @override
    def evict(self, params: EvictParams) -> EvictResult:
        """Give up leaves; what is locked must still be there."""
        result = super().evict(params)
        self._watch.gave_up(result.cache_actions)
        for lock in self._watch.locks.values():
            try:
                self.node(lock.receipt.node_id)
            except StaleHandleError:
                self._watch.breach(
                    Rule.RECEIPTS, f"node {lock.receipt.node_id} was evicted while it was locked"
                )
        return result

    @override
    def inc_lock_ref(self, params: IncLockRefParams) -> IncLockRefResult:
        """Lock a path."""
        receipt = super().inc_lock_ref(params)
        loading = self._watch.acting == "init_load_back"
        end = len(self.path_indices(params.node_id)) if loading else 0
        self._watch.locked(receipt, end)
        return receipt

    @override
    def dec_lock_ref(self, params: DecLockRefParams) -> None:
        """Release a path; twice is one too many."""
        try:
            super().dec_lock_ref(params)
        except StaleHandleError as error:
            self._watch.breach(Rule.RECEIPTS, f"{self._watch.acting}: {error}")
            raise
        self._watch.unlocked(params.receipt)

    @override
    def finish_offload(self, operation_id: OperationId, *, stored: bool) -> None:
        """An offload ended."""
        super().finish_offload(operation_id, stored=stored)
        self._watch.offload_ended(operation_id, stored=stored)

    @override
    def mark_touch_pending(self, node_id: NodeId, operation_id: OperationId) -> None:
        """A touch begins."""
        super().mark_touch_pending(node_id, operation_id)
        self._watch.touch_begun(operation_id, self.node(node_id).device_indices)

    @override
    def finish_touch(self, operation_id: OperationId, *, present: bool) -> None:
        """A touch ended."""
        super().finish_touch(operation_id, present=present)
        self._watch.touch_ended(operation_id, present=present)

    @override
    def detach_linker(self) -> None:
        """Be as without a linker."""
        super().detach_linker()
        self._watch.forget_restored()

    @override
    def reset(self) -> tuple[CacheAction, ...]:
        """Forget everything."""
        actions = super().reset()
        self._watch.gave_up(actions)
        self._watch.locks.clear()
        return actions


class WatchedAllocator(SlotAllocator):
    """The real allocator; what it deals out and takes back is seen."""

    def __init__(self, watch: Watch, inner: PagedAllocator) -> None:
        """Be the allocator of a rank."""
        self._watch = watch
        self._inner = inner

    @property
    @override
    def page_size(self) -> int:
        """Slots of a page."""
        return self._inner.page_size

    @property
    @override
    def size(self) -> int:
        """Slots of the pool."""
        return self._inner.size

    @property
    @override
    def available_size(self) -> int:
        """Slots that are free."""
        return self._inner.available_size

    @override
    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        """Take slots."""
        indices = self._inner.alloc(num_tokens)
        if indices is not None:
            self._watch.allocated(indices)
        return indices

    @override
    def free(self, indices: torch.Tensor) -> None:
        """Give slots back."""
        self._watch.freed(indices)
        self._inner.free(indices)


def pages_of(indices: torch.Tensor, page_size: int) -> list[int]:
    """The pages of slots. Shape: (num_pages * page_size,) int64."""
    slots: list[int] = indices[::page_size].tolist()
    return [slot // page_size for slot in slots]
