"""`Watch`: what is seen of one rank at its seams: its tree, its allocators and its backend.

Nothing of the code under test is looked into: each seam is a part of it that reports what it is asked
for, so that whose each page and each lock is follows from the calls alone.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import attrs
from typing_extensions import override

from radixlink_contracts import InsertOrigin, LoadMode, PoolName
from radixlink_testing.allocators import SlotObserver
from radixlink_testing.simulator._device import pages_of
from radixlink_testing.simulator._faults import Fault
from radixlink_testing.simulator._operations import marks_in
from radixlink_testing.simulator._pages import Holder
from radixlink_testing.simulator._rules import Rule

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    import torch

    from radixlink_contracts import (
        Completion,
        IncLockRefResult,
        InsertParams,
        InsertResult,
        OperationId,
        OperationTicket,
        PageBits,
        PoolTransfer,
        ReceiptId,
        RequestId,
    )
    from radixlink_contracts.actions import CacheAction
    from radixlink_linker import LinkerSettings
    from radixlink_testing.simulator._device import Device
    from radixlink_testing.simulator._group import SimulatedClock
    from radixlink_testing.simulator._operations import Operations, Parts, Share
    from radixlink_testing.simulator._rules import Referee
    from radixlink_testing.simulator._shelf import Shelf

#: An allocation, among the locks of a call.
_ALLOCATION: Final = -1


@attrs.frozen(kw_only=True)
class Lock:
    """A receipt that is out.

    Attributes:
        receipt: The receipt.
        engine: The engine took it; else the cache did.
        step: When.
        windows: The window pages that it protects.
        state: The state that it protects.
    """

    receipt: IncLockRefResult
    engine: bool
    step: int
    windows: frozenset[int] = frozenset()
    state: int | None = None


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


class Watch(SlotObserver):
    """One rank, as it is seen from outside.

    Thread: any; one at a time.
    """

    def __init__(
        self,
        rank: int,
        *,
        device: Device,
        page_size: int,
        num_layers: int,
        settings: LinkerSettings,
        shelves: Sequence[Shelf],
        storers: Mapping[PoolName, int],
        clock: SimulatedClock,
        operations: Operations,
        referee: Referee,
    ) -> None:
        """Begin to watch a rank that has done nothing.

        Args:
            rank: Which.
            device: Its pools.
            page_size: Tokens.
            num_layers: Layer ranges of a page.
            settings: Of its linker.
            shelves: Of all ranks.
            storers: Which rank stores each of its pools.
            clock: Its own.
            operations: Of all ranks.
            referee: Hears what is wrong.
        """
        self.rank = rank
        self.device = device
        self.page_size = page_size
        self.num_layers = num_layers
        self.settings = settings
        self.shelf = shelves[rank]
        self._shelves = {pool: shelves[storer] for pool, storer in storers.items()}
        #: What it stores itself.
        self._stores = frozenset(pool for pool, storer in storers.items() if storer == rank)
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
        #: It was given up: nothing may be asked of it any more.
        self.given_up = False
        #: The names of the collectives that this rank entered.
        self.collectives: list[str] = []
        self.locks: dict[ReceiptId, Lock] = {}
        #: Whose load is being queued.
        self.wanted: Wanted | None = None
        #: Within the engine's call: where each lock ended, in pages, and each allocation.
        self._within: list[int] = []
        #: And what the device had of its request: pages of the prefix, pages of full attention, and
        #: which pages the lock protects as a window without there being one.
        self.prefix_pages = self.full_pages = 0
        self._bare: list[int] = []
        #: Pages of a window; 0 without.
        self.window_pages = 0
        #: What the store answered for a request, whenever it was asked.
        self.answers: dict[str, list[PageBits]] = {}
        #: How often a request was staged.
        self._stagings: Counter[str] = Counter()
        #: The nodes whose offloads and touches the tree was told of, and the backend not yet: what
        #: is moved of them, or asked for, by all ranks together.
        self._begun: dict[OperationId, Parts] = {}

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

    # -- faults ------------------------------------------------------------------------------------

    def arm(self, fault: Fault, which: int) -> None:
        """The next that this can strike, it will."""
        self._armed.add(fault)
        if fault in {Fault.LOAD_FAILS, Fault.OFFLOAD_FAILS}:
            self.failing_layer = which % self.num_layers

    def strikes(self, fault: Fault) -> bool:
        """True when a fault was armed for this; it strikes once."""
        if not self._armed or fault not in self._armed:
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
        if self._referee.telling:
            self.note(f"lookup of {request_id}: {bits.total} of {bits.count} lengths")

    def pages_of(self, transfer: PoolTransfer) -> list[int]:
        """The pages of a transfer."""
        assert transfer.device_indices is not None
        return self.device.pages_in(transfer.name, transfer.device_indices.tolist())

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

    def load_handed_over(
        self, ticket: OperationTicket, transfers: Sequence[PoolTransfer], mode: LoadMode
    ) -> Share:
        """The wrapper queues a load: everything that must hold before."""
        wanted = self.wanted
        if wanted is None:
            self.breach(Rule.LOAD_BACK, f"load {ticket.op} is queued within {self.acting}")
            wanted = Wanted(name="nobody", marks=(), promised=0)
        start = self._locked_end(ticket)
        brought = {transfer.name: self.pages_of(transfer) for transfer in transfers}
        end = start + len(brought.get(PoolName.KV, ()))
        self._check_range(ticket, wanted, start, end)
        lacking = self._lacking(start, end)
        parts: list[tuple[PoolName, tuple[bytes, ...]]] = []
        for pool, places in lacking.items():
            pages = brought.get(pool, [])
            # A state may be there already.
            if len(places) != len(pages) and (pages or pool is not PoolName.MAMBA):
                self.breach(
                    Rule.LOAD_BACK,
                    f"load {ticket.op} brings {len(pages)} pages of {pool}, and lacks {places}",
                )
            if not pages:
                continue
            marks = [wanted.marks[place] for place in places if place < len(wanted.marks)]
            marks = [*marks, *[b""] * len(pages)][: len(pages)]
            self.device.pools[pool].staged(ticket.op, pages, marks)
            parts.append((pool, tuple(marks)))
        first = b"" if self.prefix_pages >= len(wanted.marks) else wanted.marks[self.prefix_pages]
        self._check_alone(ticket, tuple(parts), first)
        layer_wise = mode is LoadMode.LAYER_WISE
        share = self._operations.begin(
            self.rank,
            ticket,
            self.clock.now() + self.settings.transfer_timeout_s,
            load=True,
            layer_wise=layer_wise,
            parts=tuple(parts),
            request=wanted.name,
            first=first,
            end=end,
        )
        if not layer_wise:
            self._check_cap(ticket)
        self._stagings[wanted.name] += 1
        if self._stagings[wanted.name] > self.settings.max_loads:
            self.breach(
                Rule.LANDED,
                f"{wanted.name} is staged more often than {self.settings.max_loads} times",
            )
        return share

    def _locked_end(self, ticket: OperationTicket) -> int:
        """The page where the lock that this call took ends."""
        first = self._within[0] if self._within else _ALLOCATION
        if first == _ALLOCATION:
            self.breach(Rule.LOAD_BACK, f"load {ticket.op} allocated before it took its lock")
            return 0
        return first

    def _lacking(self, start: int, end: int) -> dict[PoolName, list[int]]:
        """Which pages a load up to a page has to bring of each pool.

        Args:
            start: Page where the device's part of full attention ends.
            end: Page behind the last.
        """
        return {
            PoolName.KV: list(range(start, end)),
            PoolName.SWA: [
                place
                for place in (*self._bare, *range(start, end))
                if end - self.window_pages <= place < end
            ],
            PoolName.MAMBA: [end - 1],
        }

    def _check_range(self, ticket: OperationTicket, wanted: Wanted, start: int, end: int) -> None:
        """A load brings what a lookup of its request promised, and nothing that the device has."""
        answers = self.answers.get(wanted.name, [])
        asked = min((len(wanted.marks) - bits.count for bits in answers), default=0)
        if not asked <= self.prefix_pages < end <= wanted.promised or start > end:
            self.breach(
                Rule.LOAD_BACK,
                f"load {ticket.op} brings pages {self.prefix_pages} to {end} of {wanted.name}, "
                f"which was promised {asked} to {wanted.promised}",
            )
        if start != min(self.full_pages, end):
            self.breach(
                Rule.LOAD_BACK,
                f"load {ticket.op} brings full pages {start} to {end} of {wanted.name}, of which "
                f"the device has {self.full_pages}",
            )
        if self.given_up:
            self.breach(Rule.ATTACH, f"load {ticket.op} is queued although the store was given up")

    def _check_alone(self, ticket: OperationTicket, parts: Parts, first: bytes) -> None:
        """No other load brings these pages, and the first has not failed a moment ago."""
        marks = marks_in(parts)
        for other in self._operations.undecided_loads():
            if other.op != ticket.op and not other.cancelled and other.marks & marks:
                self.breach(
                    Rule.ONE_LOAD, f"load {ticket.op} brings pages that load {other.op} brings"
                )
        if first in self._operations.missing:
            self.breach(Rule.ONE_LOAD, f"load {ticket.op} begins with a page that has just failed")

    def _check_cap(self, ticket: OperationTicket) -> None:
        """Loads that are not over hold no more pages than they may.

        Of windows and states a load needs its own whole, so that one alone may have more.
        """
        for pool in self.device.pools.values():
            cap = self.settings.staged_percent * len(pool.holds) // 100
            staged: list[int] = []
            for op, num_pages in pool.staged_by().items():
                operation = self._operations.get(op)
                # What every rank let go of may still wait for the batches that run.
                if operation is None or not (operation.quiesced or operation.layer_wise):
                    staged.append(num_pages)
            alone = pool.pool is not PoolName.KV and len(staged) == 1
            if sum(staged) > cap and not alone:
                self.breach(
                    Rule.LANDED,
                    f"load {ticket.op}: staged loads hold {sum(staged)} pages of {pool.pool}, "
                    f"at most {cap}",
                )

    def shelf_of(self, pool: PoolName) -> Shelf:
        """Where the pages of a pool are stored: here, or with the rank that has the same bytes."""
        return self._shelves[pool]

    def _begin(self, op: OperationId, parts: Parts) -> None:
        """The tree was told of an offload or a touch; it is of no backend where others store all of it."""
        if self._own(parts):
            self._begun[op] = parts
        else:
            self._operations.nothing_to_do(self.rank, op)

    def _own(self, parts: Parts) -> dict[PoolName, tuple[bytes, ...]]:
        """What of an offload or a touch this rank stores."""
        return {pool: marks for pool, marks in parts if pool in self._stores}

    def offload_begun(
        self, op: OperationId, full: torch.Tensor, state: int | None, unstored: Container[PoolName]
    ) -> None:
        """The tree was told of an offload of the node that has these full slots and this state."""
        held = self.device.held_by(pages_of(full, self.page_size), state)
        parts = tuple((pool, marks) for pool, marks in held.items() if pool in unstored)
        self.device.offered(parts)
        self._begin(op, parts)

    def offload_handed_over(
        self, ticket: OperationTicket, transfers: Sequence[PoolTransfer]
    ) -> Share:
        """The wrapper offers what is unstored of a node."""
        if self.given_up:
            self.breach(Rule.ATTACH, f"offload {ticket.op} is made although the store was given up")
        parts: list[tuple[PoolName, tuple[bytes, ...]]] = []
        for transfer in transfers:
            pool, pages = self.device.pools[transfer.name], self.pages_of(transfer)
            holds = [pool.holds[page] for page in pages]
            if any(hold.holder is not Holder.TREE for hold in holds):
                self.breach(
                    Rule.LANDED, f"offload {ticket.op} is of pages that are not in the tree"
                )
            if transfer.name is PoolName.KV and all(hold.operation is not None for hold in holds):
                self.breach(Rule.STORED, f"offload {ticket.op} is of pages that were all restored")
            parts.append((transfer.name, tuple([hold.mark for hold in holds])))
        if all(what == _ALLOCATION for what in self._within):
            self.breach(Rule.LOAD_BACK, f"offload {ticket.op} holds no lock")
        begun = self._begun.pop(ticket.op, ())
        if dict(parts) != self._own(begun):
            self.breach(
                Rule.STORED,
                f"offload {ticket.op} is of {_counts(parts)} pages, of its node this rank stores "
                f"{_counts(self._own(begun).items())}",
            )
        return self._operations.begin(
            self.rank,
            ticket,
            self.clock.now() + self.settings.transfer_timeout_s,
            load=False,
            parts=begun,
        )

    def stopped_waiting(self) -> None:
        """A forward waits no longer, whatever is said of its loads from now on."""
        self._operations.waited_for(self.rank, self._operations.running())

    def touch_begun(
        self, op: OperationId, full: torch.Tensor, state: int | None, unstored: Container[PoolName]
    ) -> None:
        """The tree was told of a touch of the node that has these full slots and this state."""
        held = self.device.held_by(pages_of(full, self.page_size), state)
        parts = tuple((pool, marks) for pool, marks in held.items() if pool not in unstored)
        unheard = self.device.touched(op, parts)
        if unheard:
            self.breach(Rule.STORED, f"touch {op} is of what is not stored: {unheard}")
        self._begin(op, parts)

    def touch_handed_over(
        self, ticket: OperationTicket, transfers: Sequence[PoolTransfer]
    ) -> Share:
        """The wrapper touches what is stored of a node, of which the tree was told before."""
        if self.given_up:
            self.breach(Rule.ATTACH, f"touch {ticket.op} is made although the store was given up")
        if self.acting != "insert":
            self.breach(Rule.MATCH, f"touch {ticket.op} begins within {self.acting}")
        begun = self._begun.pop(ticket.op, ())
        asked = {transfer.name: len(transfer.keys) for transfer in transfers}
        there = _counts(self._own(begun).items())
        if asked != there:
            self.breach(
                Rule.STORED,
                f"touch {ticket.op} is of {asked} pages, of its node {there} are stored",
            )
        return self._operations.begin(
            self.rank,
            ticket,
            self.clock.now() + self.settings.transfer_timeout_s,
            load=False,
            touch=True,
            parts=begun,
        )

    def touch_ended(self, op: OperationId, *, present: bool) -> None:
        """The tree was told how a touch ended; what is not there is to be offered, restored or not."""
        if present:
            self._operations.landed(self.rank, op)
        self.device.touch_ended(op, present=present)

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
        loads = self.device.inserted(params, result)
        if not loads and params.origin is InsertOrigin.RESTORED:
            # All that it brought somebody else has brought since.
            loads = self._operations.being_published(self.rank, len(params.key) // self.page_size)
        for op in sorted(loads):
            self.device.left_over(op)
            self._operations.landed(self.rank, op)
            operation = self._operations.get(op)
            if operation is not None:
                self.device.offered(operation.parts)

    def gave_up(self, actions: Iterable[CacheAction]) -> None:
        """The tree gave pages up."""
        for pool, pages in self.device.gave_up(actions):
            for lock in self.locks.values():
                if (pool is PoolName.SWA and not lock.windows.isdisjoint(pages)) or (
                    pool is PoolName.MAMBA and lock.state in pages
                ):
                    self.breach(
                        Rule.RECEIPTS,
                        f"{pool} pages {pages} were given up while node "
                        f"{lock.receipt.node_id} has them locked",
                    )

    def locked(
        self,
        receipt: IncLockRefResult,
        num_tokens: int,
        window: Sequence[int],
        state: int | None,
    ) -> None:
        """A path was locked, with the windows beside some full pages, and a state."""
        self.locks[receipt.receipt_id] = Lock(
            receipt=receipt,
            engine=self.acting == "inc_lock_ref",
            step=self.step,
            windows=frozenset(self.device.windows_of(window)),
            state=state,
        )
        num_pages = num_tokens // self.page_size
        self._within.append(num_pages)
        if self.acting == "init_load_back" and len(self._within) == 1:
            places = range(num_pages - len(window), num_pages)
            self._bare = [
                place
                for place, page in zip(places, window, strict=True)
                if not self.device.windows_of((page,))
            ]

    def lock_reduced(self, old: IncLockRefResult, new: IncLockRefResult) -> None:
        """A lock protects full attention alone from now on."""
        lock = self.locks.pop(old.receipt_id)
        self.locks[new.receipt_id] = attrs.evolve(
            lock, receipt=new, windows=frozenset(), state=None
        )

    def unlocked(self, receipt: IncLockRefResult) -> None:
        """A path was released."""
        lock = self.locks.pop(receipt.receipt_id, None)
        if lock is not None and lock.engine and self.acting != "dec_lock_ref":
            self.breach(Rule.RECEIPTS, f"{self.acting} released a lock of the engine")

    def offload_ended(self, op: OperationId, *, stored: bool) -> None:
        """The tree was told how an offload ended."""
        if stored:
            self._operations.landed(self.rank, op)
            return
        operation = self._operations.get(op)
        if operation is not None:
            self.device.not_stored(operation.parts)

    # -- the allocators ----------------------------------------------------------------------------

    @override
    def taken(self, pool: PoolName, slots: list[int]) -> None:
        """Slots were dealt out."""
        if self.acting == "match_prefix":
            self.breach(Rule.MATCH, "a match allocated")
        self._within.append(_ALLOCATION)
        self.device.pools[pool].allocated(self.device.pages_in(pool, slots))

    @override
    def given_back(self, pool: PoolName, slots: list[int]) -> None:
        """Slots came back."""
        pages = self.device.pages_in(pool, slots)
        holds = self.device.pools[pool].holds
        for op in {holds[page].operation for page in pages}:
            if op is not None:
                self._check_quiesced(op, {holds[page].holder for page in pages})
        self.device.freed(pool, pages)

    @override
    def paired(self, full: list[int], swa: list[int]) -> None:
        """Window slots are beside full slots."""
        self.device.paired(
            self.device.pages_in(PoolName.KV, full), self.device.pages_in(PoolName.SWA, swa)
        )

    def _check_quiesced(self, op: OperationId, holders: set[Holder]) -> None:
        """The slots of a load go back when no rank touches them any more."""
        operation = self._operations.live.get(op)
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


def _counts(parts: Iterable[tuple[PoolName, tuple[bytes, ...]]]) -> dict[PoolName, int]:
    """How many pages there are of each pool."""
    return {pool: len(marks) for pool, marks in parts}
