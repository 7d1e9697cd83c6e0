"""Layer-wise loads of a `StoreLinker`: real threads, a store and a copier that a test holds up."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import TYPE_CHECKING

import attrs
import pytest
import torch
from typing_extensions import override

from radixlink_contracts import (
    BatchIndex,
    CacheIdentity,
    Completion,
    Fence,
    LentFrames,
    LoadMode,
    OperationId,
    OperationTicket,
    Outcome,
    PageBits,
    PageHandles,
    PageKeys,
    PoolName,
    PoolTransfer,
    RequestId,
    RowCopier,
    Staging,
)
from radixlink_contracts.errors import StorageError, TransferTimeoutError
from radixlink_linker import StoreLinker, StoreLinkerSettings
from radixlink_pools import CpuCopier, DevicePoolEntry, DevicePoolGroup, LayerBuffers
from radixlink_testing import InMemoryStoreFactory
from radixlink_testing.lending import LendingPageStore
from radixlink_testing.linkers import FaultyPageStore
from radixlink_testing.pages import page_keys, range_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import ByteRegion, PageStore

NUM_LAYERS = 3
NUM_PAGES = 16
PAGE_SIZE = 2
EMPTY = 0xEE
IDENTITY = CacheIdentity(
    model="test",
    revision="1",
    dtype="uint8",
    page_size=PAGE_SIZE,
    num_layers=NUM_LAYERS,
    layout="bytes",
)


class Gate:
    """A point that a thread reaches, and passes when it is told to."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def enter(self) -> None:
        self.reached.set()
        assert self.open.wait(30), "nobody opened the gate"


@attrs.define(eq=False)
class Story:
    """What the thread did, in its order, and where it is held up.

    Attributes:
        events: (call, layer, page of the first key); a layer of -1 where the call is of all.
        gates: By call and layer.
    """

    events: list[tuple[str, int, int]] = attrs.field(factory=list)
    gates: dict[tuple[str, int], Gate] = attrs.field(factory=dict)

    def gate(self, call: str, layer: int) -> Gate:
        return self.gates.setdefault((call, layer), Gate())

    def tell(self, call: str, layer: int, keys: PageKeys) -> None:
        self.events.append((call, layer, PAGES.index(keys[0])))
        gate = self.gates.get((call, layer))
        if gate is not None:
            gate.enter()

    def of(self, call: str) -> list[tuple[int, int]]:
        """(layer, page) of each of these calls."""
        return [(layer, page) for name, layer, page in self.events if name == call]

    def open_all(self) -> None:
        for gate in self.gates.values():
            gate.open.set()


PAGES = list(page_keys(range(NUM_PAGES)))


class ToldStore(FaultyPageStore):
    """A store that tells each call by its layer."""

    def __init__(self, inner: PageStore, story: Story, layers: Sequence[int]) -> None:
        super().__init__(inner)
        self.story = story
        self.layers = layers
        #: (layer, page) of reads that raise.
        self.unreadable: set[tuple[int, int]] = set()

    @override
    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        self.story.tell("open", -1, keys)
        return super().open(keys, ttl_s)

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        layer = self.layers[layer_range]
        self.story.tell("read", layer, handles.keys)
        if any((layer, PAGES.index(key)) in self.unreadable for key in handles.keys):
            raise StorageError("a range that cannot be read")
        return super().read(handles, layer_range, out)

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        self.story.tell("put", -1, keys)
        return super().put(keys, parts)


class HeldFence(Fence):
    """The end of a copy that waits for a gate."""

    def __init__(self, copier: HeldCopier) -> None:
        self._copier = copier

    @override
    def done(self) -> bool:
        return self._copier.gate.is_set()

    @override
    def wait(self, timeout_s: float) -> bool:
        if self._copier.late:
            self._copier.late -= 1
            return False
        self._copier.waiting.set()
        assert self._copier.gate.wait(30)
        return True


