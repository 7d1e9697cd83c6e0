"""The skeleton of a connector, driven by a loop like vLLM's, over the real linker and stores."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import attrs
import pytest
from tests.integration.connector.fake_vllm import (
    NUM_WORKERS,
    PAGE_SIZE,
    FakeEngine,
    Status,
    answer_of,
)
from tests.integration.connector.skeleton import page_keys

from radixlink_contracts import LoadMode, PageBits
from radixlink_linker import StoreLinkerSettings
from radixlink_testing import InMemoryStoreFactory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import (
        PageHandles,
        PageKeys,
        PageStore,
        PoolLayout,
        StoreFactory,
    )

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
        settings: StoreLinkerSettings | None = None,
    ) -> FakeEngine:
        """An engine whose last worker's store has faults."""
        stores: list[StoreFactory] = [self.stores] * (NUM_WORKERS - 1)
        stores.append(self.stores if faults is None else FaultyStores(self.stores, faults))
        engine = FakeEngine(stores, mode, num_blocks=num_blocks, settings=settings)
        self.engines.append(engine)
        return engine


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for engine in world.engines:
        engine.close()


@pytest.fixture(params=list(LoadMode), ids=lambda mode: mode.name.lower())
def mode(request: pytest.FixtureRequest) -> LoadMode:
    found: LoadMode = request.param
    return found


def _until(engine: FakeEngine, happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        engine.step()


def _settle(engine: FakeEngine) -> None:
    _until(engine, lambda: engine.is_idle)


def _store(world: World, *prompts: list[int]) -> None:
    donor = world.engine(LoadMode.STAGED)
    for index, prompt in enumerate(prompts):
        request = donor.add(f"{index}", prompt, 2)
        _settle(donor)
        assert request.num_run == len(prompt) + 1


def test_another_engine_loads_what_the_first_computed(world: World, mode: LoadMode) -> None:
    _store(world, PROMPT)
    heir = world.engine(mode)
    same, longer = heir.add("same", PROMPT, 5), heir.add("longer", [*PROMPT[:30], 1, 2, 3], 5)
    _settle(heir)
    assert same.answer == answer_of(PROMPT, 5)
    assert longer.answer == answer_of([*PROMPT[:30], 1, 2, 3], 5)
    # 36 tokens came from the store, and 28; all but the last token of an answer are run.
    assert (same.num_run, longer.num_run) == (1 + 4, 5 + 4)
    assert len(heir.free_blocks) == 32


def test_a_prompt_is_asked_about_again_until_the_store_has_answered(
    world: World, mode: LoadMode
) -> None:
    _store(world, PROMPT)
    faults = Faults()
    faults.answering.clear()
    heir = world.engine(mode, faults)
    request = heir.add("r", PROMPT, 2)
    for _ in range(3):
        heir.step()
    assert request.status is Status.WAITING
    assert not request.block_ids
    faults.answering.set()
    _settle(heir)
    assert request.answer == answer_of(PROMPT, 2)
    assert request.num_run == 2


@pytest.mark.parametrize("layer", [0, 2])
def test_a_block_that_one_worker_lacks_costs_its_request_a_recompute_and_no_other(
    world: World, mode: LoadMode, layer: int
) -> None:
    _store(world, PROMPT, OTHER)
    faults = Faults(torn={(page_keys(PROMPT, PAGE_SIZE)[4], layer)})
    heir = world.engine(mode, faults)
    broken, whole = heir.add("broken", PROMPT, 4), heir.add("whole", OTHER, 4)
    _settle(heir)
    assert broken.answer == answer_of(PROMPT, 4)
    assert whole.answer == answer_of(OTHER, 4)
    # vLLM is told of all blocks of the load. Layer by layer a token had been run by then.
    wasted = 1 if mode is LoadMode.LAYER_WISE else 0
    assert broken.num_run == 37 + 3 + wasted
    assert whole.num_run == 2 + 3
    assert len(heir.free_blocks) == 32


def test_a_layer_that_comes_after_the_forward_went_on_counts_as_none(world: World) -> None:
    _store(world, PROMPT)
    came = threading.Event()
    faults = Faults(before_read=lambda layer: layer == 1 and came.wait(20))
    settings = StoreLinkerSettings(layer_timeout_s=0.05)
    heir = world.engine(LoadMode.LAYER_WISE, faults, settings=settings)
    request = heir.add("r", PROMPT, 3)
    timer = threading.Timer(0.3, came.set)
    timer.start()
    _settle(heir)
    timer.join()
    assert request.answer == answer_of(PROMPT, 3)
    assert request.num_run == 37 + 2 + 1


def test_blocks_are_not_used_again_before_every_worker_has_stored_them(
    world: World, mode: LoadMode
) -> None:
    faults = Faults()
    faults.writable.clear()
    engine = world.engine(mode, faults, num_blocks=12)
    first = engine.add("first", PROMPT, 2)
    _until(engine, lambda: first.status is Status.FINISHED)
    second = engine.add("second", OTHER, 2)
    for _ in range(20):
        engine.step()
    # One worker has stored them, the other has not.
    assert len(engine.free_blocks) == 12 - 10
    assert second.status is Status.WAITING
    faults.writable.set()
    _settle(engine)
    assert second.answer == answer_of(OTHER, 2)
    heir = world.engine(mode)
    again = heir.add("again", PROMPT, 2)
    _settle(heir)
    assert again.answer == answer_of(PROMPT, 2)
    assert again.num_run == 2


def test_a_store_that_hangs_in_one_worker_costs_no_more_than_computing(
    world: World, mode: LoadMode
) -> None:
    """Behind a call that hangs the linker refuses, by an exception, what is begun."""
    _store(world, PROMPT)
    faults = Faults()
    faults.writable.clear()
    settings = StoreLinkerSettings(hang_s=0.05)
    engine = world.engine(mode, faults, num_blocks=64, settings=settings)
    first = engine.add("first", OTHER, 2)
    _until(engine, lambda: first.status is Status.FINISHED)
    _until(engine, lambda: engine.hangs)
    requests = [engine.add(f"{index}", PROMPT, 4) for index in range(3)]
    _until(engine, lambda: all(one.status is Status.FINISHED for one in requests))
    assert [one.answer for one in requests] == [answer_of(PROMPT, 4)] * 3
    faults.writable.set()
    _settle(engine)
    assert len(engine.free_blocks) == 64
