"""Engines that share a store, what goes wrong in it, and what has to be in it."""

from __future__ import annotations

import threading
import time
from array import array
from typing import TYPE_CHECKING

import attrs
from tests.integration.connector.fake_vllm import (
    NUM_LAYERS,
    NUM_WORKERS,
    PAGE_SIZE,
    FakeEngine,
    kv_of,
    layout,
)
from tests.integration.connector.skeleton import page_keys

from radixlink_contracts import DEFAULT_NAMESPACE, LoadMode, Namespace, PageBits
from radixlink_testing import InMemoryStoreFactory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import PageHandles, PageKeys, PageStore, PoolLayout, StoreFactory
    from radixlink_linker import StoreLinkerSettings

#: 9 whole blocks and a token.
PROMPT = [(7 * index) % 250 for index in range(37)]
OTHER = [(11 * index + 3) % 250 for index in range(30)]


@attrs.define(eq=False)
class Faults:
    """What goes wrong in one worker's store.

    Attributes:
        torn: Pages that cannot be read in a layer, though they are there.
        answering: While clear, lookups wait.
        writable: While clear, puts wait.
        before_read: Is called before each read, with its layer.
    """

    torn: set[tuple[bytes, int]] = attrs.field(factory=set)
    answering: threading.Event = attrs.field(factory=threading.Event)
    writable: threading.Event = attrs.field(factory=threading.Event)
    before_read: Callable[[int], object] = lambda layer: None

    def __attrs_post_init__(self) -> None:
        """Nothing does at first."""
        self.answering.set()
        self.writable.set()


@attrs.frozen
class FaultyStore:
    """Another store, with faults."""

    store: PageStore
    faults: Faults

    @property
    def layout(self) -> PoolLayout:
        return self.store.layout

    def contains(self, keys: PageKeys) -> PageBits:
        assert self.faults.answering.wait(20)
        return self.store.contains(keys)

    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        return self.store.open(keys, ttl_s)

    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        self.faults.before_read(layer_range)
        good = self.store.read(handles, layer_range, out)
        torn = [at for at, key in enumerate(handles.keys) if (key, layer_range) in self.faults.torn]
        return PageBits.of((at for at in good if at not in torn), good.count)

    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        assert self.faults.writable.wait(20)
        return self.store.put(keys, parts)

    def close(self) -> None:
        self.store.close()


@attrs.frozen
class FaultyStores:
    """Opens such stores."""

    stores: StoreFactory
    faults: Faults

    def open(self, layout: PoolLayout) -> PageStore:
        return FaultyStore(self.stores.open(layout), self.faults)

    def close(self) -> None: ...


@attrs.define(eq=False)
class World:
    """Engines that share a store."""

    stores: InMemoryStoreFactory = attrs.field(factory=InMemoryStoreFactory)
    engines: list[FakeEngine] = attrs.field(factory=list)

    def engine(
        self,
        mode: LoadMode,
        faults: Faults | None = None,
        *,
        num_blocks: int = 32,
        lookup_timeout_s: float = 20.0,
        settings: StoreLinkerSettings | None = None,
    ) -> FakeEngine:
        """An engine whose last worker's store has faults."""
        stores: list[StoreFactory] = [self.stores] * (NUM_WORKERS - 1)
        stores.append(self.stores if faults is None else FaultyStores(self.stores, faults))
        engine = FakeEngine(
            stores,
            mode,
            num_blocks=num_blocks,
            lookup_timeout_s=lookup_timeout_s,
            settings=settings,
        )
        self.engines.append(engine)
        return engine

    def fill(self, *prompts: list[int]) -> None:
        """Have an engine compute and store these."""
        donor = self.engine(LoadMode.STAGED)
        for index, prompt in enumerate(prompts):
            request = donor.add(f"{index}", prompt, 2)
            settle(donor)
            assert request.num_run == len(prompt) + 1

    def drop(self, worker: int, tokens: Sequence[int]) -> None:
        """One worker's shard loses all pages of these tokens that it has."""
        store, keys = self.stores.open(layout(worker)), page_keys(tokens, PAGE_SIZE)
        for page in store.contains(keys):
            store.drop(keys[page])

    def pages_of(
        self,
        tokens: Sequence[int],
        *,
        namespace: Namespace = DEFAULT_NAMESPACE,
        bias: int = 0,
    ) -> list[int]:
        """How many pages of these tokens each worker's shard has; all bytes of them are right."""
        keys = page_keys(tokens, PAGE_SIZE, namespace)
        num_pages: list[int] = []
        for worker in range(NUM_WORKERS):
            store = self.stores.open(layout(worker))
            handles = store.open(keys, 10.0)
            num_pages.append(handles.found.total)
            for layer in range(NUM_LAYERS):
                got = array("q", bytes(8 * PAGE_SIZE * len(keys)))
                assert store.read(handles, layer, got) == handles.found
                right = kv_of(tokens, layer, worker, bias)
                for page in handles.found:
                    part = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
                    assert got[part].tolist() == right[part], (worker, layer, page)
        return num_pages


def until(engine: FakeEngine, happened: Callable[[], bool]) -> None:
    """Step until it happened."""
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        engine.step()


def settle(engine: FakeEngine) -> None:
    """Step until all requests are finished and stored."""
    until(engine, lambda: engine.is_idle)
