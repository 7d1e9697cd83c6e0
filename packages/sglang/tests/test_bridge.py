"""The bridge over a real `StoreLinker` and a store in memory: what needs no SGLang to be seen."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Final, Never

import attrs
import pytest
import torch
from typing_extensions import override

from radixlink_contracts import (
    ByteRegion,
    CacheIdentity,
    Copier,
    Fence,
    OperationId,
    Outcome,
    PoolLayout,
    PoolName,
    RequestId,
    Staging,
)
from radixlink_contracts.errors import (
    BackendUnavailableError,
    ContractError,
    TransferTimeoutError,
)
from radixlink_linker import StoreLinker, StoreLinkerSettings, ThreadExecutor
from radixlink_pools import CpuCopier, DevicePoolEntry, DevicePoolGroup
from radixlink_sglang._bridge import Bridge
from radixlink_sglang._config import LinkerConfig
from radixlink_sglang._layer_gate import NO_BATCH, LayerGate
from radixlink_sglang._lookups import LookupFailed, TimedLookups
from radixlink_sglang._operations import Operation, Ticket
from radixlink_sglang._ready_pools import ReadyPools
from radixlink_testing import InMemoryStoreFactory
from radixlink_testing.faults import Fault, FaultKind, FaultyStore, Nameless, StoreCall
from radixlink_testing.linkers import ManualClock
from radixlink_testing.pages import page_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

NUM_LAYERS: Final = 2
NUM_PAGES: Final = 16
ROW_BYTES: Final = 8
EMPTY: Final = 0xEE
_WAIT_S: Final = 10.0


@attrs.frozen
class Name:
    value: str


@attrs.frozen
class Transfer:
    """As SGLang hands one over."""

    keys: Sequence[str]
    device_indices: torch.Tensor | None = None
    name: Name = Name("kv")
    hit_policy: Name = Name("all_pages")


class HeldFence(Fence):
    """The end of a copy, when the test lets it end."""

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    @override
    def done(self) -> bool:
        return self._gate.is_set()

    @override
    def wait(self, timeout_s: float) -> bool:
        return self._gate.wait(timeout_s)


class HeldCopier(Copier):
    """Copies at once; the test says when a copy has ended."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.copying = threading.Event()
        self._copier = CpuCopier()

    @override
    def staging(self, num_bytes: int) -> Staging:
        return self._copier.staging(num_bytes)

    @override
    def gather(self, region: ByteRegion, out: torch.Tensor) -> Fence:
        self._copier.gather(region, out)
        return self._held()

    @override
    def scatter(self, region: ByteRegion, source: torch.Tensor) -> Fence:
        self._copier.scatter(region, source)
        return self._held()

    def _held(self) -> Fence:
        self.copying.set()
        return HeldFence(self.gate)


