from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections import deque
from typing import TYPE_CHECKING, Never

import attrs
import pytest
import torch
from typing_extensions import override

from radixlink_contracts import (
    BatchIndex,
    ByteRegion,
    CacheIdentity,
    Completion,
    DevicePool,
    Fence,
    LendingStore,
    LentFrames,
    LoadMode,
    OperationId,
    OperationTicket,
    Outcome,
    PageBits,
    PageHandles,
    PageKeys,
    PoolHitPolicy,
    PoolLayout,
    PoolName,
    PoolTransfer,
    RequestId,
    RowCopier,
    Staging,
    StoreConfig,
)
from radixlink_contracts.errors import (
    ContractError,
    StaleHandleError,
    StorageError,
    TransferTimeoutError,
)
from radixlink_linker import StoreLinker, StoreLinkerSettings
from radixlink_linker._lent_pages import LentPages
from radixlink_testing import InMemoryStoreFactory
from radixlink_testing.faults import Nameless
from radixlink_testing.forks import in_a_child_while_held
from radixlink_testing.lending import GIVEN_BACK, LendingPageStore
from radixlink_testing.linkers import FaultyPageStore
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from radixlink_contracts import PageKeySource
    from radixlink_linker._jobs import Job

NUM_PAGES = 16
PAGE_SIZE = 2
RANGE_BYTES = (3, 5)
PAGE_BYTES = sum(RANGE_BYTES)
EMPTY = 0xEE


class Pool(DevicePool):
    """A pool in host memory."""

    def __init__(self, name: PoolName = PoolName.KV) -> None:
        self._name = name
        self.rows = [
            torch.full((NUM_PAGES, size), EMPTY, dtype=torch.uint8) for size in RANGE_BYTES
        ]

    @property
    @override
    def name(self) -> PoolName:
        return self._name

    @property
    @override
    def page_size(self) -> int:
        return PAGE_SIZE

    @property
    @override
    def range_bytes(self) -> tuple[int, ...]:
        return RANGE_BYTES

    @override
    def page_rows(self, transfer: PoolTransfer) -> torch.Tensor:
        assert transfer.device_indices is not None
        return transfer.device_indices[::PAGE_SIZE] // PAGE_SIZE

    @override
    def region(self, layer_range: int, page_rows: torch.Tensor) -> ByteRegion:
        return ByteRegion(rows=self.rows[layer_range], index=page_rows)

    def page(self, page: int) -> bytes:
        return b"".join(bytes(rows[page].tolist()) for rows in self.rows)

    @property
    def empty(self) -> bool:
        return all(bool((rows == EMPTY).all()) for rows in self.rows)


class Ended(Fence):
    """The end of a copy that a test may hold up."""

    def __init__(self, copier: HostCopier) -> None:
        self._copier = copier

    @override
    def done(self) -> bool:
        return self._copier.gate.is_set()

    @override
    def wait(self, timeout_s: float) -> bool:
        if self._copier.late:
            self._copier.late -= 1
            return False
        if self._copier.unknown.is_set():
            self._copier.waiting.set()
            raise RuntimeError("nobody knows")
        self._copier.waiting.set()
        return self._copier.gate.wait(10)


