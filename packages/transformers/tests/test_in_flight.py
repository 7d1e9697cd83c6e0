"""Several requests in flight: each is answered as it would be alone, to the bit.

All forwards are of one page, so that a request's sums are split alike wherever its prefix comes
from; see `alone`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlink_contracts import ComponentType, LoadMode, PoolName, RequestId
from radixlink_contracts.errors import (
    AgreementError,
    CapacityError,
    ContractError,
    InvalidTransitionError,
)
from radixlink_linker import UnifiedRadixCache
from radixlink_transformers import (
    LoadStarted,
    LookupStarted,
    PrefillStarted,
    TokenGenerated,
    build_engine,
)
from radixlink_tree import UnifiedTreeCore

from .conftest import (
    BY_PAGE,
    FAILS,
    KINDS,
    LAYERED,
    PAGE_SIZE,
    MemoryStores,
    SoloGroup,
    alone,
    at_rest,
    failing_forwards,
    other_prompt,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_transformers import (
        CausalModel,
        EngineSettings,
        PendingGeneration,
        Progress,
        TransformersEngine,
    )

    from .conftest import EngineMaker

R1, R2, R3, R4 = RequestId("r1"), RequestId("r2"), RequestId("r3"), RequestId("r4")
LAYER_WISE = attrs.evolve(BY_PAGE, load_mode=LoadMode.LAYER_WISE)
#: Prompts that share their first 2 to 6 pages begin with one of these.
HEADS = [other_prompt(seed, 6 * PAGE_SIZE) for seed in (60, 61, 62)]


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """A model and how it loads."""

    model: CausalModel
    settings: EngineSettings


@pytest.fixture(
    scope="module",
    params=[(kind, BY_PAGE) for kind in KINDS] + [(kind, LAYER_WISE) for kind in LAYERED],
    ids=lambda param: f"{param[0]}-{param[1].load_mode.name.lower()}",
)
def case(request: pytest.FixtureRequest) -> Case:
    family, settings = request.param
    return Case(model=request.getfixturevalue(family), settings=settings)


def _store(
    make: EngineMaker, stores: MemoryStores, model: CausalModel, *prompts: tuple[int, ...]
) -> None:
    donor = make(stores, of=model, settings=BY_PAGE)
    for index, prompt in enumerate(prompts):
        donor.generate(prompt, RequestId(f"{index}"), 1)
        assert donor.settle(10)
    donor.close()


def _iterate_until(engine: TransformersEngine, happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        engine.iterate()


def _answer_all(engine: TransformersEngine) -> None:
    _iterate_until(engine, lambda: engine.num_in_flight == 0)


def _is_as_alone(
    pending: PendingGeneration, model: CausalModel, prompt: tuple[int, ...], num_new: int
) -> bool:
    expected, got = alone(model, prompt, num_new), pending.result()
    assert got.tokens == expected.tokens
    return torch.equal(got.first_logits, expected.first_logits)


# -- together -----------------------------------------------------------------------------------


def test_requests_in_flight_are_answered_as_each_would_be_alone(
    make: EngineMaker, stores: MemoryStores, case: Case
) -> None:
    _store(make, stores, case.model, HEADS[0], HEADS[1])
    engine = make(stores, of=case.model, num_pages=48, settings=case.settings)
    prompts = [
        (*HEADS[0], *other_prompt(1, 21)),
        (*HEADS[0][:64], *other_prompt(2, 40)),
        HEADS[1][:50],
        other_prompt(3, 70),
        other_prompt(4, 3),
    ]
    told: list[str] = []

    def tell(name: str) -> Callable[[Progress], None]:
        return lambda progress: told.append(name) if isinstance(progress, TokenGenerated) else None

    pending = []
    for index, prompt in enumerate(prompts):
        name = f"r{index}"
        pending.append(engine.submit(prompt, RequestId(name), 12, on_progress=tell(name)))
        engine.iterate()
    assert engine.num_in_flight == len(prompts)
    _answer_all(engine)
    for prompt, one in zip(prompts, pending, strict=True):
        assert _is_as_alone(one, case.model, prompt, 12)
    assert [one.result().figures.restored_tokens for one in pending] == [96, 64, 48, 0, 0]
    # They took turns: each had a token before any had its last.
    first = [told.index(f"r{index}") for index in range(len(prompts))]
    last = [len(told) - told[::-1].index(f"r{index}") for index in range(len(prompts))]
    assert max(first) < min(last)
    assert at_rest(engine)


@pytest.mark.parametrize("family", ["model", "gemma", "falcon_h1"])
def test_of_two_that_share_a_prefix_one_waits_for_the_load_of_the_other(
    make: EngineMaker, stores: MemoryStores, request: pytest.FixtureRequest, family: str
) -> None:
    model: CausalModel = request.getfixturevalue(family)
    _store(make, stores, model, HEADS[0])
    engine = make(stores, of=model, settings=BY_PAGE)
    stores.readable.clear()
    prompts = [(*HEADS[0], *other_prompt(seed, 10)) for seed in (1, 2, 3)]
    told: list[Progress] = []
    first = engine.submit(prompts[0], R1, 4, on_progress=told.append)
    _iterate_until(engine, lambda: LoadStarted(num_tokens=96) in told)
    behind = [engine.submit(prompts[1], R2, 4), engine.submit(prompts[2], R3, 4)]
    for _ in range(3):
        engine.iterate()
    # One load for all of them, and no lookup of those that wait.
    assert engine.num_outstanding == 1
    stores.readable.set()
    _answer_all(engine)
    for prompt, pending in zip(prompts, [first, *behind], strict=True):
        assert _is_as_alone(pending, model, prompt, 4)
    num_objects = 6 if family == "model" else 6 + (2 if family == "gemma" else 1)
    assert sum(engine.pages_by_writer.values()) == num_objects
    assert at_rest(engine)


def test_others_are_evicted_while_a_request_runs(
    make: EngineMaker, stores: MemoryStores, case: Case
) -> None:
    engine = make(stores, of=case.model, num_pages=16, settings=case.settings)
    old = other_prompt(50, 97)
    engine.generate(old, R1, 1)
    assert engine.settle(10)
    assert engine.num_tokens_on_device(old) == 96
    long, short = other_prompt(51, 100), other_prompt(52, 80)
    # 9 of the 10 pages that are free, then 6.
    running = engine.submit(long, R2, 30)
    for _ in range(12):
        engine.iterate()
    late = engine.submit(short, R3, 2)
    _iterate_until(engine, lambda: late.is_over)
    assert not running.is_over
    assert engine.num_tokens_on_device(old) < 96
    _answer_all(engine)
    assert _is_as_alone(running, case.model, long, 30)
    assert _is_as_alone(late, case.model, short, 2)
    # What went comes back.
    again = engine.generate(old, R4, 2)
    assert again.figures.restored_tokens + again.figures.device_tokens == 96
    assert again.tokens == alone(case.model, old, 2).tokens
    assert at_rest(engine)


# -- room ---------------------------------------------------------------------------------------


def test_room_is_had_in_the_order_of_arrival(make: EngineMaker, model: CausalModel) -> None:
    engine = make(num_pages=16, settings=BY_PAGE)
    prompts = {R1: other_prompt(1, 100), R2: other_prompt(2, 180), R3: other_prompt(3, 10)}
    started: list[RequestId] = []

    def tell(name: RequestId) -> Callable[[Progress], None]:
        return lambda progress: (
            started.append(name) if isinstance(progress, PrefillStarted) else None
        )

    # 9 pages, 12 and 1: the last would fit, but it is not its turn.
    pending = {
        name: engine.submit(prompt, name, 30 if name == R1 else 4, on_progress=tell(name))
        for name, prompt in prompts.items()
    }
    for _ in range(10):
        engine.iterate()
    assert started == [R1]
    assert engine.available_tokens == 7 * PAGE_SIZE
    _answer_all(engine)
    assert started == [R1, R2, R3]
    for name, prompt in prompts.items():
        assert _is_as_alone(pending[name], model, prompt, 30 if name == R1 else 4)
    assert at_rest(engine)


def test_who_waits_for_room_locks_nothing(make: EngineMaker, model: CausalModel) -> None:
    engine = make(num_pages=16, settings=BY_PAGE)
    old = other_prompt(50, 97)
    engine.generate(old, R1, 1)
    # 9 of the 10 pages that are free; then 12, of which 6 are there.
    running = engine.submit(other_prompt(1, 100), R2, 30)
    waiting = engine.submit((*old, *other_prompt(2, 80)), R3, 4)
    for _ in range(5):
        engine.iterate()
    tree = engine._tree
    assert isinstance(tree, UnifiedTreeCore)
    assert (tree.protected(ComponentType.FULL), tree.evictable(ComponentType.FULL)) == (0, 96)
    assert not waiting.is_over
    _answer_all(engine)
    assert _is_as_alone(running, model, other_prompt(1, 100), 30)
    assert _is_as_alone(waiting, model, (*old, *other_prompt(2, 80)), 4)
    assert waiting.result().figures.device_tokens == 96
    assert at_rest(engine)


def test_what_others_compute_is_not_called_restored(make: EngineMaker) -> None:
    # Without a store, the second waits for room until the first is done.
    engine = make(num_pages=8, settings=BY_PAGE)
    head = other_prompt(1, 100)
    running, waiting = (engine.submit((*head, end), name, 4) for name, end in ((R1, 1), (R2, 2)))
    _answer_all(engine)
    assert running.result().figures.computed_tokens == 101
    figures = waiting.result().figures
    assert (figures.device_tokens, figures.restored_tokens, figures.computed_tokens) == (96, 0, 5)
    assert at_rest(engine)


def test_who_does_not_fit_at_all_is_refused_while_others_run(
    make: EngineMaker, model: CausalModel
) -> None:
    engine = make(num_pages=8, settings=BY_PAGE)
    prompt = other_prompt(1, 40)
    running = engine.submit(prompt, R1, 8)
    engine.iterate()
    large = engine.submit(other_prompt(2), R2, 1)
    engine.iterate()
    assert isinstance(large.error, CapacityError)
    with pytest.raises(CapacityError, match="a pool of 128"):
        large.result()
    _answer_all(engine)
    assert _is_as_alone(running, model, prompt, 8)
    assert at_rest(engine)


# -- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["model", "gemma", "falcon_h1"])
@pytest.mark.parametrize("state", ["new", "asking", "loading", "behind", "no room", "ran", "ends"])
def test_an_abort_in_any_state_leaves_the_others_and_the_cache_as_they_were(
    make: EngineMaker,
    stores: MemoryStores,
    request: pytest.FixtureRequest,
    family: str,
    state: str,
) -> None:
    model: CausalModel = request.getfixturevalue(family)
    _store(make, stores, model, HEADS[0])
    engine = make(stores, of=model, num_pages=20, settings=BY_PAGE)
    # 9 pages of 20, up to the end of the test.
    bystander, prompt = other_prompt(70, 60), (*HEADS[0], *other_prompt(1, 40))
    others = {R1: (bystander, 80, engine.submit(bystander, R1, 80))}
    for _ in range(10):
        engine.iterate()
    told: list[Progress] = []
    if state in {"loading", "behind"}:
        stores.readable.clear()
    if state == "asking":
        stores.answering.clear()
    if state == "behind":
        first = (*HEADS[0], *other_prompt(2, 5))
        others[R3] = (first, 3, engine.submit(first, R3, 3, on_progress=told.append))
        _iterate_until(engine, lambda: LoadStarted(num_tokens=96) in told)
        told.clear()
    # 9 pages, or more than are there.
    victim = engine.submit(prompt, R2, 100 if state == "no room" else 4, on_progress=told.append)
    happened: dict[str, Callable[[], bool]] = {
        "new": lambda: True,
        "asking": lambda: LookupStarted(num_device_tokens=0) in told,
        "loading": lambda: LoadStarted(num_tokens=96) in told,
        "behind": lambda: LookupStarted(num_device_tokens=0) in told,
        "no room": lambda: engine.num_tokens_on_device(prompt) == 96,
        "ran": lambda: any(isinstance(one, PrefillStarted) for one in told),
        "ends": lambda: any(isinstance(one, TokenGenerated) for one in told),
    }
    _iterate_until(engine, happened[state])
    engine.abort(R2)
    engine.abort(R2)
    assert victim.is_over
    assert victim.error is None
    with pytest.raises(InvalidTransitionError, match="a request that is aborted"):
        victim.result()
    stores.readable.set()
    stores.answering.set()
    _answer_all(engine)
    for asked, num_new, pending in others.values():
        assert _is_as_alone(pending, model, asked, num_new)
    assert at_rest(engine)
    again = engine.submit(prompt, R2, 4)
    _answer_all(engine)
    assert _is_as_alone(again, model, prompt, 4)
    assert at_rest(engine)


@pytest.mark.parametrize("family", LAYERED)
def test_another_may_insert_more_of_a_prompt_than_a_load_of_it_brings(
    make: EngineMaker, request: pytest.FixtureRequest, family: str
) -> None:
    """One computes all of a prompt, of which another process stores the head meanwhile."""
    model: CausalModel = request.getfixturevalue(family)
    prompt = (*HEADS[0], 1)
    met = False
    for head_start in range(3, 9):
        stores = MemoryStores()
        engine = make(stores, of=model, settings=LAYER_WISE)
        computes = engine.submit(prompt, R1, 4)
        engine.iterate()
        _until_lookups_are_answered(engine)
        for _ in range(head_start):
            engine.iterate()
        _store(make, stores, model, (*HEADS[0][:48], 1))
        loads = engine.submit(prompt, R2, 4)
        engine.iterate()
        _until_lookups_are_answered(engine)
        while not loads.is_over:
            ran_before = computes.is_over
            engine.iterate()
            met = met or (computes.is_over and not ran_before)
        _answer_all(engine)
        assert _is_as_alone(computes, model, prompt, 4)
        assert _is_as_alone(loads, model, prompt, 4)
        assert at_rest(engine)
        engine.close()
    assert met


def test_the_one_whose_load_others_wait_for_can_go(
    make: EngineMaker, stores: MemoryStores, model: CausalModel
) -> None:
    _store(make, stores, model, HEADS[0])
    engine = make(stores, settings=BY_PAGE)
    stores.readable.clear()
    told: list[Progress] = []
    engine.submit((*HEADS[0], 1, 2), R1, 4, on_progress=told.append)
    _iterate_until(engine, lambda: LoadStarted(num_tokens=96) in told)
    prompt = (*HEADS[0], *other_prompt(1, 20))
    behind = engine.submit(prompt, R2, 4)
    engine.iterate()
    engine.abort(R1)
    stores.readable.set()
    _answer_all(engine)
    assert _is_as_alone(behind, model, prompt, 4)
    assert sum(engine.pages_by_writer.values()) == 6
    assert at_rest(engine)


def test_a_request_that_fails_leaves_the_others(make: EngineMaker, model: CausalModel) -> None:
    engine = make(settings=BY_PAGE)
    prompt = other_prompt(1, 40)
    before = engine.submit(prompt, R1, 8)
    failing = engine.submit((*other_prompt(2, 40), *FAILS), R2, 8)
    after = engine.submit(prompt[:20], R3, 8)
    with failing_forwards(model):
        _answer_all(engine)
    assert isinstance(failing.error, IndexError)
    assert _is_as_alone(before, model, prompt, 8)
    assert _is_as_alone(after, model, prompt[:20], 8)
    assert at_rest(engine)


@pytest.mark.parametrize("kind", [LookupStarted, LoadStarted, PrefillStarted, TokenGenerated])
@pytest.mark.parametrize(
    ("family", "settings"),
    [("model", BY_PAGE), ("gemma", LAYER_WISE), ("falcon_h1", BY_PAGE)],
    ids=["model", "gemma", "falcon_h1"],
)
def test_an_interrupt_ends_all_that_is_in_flight(
    make: EngineMaker,
    stores: MemoryStores,
    request: pytest.FixtureRequest,
    family: str,
    settings: EngineSettings,
    kind: type[object],
) -> None:
    model: CausalModel = request.getfixturevalue(family)
    _store(make, stores, model, HEADS[0])
    engine = make(stores, of=model, settings=settings)

    def interrupt(progress: Progress) -> None:
        if isinstance(progress, kind):
            raise KeyboardInterrupt

    prompts = {R1: other_prompt(1, 60), R2: (*HEADS[0], 1), R3: (*HEADS[0][:70], 2)}
    pending = {
        name: engine.submit(prompt, name, 8, on_progress=interrupt if name == R2 else None)
        for name, prompt in prompts.items()
    }
    with pytest.raises(KeyboardInterrupt):
        _answer_all(engine)
    assert engine.num_in_flight == 0
    assert all(one.is_over and one.error is None for one in pending.values())
    assert at_rest(engine)
    for name, prompt in prompts.items():
        again = engine.submit(prompt, name, 8)
        _answer_all(engine)
        assert _is_as_alone(again, model, prompt, 8)
    assert at_rest(engine)


@pytest.mark.parametrize("call", ["reset", "close", "submit", "iterate"])
def test_no_call_comes_from_within(
    make: EngineMaker, model: CausalModel, prompt: tuple[int, ...], call: str
) -> None:
    engine = make(settings=BY_PAGE)
    calls = {
        "reset": engine.reset,
        "close": engine.close,
        "submit": lambda: engine.submit(prompt, R3, 1),
        "iterate": engine.iterate,
    }

    def call_back(progress: Progress) -> None:
        if isinstance(progress, TokenGenerated):
            calls[call]()

    broken = engine.submit(prompt, R1, 2, on_progress=call_back)
    whole = engine.submit(prompt[:50], R2, 2)
    _answer_all(engine)
    with pytest.raises(InvalidTransitionError, match=f"{call}: expected no iteration to run"):
        broken.result()
    assert _is_as_alone(whole, model, prompt[:50], 2)
    assert at_rest(engine)


def test_ranks_that_do_not_agree_are_what_every_request_failed_with(
    make: EngineMaker, prompt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(settings=BY_PAGE)
    pending = [engine.submit(prompt, name, 2) for name in (R1, R2)]
    engine.iterate()
    error = AgreementError("ranks differ", by_rank={0: "a", 1: "b"}, rank=0)

    def differ(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine._cache, "step", differ)
        with pytest.raises(AgreementError):
            engine.iterate()
    assert [one.error for one in pending] == [error, error]
    assert engine.num_in_flight == 0
    engine.reset()
    assert at_rest(engine)


def test_a_name_is_of_one_request_and_no_call_comes_from_within(
    make: EngineMaker, prompt: tuple[int, ...]
) -> None:
    engine = make(settings=BY_PAGE)

    def call_back(progress: Progress) -> None:
        if isinstance(progress, TokenGenerated):
            engine.abort(R1)

    pending = engine.submit(prompt, R1, 2, on_progress=call_back)
    with pytest.raises(ContractError, match="r1 again"):
        engine.submit(prompt, R1, 2)
    with pytest.raises(InvalidTransitionError, match="a request that is on its way"):
        pending.result()
    _answer_all(engine)
    assert isinstance(pending.error, InvalidTransitionError)
    assert at_rest(engine)
    engine.submit(prompt, R2, 2)
    engine.iterate()
    engine.close()
    with pytest.raises(InvalidTransitionError, match="closed"):
        engine.iterate()


# -- layers that do not come --------------------------------------------------------------------


def _until_lookups_are_answered(engine: TransformersEngine) -> None:
    """The store answered all that was asked, so that the next step lets all of them go on at once."""
    cache = engine._cache
    assert isinstance(cache, UnifiedRadixCache)
    assert cache._wrapper is not None
    deadline = time.monotonic() + 20
    while any(lookup.answer is None for lookup in cache._wrapper._requests.lookups):
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("family", "pool", "layer_range"),
    [
        ("model", PoolName.KV, 0),
        ("model", PoolName.KV, 2),
        ("mistral", PoolName.KV, 3),
        ("gemma", PoolName.KV, 0),
        ("gemma", PoolName.SWA, 1),
        ("gpt_oss", PoolName.SWA, 1),
        ("qwen3_next", PoolName.KV, 0),
        ("falcon_h1", PoolName.KV, 2),
        ("falcon_h1", PoolName.MAMBA, 0),
        ("bamba", PoolName.MAMBA, 0),
    ],
)
def test_a_layer_that_fails_fails_one_request_of_the_batch(
    make: EngineMaker,
    stores: MemoryStores,
    request: pytest.FixtureRequest,
    family: str,
    pool: PoolName,
    layer_range: int,
) -> None:
    model: CausalModel = request.getfixturevalue(family)
    _store(make, stores, model, HEADS[0], HEADS[1])
    # The last object of the first prompt: of its page 5, or the state behind that.
    stores.torn.add((pool, layer_range, list(stores.pool(pool))[5]))
    engine = make(stores, of=model, settings=LAYER_WISE)
    running, prompts = other_prompt(3, 20), [(*head, *other_prompt(4, 20)) for head in HEADS[:2]]
    told: list[tuple[RequestId, int, Progress]] = []
    iteration = 0

    def tell(name: RequestId) -> Callable[[Progress], None]:
        return lambda progress: told.append((name, iteration, progress))

    bystander = engine.submit(running, R3, 40)
    for _ in range(5):
        engine.iterate()
    broken = engine.submit(prompts[0], R1, 6, on_progress=tell(R1))
    whole = engine.submit(prompts[1], R2, 6, on_progress=tell(R2))
    engine.iterate()
    _until_lookups_are_answered(engine)
    while engine.num_in_flight:
        iteration += 1
        engine.iterate()
    assert _is_as_alone(broken, model, prompts[0], 6)
    assert _is_as_alone(whole, model, prompts[1], 6)
    assert _is_as_alone(bystander, model, running, 40)
    assert broken.result().figures.restored_tokens == 0
    assert whole.result().figures.restored_tokens == 96
    starts = {
        name: [
            (when, one.num_cached_tokens)
            for who, when, one in told
            if who == name and isinstance(one, PrefillStarted)
        ]
        for name in (R1, R2)
    }
    if family in LAYERED:
        # Both ran in one batch, and one of them again.
        (together, loading), (later, nothing) = starts[R1]
        assert starts[R2] == [(together, 96)]
        assert (loading, nothing) == (96, 0)
        assert later > together
    else:
        # A state is loaded before the forward, and so is all else of such a model.
        assert [cached for _, cached in starts[R1]] == [0]
        assert [cached for _, cached in starts[R2]] == [96]
    assert at_rest(engine)


# -- any schedule -------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Asked:
    """One request of a schedule.

    Attributes:
        prompt: Of 1 to 136 tokens.
        num_new: How long its answer is.
        arrives: At this iteration.
        patience: Iterations after which it is aborted; None for never.
    """

    prompt: tuple[int, ...]
    num_new: int
    arrives: int
    patience: int | None


@st.composite
def _asked(draw: st.DrawFn) -> Asked:
    head, num_pages, num_more = (
        draw(st.integers(0, 2)),
        draw(st.integers(0, 6)),
        draw(st.integers(1, 40)),
    )
    return Asked(
        # The same rest for the same length, so that whole prompts are asked twice too.
        prompt=(*HEADS[head][: num_pages * PAGE_SIZE], *other_prompt(1000 + num_more, num_more)),
        num_new=draw(st.integers(1, 6)),
        arrives=draw(st.integers(0, 30)),
        patience=draw(st.none() | st.integers(0, 40)),
    )


@attrs.frozen(kw_only=True)
class Schedule:
    """Requests, and how little room there is for them.

    Attributes:
        asked: The requests.
        num_pages: At least as many as one request takes.
        num_window_pages: Likewise, of its windows.
        num_states: Likewise: one to go on from, and one to change.
        torn: A page of the first head that cannot be read.
    """

    asked: list[Asked]
    num_pages: int
    num_window_pages: int
    num_states: int
    torn: int | None


SCHEDULES = st.builds(
    Schedule,
    asked=st.lists(_asked(), min_size=2, max_size=8),
    num_pages=st.integers(9, 24),
    num_window_pages=st.integers(4, 24),
    num_states=st.integers(3, 12),
    torn=st.none() | st.integers(0, 5),
)


@pytest.fixture(scope="module")
def stocked(case: Case) -> MemoryStores:
    """A store that has two of the heads."""
    stores = MemoryStores()
    with build_engine(
        case.model,
        identity_name="tiny",
        revision="1",
        page_size=PAGE_SIZE,
        num_pages=64,
        stores=stores,
        group=SoloGroup(),
        settings=BY_PAGE,
    ) as donor:
        for index, head in enumerate(HEADS[:2]):
            donor.generate(head, RequestId(f"{index}"), 1)
            assert donor.settle(10)
    return stores


@settings(max_examples=max(4, settings().max_examples // 25))
@given(schedule=SCHEDULES)
def test_whatever_the_schedule_each_is_answered_as_alone(
    case: Case, stocked: MemoryStores, schedule: Schedule
) -> None:
    stocked.torn.clear()
    if schedule.torn is not None:
        stocked.torn.add((PoolName.KV, 0, list(stocked.pool())[schedule.torn]))
    with build_engine(
        case.model,
        identity_name="tiny",
        revision="1",
        page_size=PAGE_SIZE,
        num_pages=schedule.num_pages,
        num_window_pages=schedule.num_window_pages,
        num_states=schedule.num_states,
        stores=stocked,
        group=SoloGroup(),
        settings=case.settings,
    ) as engine:
        pending: dict[int, PendingGeneration] = {}
        aborted: set[int] = set()
        iteration = 0
        while len(pending) < len(schedule.asked) or engine.num_in_flight:
            for index, asked in enumerate(schedule.asked):
                name = RequestId(f"{index}")
                if asked.arrives == iteration:
                    pending[index] = engine.submit(asked.prompt, name, asked.num_new)
                if asked.patience is not None and iteration == asked.arrives + asked.patience:
                    if not pending[index].is_over:
                        aborted.add(index)
                    engine.abort(name)
            engine.iterate()
            iteration += 1
            assert iteration < 20_000
        for index, asked in enumerate(schedule.asked):
            if index in aborted:
                assert pending[index].error is None
            else:
                assert _is_as_alone(pending[index], case.model, asked.prompt, asked.num_new)
        assert at_rest(engine)