class HeldCopier(RowCopier):
    """Copies at once; the end of each copy waits for `gate`."""

    def __init__(self) -> None:
        self._inner = CpuCopier()
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()
        #: How many waits time out at once.
        self.late = 0
        self.scatters = 0

    @override
    def staging(self, num_bytes: int) -> Staging:
        return self._inner.staging(num_bytes)

    @override
    def gather(self, region: ByteRegion, out: torch.Tensor) -> Fence:
        self._inner.gather(region, out)
        return HeldFence(self)

    @override
    def scatter(self, region: ByteRegion, source: torch.Tensor) -> Fence:
        self.scatters += 1
        self._inner.scatter(region, source)
        return HeldFence(self)

    @override
    def gather_rows(self, region: ByteRegion, out: torch.Tensor) -> Fence:
        self._inner.gather_rows(region, out)
        return HeldFence(self)

    @override
    def scatter_rows(self, region: ByteRegion, source: torch.Tensor) -> Fence:
        self.scatters += 1
        self._inner.scatter_rows(region, source)
        return HeldFence(self)


@attrs.define(eq=False)
class Ticket(OperationTicket):
    """An operation that a test decides."""

    op: OperationId
    decided: bool = False


class World:
    """A linker over a pool that has K and V in each layer."""

    def __init__(self, *, packed: bool = True, lending: bool = False, **settings: float) -> None:
        self.story = Story()
        self.copier = HeldCopier()
        buffers = LayerBuffers(
            groups=[
                [
                    torch.full((NUM_PAGES * PAGE_SIZE, 3 + layer + part), EMPTY, dtype=torch.uint8)
                    for layer in range(NUM_LAYERS)
                ]
                for part in range(2)
            ],
            layers=tuple(range(NUM_LAYERS)),
        )
        entry = DevicePoolEntry.of_buffers(PoolName.KV, buffers, PAGE_SIZE, packed=packed)
        group = DevicePoolGroup([entry])
        self.stores = [
            (pool, ToldStore(InMemoryStoreFactory().open(layout), self.story, pool.layers))
            for pool, layout in group.layouts(IDENTITY)
        ]
        assert len(self.stores) == (1 if packed else 2)
        self.lenders = [(pool, LendingPageStore(store)) for pool, store in self.stores]
        self.linker = StoreLinker(
            pools=group,
            stores=self.lenders if lending else self.stores,
            copier=self.copier,
            settings=StoreLinkerSettings(**{"layer_timeout_s": 60.0, **settings}),  # type: ignore[arg-type]
        )
        self.counter = self.linker.layer_done_counter
        self.tickets: list[Ticket] = []

    # -- what there is -----------------------------------------------------------------------------

    def put(self, first: int, last: int) -> None:
        """Have pages in the stores."""
        keys = page_keys(range(first, last))
        for place, (pool, store) in enumerate(self.stores):
            parts = [
                b"".join(_bytes(place, key, layer_range, size) for key in keys)
                for layer_range, size in enumerate(pool.range_bytes)
            ]
            assert store.inner.put(keys, parts).complete

    def layer(self, layer: int, page: int) -> list[list[int]]:
        """What the device has of a page in a layer: K and V."""
        return [
            pool.region(layer_range, torch.tensor([page])).rows[page].tolist()
            for pool, _ in self.stores
            for layer_range, owner in enumerate(pool.layers)
            if owner == layer
        ]

    def right(self, layer: int, pages: range, at: int) -> bool:
        """The device has these pages in a layer, from page `at` on."""
        return all(
            pool.region(layer_range, torch.tensor([0])).rows[at + nth].tolist()
            == list(_bytes(place, PAGES[page], layer_range, pool.range_bytes[layer_range]))
            for place, (pool, _) in enumerate(self.stores)
            for layer_range, owner in enumerate(pool.layers)
            if owner == layer
            for nth, page in enumerate(pages)
        )

    def empty(self, pages: range) -> bool:
        """Nothing was written to some pages of the device."""
        return all(
            byte == EMPTY
            for layer in range(NUM_LAYERS)
            for page in pages
            for part in self.layer(layer, page)
            for byte in part
        )

    # -- what is asked for -------------------------------------------------------------------------

    def _transfer(self, first: int, last: int, at: int) -> PoolTransfer:
        slots = torch.arange(at * PAGE_SIZE, (at + last - first) * PAGE_SIZE)
        return PoolTransfer(
            name=PoolName.KV, keys=page_keys(range(first, last)), device_indices=slots
        )

    def ticket(self) -> Ticket:
        ticket = Ticket(OperationId(len(self.tickets) + 1))
        self.tickets.append(ticket)
        return ticket

    def load(self, first: int, last: int, at: int, mode: LoadMode = LoadMode.LAYER_WISE) -> Ticket:
        ticket = self.ticket()
        assert self.linker.load(ticket, [self._transfer(first, last, at)], mode)
        return ticket

    def offload(self, first: int, last: int, at: int) -> Ticket:
        ticket = self.ticket()
        assert self.linker.offload(ticket, [self._transfer(first, last, at)])
        return ticket

    def start(self) -> BatchIndex:
        batch = self.linker.start_layer_wise_loading()
        assert batch is not None
        self.counter.set_consumer(batch)
        return batch

    def idle(self) -> None:
        """Return when the thread has nothing to do."""
        linker = self.linker
        with linker._board._changed:
            assert linker._board._changed.wait_for(
                lambda: (
                    not linker._board._running
                    and not linker._board._batches
                    and not linker._board._loads
                    and not linker._board._offloads
                ),
                10,
            )

    def loads(self) -> list[Completion]:
        return [self.linker.pop_completed_load() for _ in range(self.linker.num_completed_loads())]

    def offloads(self) -> list[Completion]:
        return [
            self.linker.pop_completed_offload() for _ in range(self.linker.num_completed_offloads())
        ]

    def end(self) -> None:
        self.story.open_all()
        self.copier.gate.set()
        self.linker.close()