class HostCopier(RowCopier):
    """Copies at once; the end of each copy waits for `gate`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()
        #: How many waits time out at once.
        self.late = 0
        #: While it is set, waits raise.
        self.unknown = threading.Event()
        self.sizes: list[int] = []
        self.copies = 0

    @override
    def staging(self, num_bytes: int) -> Staging:
        self.sizes.append(num_bytes)
        memory = bytearray(num_bytes)
        return Staging(
            tensor=torch.frombuffer(memory, dtype=torch.uint8), buffer=memoryview(memory)
        )

    @override
    def gather(self, region: ByteRegion, out: torch.Tensor) -> Fence:
        return self.gather_rows(region, out.view(len(region.index), -1))

    @override
    def scatter(self, region: ByteRegion, source: torch.Tensor) -> Fence:
        return self.scatter_rows(region, source.view(len(region.index), -1))

    @override
    def gather_rows(self, region: ByteRegion, out: torch.Tensor) -> Fence:
        self.copies += 1
        out.copy_(region.rows[region.index])
        return Ended(self)

    @override
    def scatter_rows(self, region: ByteRegion, source: torch.Tensor) -> Fence:
        self.copies += 1
        region.rows[region.index] = source
        return Ended(self)


@attrs.define(eq=False)
class Ticket(OperationTicket):
    """An operation that a test decides."""

    op: OperationId
    decided: bool = False


LAYOUT = PoolLayout(
    identity=CacheIdentity(
        model="test", revision="1", dtype="uint8", page_size=2, num_layers=2, layout="bytes"
    ),
    pool=PoolName.KV,
    range_bytes=RANGE_BYTES,
)


class World:
    """A linker, a pool and a store."""

    def __init__(
        self, *, lending: bool = False, max_pages: int = 99, max_loans: int = 2, **settings: float
    ) -> None:
        self.pool = Pool()
        self.copier = HostCopier()
        self.store = FaultyPageStore(InMemoryStoreFactory().open(LAYOUT))
        self.lender = LendingPageStore(self.store, max_pages=max_pages, max_loans=max_loans)
        self.linker = StoreLinker(
            pools={PoolName.KV: self.pool},
            stores={PoolName.KV: self.lender if lending else self.store},
            copier=self.copier,
            settings=StoreLinkerSettings(**settings),  # type: ignore[arg-type]
        )
        self.tickets: list[Ticket] = []

    def transfer(self, first: int, last: int, at: int = 0) -> PoolTransfer:
        """Pages first..last-1 of the only series, at pages `at` and following of the pool."""
        slots = torch.arange(at * PAGE_SIZE, (at + last - first) * PAGE_SIZE)
        return PoolTransfer(
            name=PoolName.KV, keys=page_keys(range(first, last)), device_indices=slots
        )

    def put(self, first: int, last: int) -> None:
        """Have pages in the store."""
        keys = page_keys(range(first, last))
        self.store.inner.put(keys, page_parts(keys, LAYOUT))

    def fill(self, first: int, last: int, at: int = 0) -> None:
        """Have pages on the device."""
        for page, key in enumerate(page_keys(range(first, last)), start=at):
            for layer_range, part in enumerate(page_parts(PageKeys(key), LAYOUT)):
                self.pool.rows[layer_range][page] = torch.tensor(list(part))

    def ticket(self) -> Ticket:
        ticket = Ticket(OperationId(len(self.tickets) + 1))
        self.tickets.append(ticket)
        return ticket

    def load(self, first: int, last: int, at: int = 0, *, start: bool = True) -> Ticket:
        ticket = self.ticket()
        assert self.linker.load(ticket, [self.transfer(first, last, at)], LoadMode.STAGED)
        if start:
            assert self.linker.start_layer_wise_loading() is None
        return ticket

    def offload(self, first: int, last: int, at: int = 0) -> Ticket:
        ticket = self.ticket()
        assert self.linker.offload(ticket, [self.transfer(first, last, at)])
        return ticket

    def touch(self, first: int, last: int) -> Ticket:
        ticket = self.ticket()
        transfer = attrs.evolve(self.transfer(first, last), device_indices=None)
        assert self.linker.touch(ticket, [transfer])
        return ticket

    def idle(self) -> None:
        """Return when the thread has nothing to do."""
        linker = self.linker
        with linker._board._changed:
            board = linker._board
            assert board._changed.wait_for(
                lambda: (
                    not board._running
                    and not board._loads
                    and not board._offloads
                    and not board._touches
                ),
                10,
            )

    def loads(self) -> list[Completion]:
        """Pop what is complete."""
        return [self.linker.pop_completed_load() for _ in range(self.linker.num_completed_loads())]

    def offloads(self) -> list[Completion]:
        return [
            self.linker.pop_completed_offload() for _ in range(self.linker.num_completed_offloads())
        ]

    def end(self) -> None:
        self.store.gate.set()
        self.copier.gate.set()
        self.copier.unknown.clear()
        self.linker.close()
        assert self.lender.num_lent == 0


@pytest.fixture(params=[False, True], ids=["copied", "lent"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(lending=request.param)
    yield world
    world.end()


def landed(*tickets: Ticket) -> list[Completion]:
    return [Completion(op=one.op, outcome=Outcome.LANDED, quiesced=True) for one in tickets]


def failed(*tickets: Ticket, quiesced: bool = True) -> list[Completion]:
    return [Completion(op=one.op, outcome=Outcome.FAILED, quiesced=quiesced) for one in tickets]


# -- what moves ------------------------------------------------------------------------------------


@pytest.mark.parametrize("staging_bytes", [1, PAGE_BYTES, 2 * PAGE_BYTES + 1, 1 << 20])
def test_pages_go_out_and_come_back(staging_bytes: int) -> None:
    world = World(staging_bytes=staging_bytes)
    try:
        world.fill(0, 5)
        stored = world.offload(0, 5)
        world.idle()
        assert world.offloads() == landed(stored)
        loaded = world.load(1, 5, at=9)
        world.idle()
        assert world.loads() == landed(loaded)
        assert [world.pool.page(page) for page in range(9, 13)] == [
            world.pool.page(page) for page in range(1, 5)
        ]
        counters = world.linker.counters
        assert (counters.pages_stored, counters.pages_loaded) == (5, 4)
        # Whole pages at a time, at least one, in memory that is asked for as it is needed.
        run = max(1, staging_bytes // PAGE_BYTES)
        assert world.store.calls.count("put") == -(-5 // run)
        assert max(world.copier.sizes) == min(run, 5) * PAGE_BYTES
        assert world.copier.sizes == sorted(set(world.copier.sizes))
    finally:
        world.end()


@pytest.mark.parametrize("staging_bytes", [1, 2 * PAGE_BYTES + 1, 1 << 20])
@pytest.mark.parametrize("max_pages", [1, 3, 100])
def test_pages_go_through_lent_memory_and_no_other(staging_bytes: int, max_pages: int) -> None:
    world = World(lending=True, staging_bytes=staging_bytes, max_pages=max_pages)
    try:
        world.fill(0, 5)
        stored = world.offload(0, 5)
        world.idle()
        loaded = world.load(1, 5, at=9)
        world.idle()
        assert world.offloads() == landed(stored)
        assert world.loads() == landed(loaded)
        assert [world.pool.page(page) for page in range(9, 13)] == [
            b"".join(page_parts(PageKeys(key), LAYOUT)) for key in page_keys(range(1, 5))
        ]
        assert world.copier.sizes == []
        run = min(max(1, staging_bytes // PAGE_BYTES), max_pages)
        assert sum(world.lender.loans) == 5 + 4
        assert max(world.lender.loans) == min(run, 5)
        assert world.lender.num_lent == 0
    finally:
        world.end()


def test_what_is_not_lent_goes_through_staging() -> None:
    world = World(lending=True, max_loans=1)
    try:
        other = world.lender.lend(1)
        assert other is not None
        world.fill(0, 5)
        stored = world.offload(0, 5)
        world.idle()
        loaded = world.load(0, 5, at=9)
        world.idle()
        assert (world.offloads(), world.loads()) == (landed(stored), landed(loaded))
        assert world.copier.sizes
        assert world.lender.loans == [1]
        assert [world.pool.page(page) for page in range(9, 14)] == [
            world.pool.page(page) for page in range(5)
        ]
        other.release()
        assert bytes(other.buffer) == bytes([GIVEN_BACK]) * len(other.buffer)
    finally:
        world.end()


@pytest.mark.parametrize("call", ["open", "read", "put"])
def test_memory_is_given_back_when_a_call_fails(call: str) -> None:
    world = World(lending=True)
    try:
        world.put(0, 3)
        world.fill(3, 6, at=3)
        world.store.raising.add(call)
        ticket = world.offload(3, 6, at=3) if call == "put" else world.load(0, 3, at=8)
        world.idle()
        assert world.offloads() + world.loads() == failed(ticket)
        assert len(world.lender.loans) == 1
        assert world.lender.num_lent == 0
    finally:
        world.end()


def test_memory_is_lent_as_long_as_a_copy_of_it_runs() -> None:
    world = World(lending=True)
    try:
        world.put(0, 2)
        world.copier.gate.clear()
        loaded = world.load(0, 2)
        assert world.copier.waiting.wait(10)
        loaded.decided = True
        assert world.lender.num_lent == 1
        world.copier.gate.set()
        world.idle()
        assert world.lender.num_lent == 0
        assert world.loads() == failed(loaded)
    finally:
        world.end()


def test_nothing_moves_before_the_start(world: World) -> None:
    world.put(0, 4)
    first, second = world.load(0, 2, start=False), world.load(2, 4, at=2, start=False)
    assert world.store.calls == []
    assert world.linker._thread._thread is None
    world.linker.start_layer_wise_loading()
    world.idle()
    assert world.loads() == landed(first, second)


def test_loads_go_before_offloads(world: World) -> None:
    world.put(4, 6)
    world.fill(0, 3)
    world.store.hanging.add("put")
    stored = [world.offload(0, 1), world.offload(1, 2, at=1)]
    assert world.store.waiting.wait(10)
    loaded = world.load(4, 6, at=8)
    world.store.hanging.clear()
    world.store.gate.set()
    world.idle()
    assert world.store.calls == ["put", "open", "read", "read", "put"]
    assert (world.loads(), world.offloads()) == (landed(loaded), landed(*stored))


def test_pages_are_counted_by_their_writer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.put(0, 3)
    inner = world.store.inner

    def opened(keys: PageKeys, ttl_s: float) -> PageHandles:
        handles = type(inner).open(inner, keys, ttl_s)
        return attrs.evolve(handles, writers=array("Q", [7, 7, 0]))

    monkeypatch.setattr(inner, "open", opened)
    world.load(0, 3)
    world.idle()
    assert world.linker.counters.pages_by_writer == {7: 2, 0: 1}
    world.store.lost.update(page_keys([1]))
    world.load(0, 3)
    world.idle()
    assert world.linker.counters.pages_by_writer == {7: 2, 0: 1}


# -- what fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["absent", "lost", "corrupt", "open raises", "read raises"])
def test_a_load_is_all_or_nothing(world: World, fault: str) -> None:
    world.put(0, 3 if fault == "absent" else 4)
    match fault:
        case "lost":
            world.store.lost.update(page_keys([2]))
        case "corrupt":
            world.store.inner.corrupt(page_keys([2])[0], 1)  # type: ignore[attr-defined]
        case "open raises":
            world.store.raising.add("open")
        case "read raises":
            world.store.raising.add("read")
        case _:
            pass
    ticket = world.load(0, 4)
    world.idle()
    assert world.loads() == failed(ticket)
    assert f"operation {ticket.op}" in world.linker.counters.last_error
    assert world.linker.counters.pages_loaded == 0
    # The thread goes on.
    world.store.raising.clear()
    world.put(8, 9)
    after = world.load(8, 9)
    world.idle()
    assert world.loads() == landed(after)


@pytest.mark.parametrize("fault", ["no room", "raises"])
def test_an_offload_is_all_or_nothing(world: World, fault: str) -> None:
    world.fill(0, 4)
    if fault == "raises":
        world.store.raising.add("put")
    else:
        world.store.unwelcome.update(page_keys([2]))
    ticket = world.offload(0, 4)
    world.idle()
    assert world.offloads() == failed(ticket)
    assert world.linker.counters.pages_stored == 0


@pytest.mark.parametrize("num_pages", [0, 1, 3])
@pytest.mark.parametrize("call", ["open", "read", "put"])
def test_an_answer_for_another_number_of_pages_moves_and_stores_nothing(
    world: World, call: str, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two pages; an answer for none is as complete as one for all."""
    store = world.linker._stores.store_of(world.pool)
    told = call
    if isinstance(store, LendingStore):
        told = "verify" if call == "read" else call
        call = {"open": "open_lent", "read": "verify", "put": "put_lent"}[call]
    bits = PageBits.all(num_pages)
    keys = page_keys(range(num_pages))
    answer = PageHandles.without_places(keys, bits) if told == "open" else bits
    world.put(0, 2)
    with monkeypatch.context() as patched:
        patched.setattr(store, call, lambda *_: answer)
        ticket = world.offload(0, 2, at=4) if told == "put" else world.load(0, 2)
        world.idle()
        (completion,) = (*world.loads(), *world.offloads())
    assert completion == failed(ticket)[0]
    assert completion.why == (
        f"ContractError: {told}: expected the store of {PoolName.KV} to answer for 2 pages, "
        f"got an answer for {num_pages}"
    )
    assert world.pool.empty
    counters = world.linker.counters
    assert (counters.pages_loaded, counters.pages_stored) == (0, 0)