class Event:
    """An event of a stream."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def synchronize(self) -> None:
        self._log.append(self._name)


class Rank:
    """A bridge, and what it stands between."""

    def __init__(self, *, stored_elsewhere: Sequence[PoolName] = (), **config: float) -> None:
        self.rows = [
            torch.full((NUM_PAGES, ROW_BYTES), EMPTY, dtype=torch.uint8) for _ in range(NUM_LAYERS)
        ]
        identity = CacheIdentity(
            model="m",
            revision="1",
            dtype="uint8",
            page_size=1,
            num_layers=NUM_LAYERS,
            layout="bytes",
        )
        self.pool = DevicePoolEntry(PoolName.KV, self.rows, 1)
        layout = PoolLayout(
            identity=identity, pool=PoolName.KV, range_bytes=(ROW_BYTES,) * NUM_LAYERS
        )
        self.store = FaultyStore(InMemoryStoreFactory().open(layout))
        self.copier = HeldCopier()
        self.clock = ManualClock()
        self.waited: list[str] = []
        self._recorded = 0
        self.executor = ThreadExecutor()
        settings = LinkerConfig.of_json(config)
        self.ready = ReadyPools(DevicePoolGroup([self.pool]))
        linker = StoreLinker(
            pools=self.ready,
            stores=[(self.pool, self.store)],
            copier=self.copier,
            settings=StoreLinkerSettings(
                copy_timeout_s=settings.copy_timeout_s,
                layer_timeout_s=settings.load_timeout_s,
                close_timeout_s=_WAIT_S,
            ),
        )
        self.gate = LayerGate(linker.layer_done_counter, NUM_LAYERS)
        self.bridge = Bridge(
            linker=linker,
            gate=self.gate,
            ready=self.ready,
            record_ready=self._record,
            stored_elsewhere=stored_elsewhere,
            executor=self.executor,
            clock=self.clock,
            config=settings,
        )

    def _record(self) -> list[Event]:
        self._recorded += 1
        return [Event(self.waited, f"event {self._recorded}")]

    def fill(self, pages: Sequence[int], number: int) -> None:
        for rows in self.rows:
            rows[list(pages)] = number

    def offload(self, pages: Sequence[int], number: int) -> bool:
        """Have pages stored that hold a number; return whether they were."""
        self.fill(pages, number)
        assert self.bridge.offload([transfer(pages)])
        self.wait_for_offloads(1)
        return self.bridge.pop_completed_offload()

    def wait_for_offloads(self, count: int) -> None:
        tick = threading.Event()
        for _ in range(int(_WAIT_S / 1e-3)):
            if self.bridge.num_completed_offloads() >= count:
                return
            tick.wait(1e-3)
        pytest.fail(f"expected {count} offloads to end")

    def when_given_up(self, batch: int, then: Callable[[], None]) -> threading.Thread:
        """Do something when the loads of a batch are given up."""
        (operation,) = self.bridge._batches[batch]
        tick = threading.Event()

        def watch() -> None:
            while not operation.ticket.decided:
                tick.wait(1e-3)
            then()

        thread = threading.Thread(target=watch)
        thread.start()
        return thread

    def holds(self, pages: Sequence[int], number: int) -> bool:
        return all(bool((rows[list(pages)] == number).all()) for rows in self.rows)


def transfer(pages: Sequence[int], *, slots: bool = True) -> Transfer:
    """Pages by number: keys of these numbers, in slots of these numbers."""
    keys = page_keys(range(NUM_PAGES))
    return Transfer(
        keys=[keys[page].hex() for page in pages],
        device_indices=torch.tensor(pages) if slots else None,
    )


def lookup(rank: Rank, pages: Sequence[int]) -> list[int]:
    return rank.bridge.lookup("r", [transfer(pages, slots=False)])


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    end(made)


def end(rank: Rank) -> None:
    rank.copier.gate.set()
    rank.store.release()
    rank.bridge.close()
    rank.executor.close()


def test_pages_go_to_the_store_and_come_back(rank: Rank) -> None:
    assert rank.offload([0, 1, 2], 7)
    rank.fill(range(NUM_PAGES), EMPTY)
    assert lookup(rank, [0, 1, 2, 3]) == [1, 2, 3]
    assert rank.bridge.load("r", [transfer([0, 1, 2])])
    batch = rank.bridge.start_layer_wise_loading()
    assert rank.bridge.finish_layer_wise_loading(batch)
    assert rank.holds([0, 1, 2], 7)
    assert rank.holds(range(3, NUM_PAGES), EMPTY)


def test_slots_are_looked_at_when_the_streams_are_done_with_them(rank: Rank) -> None:
    rank.offload([0], 7)
    assert rank.waited == ["event 1"]
    rank.bridge.load("r", [transfer([0])])
    assert rank.bridge.finish_layer_wise_loading(rank.bridge.start_layer_wise_loading())
    assert rank.waited == ["event 1", "event 2"]


def test_a_forward_waits_for_each_layer_of_its_batch(rank: Rank) -> None:
    rank.offload([0], 7)
    rank.fill([0], EMPTY)
    rank.store.plan(Fault(StoreCall.READ, FaultKind.LATE, first=1, count=1))
    rank.bridge.load("r", [transfer([0])])
    batch = rank.bridge.start_layer_wise_loading()
    seen: list[tuple[int, ...]] = []

    def forward() -> None:
        for layer, rows in enumerate(rank.rows):
            rank.gate.wait_until(layer)
            seen.append((layer, int(rows[0, 0])))

    rank.gate.set_consumer(batch)
    assert rank.gate.consumer_index == batch
    launched = threading.Thread(target=forward)
    launched.start()
    assert rank.store.waiting.wait(_WAIT_S)
    rank.store.release()
    launched.join()
    assert seen == [(0, 7), (1, 7)]
    assert rank.bridge.finish_layer_wise_loading(batch)
    rank.gate.set_consumer(NO_BATCH)
    forward()
    assert len(seen) == 2 * NUM_LAYERS


def test_what_was_said_first_of_an_operation_counts() -> None:
    operation = Operation(ticket=Ticket(OperationId(1)), transfers=(), started_at=0.0)
    operation.end(Outcome.FAILED, quiesced=False, why="late")
    operation.end(Outcome.LANDED, quiesced=True)
    assert (operation.landed, operation.quiesced, operation.why) == (False, True, "late")


def test_nothing_queued_is_no_batch(rank: Rank) -> None:
    assert rank.bridge.start_layer_wise_loading() == NO_BATCH
    assert rank.bridge.finish_layer_wise_loading(NO_BATCH)
    assert not rank.bridge.load("r", [])
    assert not rank.bridge.offload([])


def test_a_second_load_of_a_request_is_refused(rank: Rank) -> None:
    rank.bridge.load("r", [transfer([0])])
    with pytest.raises(ContractError, match="one load of request r"):
        rank.bridge.load("r", [transfer([1])])


def test_a_cancelled_load_is_not_started(rank: Rank) -> None:
    rank.bridge.load("r", [transfer([0])])
    assert rank.bridge.cancel_queued_load("r")
    assert not rank.bridge.cancel_queued_load("r")
    assert rank.bridge.start_layer_wise_loading() == NO_BATCH


@pytest.mark.parametrize(
    "broken",
    [
        attrs.evolve(transfer([0]), name=Name("deepseek_v4_c4")),
        attrs.evolve(transfer([0]), hit_policy=Name("block_groups")),
        attrs.evolve(transfer([0]), keys=["not hex"]),
    ],
)
def test_a_transfer_that_is_not_known_is_refused(rank: Rank, broken: Transfer) -> None:
    for call in (rank.bridge.offload, lambda transfers: rank.bridge.load("r", transfers)):
        with pytest.raises(ContractError, match="a known pool and policy with hex keys"):
            call([broken])


def test_offloads_are_answered_in_order_although_the_first_is_late(rank: Rank) -> None:
    rank.store.plan(Fault(StoreCall.PUT, FaultKind.LATE, count=1))
    rank.bridge.offload([transfer([0])])
    rank.bridge.offload([transfer([1])])
    assert rank.store.waiting.wait(_WAIT_S)
    assert rank.bridge.num_completed_offloads() == 0
    with pytest.raises(ContractError, match="expected one that has ended"):
        rank.bridge.pop_completed_offload()
    rank.store.release()
    rank.wait_for_offloads(2)
    assert rank.bridge.pop_completed_offload()
    assert rank.bridge.pop_completed_offload()


def test_an_offload_that_takes_too_long_failed() -> None:
    rank = Rank(offload_timeout_s=5.0)
    rank.store.plan(Fault(StoreCall.PUT, FaultKind.LATE, count=1))
    rank.bridge.offload([transfer([0])])
    assert rank.store.waiting.wait(_WAIT_S)
    rank.clock.advance(6.0)
    rank.bridge.offload([transfer([1])])
    assert rank.bridge.num_completed_offloads() == 1
    assert not rank.bridge.pop_completed_offload()
    rank.store.release()
    rank.wait_for_offloads(1)
    assert rank.bridge.pop_completed_offload()
    end(rank)


def test_a_copy_that_is_late_keeps_its_offload_until_it_ends() -> None:
    rank = Rank(copy_timeout_s=0.05)
    rank.copier.gate.clear()
    rank.bridge.offload([transfer([0])])
    assert rank.copier.copying.wait(_WAIT_S)
    rank.clock.advance(100.0)
    assert rank.bridge.num_completed_offloads() == 0
    rank.copier.gate.set()
    rank.wait_for_offloads(1)
    assert not rank.bridge.pop_completed_offload()
    end(rank)


def test_a_late_batch_is_finished_when_its_copy_has_ended() -> None:
    rank = Rank(load_timeout_s=0.05, copy_timeout_s=0.05)
    rank.offload([0, 1], 7)
    rank.copier.gate.clear()
    rank.copier.copying.clear()
    rank.bridge.load("r", [transfer([0, 1])])
    batch = rank.bridge.start_layer_wise_loading()
    assert rank.copier.copying.wait(_WAIT_S)
    release = rank.when_given_up(batch, rank.copier.gate.set)
    assert not rank.bridge.finish_layer_wise_loading(batch)
    assert rank.copier.gate.is_set()
    release.join()
    end(rank)


def test_a_copy_that_does_not_end_is_an_error_not_a_verdict() -> None:
    rank = Rank(load_timeout_s=0.05, copy_timeout_s=0.05, quiesce_timeout_s=3.0)
    rank.offload([0], 7)
    rank.copier.gate.clear()
    rank.copier.copying.clear()
    rank.bridge.load("r", [transfer([0])])
    batch = rank.bridge.start_layer_wise_loading()
    assert rank.copier.copying.wait(_WAIT_S)
    later = rank.when_given_up(batch, lambda: rank.clock.advance(4.0))
    with pytest.raises(TransferTimeoutError, match="end within 3"):
        rank.bridge.finish_layer_wise_loading(batch)
    later.join()
    end(rank)


def test_pages_of_a_failed_load_are_missing_for_a_while() -> None:
    rank = Rank(miss_s=30.0)
    rank.offload([0, 1, 2, 3], 7)
    rank.store.plan(Fault(StoreCall.READ, FaultKind.FAILS, count=1))
    rank.bridge.load("r", [transfer([2, 3])])
    assert not rank.bridge.finish_layer_wise_loading(rank.bridge.start_layer_wise_loading())
    assert lookup(rank, [0, 1, 2, 3]) == [1, 2]
    assert lookup(rank, [2, 3]) == []
    rank.clock.advance(31.0)
    assert lookup(rank, [0, 1, 2, 3]) == [1, 2, 3, 4]
    end(rank)


def test_restored_pages_are_stored_already(rank: Rank) -> None:
    rank.offload([0, 1], 7)
    rank.bridge.load("r", [transfer([0, 1])])
    rank.bridge.finish_layer_wise_loading(rank.bridge.start_layer_wise_loading())
    before = len(rank.store.calls)
    assert rank.offload([0, 1], 7)
    assert rank.store.calls[before:] == []
    # What was offered once is offered like any other after that.
    assert rank.offload([0, 1], 7)
    assert rank.store.calls[before:] == ["put"]


def test_of_a_node_that_was_partly_restored_the_rest_is_stored(rank: Rank) -> None:
    rank.offload([0, 1], 7)
    rank.bridge.load("r", [transfer([0, 1])])
    rank.bridge.finish_layer_wise_loading(rank.bridge.start_layer_wise_loading())
    rank.fill([5], 9)
    moved = Transfer(
        keys=transfer([0, 1, 2]).keys, device_indices=torch.tensor([0, 1, 5], dtype=torch.int64)
    )
    rank.bridge.offload([moved])
    rank.wait_for_offloads(1)
    assert rank.bridge.pop_completed_offload()
    rank.fill(range(NUM_PAGES), EMPTY)
    rank.bridge.load("r", [transfer([0, 1, 2])])
    assert rank.bridge.finish_layer_wise_loading(rank.bridge.start_layer_wise_loading())
    assert rank.holds([0, 1], 7)
    assert rank.holds([2], 9)


def test_what_another_rank_stores_is_not_stored_again() -> None:
    rank = Rank(stored_elsewhere=[PoolName.KV])
    assert rank.offload([0], 7)
    assert rank.store.calls == []
    end(rank)


def test_after_a_reset_nothing_of_before_is_answered(rank: Rank) -> None:
    rank.store.plan(Fault(StoreCall.PUT, FaultKind.LATE, count=1))
    rank.bridge.offload([transfer([0])])
    rank.bridge.load("r", [transfer([1])])
    assert rank.store.waiting.wait(_WAIT_S)
    rank.bridge.reset()
    rank.store.release()
    assert rank.bridge.start_layer_wise_loading() == NO_BATCH
    assert rank.offload([3], 7)
    assert rank.bridge.num_completed_offloads() == 0


def refused(*_: object) -> bool:
    raise BackendUnavailableError("the store hangs", transient=True)


def test_refused_offloads_leave_no_event_behind(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.store.plan(Fault(StoreCall.PUT, FaultKind.LATE, count=1))
    rank.bridge.offload([transfer([0])])
    assert rank.store.waiting.wait(_WAIT_S)
    rank.bridge.offload([transfer([1])])
    for answer in (refused, lambda *_: False):
        with monkeypatch.context() as patched:
            patched.setattr(rank.bridge._linker, "offload", answer)
            rank.bridge.offload([transfer([2])])
    # What the second one waits for is there still.
    assert len(rank.ready._events) == 1
    rank.store.release()
    rank.wait_for_offloads(4)
    assert [rank.bridge.pop_completed_offload() for _ in range(4)] == [True, True, False, False]
    assert rank.waited == ["event 1", "event 2"]


def test_a_batch_of_refused_loads_leaves_no_event_behind(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank.bridge._linker, "load", refused)
    assert rank.bridge.load("r", [transfer([0])])
    assert not rank.bridge.finish_layer_wise_loading(rank.bridge.start_layer_wise_loading())
    assert len(rank.ready._events) == 0


def test_where_no_event_can_be_recorded_an_offload_and_a_batch_fail_and_the_next_do_not(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record() -> list[Event]:
        message = "CUDA error: out of memory"
        raise RuntimeError(message)

    assert rank.offload([0], 7)
    assert rank.offload([1], 9)
    rank.fill(range(NUM_PAGES), EMPTY)
    with monkeypatch.context() as patched:
        patched.setattr(rank.bridge, "_record_ready", record)
        assert not rank.offload([2], 7)
        assert rank.bridge.load("r", [transfer([0])])
        batch = rank.bridge.start_layer_wise_loading()
        assert batch != NO_BATCH
        assert not rank.bridge.finish_layer_wise_loading(batch)
    assert rank.bridge.load("r", [transfer([1])])
    assert rank.bridge.finish_layer_wise_loading(rank.bridge.start_layer_wise_loading())
    assert rank.holds([1], 9)
    # The load that failed is not a part of the next batch.
    assert rank.holds([0], EMPTY)


def test_of_a_batch_that_is_not_known_nothing_landed(rank: Rank) -> None:
    assert rank.offload([0], 7)
    assert not rank.bridge.finish_layer_wise_loading(0)
    rank.bridge.load("r", [transfer([0])])
    batch = rank.bridge.start_layer_wise_loading()
    assert rank.bridge.finish_layer_wise_loading(batch)
    for unknown in (batch, batch + 1, NO_BATCH - 1):
        assert not rank.bridge.finish_layer_wise_loading(unknown)
    assert rank.bridge.finish_layer_wise_loading(NO_BATCH)


def test_of_a_batch_that_a_reset_dropped_nothing_landed(rank: Rank) -> None:
    assert rank.offload([0], 7)
    rank.bridge.load("r", [transfer([0])])
    batch = rank.bridge.start_layer_wise_loading()
    rank.bridge.reset()
    assert not rank.bridge.finish_layer_wise_loading(batch)


@pytest.mark.parametrize(
    "raised", [Nameless(), asyncio.CancelledError()], ids=["nameless", "no Exception"]
)
def test_whatever_a_store_raises_a_lookup_is_a_miss_at_once(
    rank: Rank, raised: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*_: object) -> Never:
        raise raised

    # What is no `Exception`, the executor tells.
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    linker = rank.bridge._linker
    monkeypatch.setattr(linker, "lookup", raising)
    answer = TimedLookups(linker, rank.executor, _WAIT_S).ask(RequestId("r"), [])
    assert isinstance(answer, LookupFailed)
    assert answer.why.startswith(type(raised).__name__)
    assert not answer.late


def test_where_no_thread_can_be_had_for_a_lookup_it_is_a_miss(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rank.offload([0, 1], 7)
    assert lookup(rank, [0, 1]) == [1, 2]

    def submit(task: Callable[[], None]) -> None:
        message = "can't start new thread"
        raise RuntimeError(message)

    with monkeypatch.context() as patched:
        patched.setattr(rank.executor, "submit", submit)
        assert lookup(rank, [0, 1]) == []
    # It says nothing of the store.
    assert lookup(rank, [0, 1]) == [1, 2]