def _bytes(place: int, key: bytes, layer_range: int, size: int) -> bytes:
    return range_bytes(key, layer_range, size, variant=f"object {place}")


@pytest.fixture(
    params=[(True, False), (False, False), (True, True), (False, True)],
    ids=["packed", "unpacked", "packed-lent", "unpacked-lent"],
)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    packed, lending = request.param
    made = World(packed=packed, lending=lending)
    yield made
    made.end()
    assert all(lender.num_lent == 0 for _, lender in made.lenders)


def landed(*tickets: Ticket) -> list[Completion]:
    return [Completion(op=one.op, outcome=Outcome.LANDED, quiesced=True) for one in tickets]


def failed(*tickets: Ticket, quiesced: bool = True) -> list[Completion]:
    return [Completion(op=one.op, outcome=Outcome.FAILED, quiesced=quiesced) for one in tickets]


def running(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(10)
    return not thread.is_alive()


# -- layer after layer -----------------------------------------------------------------------------


def test_layers_come_in_order_and_each_for_all_loads_of_the_batch(world: World) -> None:
    world.put(0, 5)
    first, second = world.load(0, 2, at=0), world.load(2, 5, at=8)
    batch = world.start()
    assert world.linker.finish_layer_wise_loading(batch)
    # Whoever comes back from `finish` finds how each ended.
    assert world.loads() == landed(first, second)
    for layer in range(NUM_LAYERS):
        assert world.right(layer, range(2), at=0)
        assert world.right(layer, range(2, 5), at=8)
    # K and V of a layer for the one load, then for the other, then the next layer.
    expected = [(layer, page) for layer in range(NUM_LAYERS) for page in (0, 0, 2, 2)]
    assert world.story.of("read") == expected
    # Opened once for all its layers, all loads before the first byte.
    num_opens = 2 * len(world.stores)
    assert [call for call, _, _ in world.story.events[:num_opens]] == ["open"] * num_opens
    assert len(world.story.of("open")) == num_opens
    assert world.linker.counters.pages_loaded == 5 * len(world.stores)


def test_a_forward_runs_on_the_first_layer_while_later_ones_are_not_there(world: World) -> None:
    world.put(0, 3)
    gates = [world.story.gate("read", layer) for layer in range(1, NUM_LAYERS)]
    world.load(0, 3, at=4)
    batch = world.start()
    computed: list[bool] = []
    at_layer = [threading.Event() for _ in range(NUM_LAYERS)]

    def forward() -> None:
        for layer in range(NUM_LAYERS):
            world.counter.wait_until(layer)
            computed.append(world.right(layer, range(3), at=4))
            at_layer[layer].set()

    thread = running(forward)
    for layer, gate in enumerate(gates, start=1):
        assert at_layer[layer - 1].wait(10)
        assert gate.reached.wait(10)
        assert computed == [True] * layer
        assert not world.right(layer, range(3), at=4)
        assert world.loads() == []
        gate.open.set()
    assert ended(thread)
    assert computed == [True] * NUM_LAYERS
    assert world.linker.finish_layer_wise_loading(batch)
    assert world.loads() == landed(world.tickets[0])


def test_finish_waits_for_the_last_layer(world: World) -> None:
    world.put(0, 1)
    gate = world.story.gate("read", NUM_LAYERS - 1)
    ticket = world.load(0, 1, at=0)
    batch = world.start()
    assert gate.reached.wait(10)
    answers: list[tuple[bool, list[Completion]]] = []
    thread = running(
        lambda: answers.append((world.linker.finish_layer_wise_loading(batch), world.loads()))
    )
    assert thread.is_alive()
    assert answers == []
    gate.open.set()
    assert ended(thread)
    assert answers == [(True, landed(ticket))]


def test_staged_loads_have_no_batch_and_no_layers_to_wait_for(world: World) -> None:
    world.put(0, 2)
    ticket = world.load(0, 2, at=0, mode=LoadMode.STAGED)
    assert world.linker.start_layer_wise_loading() is None
    assert world.linker.finish_layer_wise_loading(None)
    world.idle()
    assert world.loads() == landed(ticket)


# -- what fails, fails alone -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", ["absent", "lost", "corrupt", "read raises", "gone while it runs"]
)
def test_one_bad_page_fails_one_load_of_the_batch(world: World, fault: str) -> None:
    bad = 3
    for first, last in ((0, 2), (2, bad), (bad + 1, 7)) if fault == "absent" else ((0, 7),):
        world.put(first, last)
    _, store = world.stores[-1]
    gate = world.story.gate("read", 1)
    match fault:
        case "lost":
            store.lost.add(PAGES[bad])
        case "corrupt":
            # A checksum of the last range of that page: found at the last layer.
            store.inner.corrupt(PAGES[bad], len(store.layers) - 1)  # type: ignore[attr-defined]
        case "read raises":
            store.unreadable.add((1, bad))
        case _:
            pass
    tickets = [world.load(0, 2, at=0), world.load(2, 5, at=4), world.load(5, 7, at=8)]
    batch = world.start()
    assert gate.reached.wait(10)
    if fault == "gone while it runs":
        store.lost.add(PAGES[bad])
    gate.open.set()
    # The forward has all layers of the others: the batch is whole.
    assert world.linker.finish_layer_wise_loading(batch)
    assert world.loads() == [*failed(tickets[1]), *landed(tickets[0], tickets[2])]
    for layer in range(NUM_LAYERS):
        assert world.right(layer, range(2), at=0)
        assert world.right(layer, range(5, 7), at=8)
    assert world.linker.counters.pages_loaded == 4 * len(world.stores)
    assert f"operation {tickets[1].op}: " in world.linker.counters.last_error
    # Nothing of it is read once it has failed.
    last_read = max(i for i, event in enumerate(world.story.events) if event[2] == 2)
    layer_of_failure = {"corrupt": NUM_LAYERS - 1, "read raises": 1, "gone while it runs": 1}
    assert world.story.events[last_read][1] == layer_of_failure.get(fault, -1)