def test_a_failure_pins_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Marker:
        """Stands in for what the frames of a failed call refer to."""

    markers: list[weakref.ref[Marker]] = []
    raised: list[weakref.ref[StorageError]] = []

    def opened(keys: PageKeys, ttl_s: float) -> PageHandles:
        marker = Marker()
        markers.append(weakref.ref(marker))
        error = StorageError("a fault")
        raised.append(weakref.ref(error))
        raise error

    monkeypatch.setattr(world.store, "open", opened)
    ticket = world.load(0, 4)
    world.idle()
    assert world.loads() == failed(ticket)
    told = weakref.ref(ticket)
    world.tickets.clear()
    del ticket
    gc.collect()
    assert (markers[0](), raised[0](), told()) == (None, None, None)
    assert "StorageError: a fault" in world.linker.counters.last_error


# -- what is given up ------------------------------------------------------------------------------


def test_a_decided_load_touches_no_slot(world: World) -> None:
    world.put(0, 4)
    ticket = world.load(0, 4, start=False)
    ticket.decided = True
    world.linker.start_layer_wise_loading()
    world.idle()
    assert world.loads() == failed(ticket)
    assert world.pool.empty
    assert world.store.calls == []


def test_a_load_decided_in_between_touches_no_slot_any_more(world: World) -> None:
    world.put(0, 4)
    world.store.hanging.add("read")
    ticket = world.load(0, 4)
    assert world.store.waiting.wait(10)
    ticket.decided = True
    # The store still hangs, but the slots are nobody's any more, and that is told once.
    assert world.loads() == failed(ticket)
    world.store.gate.set()
    world.idle()
    assert world.pool.empty
    assert world.loads() == []


