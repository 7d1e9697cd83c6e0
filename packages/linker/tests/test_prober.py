"""`Prober`: every lookup that was handed over is answered, whatever the store raises."""

from __future__ import annotations

import asyncio
import threading
from array import array
from typing import TYPE_CHECKING, Never

import pytest
from packages.linker.tests.test_store_linker import NUM_PAGES, PAGE_SIZE, World
from typing_extensions import override

from radixlink_contracts import (
    ComponentType,
    LinkerComponent,
    PageBits,
    PoolName,
    PoolTransfer,
    RadixKey,
    RequestId,
)
from radixlink_linker import LinkerCounters, LinkerSettings, ThreadExecutor
from radixlink_linker._breaker import Breaker
from radixlink_linker._component_transfers import ComponentTransfers
from radixlink_linker._lookup import Lookup
from radixlink_linker._prober import Prober
from radixlink_testing.faults import Nameless
from radixlink_testing.linkers import InlineExecutor, ManualClock
from radixlink_testing.pages import page_keys

if TYPE_CHECKING:
    from radixlink_contracts import (
        ExternalLinkerLoadPhase,
        InsertResult,
        LinkerTransferPhase,
        PageKeys,
        PageKeySource,
        RequestKV,
        TreeNodeView,
    )


class AllPages(LinkerComponent):
    """Full attention, which asks for every page."""

    @property
    @override
    def component_type(self) -> ComponentType:
        return ComponentType.FULL

    @override
    def build_external_linker_transfer(
        self,
        phase: LinkerTransferPhase,
        node: TreeNodeView | None,
        keys: PageKeySource | None,
    ) -> PoolTransfer | None:
        assert keys is not None
        return PoolTransfer(name=PoolName.KV, keys=keys)

    @override
    def update_external_linker_load(
        self,
        phase: ExternalLinkerLoadPhase,
        *,
        request: RequestKV | None,
        full_transfer: PoolTransfer | None,
        transfer: PoolTransfer,
        prefix_len: int,
        insert_result: InsertResult | None = None,
    ) -> None:
        raise NotImplementedError


def lookup_of(name: str, first: int, last: int) -> Lookup:
    tokens = array("q", range((last - first) * PAGE_SIZE))
    return Lookup(RequestId(name), RadixKey(tokens), 0, page_keys(range(first, last)), 5.0)


def test_a_store_that_raises_no_exception_is_a_miss_and_the_next_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cancelled(*_: object) -> None:
        raise asyncio.CancelledError

    told = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: told.set())
    world = World()
    world.put(0, 3)
    executor = ThreadExecutor(num_threads=1)
    breaker = Breaker(ManualClock(), patience_s=5.0, max_hanging=4)
    components = ComponentTransfers([AllPages()])
    prober = Prober(world.linker, components, executor, breaker, LinkerCounters())
    missed, found = lookup_of("missed", 0, 2), lookup_of("found", 0, NUM_PAGES)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(world.linker._stores.store_of(world.pool), "contains", cancelled)
            prober.add(missed)
            prober.submit()
            assert told.wait(10)
        assert missed.answer == PageBits.none(2)
        assert missed.error == "CancelledError()"
        done = threading.Event()
        prober.add(found)
        prober.submit()
        executor.submit(done.set)
        assert done.wait(10)
        assert found.error is None
        assert found.answer == PageBits((1 << 3) - 1, NUM_PAGES)
    finally:
        executor.close()
        world.end()


