"""A worker's side alone: which bytes it moves, and behind what an engine has queued."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import attrs
import pytest
import torch
from tests.integration.connector.skeleton import Metadata, Move, WorkerSide

from radixlink_contracts import CacheIdentity, LoadMode, PageKeys, PoolLayout, PoolName
from radixlink_contracts.errors import ContractError, StaleHandleError, TransferTimeoutError
from radixlink_linker import StoreLinkerSettings
from radixlink_pools import CpuCopier
from radixlink_testing import InMemoryStoreFactory

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE_SIZE = 4
KEY = bytes(range(32))


def _layout(num_layers: int, ranges_per_layer: int) -> PoolLayout:
    identity = CacheIdentity(
        model="m", revision="1", dtype="int64", page_size=PAGE_SIZE,
        num_layers=num_layers, layout="keys, values",
    )  # fmt: skip
    return PoolLayout(
        identity=identity,
        pool=PoolName.KV,
        range_bytes=(PAGE_SIZE * 8,) * (num_layers * ranges_per_layer),
    )


def _run(worker: WorkerSide, metadata: Metadata) -> tuple[set[str], set[str]]:
    """Steps until the worker has told of something: (sent, received)."""
    deadline = time.monotonic() + 20
    while True:
        assert time.monotonic() < deadline
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        worker.wait_for_save()
        sent, received = worker.get_finished(set())
        worker.clear_connector_metadata()
        metadata = Metadata()
        if sent or received:
            return sent or set(), received or set()


def _move(block: int) -> Move:
    return Move(request_id="r", keys=KEY, block_ids=(block,))


def test_tensors_that_are_not_what_the_store_holds_are_refused() -> None:
    store = InMemoryStoreFactory().open(_layout(3, 1))
    worker = WorkerSide(store=store, copier=CpuCopier(), mode=LoadMode.STAGED)
    with pytest.raises(ContractError, match="layer ranges"):
        worker.register_kv_caches({"layers.0": torch.zeros(8, PAGE_SIZE, dtype=torch.int64)})
    worker.shutdown()


def test_layers_are_numbered_as_the_model_runs_them_and_keys_come_before_values() -> None:
    stores, layout = InMemoryStoreFactory(), _layout(11, 2)
    worker = WorkerSide(
        store=stores.open(layout), copier=CpuCopier(), mode=LoadMode.STAGED, apart=True
    )
    caches: dict[str, torch.Tensor] = {}
    for layer in reversed(range(11)):
        cache = torch.full((2, 8, PAGE_SIZE), layer, dtype=torch.int64)
        cache[1] += 100
        caches[f"model.layers.{layer}.attn"] = cache
    worker.register_kv_caches(caches)
    assert _run(worker, Metadata(offloads=(_move(5),))) == ({"r"}, set())
    store = stores.open(layout)
    handles = store.open(PageKeys(KEY), 10.0)
    for layer in range(11):
        for half in range(2):
            got = bytearray(PAGE_SIZE * 8)
            assert store.read(handles, 2 * layer + half, got).complete
            assert memoryview(got).cast("q").tolist() == [layer + 100 * half] * PAGE_SIZE
    worker.shutdown()


@attrs.define(eq=False)
class Stream:
    """A device's queue: what is put in runs when somebody waits for an event behind it."""

    queued: deque[Callable[[], object]] = attrs.field(factory=deque)
    num_put: int = 0
    num_run: int = 0

    def put(self, work: Callable[[], object]) -> None:
        """Have it run later."""
        self.queued.append(work)
        self.num_put += 1

    def event(self) -> QueueEvent:
        """Behind all that was put in by now."""
        return QueueEvent(self, self.num_put)


@attrs.frozen(eq=False)
class QueueEvent:
    """An event of such a stream."""

    stream: Stream
    behind: int

    def synchronize(self) -> None:
        while self.stream.num_run < self.behind:
            self.stream.queued.popleft()()
            self.stream.num_run += 1


def test_an_offload_comes_behind_the_forward_that_writes_its_blocks() -> None:
    stores, stream, layout = InMemoryStoreFactory(), Stream(), _layout(1, 1)
    worker = WorkerSide(
        store=stores.open(layout),
        copier=CpuCopier(),
        mode=LoadMode.STAGED,
        new_event=stream.event,
    )
    cache = torch.zeros(8, PAGE_SIZE, dtype=torch.int64)
    worker.register_kv_caches({"layers.0": cache})
    stream.put(lambda: cache[5].fill_(7))
    assert _run(worker, Metadata(offloads=(_move(5),))) == ({"r"}, set())
    store, got = stores.open(layout), bytearray(PAGE_SIZE * 8)
    assert store.read(store.open(PageKeys(KEY), 10.0), 0, got).complete
    assert memoryview(got).cast("q").tolist() == [7] * PAGE_SIZE
    worker.shutdown()