def test_what_waits_behind_a_store_that_hangs_is_let_go_when_it_is_decided(world: World) -> None:
    world.put(0, 4)
    world.store.hanging.add("read")
    tickets = [world.load(0, 2), world.load(2, 4, at=2)]
    stored = world.offload(0, 2, at=8)
    assert world.store.waiting.wait(10)
    assert (world.loads(), world.offloads()) == ([], [])
    for ticket in (*tickets, stored):
        ticket.decided = True
    assert (world.loads(), world.offloads()) == (failed(*tickets), failed(stored))
    world.store.gate.set()
    world.idle()
    assert (world.loads(), world.offloads()) == ([], [])
    assert world.pool.empty
    assert "put" not in world.store.calls


def test_a_copy_that_runs_is_never_called_quiesced(world: World) -> None:
    world.put(0, 4)
    world.copier.gate.clear()
    ticket = world.load(0, 4)
    assert world.copier.waiting.wait(10)
    ticket.decided = True
    assert world.loads() == []
    world.copier.gate.set()
    world.idle()
    assert world.loads() == failed(ticket)
    # The copy of the first range was the last.
    assert world.copier.copies == 1


def test_a_copy_that_is_late_fails_first_and_is_quiesced_when_it_has_ended() -> None:
    world = World(copy_timeout_s=5.0)
    try:
        world.put(0, 4)
        world.copier.gate.clear()
        world.copier.late = 3
        ticket = world.load(0, 4)
        assert world.copier.waiting.wait(10)
        assert world.loads() == failed(ticket, quiesced=False)
        ticket.decided = True
        assert world.loads() == []
        world.copier.gate.set()
        world.idle()
        assert world.loads() == failed(ticket)
        assert "longer than 5.0 s" in world.linker.counters.last_error
    finally:
        world.end()


@pytest.mark.parametrize("what", ["load", "offload"])
def test_a_fence_that_raises_says_nothing_of_the_end_of_its_copy(world: World, what: str) -> None:
    world.put(0, 2)
    world.copier.unknown.set()
    ticket = world.load(0, 2) if what == "load" else world.offload(0, 2)
    completions = world.loads if what == "load" else world.offloads
    assert world.copier.waiting.wait(10)
    told = _told(completions)
    assert told == failed(ticket, quiesced=False)
    assert "RuntimeError: nobody knows" in told[0].why
    # The ranks have decided; but the copy may still run, in these slots and in this memory.
    ticket.decided = True
    behind = world.load(0, 2, at=8)
    for _ in range(3):
        world.copier.waiting.clear()
        assert world.copier.waiting.wait(10)
        assert completions() == []
    assert world.copier.copies == 1
    assert world.lender.num_lent == len(world.lender.loans)
    world.copier.unknown.clear()
    world.idle()
    assert sorted([*world.loads(), *world.offloads()], key=lambda one: one.op) == [
        *failed(ticket),
        *landed(behind),
    ]


def _told(completions: Callable[[], list[Completion]]) -> list[Completion]:
    """What is told next."""
    deadline = time.monotonic() + 10
    while not (told := completions()):
        assert time.monotonic() < deadline
    return told