def test_a_batch_of_which_nothing_can_be_had_keeps_no_forward_waiting(world: World) -> None:
    tickets = [world.load(0, 2, at=0), world.load(2, 4, at=4)]
    batch = world.start()
    for layer in range(NUM_LAYERS):
        world.counter.wait_until(layer)
    assert world.linker.finish_layer_wise_loading(batch)
    assert world.loads() == failed(*tickets)
    assert world.empty(range(NUM_PAGES))
    assert world.story.of("read") == []


def test_a_failure_keeps_no_exception_no_traceback_and_no_ticket(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Marker:
        """Stands in for what the frames of a failed call refer to."""

    refs: list[weakref.ref[Marker] | weakref.ref[StorageError]] = []

    def read(handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        marker = Marker()
        error = StorageError("a fault")
        refs.extend((weakref.ref(marker), weakref.ref(error)))
        raise error

    world.put(0, 4)
    monkeypatch.setattr(world.stores[0][1], "read", read)
    first, second = world.load(0, 2, at=0), world.load(2, 4, at=4)
    assert world.linker.finish_layer_wise_loading(world.start())
    assert world.loads() == failed(first, second)
    tickets = [weakref.ref(first), weakref.ref(second)]
    world.tickets.clear()
    del first, second
    world.idle()
    gc.collect()
    assert len(refs) == 4
    assert [ref() for ref in (*refs, *tickets)] == [None] * 6
    assert "StorageError: a fault" in world.linker.counters.last_error


# -- who comes first -------------------------------------------------------------------------------


def test_a_batch_goes_before_staged_loads_and_they_before_offloads(world: World) -> None:
    world.put(0, 6)
    gate = world.story.gate("put", -1)
    stored = world.offload(8, 9, at=0)
    assert gate.reached.wait(10)
    world.offload(9, 10, at=1)
    staged = world.load(0, 2, at=4, mode=LoadMode.STAGED)
    layer_wise = world.load(2, 4, at=6)
    batch = world.start()
    world.story.events.clear()
    gate.open.set()
    assert world.linker.finish_layer_wise_loading(batch)
    world.idle()
    # An offload that has a second object to put gives way before it.
    first = [8] if len(world.stores) > 1 else []
    order = [page for _, _, page in world.story.events]
    assert list(dict.fromkeys(order)) == [2, *first, 0, 9]
    assert world.loads() == landed(layer_wise, staged)
    assert [done.op for done in world.offloads()] == [stored.op, stored.op + 1]


@pytest.mark.parametrize("long", ["offload", "staged load"])
def test_a_batch_does_not_wait_for_the_end_of_a_long_transfer(long: str) -> None:
    world = World(staging_bytes=1)
    try:
        world.put(0, 8)
        held = ("put", -1) if long == "offload" else ("read", 0)
        gate = world.story.gate(*held)
        if long == "offload":
            slow = world.offload(8, 12, at=0)
        else:
            slow = world.load(0, 4, at=0, mode=LoadMode.STAGED)
            assert world.linker.start_layer_wise_loading() is None
        assert gate.reached.wait(10)
        del world.story.gates[held]
        layer_wise = world.load(5, 7, at=8)
        batch = world.start()
        gate.open.set()
        assert world.linker.finish_layer_wise_loading(batch)
        world.idle()
        assert [*world.loads(), *world.offloads()] == landed(layer_wise, slow)
        # One page of the long one, then all of the batch, then the rest.
        pages = [page for _, _, page in world.story.events]
        runs = [pages[i] for i in range(len(pages)) if i == 0 or pages[i] != pages[i - 1]]
        first = 8 if long == "offload" else 0
        assert runs[0] == first
        assert set(runs[1:-3]) == {5, 6}
        assert runs[-3:] == [first + 1, first + 2, first + 3]
        for layer in range(NUM_LAYERS):
            assert world.right(layer, range(5, 7), at=8)
    finally:
        world.end()


# -- what a lookup tells ---------------------------------------------------------------------------


def test_a_lookup_tells_which_pages_a_pool_has_all_objects_of(world: World) -> None:
    world.put(0, 5)
    world.stores[0][1].lost.add(PAGES[1])
    world.stores[-1][1].lost.add(PAGES[3])
    transfer = PoolTransfer(name=PoolName.KV, keys=page_keys(range(5)))
    result = world.linker.lookup(RequestId("a"), [transfer])
    assert result.restorable_prefix_pages == PageBits.of([0], 5)
    assert result.found == {PoolName.KV: PageBits.of([0, 2, 4], 5)}


def test_a_failure_says_why_in_its_completion(world: World) -> None:
    world.put(0, 1)
    ticket = world.load(0, 2, at=0)
    assert world.linker.finish_layer_wise_loading(world.start())
    (completion,) = world.loads()
    assert completion == failed(ticket)[0]
    assert f"load of operation {ticket.op}: 1 of 2 pages of kv are gone" in completion.why


# -- what is given up ------------------------------------------------------------------------------


def test_a_load_decided_in_between_touches_no_slot_any_more(world: World) -> None:
    world.put(0, 4)
    gate = world.story.gate("read", 1)
    given_up, other = world.load(0, 2, at=0), world.load(2, 4, at=4)
    batch = world.start()
    assert gate.reached.wait(10)
    given_up.decided = True
    # The store hangs, and its slots are nobody's all the same.
    assert world.loads() == failed(given_up)
    before = [world.layer(layer, page) for layer in range(NUM_LAYERS) for page in (0, 1)]
    gate.open.set()
    assert world.linker.finish_layer_wise_loading(batch)
    assert world.loads() == landed(other)
    after = [world.layer(layer, page) for layer in range(NUM_LAYERS) for page in (0, 1)]
    assert after == before
    assert all(world.right(layer, range(2, 4), at=4) for layer in range(NUM_LAYERS))


def test_a_batch_that_was_not_begun_is_let_go_when_it_is_decided(world: World) -> None:
    world.put(0, 4)
    gate = world.story.gate("read", 0)
    first = world.load(0, 2, at=0)
    world.start()
    assert gate.reached.wait(10)
    second = world.load(2, 4, at=4)
    world.start()
    second.decided = True
    assert world.loads() == failed(second)
    gate.open.set()
    world.idle()
    assert world.loads() == landed(first)
    assert world.empty(range(4, 6))


def test_finish_does_not_wait_for_what_the_ranks_decided_before(world: World) -> None:
    world.put(0, 4)
    gate = world.story.gate("read", 1)
    tickets = [world.load(0, 2, at=0), world.load(2, 4, at=4)]
    batch = world.start()
    assert gate.reached.wait(10)
    for ticket in tickets:
        ticket.decided = True
    # The store hangs still; the deadline of the layers is a minute away.
    answers: list[bool] = []
    assert ended(running(lambda: answers.append(world.linker.finish_layer_wise_loading(batch))))
    assert answers == [False]
    world.counter.wait_until(NUM_LAYERS - 1)
    assert world.loads() == failed(*tickets)
    gate.open.set()
    world.idle()
    assert world.loads() == []
    # And the batch is forgotten.
    assert world.linker.finish_layer_wise_loading(batch)


def test_finish_waits_for_one_that_is_not_decided(world: World) -> None:
    world.put(0, 4)
    gate = world.story.gate("read", 1)
    tickets = [world.load(0, 2, at=0), world.load(2, 4, at=4)]
    batch = world.start()
    assert gate.reached.wait(10)
    tickets[0].decided = True
    answers: list[bool] = []
    thread = running(lambda: answers.append(world.linker.finish_layer_wise_loading(batch)))
    gate.open.set()
    assert ended(thread)
    assert answers == [True]
    assert world.loads() == [*failed(tickets[0]), *landed(tickets[1])]


def test_a_load_that_was_given_up_opens_nothing_more() -> None:
    world = World(staging_bytes=1)
    try:
        world.put(0, 8)
        gate = world.story.gate("open", -1)
        ticket = world.load(0, 8, at=0)
        batch = world.start()
        assert gate.reached.wait(10)
        ticket.decided = True
        gate.open.set()
        assert not world.linker.finish_layer_wise_loading(batch)
        world.idle()
        assert world.loads() == failed(ticket)
        assert world.story.events == [("open", -1, 0)]
    finally:
        world.end()


def test_a_copy_that_hangs_fails_first_and_is_quiesced_when_it_has_ended() -> None:
    world = World(copy_timeout_s=5.0, layer_timeout_s=0.05)
    try:
        world.put(0, 4)
        world.copier.gate.clear()
        world.copier.late = 3
        first, second = world.load(0, 2, at=0), world.load(2, 4, at=4)
        batch = world.start()
        assert world.copier.waiting.wait(10)
        # The forward's deadline has nothing to do with the copy.
        world.counter.wait_until(0)
        assert not world.linker.finish_layer_wise_loading(batch)
        assert world.loads() == failed(first, quiesced=False)
        for ticket in (first, second):
            ticket.decided = True
        # What no copy touches is quiesced; what one does is not, whoever asks.
        assert world.loads() == failed(second)
        world.copier.gate.set()
        world.idle()
        assert world.loads() == failed(first)
        # The copy that hung was the last.
        assert world.copier.scatters == 1
        assert world.empty(range(4, 6))
    finally:
        world.end()


def test_a_batch_that_is_late_goes_on_until_it_is_decided() -> None:
    world = World(layer_timeout_s=0.05)
    try:
        world.put(0, 2)
        gate = world.story.gate("read", 2)
        ticket = world.load(0, 2, at=0)
        batch = world.start()
        assert gate.reached.wait(10)
        for layer in range(NUM_LAYERS):
            world.counter.wait_until(layer)
        assert not world.linker.finish_layer_wise_loading(batch)
        assert world.loads() == []
        gate.open.set()
        world.idle()
        # All its bytes are there now, and were not when a forward went on.
        (late,) = world.loads()
        assert (late.op, late.outcome, late.quiesced) == (ticket.op, Outcome.FAILED, True)
        assert "too late" in late.why
        # A later batch has a deadline of its own, and nothing of the first to wait for.
        world.load(0, 2, at=4)
        world.start()
        world.idle()
        assert world.loads() == landed(world.tickets[-1])
    finally:
        world.end()


def test_a_queued_load_is_cancelled_and_the_batch_is_the_others(world: World) -> None:
    world.put(0, 4)
    first, second = world.load(0, 2, at=0), world.load(2, 4, at=4)
    assert world.linker.cancel_queued_load(first.op)
    batch = world.start()
    assert not world.linker.cancel_queued_load(second.op)
    assert world.linker.finish_layer_wise_loading(batch)
    assert world.loads() == landed(second)
    assert world.empty(range(2))
    world.load(0, 2, at=0)
    assert world.linker.cancel_queued_load(world.tickets[-1].op)
    assert world.linker.start_layer_wise_loading() is None


# -- reset, close and no thread --------------------------------------------------------------------


@pytest.mark.parametrize("end", ["reset", "close"])
def test_reset_and_close_let_a_batch_and_its_forward_go(end: str) -> None:
    world = World(close_timeout_s=0.05)
    try:
        world.put(0, 4)
        gate = world.story.gate("read", 1)
        world.load(0, 2, at=0)
        batch = world.start()
        assert gate.reached.wait(10)
        world.load(2, 4, at=4)
        world.start()
        world.counter.set_consumer(batch)
        forward = running(lambda: world.counter.wait_until(2))
        scheduler = running(lambda: world.linker.finish_layer_wise_loading(batch))
        for _ in range(2):
            getattr(world.linker, end)()
        assert ended(forward)
        assert ended(scheduler)
        before = [world.layer(layer, 0) for layer in range(NUM_LAYERS)]
        gate.open.set()
        if end == "reset":
            world.idle()
        else:
            assert world.linker._thread._thread is not None
            assert ended(world.linker._thread._thread)
        # No slot was touched after it, and nothing is told.
        assert [world.layer(layer, 0) for layer in range(NUM_LAYERS)] == before
        assert world.empty(range(4, 6))
        assert world.loads() == []
        if end == "reset":
            after = world.load(0, 2, at=8)
            assert world.linker.finish_layer_wise_loading(world.start())
            assert world.loads() == landed(after)
        else:
            assert not world.linker.load(world.ticket(), [], LoadMode.LAYER_WISE)
            assert world.linker.start_layer_wise_loading() is None
    finally:
        world.end()


def test_reset_waits_for_the_copy_of_a_batch_and_names_the_load() -> None:
    world = World(quiesce_timeout_s=0.05)
    try:
        world.put(0, 4)
        world.copier.gate.clear()
        first = world.load(0, 2, at=0)
        world.load(2, 4, at=4)
        world.start()
        assert world.copier.waiting.wait(10)
        for _ in range(2):
            with pytest.raises(TransferTimeoutError, match=f"operation {first.op}"):
                world.linker.reset()
        world.copier.gate.set()
        world.idle()
        world.linker.reset()
        assert world.copier.scatters == 1
        assert world.loads() == []
    finally:
        world.end()


@pytest.mark.parametrize("what", ["layer-wise load", "staged load", "offload"])
def test_reset_finds_what_has_just_left_its_queue(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    taken = Gate()
    name = "_run_batch" if what == "layer-wise load" else "_run"
    run = getattr(world.linker._thread, name)

    def held(work: object) -> None:
        taken.enter()
        run(work)

    monkeypatch.setattr(world.linker._thread, name, held)
    try:
        world.put(0, 2)
        if what == "offload":
            world.offload(8, 10, at=0)
        else:
            mode = LoadMode.STAGED if what == "staged load" else LoadMode.LAYER_WISE
            world.load(0, 2, at=0, mode=mode)
            world.linker.start_layer_wise_loading()
        assert taken.reached.wait(10)
        world.linker.reset()
        # From here on the slots are somebody else's.
        taken.open.set()
        world.idle()
        assert world.empty(range(NUM_PAGES))
        assert world.story.of("put") == []
        assert (world.loads(), world.offloads()) == ([], [])
    finally:
        world.end()


def test_no_batch_that_failed_while_it_waited_is_kept() -> None:
    world = World(hang_s=0.05)
    try:
        world.put(0, 2)
        gate = world.story.gate("put", -1)
        world.offload(8, 9, at=0)
        assert gate.reached.wait(10)
        world.load(0, 2, at=4)
        batch = world.start()
        assert not world.linker.finish_layer_wise_loading(batch)
        deadline = time.monotonic() + 10
        while not world.loads():
            assert time.monotonic() < deadline
        gate.open.set()
        world.idle()
        kept = [one for one in vars(world.counter).values() if isinstance(one, set | dict | list)]
        assert kept
        assert not any(kept)
    finally:
        world.end()


@pytest.mark.parametrize("what", ["layer-wise load", "staged load", "offload"])
def test_without_a_thread_nothing_is_kept(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    try:
        world.put(0, 2)

        def start(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            if what == "offload":
                with pytest.raises(RuntimeError):
                    world.offload(8, 9, at=0)
            else:
                mode = LoadMode.STAGED if what == "staged load" else LoadMode.LAYER_WISE
                ticket = world.load(0, 2, at=0, mode=mode)
                with pytest.raises(RuntimeError):
                    world.linker.start_layer_wise_loading()
                assert world.linker.cancel_queued_load(ticket.op)
        # With a thread again, nothing of it is done.
        after = world.load(0, 2, at=4)
        assert world.linker.finish_layer_wise_loading(world.start())
        world.idle()
        assert world.loads() == landed(after)
        assert world.offloads() == []
        assert world.empty(range(4))
        assert world.story.of("put") == []
    finally:
        world.end()


def test_each_load_of_a_batch_has_lent_memory_of_its_own_until_it_ends() -> None:
    world = World(lending=True)
    ((_, lender),) = world.lenders
    try:
        world.put(0, 4)
        bad, good = world.load(0, 2, at=4), world.load(2, 4, at=6)
        ((_, store),) = world.stores
        store.unreadable.add((1, 1))
        world.copier.gate.clear()
        world.start()
        # Layer 0 of the first load is being copied: both are open.
        assert world.copier.waiting.wait(30)
        assert lender.num_lent == 2
        world.copier.gate.set()
        world.idle()
        assert lender.num_lent == 0
        assert lender.loans == [2, 2]
        assert sorted(world.loads(), key=lambda one: one.op) == [*failed(bad), *landed(good)]
        assert all(world.right(layer, range(2, 4), at=6) for layer in range(NUM_LAYERS))
    finally:
        world.end()


@pytest.mark.parametrize("bad", [False, True], ids=["landed", "failed"])
@pytest.mark.parametrize("what", ["layer-wise load", "staged load", "offload"])
def test_a_store_that_does_not_take_back_what_it_lent_fails_nothing_and_ends_no_thread(
    what: str, *, bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(lending=True)
    ((_, lender),) = world.lenders
    ((_, store),) = world.stores
    lend = lender.lend

    class Sticky(LentFrames):
        """Frames that are given back, with a complaint."""

        def __init__(self, inner: LentFrames) -> None:
            self._inner = inner

        @property
        @override
        def buffer(self) -> memoryview:
            return self._inner.buffer

        @override
        def release(self) -> None:
            self._inner.release()
            raise StorageError("it was in use")

    def lend_sticky(num_pages: int) -> LentFrames | None:
        lent = lend(num_pages)
        return None if lent is None else Sticky(lent)

    def inner_of(lent: LentFrames) -> LentFrames:
        assert isinstance(lent, Sticky)
        return lent._inner

    open_lent, verify, put_lent = lender.open_lent, lender.verify, lender.put_lent
    try:
        world.put(0, 4)
        if bad:
            store.unreadable.add((1, 0))
            store.unwelcome.add(PAGES[9])
        with monkeypatch.context() as patched:
            patched.setattr(lender, "lend", lend_sticky)
            patched.setattr(
                lender, "open_lent", lambda keys, ttl, lent: open_lent(keys, ttl, inner_of(lent))
            )
            patched.setattr(
                lender, "verify", lambda handles, at, lent: verify(handles, at, inner_of(lent))
            )
            patched.setattr(lender, "put_lent", lambda keys, lent: put_lent(keys, inner_of(lent)))
            match what:
                case "offload":
                    first = world.offload(8, 10, at=0)
                case "staged load":
                    first = world.load(0, 2, at=4, mode=LoadMode.STAGED)
                    assert world.linker.start_layer_wise_loading() is None
                case _:
                    first = world.load(0, 2, at=4)
                    assert world.linker.finish_layer_wise_loading(world.start())
            world.idle()
            told = [*world.loads(), *world.offloads()]
            assert told == (failed(first) if bad else landed(first))
            assert lender.num_lent == 0
        # The last error: of a load that failed, its own.
        assert ("it was in use" in world.linker.counters.last_error) is not bad
        second = world.load(2, 4, at=6)
        assert world.linker.finish_layer_wise_loading(world.start())
        assert world.loads() == landed(second)
    finally:
        world.end()