@pytest.mark.parametrize("mode", LoadMode)
def test_a_load_comes_behind_the_forward_that_reads_what_was_in_its_blocks(mode: LoadMode) -> None:
    stores, stream, layout = InMemoryStoreFactory(), Stream(), _layout(1, 1)
    stores.open(layout).put(PageKeys(KEY), [bytes([9, 0, 0, 0, 0, 0, 0, 0] * PAGE_SIZE)])
    worker = WorkerSide(
        store=stores.open(layout), copier=CpuCopier(), mode=mode, new_event=stream.event
    )
    cache = torch.full((8, PAGE_SIZE), 3, dtype=torch.int64)
    worker.register_kv_caches({"layers.0": cache})
    seen: list[torch.Tensor] = []
    stream.put(lambda: seen.append(cache[5].clone()))
    worker.bind_connector_metadata(Metadata(loads=(_move(5),)))
    worker.start_load_kv(None)
    worker.wait_for_layer_load("layers.0")
    worker.wait_for_save()
    if mode is LoadMode.STAGED:
        assert _run(worker, Metadata()) == (set(), {"r"})
    assert worker.get_block_ids_with_load_errors() == set()
    assert [one.tolist() for one in seen] == [[3] * PAGE_SIZE]
    assert cache[5].tolist() == [9] * PAGE_SIZE
    worker.shutdown()


@pytest.mark.parametrize("mode", LoadMode)
def test_a_load_that_no_thread_can_be_had_for_has_failed_and_is_not_begun_later(
    mode: LoadMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, layout = InMemoryStoreFactory(), _layout(1, 1)
    stores.open(layout).put(PageKeys(KEY), [bytes([9, 0, 0, 0, 0, 0, 0, 0] * PAGE_SIZE)])
    worker = WorkerSide(store=stores.open(layout), copier=CpuCopier(), mode=mode)
    cache = torch.full((8, PAGE_SIZE), 3, dtype=torch.int64)
    worker.register_kv_caches({"layers.0": cache})
    staged = mode is LoadMode.STAGED

    def start(thread: threading.Thread) -> None:
        message = f"can't start {thread.name}"
        raise RuntimeError(message)

    def load(block: int) -> set[int]:
        worker.bind_connector_metadata(Metadata(loads=(_move(block),)))
        worker.start_load_kv(None)
        worker.wait_for_layer_load("layers.0")
        worker.wait_for_save()
        if staged:
            assert _run(worker, Metadata()) == (set(), {"r"})
        return worker.get_block_ids_with_load_errors()

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        assert load(5) == {5}
    assert load(6) == set()
    assert cache[5:7].tolist() == [[3] * PAGE_SIZE, [9] * PAGE_SIZE]
    worker.shutdown()


@attrs.frozen(eq=False)
class HeldEvent:
    """An event of a forward that goes on until it is released."""

    waited_for: threading.Event
    released: threading.Event

    def synchronize(self) -> None:
        self.waited_for.set()
        assert self.released.wait(20)


def test_the_store_is_closed_also_where_a_copy_does_not_end() -> None:
    stores, layout = InMemoryStoreFactory(), _layout(1, 1)
    store = stores.open(layout)
    event = HeldEvent(threading.Event(), threading.Event())
    worker = WorkerSide(
        store=store,
        copier=CpuCopier(),
        mode=LoadMode.STAGED,
        new_event=lambda: event,
        settings=StoreLinkerSettings(quiesce_timeout_s=0.05),
    )
    worker.register_kv_caches({"layers.0": torch.zeros(8, PAGE_SIZE, dtype=torch.int64)})
    worker.bind_connector_metadata(Metadata(offloads=(_move(5),)))
    worker.start_load_kv(None)
    worker.wait_for_save()
    assert event.waited_for.wait(20)
    with pytest.raises(TransferTimeoutError):
        worker.shutdown()
    with pytest.raises(StaleHandleError):
        store.contains(PageKeys(KEY))
    event.released.set()