def test_what_was_given_up_is_not_the_last_error(world: World) -> None:
    world.store.raising.add("put")
    world.offload(0, 2)
    world.idle()
    assert "StorageError" in world.linker.counters.last_error
    world.store.raising.clear()
    world.put(0, 2)
    given_up = world.load(0, 2, start=False)
    given_up.decided = True
    world.linker.start_layer_wise_loading()
    world.idle()
    (_, completion) = (*world.offloads(), *world.loads())
    assert completion == failed(given_up)[0]
    assert completion.why == f"GivenUpError: load of operation {given_up.op}: it was given up"
    assert "StorageError" in world.linker.counters.last_error


def test_a_queued_load_is_cancelled_once(world: World) -> None:
    world.put(0, 4)
    first, second = world.load(0, 2, start=False), world.load(2, 4, at=2, start=False)
    assert world.linker.cancel_queued_load(first.op)
    assert not world.linker.cancel_queued_load(first.op)
    world.linker.start_layer_wise_loading()
    world.idle()
    assert world.loads() == landed(second)
    assert not world.linker.cancel_queued_load(second.op)
    assert world.pool.page(0) == bytes([EMPTY]) * PAGE_BYTES


# -- reset and close -------------------------------------------------------------------------------


def test_reset_drops_what_is_queued_and_what_is_complete(world: World) -> None:
    world.put(0, 4)
    world.load(0, 2)
    world.offload(0, 2)
    world.idle()
    world.load(2, 4, at=8, start=False)
    for _ in range(2):
        world.linker.reset()
        assert (world.loads(), world.offloads()) == ([], [])
    world.linker.start_layer_wise_loading()
    world.idle()
    assert world.pool.page(8) == bytes([EMPTY]) * PAGE_BYTES
    # It is open still.
    after = world.load(0, 4)
    world.idle()
    assert world.loads() == landed(after)


def test_reset_waits_for_the_copy_that_runs(world: World) -> None:
    world.put(0, 4)
    world.copier.gate.clear()
    world.load(0, 4)
    world.load(0, 4, at=8)
    assert world.copier.waiting.wait(10)
    resetting = threading.Thread(target=world.linker.reset)
    resetting.start()
    # It has dropped what was not begun, and waits.
    with world.linker._board._changed:
        assert world.linker._board._changed.wait_for(lambda: not world.linker._board._loads, 10)
    assert resetting.is_alive()
    world.copier.gate.set()
    resetting.join(10)
    assert not resetting.is_alive()
    world.idle()
    assert world.loads() == []
    assert world.copier.copies == 1


def test_reset_does_not_wait_for_a_store_that_hangs(world: World) -> None:
    world.put(0, 4)
    world.store.hanging.add("read")
    world.load(0, 4)
    assert world.store.waiting.wait(10)
    world.linker.reset()
    world.store.gate.set()
    world.idle()
    assert world.loads() == []
    assert world.pool.empty


def test_a_copy_that_does_not_end_is_named_and_reset_can_be_repeated() -> None:
    world = World(quiesce_timeout_s=0.01)
    try:
        world.put(0, 4)
        world.copier.gate.clear()
        ticket = world.load(0, 4)
        assert world.copier.waiting.wait(10)
        for _ in range(2):
            with pytest.raises(TransferTimeoutError) as caught:
                world.linker.reset()
            error = caught.value
            assert (error.operation, error.direction, error.pages) == (ticket.op, "load", 4)
        world.copier.gate.set()
        world.idle()
        world.linker.reset()
        assert world.loads() == []
        # It was the last copy of that load, although nobody decided it.
        assert world.copier.copies == 1
    finally:
        world.end()


def test_a_close_that_a_copy_held_up_can_be_repeated() -> None:
    world = World(quiesce_timeout_s=0.01, close_timeout_s=0.01)
    try:
        world.put(0, 4)
        world.copier.gate.clear()
        world.load(0, 4)
        assert world.copier.waiting.wait(10)
        thread, mover = world.linker._thread._thread, world.linker._thread._mover
        assert thread is not None
        for _ in range(2):
            with pytest.raises(TransferTimeoutError):
                world.linker.close()
            # The copy may run in it.
            assert mover._staging is not None
        world.copier.gate.set()
        # The thread ends by itself, and lets its memory go.
        thread.join(10)
        assert not thread.is_alive()
        assert mover._staging is None
        world.linker.close()
        assert world.copier.copies == 1
    finally:
        world.end()


def test_close_waits_for_the_thread_although_a_copy_held_it_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(quiesce_timeout_s=0.01, close_timeout_s=10.0)
    try:
        world.put(0, 4)
        world.copier.gate.clear()
        world.load(0, 4)
        assert world.copier.waiting.wait(10)
        thread = world.linker._thread._thread
        assert thread is not None
        join = thread.join

        def joined(timeout: float | None = None) -> None:
            # The copy ends while the thread is waited for.
            world.copier.gate.set()
            join(timeout)

        monkeypatch.setattr(thread, "join", joined)
        with pytest.raises(TransferTimeoutError):
            world.linker.close()
        assert not thread.is_alive()
    finally:
        world.end()


def test_close_is_idempotent_and_takes_nothing_more(world: World) -> None:
    world.put(0, 4)
    world.load(0, 2)
    world.idle()
    thread = world.linker._thread._thread
    assert thread is not None
    for _ in range(2):
        world.linker.close()
        assert not thread.is_alive()
    assert world.loads() == []
    assert not world.linker.load(world.ticket(), [world.transfer(0, 2)], LoadMode.STAGED)
    assert not world.linker.offload(world.ticket(), [world.transfer(0, 2)])
    assert not world.linker.touch(world.ticket(), [world.transfer(0, 2)])
    assert world.linker.start_layer_wise_loading() is None
    assert not world.linker.cancel_queued_load(OperationId(2))
    world.linker.reset()


