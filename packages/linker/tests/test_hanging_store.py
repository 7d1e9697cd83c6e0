"""A store that hangs: what comes behind the call fails at once, and a try once in a while finds it back."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest
from packages.linker.tests.test_store_linker import World, failed, landed

from radixlink_contracts import LoadMode
from radixlink_contracts.errors import BackendUnavailableError
from radixlink_linker import StoreLinker, StoreLinkerSettings
from radixlink_testing.linkers import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from packages.linker.tests.test_store_linker import Ticket

    from radixlink_contracts import Staging

HANG_S = 5.0


class HangingWorld(World):
    """A linker whose clock a test moves."""

    def __init__(self, **settings: float) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.clock = ManualClock()
        self.linker = StoreLinker(
            pools={self.pool.name: self.pool},
            stores={self.pool.name: self.store},
            copier=self.copier,
            settings=StoreLinkerSettings(hang_s=HANG_S, **settings),  # type: ignore[arg-type]
            clock=self.clock,
        )

    def hang(self, call: str) -> Ticket:
        """An operation whose call does not return, and has not for long."""
        self.store.hanging.add(call)
        self.store.gate.clear()
        self.store.waiting.clear()
        ticket = self.offload(8, 9, at=8) if call == "put" else self.load(0, 1, at=0)
        assert self.store.waiting.wait(10)
        self.clock.advance(HANG_S)
        return ticket

    def lose_the_call(self) -> threading.Thread:
        """The store is back, but for the one call, which is lost. Returns its thread."""
        hung = self.linker._thread._thread
        assert hung is not None
        self.store.hanging.clear()
        self.clock.advance(HANG_S)
        return hung

    def let_it_return(self, hung: threading.Thread) -> None:
        """What was lost comes back late, and its thread ends."""
        self.store.gate.set()
        hung.join(10)
        assert not hung.is_alive()

    def refused(self, begin: str) -> str:
        """What the linker says to one more."""
        ticket, transfers = self.ticket(), [self.transfer(0, 1)]
        calls = {
            "load": partial(self.linker.load, ticket, transfers, LoadMode.STAGED),
            "offload": partial(self.linker.offload, ticket, transfers),
            "touch": partial(self.linker.touch, ticket, transfers),
        }
        with pytest.raises(BackendUnavailableError) as raised:
            calls[begin]()
        assert raised.value.transient
        return raised.value.message


@pytest.fixture
def world() -> Iterator[HangingWorld]:
    world = HangingWorld()
    world.put(0, 8)
    yield world
    world.end()


@pytest.mark.parametrize("call", ["open", "read", "put"])
@pytest.mark.parametrize("begin", ["load", "offload", "touch"])
def test_behind_a_call_that_hangs_nothing_is_begun(
    world: HangingWorld, call: str, begin: str
) -> None:
    world.hang(call)
    assert world.refused(begin) == f"the store hangs: {call} has not returned for 5.0 s"
    assert world.linker.counters.refused == 1
    assert "hangs" in world.linker.counters.last_error
    # Nothing of it was kept.
    assert world.linker.start_layer_wise_loading() is None


def test_what_waits_behind_a_call_that_hangs_has_failed(world: HangingWorld) -> None:
    world.store.hanging.add("open")
    world.store.gate.clear()
    stuck = world.load(0, 1)
    assert world.store.waiting.wait(10)
    waiting = world.load(1, 2, at=1)
    stored, touched = world.offload(8, 9, at=8), world.touch(0, 1)
    assert (world.loads(), world.offloads()) == ([], [])
    world.clock.advance(HANG_S)
    # The call itself is not given up: the ranks decide about that, by its deadline.
    assert world.loads() == failed(waiting)
    assert world.offloads() == failed(stored, touched)
    assert world.linker.counters.refused == 3
    world.store.gate.set()
    world.idle()
    assert world.loads() == landed(stuck)
    assert world.offloads() == []


@pytest.mark.parametrize("asked_first", ["loads", "offloads"])
def test_who_asks_for_one_kind_of_completions_alone_hears_of_a_call_that_hangs(
    world: HangingWorld, asked_first: str
) -> None:
    world.store.hanging.add("open")
    world.store.gate.clear()
    stuck = world.load(0, 1)
    assert world.store.waiting.wait(10)
    waiting = world.load(1, 2, at=1)
    stored, touched = world.offload(8, 9, at=8), world.touch(0, 1)
    world.clock.advance(HANG_S)
    if asked_first == "loads":
        assert world.linker.num_completed_loads() == 1
    else:
        assert world.linker.num_completed_offloads() == 2
    # All of it was counted, once.
    assert world.linker.counters.refused == 3
    assert (world.loads(), world.offloads()) == (failed(waiting), failed(stored, touched))
    assert world.linker.counters.refused == 3
    # What the ranks decided of the call that hangs is told to who asks for it.
    stuck.decided = True
    assert (world.offloads(), world.loads()) == ([], failed(stuck))


@pytest.mark.parametrize("call", ["open", "read"])
def test_once_the_call_has_returned_all_is_as_before(world: HangingWorld, call: str) -> None:
    stuck = world.hang(call)
    world.refused("load")
    world.store.gate.set()
    world.idle()
    after = world.load(1, 3, at=1)
    world.idle()
    assert world.loads() == landed(stuck, after)


def test_a_try_on_another_thread_finds_the_store_back(world: HangingWorld) -> None:
    stuck = world.hang("open")
    world.refused("load")
    hung = world.lose_the_call()
    found = world.load(1, 3, at=1)
    world.idle()
    assert world.loads() == [*failed(stuck), *landed(found)]
    # All is as before from here on.
    after, stored = world.load(3, 4, at=3), world.offload(8, 9, at=8)
    world.idle()
    assert (world.loads(), world.offloads()) == (landed(after), landed(stored))
    # What comes back late touches nothing, and its thread ends.
    copies = world.copier.copies
    world.let_it_return(hung)
    assert world.copier.copies == copies
    assert world.loads() == []


@pytest.mark.parametrize("call", ["open", "read", "put"])
def test_what_comes_back_late_asks_neither_the_store_nor_the_copier_for_more(
    world: HangingWorld, call: str
) -> None:
    """Another thread has the copier, which takes one call at a time, and staging of its own."""
    # It has its staging, so that it need not ask for any.
    world.load(0, 1)
    world.offload(8, 9, at=8)
    world.idle()
    world.hang(call)
    world.refused("load")
    hung = world.lose_the_call()
    found = world.load(1, 3, at=1)
    world.idle()
    assert landed(found)[0] in world.loads()
    before = (list(world.store.calls), list(world.copier.sizes), world.copier.copies)
    world.let_it_return(hung)
    assert (world.store.calls, world.copier.sizes, world.copier.copies) == before


def test_no_thread_is_left_for_another_while_it_asks_for_staging(
    world: HangingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned: list[bool] = []
    staging = world.copier.staging
    board = world.linker._board

    def asked(num_bytes: int) -> Staging:
        abandoned.append(board.abandon("it hangs") is not None)
        return staging(num_bytes)

    monkeypatch.setattr(world.copier, "staging", asked)
    ticket = world.load(0, 1)
    world.idle()
    assert world.loads() == landed(ticket)
    # For each range, which is larger than the last.
    assert abandoned == [False, False]


def test_a_try_that_hangs_too_keeps_one_thread_more_and_there_are_not_many() -> None:
    world = HangingWorld(max_hanging_calls=3)
    world.put(0, 8)
    try:
        world.hang("open")
        threads = {world.linker._thread._thread}
        for _ in range(10):
            world.clock.advance(100 * HANG_S)
            world.store.waiting.clear()
            try:
                world.load(0, 1)
            except BackendUnavailableError:
                continue
            assert world.store.waiting.wait(10)
            threads.add(world.linker._thread._thread)
        assert len(threads) == 3
        assert all(thread is not None and thread.is_alive() for thread in threads)
        world.store.gate.set()
        world.idle()
        world.loads()
        after = world.load(0, 1)
        world.idle()
        assert world.loads() == landed(after)
    finally:
        world.end()


def test_no_forward_waits_for_a_batch_behind_a_call_that_hangs(world: HangingWorld) -> None:
    world.store.hanging.add("put")
    world.store.gate.clear()
    world.fill(8, 9, at=8)
    world.offload(8, 9, at=8)
    assert world.store.waiting.wait(10)
    ticket = world.ticket()
    assert world.linker.load(ticket, [world.transfer(0, 1)], LoadMode.LAYER_WISE)
    batch = world.linker.start_layer_wise_loading()
    assert batch is not None
    world.clock.advance(HANG_S)
    assert world.loads() == failed(ticket)
    world.linker.layer_done_counter.set_consumer(batch)
    world.linker.layer_done_counter.wait_until(0)
    assert not world.linker.finish_layer_wise_loading(batch)


@pytest.mark.parametrize("waits", ["wait_until", "finish"])
def test_who_waits_for_a_layer_sees_itself_that_the_store_hangs(waits: str) -> None:
    world = HangingWorld(layer_timeout_s=3600.0)
    world.put(0, 8)
    try:
        world.store.hanging.add("put")
        world.store.gate.clear()
        world.offload(8, 9, at=8)
        assert world.store.waiting.wait(10)
        ticket = world.ticket()
        assert world.linker.load(ticket, [world.transfer(0, 1)], LoadMode.LAYER_WISE)
        batch = world.linker.start_layer_wise_loading()
        assert batch is not None
        counter = world.linker.layer_done_counter
        counter.set_consumer(batch)
        calls: dict[str, Callable[[], object]] = {
            "wait_until": partial(counter.wait_until, 0),
            "finish": partial(counter.finish, batch),
        }
        answers: list[object] = []

        def wait() -> None:
            answers.append(calls[waits]())

        # The scheduler thread is in that very wait, and asks for no completions.
        forward = threading.Thread(target=wait, daemon=True)
        forward.start()
        world.clock.advance(HANG_S)
        forward.join(10)
        assert answers == [None if waits == "wait_until" else False]
        assert world.loads() == failed(ticket)
    finally:
        world.end()


def test_a_copy_that_hangs_keeps_its_thread(world: HangingWorld) -> None:
    world.copier.gate.clear()
    ticket = world.load(0, 1)
    assert world.copier.waiting.wait(10)
    world.clock.advance(100 * HANG_S)
    # It is no store that hangs.
    behind = world.load(1, 2, at=1)
    world.copier.gate.set()
    world.idle()
    assert world.loads() == landed(ticket, behind)
