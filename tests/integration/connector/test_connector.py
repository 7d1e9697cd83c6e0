"""The skeleton of a connector, driven by a loop like vLLM's, over the real linker and stores."""

from __future__ import annotations

import threading

import attrs
import pytest
from tests.integration.connector.fake_vllm import LAYERS, PAGE_SIZE, FakeEngine, Status, answer_of
from tests.integration.connector.skeleton import page_keys
from tests.integration.connector.world import OTHER, PROMPT, Faults, World, settle, until

from radixlink_contracts import LoadMode, PageStore, PoolLayout
from radixlink_linker import StoreLinkerSettings
from radixlink_testing import InMemoryStoreFactory
from radixlink_testing.faults import Fault, FaultKind, FaultyStore, StoreCall
from radixlink_testing.linkers import ManualClock


@attrs.frozen
class HangingStores:
    """Opens stores whose lookups hang."""

    stores: InMemoryStoreFactory
    opened: list[FaultyStore] = attrs.field(factory=list)

    @property
    def num_asked(self) -> int:
        """Lookups that came to any of them."""
        return sum(store.calls.count("contains") for store in self.opened)

    def open(self, layout: PoolLayout) -> PageStore:
        hang = Fault(StoreCall.CONTAINS, FaultKind.HANGS)
        store = FaultyStore(self.stores.open(layout), [hang])
        self.opened.append(store)
        return store

    def close(self) -> None: ...


def test_another_engine_loads_what_the_first_computed(world: World, mode: LoadMode) -> None:
    world.fill(PROMPT)
    heir = world.engine(mode)
    same, longer = heir.add("same", PROMPT, 5), heir.add("longer", [*PROMPT[:30], 1, 2, 3], 5)
    settle(heir)
    assert same.answer == answer_of(PROMPT, 5)
    assert longer.answer == answer_of([*PROMPT[:30], 1, 2, 3], 5)
    # 36 tokens came from the store, and 28; all but the last token of an answer are run.
    assert (same.num_run, longer.num_run) == (1 + 4, 5 + 4)
    assert len(heir.free_blocks) == 32


def test_a_prompt_is_asked_about_again_until_the_store_has_answered(
    world: World, mode: LoadMode
) -> None:
    world.fill(PROMPT)
    faults = Faults()
    faults.answering.clear()
    heir = world.engine(mode, faults)
    request = heir.add("r", PROMPT, 2)
    for _ in range(3):
        heir.step()
    assert request.status is Status.WAITING
    assert not request.block_ids
    faults.answering.set()
    settle(heir)
    assert request.answer == answer_of(PROMPT, 2)
    assert request.num_run == 2


@pytest.mark.parametrize("layer", [0, 2])
def test_a_block_that_one_worker_lacks_costs_its_request_a_recompute_and_no_other(
    world: World, mode: LoadMode, layer: int
) -> None:
    world.fill(PROMPT, OTHER)
    faults = Faults(torn={(page_keys(PROMPT, PAGE_SIZE)[4], layer)})
    heir = world.engine(mode, faults)
    broken, whole = heir.add("broken", PROMPT, 4), heir.add("whole", OTHER, 4)
    settle(heir)
    assert broken.answer == answer_of(PROMPT, 4)
    assert whole.answer == answer_of(OTHER, 4)
    # vLLM is told of all blocks of the load. Layer by layer a token had been run by then.
    wasted = 1 if mode is LoadMode.LAYER_WISE else 0
    assert broken.num_run == 37 + 3 + wasted
    assert whole.num_run == 2 + 3
    assert len(heir.free_blocks) == 32


def test_a_layer_that_comes_after_the_forward_went_on_counts_as_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.fill(PROMPT)
    came = threading.Event()
    faults = Faults(before_read=lambda layer: layer == 1 and came.wait(20))
    settings = StoreLinkerSettings(layer_timeout_s=0.05)
    heir = world.engine(LoadMode.LAYER_WISE, faults, settings=settings)
    request = heir.add("r", PROMPT, 3)
    connector = heir.workers[-1].connector
    wait_for_layer = connector.wait_for_layer_load

    def go_on_without(layer_name: str) -> None:
        wait_for_layer(layer_name)
        if layer_name == LAYERS[1]:
            came.set()

    monkeypatch.setattr(connector, "wait_for_layer_load", go_on_without)
    settle(heir)
    assert request.answer == answer_of(PROMPT, 3)
    assert request.num_run == 37 + 2 + 1