def test_close_before_any_transfer(world: World) -> None:
    world.load(0, 2, start=False)
    world.linker.close()
    assert world.linker._thread._thread is None


# -- touches ---------------------------------------------------------------------------------------


def test_a_touch_asks_for_all_pages_and_moves_none(world: World) -> None:
    world.put(0, 4)
    there, partly = world.touch(0, 4), world.touch(3, 6)
    world.idle()
    (first, second) = world.offloads()
    assert (first, second) == (landed(there)[0], failed(partly)[0])
    assert "some page is gone" in second.why
    assert world.copier.copies == 0
    assert world.linker.counters.pages_touched == 4


def test_what_is_touched_is_not_the_coldest_page_of_a_store_that_touches() -> None:
    world = World()
    store = InMemoryStoreFactory(StoreConfig(capacity_bytes=3 * PAGE_BYTES)).open(LAYOUT)
    world.linker = StoreLinker(
        pools={PoolName.KV: world.pool}, stores={PoolName.KV: store}, copier=world.copier
    )
    try:
        for page in range(3):
            keys = page_keys([page])
            store.put(keys, page_parts(keys, LAYOUT))
        touched = world.touch(0, 1)
        world.idle()
        assert world.offloads() == landed(touched)
        world.fill(3, 5)
        world.offload(3, 5)
        world.idle()
        assert store.open(page_keys(range(5)), 0.0).found == PageBits.of([0, 3, 4], 5)
    finally:
        world.end()


def test_touches_that_wait_together_are_one_question(world: World) -> None:
    world.put(0, 8)
    world.store.gate.clear()
    world.store.hanging.add("contains")
    first = world.touch(0, 1)
    assert world.store.waiting.wait(10)
    waiting = [world.touch(page, page + 1) for page in range(1, 8)]
    assert world.offloads() == []
    world.store.gate.set()
    world.idle()
    assert world.offloads() == landed(first, *waiting)
    assert world.store.calls.count("contains") == 2


def test_touches_go_behind_loads_and_before_offloads(world: World) -> None:
    world.put(0, 4)
    world.fill(8, 10, at=8)
    world.store.gate.clear()
    world.store.hanging.add("contains")
    world.touch(0, 1)
    assert world.store.waiting.wait(10)
    before = len(world.store.calls)
    world.offload(8, 10, at=8)
    world.touch(0, 1)
    world.load(0, 2)
    world.store.gate.set()
    world.idle()
    order = dict.fromkeys(world.store.calls[before:])
    assert list(order) == ["open", "read", "contains", "put"]


def test_a_store_that_raises_fails_the_touches_that_asked_it(world: World) -> None:
    world.put(0, 2)
    world.store.raising.add("contains")
    ticket = world.touch(0, 2)
    world.idle()
    (completion,) = world.offloads()
    assert completion == failed(ticket)[0]
    assert "StorageError" in completion.why
    world.store.raising.clear()
    again = world.touch(0, 2)
    world.idle()
    assert world.offloads() == landed(again)


def test_a_touch_of_a_store_that_hangs_ends_with_the_ranks_verdict(world: World) -> None:
    world.put(0, 2)
    world.store.gate.clear()
    world.store.hanging.add("contains")
    ticket = world.touch(0, 2)
    assert world.store.waiting.wait(10)
    assert world.offloads() == []
    ticket.decided = True
    assert world.offloads() == failed(ticket)
    world.store.gate.set()
    world.idle()
    assert world.offloads() == []


def test_reset_drops_touches(world: World) -> None:
    world.put(0, 2)
    world.store.gate.clear()
    world.store.hanging.add("contains")
    world.touch(0, 1)
    assert world.store.waiting.wait(10)
    world.touch(1, 2)
    world.linker.reset()
    world.store.gate.set()
    world.idle()
    assert world.offloads() == []
    assert world.store.calls.count("contains") == 1


# -- the rest --------------------------------------------------------------------------------------


def test_there_is_nothing_to_pop(world: World) -> None:
    with pytest.raises(ContractError):
        world.linker.pop_completed_load()
    with pytest.raises(ContractError):
        world.linker.pop_completed_offload()


def ask(linker: StoreLinker, *transfers: PoolTransfer) -> PageBits:
    return linker.lookup(RequestId("a"), transfers).restorable_prefix_pages


def test_a_lookup_answers_every_length_up_to_the_first_hole(world: World) -> None:
    world.put(0, 5)
    world.store.lost.update(page_keys([3]))
    transfer = PoolTransfer(name=PoolName.KV, keys=page_keys(range(5)))
    assert ask(world.linker, transfer) == PageBits.of([0, 1, 2], 5)
    assert ask(world.linker, attrs.evolve(transfer, keys=page_keys([9]))) == PageBits.none(1)


def test_a_lookup_in_several_pools_is_their_intersection(world: World) -> None:
    layout = attrs.evolve(LAYOUT, pool=PoolName.SWA)
    other = FaultyPageStore(InMemoryStoreFactory().open(layout))
    linker = StoreLinker(
        pools={PoolName.KV: world.pool, PoolName.SWA: Pool(PoolName.SWA)},
        stores={PoolName.KV: world.store, PoolName.SWA: other},
        copier=world.copier,
    )
    world.put(0, 5)
    keys = page_keys(range(5))
    other.put(keys, page_parts(keys, layout))
    other.lost.update(page_keys([2]))
    transfers = [PoolTransfer(name=name, keys=keys) for name in (PoolName.KV, PoolName.SWA)]
    assert ask(linker, *transfers) == PageBits.of([0, 1], 5)


