"""Requests that end in any state: what is stored of them is right, and blocks are not used too early."""

from __future__ import annotations

import threading

import hypothesis.strategies as st
from hypothesis import given, settings
from tests.integration.connector.fake_vllm import (
    NUM_WORKERS,
    FakeEngine,
    FakeRequest,
    Status,
    answer_of,
)
from tests.integration.connector.world import OTHER, PROMPT, Faults, World, settle, until

from radixlink_contracts import LoadMode


def test_a_request_aborted_before_the_store_has_answered_leaves_nothing(
    world: World, mode: LoadMode
) -> None:
    world.fill(PROMPT)
    faults = Faults()
    faults.answering.clear()
    engine = world.engine(mode, faults)
    request = engine.add("r", PROMPT, 2)
    engine.step()
    assert request.status is Status.WAITING
    engine.abort(request)
    assert engine.is_idle
    faults.answering.set()
    again = engine.add("again", PROMPT, 2)
    settle(engine)
    assert (again.answer, again.num_run) == (answer_of(PROMPT, 2), 2)


def test_a_request_aborted_while_its_load_is_on_its_way_offers_nothing(
    world: World, mode: LoadMode
) -> None:
    """The load fails later, so that its blocks hold what was in them before."""
    world.fill(PROMPT)
    aborted = threading.Event()

    def lose_and_abort(layer: int) -> None:
        if not aborted.is_set():
            world.drop(NUM_WORKERS - 1, PROMPT)
            engine.abort_in_flight(request)
            aborted.set()

    engine = world.engine(mode, Faults(before_read=lose_and_abort))
    request = engine.add("r", PROMPT, 2)
    until(engine, lambda: aborted.is_set() and engine.is_idle)
    assert world.pages_of(PROMPT[:36]) == [9, 0]
    heir = world.engine(mode)
    again = heir.add("again", PROMPT, 2)
    settle(heir)
    assert (again.answer, again.num_run) == (answer_of(PROMPT, 2), 37 + 1)
    assert len(engine.free_blocks) == len(heir.free_blocks) == 32


def test_blocks_of_an_aborted_request_are_not_used_again_before_its_load_has_ended(
    world: World,
) -> None:
    world.fill(PROMPT)
    reads, readable = threading.Event(), threading.Event()

    def hang(layer: int) -> None:
        reads.set()
        assert readable.wait(20)

    engine = world.engine(LoadMode.STAGED, Faults(before_read=hang), num_blocks=12)
    request = engine.add("r", PROMPT, 2)
    until(engine, reads.is_set)
    engine.abort(request)
    other = engine.add("other", OTHER, 2)
    for _ in range(20):
        engine.step()
    assert len(engine.free_blocks) == 12 - 10
    assert other.status is Status.WAITING
    readable.set()
    settle(engine)
    assert other.answer == answer_of(OTHER, 2)
    assert world.pages_of(OTHER[:28]) == [7, 7]
    assert len(engine.free_blocks) == 12


def test_a_request_aborted_after_its_load_offers_all_that_it_has(
    world: World, mode: LoadMode
) -> None:
    world.fill(PROMPT)
    engine = world.engine(mode)
    request = engine.add("r", PROMPT, 8)
    until(engine, lambda: len(request.answer) == 3)
    assert request.num_run == 3
    for worker in range(NUM_WORKERS):
        world.drop(worker, PROMPT)
    engine.abort(request)
    settle(engine)
    assert world.pages_of(PROMPT[:36]) == [9, 9]


def test_a_request_aborted_between_its_load_and_its_forward_offers_what_was_loaded(
    world: World,
) -> None:
    world.fill(PROMPT)
    engine = world.engine(LoadMode.STAGED)
    request = engine.add("r", PROMPT, 8)
    until(engine, lambda: request.status is Status.RUNNING)
    assert request.num_run == 0
    for worker in range(NUM_WORKERS):
        world.drop(worker, PROMPT)
    engine.abort(request)
    settle(engine)
    assert world.pages_of(PROMPT[:36]) == [9, 9]


_WHOLE = [PROMPT, OTHER, [*PROMPT[:20], *OTHER[:10]]]
_OPS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, len(_WHOLE) - 1)),
    st.tuples(st.sampled_from(["abort", "abort in flight"]), st.integers(0, 7)),
    st.tuples(st.just("drop"), st.integers(0, NUM_WORKERS - 1)),
    st.tuples(st.just("step"), st.integers(1, 4)),
)


@settings(max_examples=settings().max_examples // 4)
@given(mode=st.sampled_from(LoadMode), ops=st.lists(_OPS, max_size=30))
def test_whatever_ends_when_all_that_is_stored_and_answered_is_right(
    mode: LoadMode, ops: list[tuple[str, int]]
) -> None:
    world = World()
    world.fill(PROMPT)
    engine = world.engine(mode, num_blocks=40)
    try:
        _run(world, engine, ops)
    finally:
        for one in world.engines:
            one.close()


def _run(world: World, engine: FakeEngine, ops: list[tuple[str, int]]) -> None:
    requests: list[tuple[FakeRequest, list[int]]] = []
    for number, (op, which) in enumerate(ops):
        alive = [one for one, _ in requests if one.status is not Status.FINISHED]
        match op:
            case "add":
                requests.append((engine.add(f"{number}", _WHOLE[which], 3), _WHOLE[which]))
            case "abort" if alive:
                engine.abort(alive[which % len(alive)])
            case "abort in flight" if alive:
                engine.abort_in_flight(alive[which % len(alive)])
            case "drop":
                for prompt in _WHOLE:
                    world.drop(which, prompt)
            case "step":
                for _ in range(which):
                    engine.step()
            case _:
                assert not alive, "only an abort has nothing to do, where nobody is alive"
    settle(engine)
    assert len(engine.free_blocks) == 40
    for request, prompt in requests:
        assert request.answer == answer_of(prompt, 3)[: len(request.answer)]
    for prompt in _WHOLE:
        world.pages_of(prompt[: len(prompt) // 4 * 4])