def test_blocks_are_not_used_again_before_every_worker_has_stored_them(
    world: World, mode: LoadMode
) -> None:
    faults = Faults()
    faults.writable.clear()
    engine = world.engine(mode, faults, num_blocks=12)
    first = engine.add("first", PROMPT, 2)
    until(engine, lambda: first.status is Status.FINISHED)
    second = engine.add("second", OTHER, 2)
    for _ in range(20):
        engine.step()
    # One worker has stored them, the other has not.
    assert len(engine.free_blocks) == 12 - 10
    assert second.status is Status.WAITING
    faults.writable.set()
    settle(engine)
    assert second.answer == answer_of(OTHER, 2)
    heir = world.engine(mode)
    again = heir.add("again", PROMPT, 2)
    settle(heir)
    assert again.answer == answer_of(PROMPT, 2)
    assert again.num_run == 2


def test_a_store_that_hangs_in_one_worker_costs_no_more_than_computing(
    world: World, mode: LoadMode
) -> None:
    """Behind a call that hangs the linker refuses, by an exception, what is begun."""
    world.fill(PROMPT)
    faults = Faults()
    faults.writable.clear()
    settings = StoreLinkerSettings(hang_s=0.05)
    engine = world.engine(mode, faults, num_blocks=64, settings=settings)
    first = engine.add("first", OTHER, 2)
    until(engine, lambda: first.status is Status.FINISHED)
    until(engine, lambda: engine.hangs)
    requests = [engine.add(f"{index}", PROMPT, 4) for index in range(3)]
    until(engine, lambda: all(one.status is Status.FINISHED for one in requests))
    assert [one.answer for one in requests] == [answer_of(PROMPT, 4)] * 3
    faults.writable.set()
    settle(engine)
    assert len(engine.free_blocks) == 64


def _beside_one_that_hangs(mode: LoadMode) -> tuple[FakeEngine, HangingStores, ManualClock]:
    """An engine whose lookups hang in one shard, though all of the prompt is stored."""
    stores = InMemoryStoreFactory()
    donor = FakeEngine([stores, stores], mode)
    donor.add("donor", PROMPT, 2)
    settle(donor)
    donor.close()
    hanging, clock = HangingStores(stores), ManualClock()
    engine = FakeEngine([stores, hanging], mode, lookup_timeout_s=5.0, clock=clock)
    return engine, hanging, clock


@pytest.mark.parametrize("aborted", [False, True])
def test_a_store_that_does_not_answer_is_a_miss_after_the_deadline_and_is_asked_no_more(
    mode: LoadMode, *, aborted: bool
) -> None:
    engine, hanging, clock = _beside_one_that_hangs(mode)
    first = engine.add("first", PROMPT, 2)
    until(engine, lambda: hanging.num_asked == 1)
    clock.advance(4.9)
    engine.step()
    assert first.status is Status.WAITING
    if aborted:
        engine.abort(first)
    clock.advance(0.2)
    settle(engine)
    if not aborted:
        assert (first.answer, first.num_run) == (answer_of(PROMPT, 2), 37 + 1)
    # Not asked: it does not wait for a deadline of its own.
    second = engine.add("second", PROMPT, 2)
    engine.step()
    assert second.status is Status.RUNNING
    settle(engine)
    assert (second.answer, second.num_run) == (answer_of(PROMPT, 2), 37 + 1)
    (left,) = engine._connector._left
    # It answers again: so do lookups.
    for store in hanging.opened:
        store.release()
    until(engine, lambda: left.num_pages is not None)
    third = engine.add("third", PROMPT, 2)
    settle(engine)
    assert (third.answer, third.num_run) == (answer_of(PROMPT, 2), 1 + 1)
    engine.close()
    assert hanging.num_asked == 2


def test_requests_aborted_at_different_times_are_all_waited_for(mode: LoadMode) -> None:
    engine, hanging, clock = _beside_one_that_hangs(mode)
    first = engine.add("first", PROMPT, 2)
    until(engine, lambda: hanging.num_asked == 1)
    engine.abort(first)
    clock.advance(3.0)
    second = engine.add("second", PROMPT, 2)
    until(engine, lambda: hanging.num_asked == 2)
    engine.abort(second)
    clock.advance(3.0)
    # The deadline of the first has passed, that of the second has not.
    third = engine.add("third", PROMPT, 2)
    engine.step()
    assert third.status is Status.RUNNING
    settle(engine)
    for store in hanging.opened:
        store.release()
    engine.close()
    assert hanging.num_asked == 2


def test_an_engine_that_gets_no_more_threads_computes(
    world: World, mode: LoadMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.fill(PROMPT)
    engine = world.engine(mode)

    def start(thread: threading.Thread) -> None:
        message = f"can't start {thread.name}"
        raise RuntimeError(message)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        first = engine.add("first", PROMPT, 2)
        settle(engine)
    assert (first.answer, first.num_run) == (answer_of(PROMPT, 2), 37 + 1)
    assert len(engine.free_blocks) == 32
    second = engine.add("second", PROMPT, 2)
    settle(engine)
    assert (second.answer, second.num_run) == (answer_of(PROMPT, 2), 1 + 1)