def test_a_lookup_without_full_attention_is_refused(world: World) -> None:
    window = PoolTransfer(
        name=PoolName.SWA, keys=page_keys(range(5)), hit_policy=PoolHitPolicy.TRAILING_PAGES
    )
    for transfers in ((), (window,)):
        with pytest.raises(ContractError, match="at least one transfer, of KV"):
            ask(world.linker, *transfers)


def test_pools_and_stores_must_fit(world: World) -> None:
    with pytest.raises(ContractError, match="expected stores for"):
        StoreLinker(pools={PoolName.KV: world.pool}, stores={}, copier=world.copier)
    for layout in (
        attrs.evolve(LAYOUT, range_bytes=(3, 4)),
        attrs.evolve(LAYOUT, pool=PoolName.SWA),
        attrs.evolve(LAYOUT, identity=attrs.evolve(LAYOUT.identity, page_size=99)),
    ):
        unfit = InMemoryStoreFactory().open(layout)
        with pytest.raises(ContractError, match="expected a store of"):
            StoreLinker(
                pools={PoolName.KV: world.pool}, stores={PoolName.KV: unfit}, copier=world.copier
            )


def test_keys_are_hashed_by_the_thread_that_moves(world: World) -> None:
    class Source:
        """Keys that note who resolves them."""

        def __init__(self) -> None:
            self.threads: deque[threading.Thread] = deque()

        def __len__(self) -> int:
            return 2

        def span(self, start: int, stop: int) -> PageKeySource:
            raise AssertionError

        def resolve(self, pause: Callable[[], None] | None = None) -> PageKeys:
            self.threads.append(threading.current_thread())
            return page_keys(range(2))

    world.put(0, 2)
    source = Source()
    transfer = attrs.evolve(world.transfer(0, 2), keys=source)
    assert world.linker.load(world.ticket(), [transfer], LoadMode.STAGED)
    world.linker.start_layer_wise_loading()
    world.idle()
    assert list(source.threads) == [world.linker._thread._thread]


class LentElsewhere(LentFrames):
    """Frames of a store with some bytes too many behind them, or too few."""

    def __init__(self, inner: LentFrames, more: int) -> None:
        self._inner = inner
        self._memory = memoryview(bytearray(len(inner.buffer) + more))

    @property
    @override
    def buffer(self) -> memoryview:
        return self._memory

    @override
    def release(self) -> None:
        self._inner.release()