@pytest.mark.parametrize("at", ["contains", "lookup_batch", "submit", "build"])
def test_what_has_no_text_is_a_miss_at_once_all_the_same(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nameless(*_: object) -> Never:
        raise Nameless

    world, executor, components = World(), InlineExecutor(), ComponentTransfers([AllPages()])
    world.put(0, 3)
    breaker = Breaker(ManualClock(), patience_s=5.0, max_hanging=4)
    prober = Prober(world.linker, components, executor, breaker, LinkerCounters())
    missed, found = lookup_of("missed", 0, 2), lookup_of("found", 0, NUM_PAGES)
    try:
        with monkeypatch.context() as patched:
            match at:
                case "contains":
                    store = world.linker._stores.store_of(world.pool)
                    patched.setattr(store, "contains", nameless)
                case "lookup_batch":
                    patched.setattr(world.linker, "lookup_batch", nameless)
                case "submit":
                    patched.setattr(executor, "submit", nameless)
                case _:
                    patched.setattr(components, "lookup", nameless)
            prober.add(missed)
            prober.submit()
        assert missed.answer == PageBits.none(2)
        assert missed.error is not None
        assert missed.error.endswith("Nameless")
        assert breaker.hanging() is None
        prober.add(found)
        prober.submit()
        assert found.answer == PageBits((1 << 3) - 1, NUM_PAGES)
    finally:
        world.end()


def test_an_answer_of_which_no_text_can_be_had_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unspeakable:
        @override
        def __repr__(self) -> Never:
            raise ValueError("no text")

    world, executor, components = World(), InlineExecutor(), ComponentTransfers([AllPages()])
    breaker = Breaker(ManualClock(), patience_s=5.0, max_hanging=4)
    prober = Prober(world.linker, components, executor, breaker, LinkerCounters())
    missed = lookup_of("missed", 0, 2)
    try:
        monkeypatch.setattr(world.linker, "lookup_batch", lambda _: [Unspeakable()])
        prober.add(missed)
        prober.submit()
        assert missed.answer == PageBits.none(2)
        assert missed.error is not None
        assert "expected a PoolTransferResult, got a Unspeakable" in missed.error
    finally:
        world.end()


def test_a_lookup_that_a_signal_kept_from_its_thread_does_not_count_as_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> Never:
        raise KeyboardInterrupt

    world, clock = World(), ManualClock()
    executor, components = InlineExecutor(), ComponentTransfers([AllPages()])
    breaker = Breaker(clock, patience_s=5.0, max_hanging=4)
    prober = Prober(world.linker, components, executor, breaker, LinkerCounters())
    try:
        with monkeypatch.context() as patched:
            patched.setattr(executor, "submit", interrupted)
            prober.add(lookup_of("left", 0, 2))
            with pytest.raises(KeyboardInterrupt):
                prober.submit()
        clock.advance(6.0)
        assert breaker.hanging() is None
    finally:
        world.end()


def test_by_default_there_is_a_thread_for_the_last_try_that_is_let_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, clock, world = LinkerSettings(), ManualClock(), World()
    world.put(0, 3)
    store = world.linker._stores.store_of(world.pool)
    contains = store.contains
    gate, hung = threading.Event(), threading.Semaphore(0)
    num_hanging = settings.max_hanging_lookups - 1

    def hang_at_first(keys: PageKeys) -> PageBits:
        nonlocal num_hanging
        if num_hanging:
            num_hanging -= 1
            hung.release()
            gate.wait(30)
        return contains(keys)

    monkeypatch.setattr(store, "contains", hang_at_first)
    executor = ThreadExecutor()
    breaker = Breaker(
        clock,
        patience_s=settings.lookup_timeout_s,
        max_hanging=settings.max_hanging_lookups,
    )
    prober = Prober(
        world.linker, ComponentTransfers([AllPages()]), executor, breaker, LinkerCounters()
    )

    def ask(name: str) -> Lookup:
        lookup = lookup_of(name, 0, NUM_PAGES)
        prober.add(lookup)
        prober.submit()
        return lookup

    try:
        for number in range(settings.max_hanging_lookups - 1):
            ask(f"hangs {number}")
            assert hung.acquire(timeout=10)
            clock.advance(settings.lookup_timeout_s)
            refused = ask("refused")
            assert refused.answer == PageBits.none(NUM_PAGES)
            # Past every back-off: the next one is let through.
            clock.advance(100 * settings.lookup_timeout_s)
        found, done = ask("found"), threading.Event()
        executor.submit(done.set)
        assert done.wait(10)
        assert found.answer == PageBits((1 << 3) - 1, NUM_PAGES)
        # Those that hang are lost: the store is asked as ever.
        assert breaker.refusal() is None
    finally:
        gate.set()
        executor.close()
        world.end()
