from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from radixlink_contracts import BatchIndex
from radixlink_linker._layer_counter import LayerDoneCounter

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_LAYERS = 4


class Watched(threading.Condition):
    """A condition that tells of each wait, once the lock is about to be let go for it."""

    def __init__(self, counter: LayerDoneCounter) -> None:
        super().__init__(counter._lock)
        self.waits = threading.Semaphore(0)

    @override
    def wait(self, timeout: float | None = None) -> bool:
        self.waits.release()
        return super().wait(timeout)


class World:
    """A counter, and threads that wait on it."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.counter = LayerDoneCounter(NUM_LAYERS, timeout_s)
        self.watched = Watched(self.counter)
        self.counter._changed = self.watched  # type: ignore[misc]

    def waiting(self, call: Callable[[], object]) -> threading.Thread:
        """A thread that makes a call, and waits within it."""
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        self.wait_again()
        assert thread.is_alive()
        return thread

    def wait_again(self) -> None:
        """Return when a thread waits; whoever takes the condition from now on is not ahead of it."""
        assert self.watched.waits.acquire(timeout=10)
        with self.watched:
            pass


def ended(thread: threading.Thread) -> bool:
    thread.join(10)
    return not thread.is_alive()


def opened(counter: LayerDoneCounter) -> BatchIndex:
    """A batch that the next forward waits for."""
    batch = counter.update_producer()
    counter.set_consumer(batch)
    return batch


# -- one thread: what is decided does not wait -----------------------------------------------------


def test_every_batch_has_an_index_of_its_own() -> None:
    counter = LayerDoneCounter(NUM_LAYERS, 60.0)
    batches = [counter.update_producer() for _ in range(3)]
    counter.reset()
    batches.append(counter.update_producer())
    assert len(set(batches)) == 4


def test_a_complete_batch_is_finished_at_once_in_any_order_of_layers() -> None:
    counter = LayerDoneCounter(NUM_LAYERS, 60.0)
    batch = opened(counter)
    for layer in (2, 0, 3, 1, 1):
        counter.complete(batch, layer)
    for layer in range(NUM_LAYERS):
        counter.wait_until(layer)
    assert counter.finish(batch)


def test_after_a_failure_every_wait_returns() -> None:
    counter = LayerDoneCounter(NUM_LAYERS, 60.0)
    batch = opened(counter)
    counter.complete(batch, 0)
    counter.fail(batch)
    for layer in range(NUM_LAYERS):
        counter.wait_until(layer)
    # What failed does not land later, and what had landed did.
    counter.complete(batch, 1)
    assert counter._batches[batch].missing == {1, 2, 3}
    assert not counter.finish(batch)


def test_a_failure_takes_back_no_layer() -> None:
    counter = LayerDoneCounter(NUM_LAYERS, 60.0)
    batch = opened(counter)
    for layer in range(NUM_LAYERS):
        counter.complete(batch, layer)
    counter.fail(batch)
    assert counter.finish(batch)


def test_what_nobody_knows_is_waited_for_by_nobody() -> None:
    counter = LayerDoneCounter(NUM_LAYERS, 60.0)
    counter.wait_until(0)
    counter.set_consumer(BatchIndex(77))
    counter.wait_until(0)
    counter.complete(BatchIndex(77), 0)
    counter.fail(BatchIndex(77))
    assert counter.finish(BatchIndex(77))
    counter.set_consumer(None)
    counter.wait_until(0)
    # A layer that is no layer of the model never comes, so it is not missing.
    opened(counter)
    counter.wait_until(NUM_LAYERS)


@pytest.mark.parametrize("complete", [False, True])
def test_a_finished_batch_is_forgotten(*, complete: bool) -> None:
    counter = LayerDoneCounter(NUM_LAYERS, 60.0)
    batch = opened(counter)
    for layer in range(NUM_LAYERS if complete else 1):
        counter.complete(batch, layer)
    counter.fail(batch)
    assert counter.finish(batch) is complete
    assert counter._batches == {}
    assert counter.finish(batch)
    counter.wait_until(3)


def test_only_the_batch_of_the_forward_is_waited_for() -> None:
    counter = LayerDoneCounter(NUM_LAYERS, 60.0)
    first = opened(counter)
    second = opened(counter)
    for layer in range(NUM_LAYERS):
        counter.complete(second, layer)
        counter.wait_until(layer)
    # Another batch that ends is not what the forward waits for.
    counter.fail(first)
    assert not counter.finish(first)
    counter.wait_until(0)
    assert counter.finish(second)


def test_a_deadline_that_has_passed_fails_the_batch_and_raises_nothing() -> None:
    counter = LayerDoneCounter(NUM_LAYERS, 0.0)
    batch = opened(counter)
    counter.complete(batch, 0)
    counter.wait_until(0)
    # The layer that was there is no reason to fail.
    counter.complete(batch, 1)
    assert counter._batches[batch].missing == {2, 3}
    counter.wait_until(2)
    counter.complete(batch, 2)
    counter.complete(batch, 3)
    assert not counter.finish(batch)


# -- two threads: what is not decided waits --------------------------------------------------------


def test_a_forward_runs_layer_by_layer_behind_the_thread_that_brings_them() -> None:
    world = World()
    counter = world.counter
    batch = opened(counter)
    computed: list[int] = []

    def forward() -> None:
        for layer in range(NUM_LAYERS):
            counter.wait_until(layer)
            computed.append(layer)

    thread = world.waiting(forward)
    for layer in range(NUM_LAYERS - 1):
        assert computed == list(range(layer))
        counter.complete(batch, layer)
        world.wait_again()
    # A later layer alone lets nobody go further; here it is the last that is missing.
    assert computed == [0, 1, 2]
    counter.complete(batch, 3)
    assert ended(thread)
    assert computed == [0, 1, 2, 3]
    assert counter.finish(batch)


def test_a_later_layer_lets_nobody_go_on_at_an_earlier_one() -> None:
    world = World()
    batch = opened(world.counter)
    thread = world.waiting(lambda: world.counter.wait_until(0))
    for layer in (3, 2, 1):
        world.counter.complete(batch, layer)
        world.wait_again()
        assert thread.is_alive()
    world.counter.complete(batch, 0)
    assert ended(thread)


@pytest.mark.parametrize("end", ["fail", "reset"])
@pytest.mark.parametrize("waits", ["wait_until", "finish"])
def test_whoever_waits_is_let_go(end: str, waits: str) -> None:
    world = World()
    counter = world.counter
    batch = opened(counter)
    counter.complete(batch, 0)
    answers: list[bool | None] = []

    def wait() -> None:
        answers.append(counter.wait_until(2) if waits == "wait_until" else counter.finish(batch))

    thread = world.waiting(wait)
    if end == "fail":
        counter.fail(batch)
    else:
        counter.reset()
    assert ended(thread)
    assert answers == [None if waits == "wait_until" else False]
    # And whoever comes later does not wait.
    counter.wait_until(3)
    assert counter._consumer is (batch if (end, waits) == ("fail", "wait_until") else None)


def test_a_deadline_that_passes_while_they_wait_lets_all_go() -> None:
    world = World(timeout_s=0.05)
    counter = world.counter
    batch = opened(counter)
    threads = [
        threading.Thread(target=counter.wait_until, args=(layer,)) for layer in range(NUM_LAYERS)
    ]
    for thread in threads:
        thread.start()
    assert all(ended(thread) for thread in threads)
    assert not counter.finish(batch)


def test_a_batch_may_be_finished_while_its_forward_waits() -> None:
    world = World()
    counter = world.counter
    batch = opened(counter)
    forward = world.waiting(lambda: counter.wait_until(3))
    scheduler = world.waiting(lambda: counter.finish(batch))
    for layer in range(NUM_LAYERS):
        counter.complete(batch, layer)
    assert ended(forward)
    assert ended(scheduler)
    assert counter._batches == {}


@pytest.mark.parametrize("turn", range(3))
def test_no_wait_is_over_before_its_layer_however_the_threads_are_scheduled(turn: int) -> None:
    """Real threads, no order but the counter's: what a forward finds behind a wait is there."""
    del turn
    counter = LayerDoneCounter(NUM_LAYERS, 60.0)
    there: dict[BatchIndex, set[int]] = {}
    early: list[tuple[BatchIndex, int]] = []
    started = threading.Barrier(2)
    rounds = 200
    batches: list[BatchIndex] = []

    def bring() -> None:
        for turn in range(rounds):
            started.wait(10)
            batch = batches[turn]
            for layer in range(NUM_LAYERS):
                there[batch].add(layer)
                counter.complete(batch, layer)

    bringer = threading.Thread(target=bring, daemon=True)
    bringer.start()
    for _ in range(rounds):
        batch = opened(counter)
        there[batch] = set()
        batches.append(batch)
        started.wait(10)
        for layer in range(NUM_LAYERS):
            counter.wait_until(layer)
            if layer not in there[batch]:
                early.append((batch, layer))
        assert counter.finish(batch)
    assert ended(bringer)
    assert early == []
    assert counter._batches == {}