@pytest.mark.parametrize("more", [-2, 1, 2])
@pytest.mark.parametrize("what", ["load", "offload"])
def test_lent_memory_of_another_size_is_refused_and_given_back(
    what: str, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pages: frames of another size would still be two, each with the bytes of another place."""
    world = World(lending=True)
    lend = world.lender.lend

    def lend_elsewhere(num_pages: int) -> LentFrames | None:
        lent = lend(num_pages)
        return None if lent is None else LentElsewhere(lent, more)

    try:
        world.put(0, 2)
        with monkeypatch.context() as patched:
            patched.setattr(world.lender, "lend", lend_elsewhere)
            ticket = world.load(0, 2, at=4) if what == "load" else world.offload(0, 2)
            world.idle()
        size = 2 * world.lender.frames.frame_bytes
        why = (
            f"ContractError: lend: expected 2 frames of {size // 2} bytes for pages of "
            f"{PoolName.KV}, got {size + more} bytes"
        )
        assert [*world.loads(), *world.offloads()] == [attrs.evolve(failed(ticket)[0], why=why)]
        assert world.lender.num_lent == 0
        assert world.pool.empty
    finally:
        world.end()


# -- the end of the process ------------------------------------------------------------------------

ENDS_IN_THE_MIDDLE = """
import sys, threading
import torch
from packages.linker.tests.test_store_linker import HostCopier, LAYOUT, Pool, Ticket
from radixlink_contracts import OperationId, PoolName, PoolTransfer
from radixlink_linker import StoreLinker, StoreLinkerSettings
from radixlink_testing import InMemoryStoreFactory
from radixlink_testing.pages import page_keys

moves = threading.Event()

class Copier(HostCopier):
    def gather_rows(self, region, out):
        # Most of the thread's time is spent in torch.
        for _ in range(50):
            torch.zeros(64).sum()
        moves.set()
        return super().gather_rows(region, out)

linker = StoreLinker(
    pools={PoolName.KV: Pool()},
    stores={PoolName.KV: InMemoryStoreFactory().open(LAYOUT)},
    copier=Copier(),
    settings=StoreLinkerSettings(staging_bytes=1),
)
transfer = PoolTransfer(
    name=PoolName.KV, keys=page_keys(range(4096)), device_indices=torch.arange(2).repeat(4096)
)
linker.offload(Ticket(OperationId(1)), [transfer])
assert moves.wait(30)
sys.exit(3)
"""


def test_a_process_that_ends_without_close_has_its_own_exit_status() -> None:
    ended = subprocess.run(
        # torch warns where there is no numpy.
        [sys.executable, "-W", "ignore", "-c", ENDS_IN_THE_MIDDLE],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (3, "")


# -- what is no Exception --------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["open", "read", "put", "touch"])
def test_whatever_a_store_raises_ends_one_operation_and_not_the_thread(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelled(*_: object) -> None:
        # What an event loop raises in who waits for it is no `Exception`.
        raise asyncio.CancelledError

    world = World()
    try:
        world.put(0, 2)
        with monkeypatch.context() as patched:
            patched.setattr(world.linker._stores.store_of(world.pool), call, cancelled)
            match call:
                case "put":
                    ticket = world.offload(0, 2)
                case "touch":
                    ticket = world.touch(0, 2)
                case _:
                    ticket = world.load(0, 2)
            world.idle()
            told = [*world.loads(), *world.offloads()]
        assert told == [attrs.evolve(failed(ticket)[0], why="CancelledError: ")]
        again = world.load(0, 2)
        world.idle()
        assert world.loads() == landed(again)
    finally:
        world.end()


@pytest.mark.parametrize("call", ["open", "put", "contains", "release"])
def test_what_has_no_text_is_told_by_its_type(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless(*_: object) -> Never:
        raise Nameless

    world = World(lending=call == "release")
    try:
        world.put(0, 2)
        with monkeypatch.context() as patched:
            if call == "release":
                patched.setattr(LentPages, "release", nameless)
            else:
                patched.setattr(world.store, call, nameless)
            match call:
                case "put":
                    world.offload(0, 2)
                case "contains":
                    world.touch(0, 2)
                case _:
                    world.load(0, 2)
            world.idle()
        completions = [*world.loads(), *world.offloads()]
        assert [one.op for one in completions] == [OperationId(1)]
        assert world.linker.counters.last_error.endswith(": Nameless")
        # The thread goes on.
        again = world.load(0, 2)
        world.idle()
        assert world.loads() == landed(again)
    finally:
        world.store.gate.set()
        world.linker.close()


# -- threads that come and go ----------------------------------------------------------------------


def test_another_thread_takes_the_place_of_one_that_died(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(job: Job) -> Never:
        raise MemoryError

    world.put(0, 2)
    with monkeypatch.context() as patched:
        patched.setattr(threading, "excepthook", lambda _: None)
        patched.setattr(world.linker._thread, "_run", dying)
        world.load(0, 2)
        died = world.linker._thread._thread
        assert died is not None
        died.join(10)
        assert not died.is_alive()
    after = world.load(0, 2)
    world.idle()
    assert world.loads() == landed(after)
    assert world.linker._thread._thread is not died


class Interrupted(Exception):  # noqa: N818 -- what a signal's handler raises
    """In the middle of whatever the main thread is at."""


@pytest.mark.parametrize("begun", [True, False], ids=["that runs", "that comes to run later"])
def test_a_start_that_a_signal_left_leaves_one_thread_on_the_board(
    monkeypatch: pytest.MonkeyPatch, *, begun: bool
) -> None:
    world = World()
    start = threading.Thread.start
    left: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        left.append(thread)
        if begun:
            start(thread)
        raise Interrupted

    try:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(Interrupted):
                world.offload(0, 1)
        world.linker.reset()
        world.fill(0, 8)
        stored = [world.offload(page, page + 1, at=page) for page in range(8)]
        works = world.linker._thread._thread
        assert works is not None
        if begun:
            assert works is left[0]
        else:
            start(left[0])
            left[0].join(10)
            assert not left[0].is_alive()
        world.idle()
        assert world.offloads() == landed(*stored)
        assert works.is_alive()
        keys = page_keys(range(8))
        handles = world.store.inner.open(keys, 1.0)
        for layer_range, part in enumerate(page_parts(keys, LAYOUT)):
            out = bytearray(len(part))
            assert world.store.inner.read(handles, layer_range, out).complete
            assert out == part
    finally:
        world.end()


def test_a_forked_child_is_refused_and_waits_for_no_lock(world: World) -> None:
    world.put(0, 2)
    world.load(0, 1)
    world.idle()
    queued = world.ticket()
    assert world.linker.load(queued, [world.transfer(0, 2)], LoadMode.STAGED)
    linker = world.linker
    calls: list[Callable[[], object]] = [
        lambda: linker.load(world.ticket(), [world.transfer(0, 2)], LoadMode.STAGED),
        lambda: linker.offload(world.ticket(), [world.transfer(0, 2)]),
        lambda: linker.touch(world.ticket(), [world.transfer(0, 2)]),
        linker.start_layer_wise_loading,
        lambda: linker.finish_layer_wise_loading(BatchIndex(0)),
        linker.num_completed_loads,
        linker.num_completed_offloads,
        linker.reset,
    ]

    def in_the_child() -> int:
        for call in calls:
            with pytest.raises(StaleHandleError, match="make another in the child"):
                call()
        linker.close()
        # A linker of its own serves.
        mine = World()
        mine.put(0, 2)
        ticket = mine.load(0, 2)
        mine.idle()
        assert mine.loads() == landed(ticket)
        mine.end()
        return 0

    assert in_a_child_while_held(linker._board._changed, in_the_child) == 0
    # The parent goes on.
    linker.start_layer_wise_loading()
    world.idle()
    assert world.loads()[-1:] == landed(queued)


def test_the_end_of_a_with_closes_it(world: World) -> None:
    world.put(0, 2)
    with world.linker as linker:
        assert linker is world.linker
        ticket = world.load(0, 2)
        world.idle()
        assert world.loads() == landed(ticket)
    assert not linker.load(world.ticket(), [world.transfer(0, 2)], LoadMode.STAGED)
