"""The engine with the real tree, allocator, component, cache and linker, on a store in memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from radixlink_contracts import LoadMode, RequestId
from radixlink_contracts.errors import CapacityError, ContractError, InvalidTransitionError
from radixlink_transformers import (
    EngineSettings,
    LoadStarted,
    LookupStarted,
    PrefillStarted,
    Progress,
    TokenGenerated,
    build_engine,
    generate_without_cache,
)
from radixlink_transformers._forward import prefill
from radixlink_transformers._hugging_face import new_cache
from radixlink_transformers.errors import UnsupportedModelError

from .conftest import FAILS, PAGE_SIZE, SoloGroup, at_rest, failing_forwards, other_prompt, tiny

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import InsertParams
    from radixlink_transformers import CausalModel, TransformersEngine

    from .conftest import EngineMaker, MemoryStores

NUM_NEW = 8
R1, R2, R3 = RequestId("r1"), RequestId("r2"), RequestId("r3")


# -- what is computed, and what is not ----------------------------------------------------------


def test_an_engine_without_a_store_answers_like_the_reference(
    make: EngineMaker, model: CausalModel, prompt: tuple[int, ...]
) -> None:
    engine = make()
    reference = generate_without_cache(model, prompt, NUM_NEW)
    generation = engine.generate(prompt, R1, NUM_NEW)
    assert generation.tokens == reference.tokens
    assert torch.equal(generation.first_logits, reference.first_logits)
    assert generation.figures.computed_tokens == len(prompt)
    assert at_rest(engine)


def test_a_second_request_takes_its_prefix_from_the_device(
    make: EngineMaker, model: CausalModel, prompt: tuple[int, ...]
) -> None:
    engine = make()
    engine.generate(prompt, R1, NUM_NEW)
    again = engine.generate(prompt, R2, NUM_NEW)
    # The last token is always computed, so the last page of a prompt of whole pages is too.
    assert again.figures.device_tokens == 176
    assert again.figures.computed_tokens == 16
    assert again.tokens == generate_without_cache(model, prompt, NUM_NEW).tokens


def test_an_answer_is_a_prefix_of_the_next_turn(
    make: EngineMaker, model: CausalModel, prompt: tuple[int, ...]
) -> None:
    engine = make()
    first = engine.generate(prompt, R1, 20)
    # 192 + 19 tokens have KV: 13 whole pages.
    turn = (*prompt, *first.tokens, 1, 2, 3)
    second = engine.generate(turn, R2, NUM_NEW)
    assert second.figures.device_tokens == 208
    assert second.tokens == generate_without_cache(model, turn, NUM_NEW).tokens


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 32, 33, 100, 191, 192])
def test_another_engine_restores_what_the_store_has(
    make: EngineMaker,
    stores: MemoryStores,
    model: CausalModel,
    prompt: tuple[int, ...],
    num_tokens: int,
) -> None:
    donor = make(stores)
    donor.generate(prompt, R1, NUM_NEW)
    assert donor.settle(10)
    head = prompt[:num_tokens]
    heir = make(stores)
    reference = generate_without_cache(model, head, NUM_NEW)
    generation = heir.generate(head, R1, NUM_NEW)
    restored = (num_tokens - 1) // PAGE_SIZE * PAGE_SIZE
    assert generation.figures.restored_tokens == restored
    assert generation.figures.computed_tokens == num_tokens - restored
    assert (generation.first_logits - reference.first_logits).abs().max() < 1e-4
    assert generation.tokens == reference.tokens
    assert at_rest(heir)


def test_restored_logits_equal_those_of_the_same_chunks_to_the_bit(
    make: EngineMaker, stores: MemoryStores, model: CausalModel, prompt: tuple[int, ...]
) -> None:
    donor = make(stores)
    donor.generate(prompt[:100], R1, 1)
    assert donor.settle(10)
    heir = make(stores, settings=EngineSettings(chunk_tokens=40))
    generation = heir.generate(prompt, R1, 1)
    assert generation.figures.restored_tokens == 96
    kv = new_cache(model.config)
    for start, end in ((0, 100), (100, 192)):
        prefill(model, kv, prompt[start:end], start)
    same_chunks = new_cache(model.config)
    logits = torch.empty(0)
    for start, end in ((0, 96), (96, 136), (136, 176), (176, 192)):
        logits = prefill(model, same_chunks, prompt[start:end], start)
    assert torch.equal(generation.first_logits, logits)


def test_an_engine_says_who_wrote_what_it_restored(
    make: EngineMaker, stores: MemoryStores, prompt: tuple[int, ...]
) -> None:
    donor = make(stores)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)
    heir = make(stores)
    heir.generate(prompt, R1, 1)
    # This store does not know its writers.
    assert (donor.pages_by_writer, heir.pages_by_writer) == ({}, {0: 11})
    assert make().pages_by_writer == {}
    assert heir.page_size == PAGE_SIZE


def test_device_and_store_each_give_a_part(
    make: EngineMaker, stores: MemoryStores, model: CausalModel, prompt: tuple[int, ...]
) -> None:
    donor = make(stores)
    donor.generate(prompt, R1, NUM_NEW)
    assert donor.settle(10)
    heir = make(stores)
    heir.generate(prompt[:50], R1, 1)
    generation = heir.generate(prompt, R2, NUM_NEW)
    assert generation.figures.device_tokens == 48
    assert generation.figures.restored_tokens == 128
    assert generation.tokens == generate_without_cache(model, prompt, NUM_NEW).tokens


def test_a_lost_page_makes_the_prefix_shorter(
    make: EngineMaker, stores: MemoryStores, model: CausalModel, prompt: tuple[int, ...]
) -> None:
    donor = make(stores)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)
    del stores.pool()[list(stores.pool())[5]]
    generation = make(stores).generate(prompt, R1, NUM_NEW)
    assert generation.figures.restored_tokens == 5 * PAGE_SIZE
    assert generation.tokens == generate_without_cache(model, prompt, NUM_NEW).tokens


def test_a_page_lost_between_lookup_and_load_is_computed(
    make: EngineMaker, stores: MemoryStores, model: CausalModel, prompt: tuple[int, ...]
) -> None:
    donor = make(stores)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)
    heir = make(stores)

    def lose_one(progress: Progress) -> None:
        if isinstance(progress, LoadStarted):
            del stores.pool()[list(stores.pool())[3]]

    generation = heir.generate(prompt, R1, NUM_NEW, on_progress=lose_one)
    assert generation.figures.restored_tokens == 0
    assert generation.tokens == generate_without_cache(model, prompt, NUM_NEW).tokens
    assert at_rest(heir)


def test_wrong_bytes_in_a_restored_page_show_in_the_logits(
    make: EngineMaker, stores: MemoryStores, model: CausalModel, prompt: tuple[int, ...]
) -> None:
    # The store in memory checks nothing, so that a test can see what a check is for.
    donor = make(stores)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)
    pages = stores.pool()
    first, second = list(pages)[4:6]
    pages[first] = pages[second]
    generation = make(stores).generate(prompt, R1, 1)
    reference = generate_without_cache(model, prompt, 1)
    assert (generation.first_logits - reference.first_logits).abs().max() > 1e-2


def test_an_end_token_ends_the_answer(
    make: EngineMaker, model: CausalModel, prompt: tuple[int, ...]
) -> None:
    reference = generate_without_cache(model, prompt, NUM_NEW)
    end = reference.tokens[3]
    expected = reference.tokens[: reference.tokens.index(end) + 1]
    assert generate_without_cache(model, prompt, NUM_NEW, {end}).tokens == expected
    engine = make()
    assert engine.generate(prompt, R1, NUM_NEW, eos_ids={end}).tokens == expected
    assert at_rest(engine)


def test_progress_is_told_in_order(
    make: EngineMaker, stores: MemoryStores, prompt: tuple[int, ...]
) -> None:
    donor = make(stores)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)
    told: list[Progress] = []
    tokens = make(stores).generate(prompt, R1, 2, on_progress=told.append).tokens
    assert told == [
        LookupStarted(num_device_tokens=0),
        LoadStarted(num_tokens=176),
        PrefillStarted(num_cached_tokens=176, num_tokens=16),
        TokenGenerated(token=tokens[0]),
        TokenGenerated(token=tokens[1]),
    ]


def test_figures_add_up(make: EngineMaker, prompt: tuple[int, ...]) -> None:
    engine = make()
    engine.generate(prompt[:60], R1, 1)
    figures = engine.generate(prompt, R2, 1).figures
    assert figures.prompt_tokens == len(prompt)
    parts = (figures.device_tokens, figures.restored_tokens, figures.computed_tokens)
    assert parts == (48, 0, 144)
    assert figures.load_s + figures.compute_s == pytest.approx(figures.time_to_first_token_s)


# -- room ---------------------------------------------------------------------------------------


def test_requests_push_each_other_out_and_come_back_from_the_store(
    make: EngineMaker, stores: MemoryStores, model: CausalModel
) -> None:
    # Each request needs 13 of 16 pages. What is evicted is poisoned, so reading it would be NaN.
    engine = make(stores, num_pages=16)
    prompts = [other_prompt(seed) for seed in (1, 2, 3)]
    for round_ in range(3):
        for index, prompt in enumerate(prompts):
            generation = engine.generate(prompt, RequestId(f"{round_}.{index}"), NUM_NEW)
            assert generation.tokens == generate_without_cache(model, prompt, NUM_NEW).tokens
            if round_:
                figures = generation.figures
                assert figures.device_tokens + figures.restored_tokens == 176
                assert figures.restored_tokens > 0
    assert at_rest(engine)


def test_room_that_an_offload_still_reads_is_waited_for(
    make: EngineMaker, stores: MemoryStores, model: CausalModel, prompt: tuple[int, ...]
) -> None:
    engine = make(stores, num_pages=14)
    stores.writable.clear()
    engine.generate(prompt, R1, NUM_NEW)
    assert engine.num_outstanding
    timer = threading.Timer(0.2, stores.writable.set)
    timer.start()
    other = other_prompt(5)
    generation = engine.generate(other, R2, NUM_NEW)
    timer.join()
    assert generation.tokens == generate_without_cache(model, other, NUM_NEW).tokens
    assert at_rest(engine)


def test_a_request_larger_than_the_pool_is_refused_and_evicts_nothing(
    make: EngineMaker, prompt: tuple[int, ...]
) -> None:
    engine = make(num_pages=8)
    engine.generate(prompt[:64], R1, 1)
    cached = engine._tree.evictable_size
    with pytest.raises(CapacityError, match="a pool of 128") as caught:
        engine.generate(prompt, R2, 100)
    # 192 + 99 tokens are 19 pages, 4 of which are there.
    assert caught.value.needed == 304 - 64
    assert engine._tree.evictable_size == cached
    assert at_rest(engine)
    assert engine.generate(prompt[:64], R3, 1).figures.device_tokens == 48


def test_no_room_beside_what_is_locked_leaves_nothing_half_done(
    make: EngineMaker, stores: MemoryStores, prompt: tuple[int, ...]
) -> None:
    # An offload that does not end keeps its pages locked.
    engine = make(stores, num_pages=14, settings=EngineSettings(wait_timeout_s=0.05))
    stores.writable.clear()
    engine.generate(prompt, R1, NUM_NEW)
    free = engine.available_tokens
    with pytest.raises(CapacityError):
        engine.generate(other_prompt(5), R2, NUM_NEW)
    assert engine.available_tokens == free
    stores.writable.set()
    assert at_rest(engine)


# -- a slow store -------------------------------------------------------------------------------


def test_a_lookup_that_does_not_answer_is_done_without(
    make: EngineMaker, stores: MemoryStores, model: CausalModel, prompt: tuple[int, ...]
) -> None:
    engine = make(stores, settings=EngineSettings(wait_timeout_s=0.05))
    stores.answering.clear()
    generation = engine.generate(prompt, R1, NUM_NEW)
    stores.answering.set()
    assert generation.tokens == generate_without_cache(model, prompt, NUM_NEW).tokens
    assert at_rest(engine)


def test_a_load_that_does_not_end_is_done_without_and_ends_for_nobody(
    make: EngineMaker, stores: MemoryStores, model: CausalModel, prompt: tuple[int, ...]
) -> None:
    donor = make(stores)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)
    heir = make(stores, settings=EngineSettings(wait_timeout_s=0.05, poison_freed_pages=True))
    stores.readable.clear()
    generation = heir.generate(prompt, R1, NUM_NEW)
    assert generation.figures.restored_tokens == 0
    assert heir.num_outstanding
    stores.readable.set()
    assert generation.tokens == generate_without_cache(model, prompt, NUM_NEW).tokens
    assert at_rest(heir)
    assert heir.generate(prompt, R2, NUM_NEW).tokens == generation.tokens


def test_a_request_behind_an_abandoned_load_waits_for_it_and_has_it(
    make: EngineMaker,
    stores: MemoryStores,
    model: CausalModel,
    prompt: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    donor = make(stores)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)
    heir = make(stores)
    stores.readable.clear()

    def interrupt_the_wait(progress: Progress) -> None:
        if isinstance(progress, LoadStarted):
            monkeypatch.setattr("radixlink_transformers._scheduler.time.sleep", _interrupt)

    with pytest.raises(KeyboardInterrupt):
        heir.generate(prompt, R1, NUM_NEW, on_progress=interrupt_the_wait)
    monkeypatch.undo()
    assert heir.num_outstanding == 1
    timer = threading.Timer(0.1, stores.readable.set)
    timer.start()
    generation = heir.generate(prompt, R2, NUM_NEW)
    timer.join()
    assert generation.figures.restored_tokens == 176
    assert generation.tokens == generate_without_cache(model, prompt, NUM_NEW).tokens
    assert at_rest(heir)


def test_settle_says_when_it_took_too_long(
    make: EngineMaker, stores: MemoryStores, prompt: tuple[int, ...]
) -> None:
    engine = make(stores)
    stores.writable.clear()
    engine.generate(prompt, R1, 1)
    assert not engine.settle(0.01)
    stores.writable.set()
    assert engine.settle(10)


# -- every way out ------------------------------------------------------------------------------


def _interrupt(seconds: float) -> None:
    raise KeyboardInterrupt


def _interrupt_at(kind: type[object], *, after: int = 0) -> Callable[[Progress], None]:
    """A Ctrl-C at the first, second, ... event of a kind."""
    left = after

    def interrupt(progress: Progress) -> None:
        nonlocal left
        if isinstance(progress, kind):
            left -= 1
            if left < 0:
                raise KeyboardInterrupt

    return interrupt


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        (LookupStarted, 0),
        (LoadStarted, 0),
        (PrefillStarted, 0),
        (TokenGenerated, 0),
        (TokenGenerated, 5),
    ],
)
def test_an_abort_in_the_middle_leaves_locks_and_slots_as_they_were(
    make: EngineMaker,
    stores: MemoryStores,
    model: CausalModel,
    prompt: tuple[int, ...],
    kind: type[object],
    after: int,
) -> None:
    donor = make(stores)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)
    heir = make(stores)
    heir.generate(prompt[:40], R1, 1)
    assert at_rest(heir)
    with pytest.raises(KeyboardInterrupt):
        heir.generate(prompt, R2, NUM_NEW, on_progress=_interrupt_at(kind, after=after))
    assert at_rest(heir)
    generation = heir.generate(prompt, R3, NUM_NEW)
    assert generation.tokens == generate_without_cache(model, prompt, NUM_NEW).tokens
    assert at_rest(heir)


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("model", LoadMode.STAGED),
        ("model", LoadMode.LAYER_WISE),
        ("gemma", LoadMode.STAGED),
        ("gemma", LoadMode.LAYER_WISE),
        ("falcon_h1", LoadMode.STAGED),
    ],
)
def test_an_interrupt_before_any_call_leaves_locks_and_slots_as_they_were(
    make: EngineMaker,
    stores: MemoryStores,
    request: pytest.FixtureRequest,
    prompt: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    mode: LoadMode,
) -> None:
    kind: CausalModel = request.getfixturevalue(family)
    settings = EngineSettings(load_mode=mode, poison_freed_pages=True)
    donor = make(stores, of=kind)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)
    reference = generate_without_cache(kind, prompt, 2)
    done = False
    num_interrupted = 0
    while not done:
        # 14 pages hold the request and 1 of what was there, so it evicts too; so do 6 states.
        heir = make(stores, of=kind, num_pages=14, num_states=6, settings=settings)
        heir.generate(other_prompt(9, 64), R1, 1)
        assert at_rest(heir)
        with monkeypatch.context() as patched:
            _interrupt_call(patched, heir, num_interrupted)
            try:
                tokens = heir.generate(prompt, R2, 2).tokens
            except KeyboardInterrupt:
                num_interrupted += 1
            else:
                done = True
                assert tokens == reference.tokens
        assert at_rest(heir)
        assert heir.generate(prompt, R3, 2).tokens == reference.tokens
        assert at_rest(heir)
        heir.close()
    assert num_interrupted > 15


@pytest.mark.parametrize("num_old", [0, 20])
@pytest.mark.parametrize("inserted", [False, True])
def test_an_interrupted_insert_leaves_each_slot_one_owner(
    make: EngineMaker,
    model: CausalModel,
    prompt: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_old: int,
    inserted: bool,
) -> None:
    engine = make()
    if num_old:
        # Its answer is in the tree already: the insert frees duplicates.
        engine.generate(prompt, R1, num_old)
    insert = engine._cache.insert

    def interrupted(params: InsertParams) -> None:
        if inserted:
            insert(params)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine._cache, "insert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompt, R2, 40)
    assert at_rest(engine)
    assert (
        engine.generate(prompt, R3, 40).tokens == generate_without_cache(model, prompt, 40).tokens
    )
    assert at_rest(engine)


def _interrupt_call(
    patched: pytest.MonkeyPatch, engine: TransformersEngine, num_before: int
) -> None:
    """Put a Ctrl-C in the place of one call that `generate` makes on its parts."""
    left = num_before

    def guard(owner: object, name: str) -> None:
        call: Callable[..., object] = getattr(owner, name)

        def guarded(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left == -1:
                raise KeyboardInterrupt
            return call(*args, **kwargs)

        patched.setattr(owner, name, guarded)

    parts: dict[object, tuple[str, ...]] = {
        engine._cache: (
            "step",
            "match_prefix",
            "init_load_back",
            "ready_to_load_host_cache",
            "finish_loads",
            "inc_lock_ref",
            "fork_state",
            "evict",
            "insert",
        ),
        engine._device.kv: ("read", "write"),
    }
    if engine._device.windows is not None:
        parts[engine._device.windows.pool] = ("read", "write")
    if engine._device.states is not None:
        parts[engine._device.states.pool] = ("lend", "copy")
    for owner, names in parts.items():
        for name in names:
            guard(owner, name)


def test_a_forward_that_fails_leaves_locks_and_slots_as_they_were(
    make: EngineMaker, model: CausalModel, prompt: tuple[int, ...]
) -> None:
    engine = make()
    engine.generate(prompt, R1, 1)
    cached = engine._tree.evictable_size
    with failing_forwards(model), pytest.raises(IndexError):
        engine.generate((*prompt, *FAILS), R2, 4)
    assert engine._tree.evictable_size == cached
    assert at_rest(engine)


def test_an_interrupt_while_it_waits_for_the_store_leaves_nothing(
    make: EngineMaker,
    stores: MemoryStores,
    prompt: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make(stores)
    stores.answering.clear()

    with monkeypatch.context() as patched:
        patched.setattr("radixlink_transformers._scheduler.time.sleep", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompt, R1, 1)
    stores.answering.set()
    assert engine.num_outstanding == 0
    assert engine.available_tokens == 64 * PAGE_SIZE
    assert at_rest(engine)


def test_a_closed_engine_answers_no_more(
    make: EngineMaker, stores: MemoryStores, prompt: tuple[int, ...]
) -> None:
    engine = make(stores)
    engine.generate(prompt, R1, 1)
    assert stores.num_open == 1
    with engine:
        pass
    engine.close()
    assert stores.num_open == 0
    with pytest.raises(InvalidTransitionError, match="closed"):
        engine.generate(prompt, R2, 1)


def test_an_engine_that_cannot_be_built_leaves_no_store_open(
    model: CausalModel, stores: MemoryStores
) -> None:
    with pytest.raises(ContractError):
        build_engine(
            model,
            identity_name="",
            revision="1",
            page_size=PAGE_SIZE,
            num_pages=8,
            stores=stores,
            group=SoloGroup(),
        )
    assert stores.num_open == 0


def test_reset_forgets_the_device_and_not_the_store(
    make: EngineMaker, stores: MemoryStores, model: CausalModel, prompt: tuple[int, ...]
) -> None:
    engine = make(stores)
    engine.generate(prompt, R1, 1)
    assert engine.settle(10)
    engine.reset()
    assert engine.available_tokens == 64 * PAGE_SIZE
    generation = engine.generate(prompt, R2, NUM_NEW)
    assert generation.figures.restored_tokens == 176
    assert generation.tokens == generate_without_cache(model, prompt, NUM_NEW).tokens


def test_there_must_be_something_to_do(make: EngineMaker, prompt: tuple[int, ...]) -> None:
    engine = make()
    with pytest.raises(ContractError, match="empty"):
        engine.generate((), R1, 1)
    with pytest.raises(ContractError, match="max_new_tokens"):
        engine.generate(prompt, R1, 0)
    assert at_rest(engine)


# -- the other arm, and the control -------------------------------------------------------------


def test_without_the_store_the_same_token_follows_and_nothing_changes(
    make: EngineMaker, stores: MemoryStores, model: CausalModel, prompt: tuple[int, ...]
) -> None:
    donor = make(stores)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)
    heir = make(stores)
    heir.generate(prompt[:50], R1, 1)
    assert heir.settle(10)
    free, cached = heir.available_tokens, heir._tree.evictable_size
    first = heir.first_token_without_store(prompt)
    assert first.figures.device_tokens == 48
    assert first.figures.computed_tokens == 144
    reference = generate_without_cache(model, prompt, 1)
    assert first.token == reference.tokens[0]
    assert (first.logits - reference.first_logits).abs().max() < 1e-4
    assert (heir.available_tokens, heir._tree.evictable_size) == (free, cached)
    assert heir.num_outstanding == 0
    assert at_rest(heir)


def test_a_swapped_page_shows_in_the_logits(
    make: EngineMaker, stores: MemoryStores, prompt: tuple[int, ...]
) -> None:
    donor = make(stores)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)
    heir = make(stores)
    restored = heir.generate(prompt, R1, 1)
    for page in (0, 5, 10):
        control = heir.first_token_with_pages_swapped(
            prompt,
            page=page,
            other=7,
            num_prefix_tokens=restored.figures.restored_tokens,
        )
        assert (control.logits - restored.first_logits).abs().max() > 1e-2
    # The pool itself is as it was.
    right = heir.first_token_without_store(prompt)
    assert (right.logits - restored.first_logits).abs().max() < 1e-4
    assert at_rest(heir)


def test_pages_that_are_not_there_cannot_be_swapped(
    make: EngineMaker, prompt: tuple[int, ...]
) -> None:
    engine = make()
    engine.generate(prompt[:50], R1, 1)
    with pytest.raises(ContractError, match="of the 3 that are used"):
        engine.first_token_with_pages_swapped(prompt, page=0, other=3)
    with pytest.raises(ContractError, match="two different pages"):
        engine.first_token_with_pages_swapped(prompt, page=1, other=1)
    assert at_rest(engine)


# -- what callers get wrong, and other models ---------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ((1, 2, 256), r"of 0\.\.255, got 256 at 2"),
        ((1, -2, 3), r"of 0\.\.255, got -2 at 1"),
        ((1, 2**70), "token ids, got"),
        (("a", "b"), "token ids, got"),
        ((), "at least one token"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(
    make: EngineMaker, wrong: tuple[int, ...], said: str
) -> None:
    engine = make()
    with pytest.raises(ContractError, match=f"submit r1: .*{said}"):
        engine.submit(wrong, R1, 1)
    with pytest.raises(ContractError, match=f"num_tokens_on_device: .*{said}"):
        engine.num_tokens_on_device(wrong)
    assert engine.num_in_flight == 0


def test_any_integers_are_a_prompt(make: EngineMaker, prompt: tuple[int, ...]) -> None:
    engine = make()
    expected = engine.generate(prompt, R1, 2).tokens
    assert engine.generate(torch.tensor(prompt), R2, 2).tokens == expected  # type: ignore[arg-type]


def test_who_finds_no_room_is_named(make: EngineMaker, prompt: tuple[int, ...]) -> None:
    with pytest.raises(CapacityError, match="request r1: expected room"):
        make(num_pages=4).generate(prompt, R1, 1)


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), -1.0])
def test_settling_takes_a_time(make: EngineMaker, seconds: float) -> None:
    with pytest.raises(ContractError, match="settle: expected timeout_s"):
        make().settle(seconds)


def test_what_a_model_keeps_is_held_against_its_settings(make: EngineMaker) -> None:
    # One head for all queries, which this family does not say by the usual setting.
    falcon = tiny("falcon", multi_query=True, head_dim=..., num_key_value_heads=...)
    with pytest.raises(
        UnsupportedModelError, match=r"falcon: expected keys .* got \(1, 1, 1, 16\)"
    ):
        make(of=falcon)


def test_older_families_load_staged_alone(
    make: EngineMaker, stores: MemoryStores, prompt: tuple[int, ...]
) -> None:
    gpt2 = tiny("gpt2", n_positions=256, num_key_value_heads=...)
    donor = make(stores, of=gpt2)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)
    generation = make(stores, of=gpt2).generate(prompt, R1, NUM_NEW)
    assert generation.figures.restored_tokens == 176
    assert generation.tokens == generate_without_cache(gpt2, prompt, NUM_NEW).tokens
    with pytest.raises(UnsupportedModelError, match="GPT2Model: expected its layers in `layers`"):
        make(stores, of=gpt2, settings=EngineSettings(load_mode=LoadMode.LAYER_WISE))
    assert stores.num_open == 2
