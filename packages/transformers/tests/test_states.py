"""Models with recurrent states beside full attention, restored wherever a state was kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from radixlink_contracts import EvictParams, PoolName, RequestId
from radixlink_contracts.errors import CapacityError, ContractError
from radixlink_transformers import EngineSettings, TokenGenerated, generate_without_cache

from .conftest import PAGE_SIZE, at_rest, other_prompt, recompute_at_every_page

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import InsertParams, InsertResult
    from radixlink_transformers import CausalModel, Progress

    from .conftest import EngineMaker, MemoryStores

NUM_NEW = 8
R1, R2, R3 = RequestId("r1"), RequestId("r2"), RequestId("r3")
#: A state behind every page, and the same chunks everywhere, so that sums are split alike.
BY_PAGE = EngineSettings(state_interval_tokens=PAGE_SIZE, poison_freed_pages=True)
LONG = other_prompt(40, 40 * PAGE_SIZE)
#: What a delta net computes in other chunks differs by up to 4e-4, the others by 5e-6.
TOLERANCE = 1e-3


@pytest.fixture(params=["qwen3_next", "falcon_h1", "bamba"])
def recurrent(request: pytest.FixtureRequest) -> CausalModel:
    found: CausalModel = request.getfixturevalue(request.param)
    return found


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


# -- restored logits ----------------------------------------------------------------------------


def test_restored_logits_equal_recomputed_ones_at_every_page_of_a_long_prompt(
    make: EngineMaker, stores: MemoryStores, recurrent: CausalModel
) -> None:
    donor = make(stores, of=recurrent, settings=BY_PAGE)
    donor.generate(LONG, R1, 1)
    assert donor.settle(10)
    for recomputed in recompute_at_every_page(recurrent, LONG):
        heir = make(stores, of=recurrent, settings=BY_PAGE)
        restored = heir.generate(recomputed.prompt, R1, 1)
        assert restored.figures.restored_tokens == recomputed.num_shared
        assert torch.equal(restored.first_logits, recomputed.logits)
        assert at_rest(heir)
        heir.close()


def test_restored_logits_are_close_to_those_of_one_forward(
    make: EngineMaker, stores: MemoryStores, recurrent: CausalModel, prompt: tuple[int, ...]
) -> None:
    donor = make(stores, of=recurrent, settings=BY_PAGE)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)
    for num_tokens in (17, 33, 100, 192):
        generation = make(stores, of=recurrent).generate(prompt[:num_tokens], R1, NUM_NEW)
        reference = generate_without_cache(recurrent, prompt[:num_tokens], NUM_NEW)
        assert generation.figures.restored_tokens == (num_tokens - 1) // PAGE_SIZE * PAGE_SIZE
        assert _distance(generation.first_logits, reference.first_logits) < TOLERANCE
        assert generation.tokens == reference.tokens


@pytest.mark.parametrize(("pool", "page"), [(PoolName.KV, 7), (PoolName.MAMBA, 10)])
def test_one_wrong_page_or_state_shows_a_hundred_times_what_rounding_does(
    make: EngineMaker,
    stores: MemoryStores,
    recurrent: CausalModel,
    prompt: tuple[int, ...],
    pool: PoolName,
    page: int,
) -> None:
    donor = make(stores, of=recurrent, settings=BY_PAGE)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)
    right = make(stores, of=recurrent, settings=BY_PAGE).generate(prompt, R1, 1)
    pages = stores.pool(pool)
    keys = list(pages)
    pages[keys[page]] = pages[keys[page - 1]]
    wrong = make(stores, of=recurrent, settings=BY_PAGE).generate(prompt, R1, 1)
    assert right.figures.restored_tokens == wrong.figures.restored_tokens == 176
    reference = generate_without_cache(recurrent, prompt, 1)
    rounding = _distance(right.first_logits, reference.first_logits)
    assert rounding < TOLERANCE
    assert _distance(wrong.first_logits, reference.first_logits) > 100 * max(rounding, 1e-5)


def test_without_its_state_a_page_is_no_boundary(
    make: EngineMaker, stores: MemoryStores, falcon_h1: CausalModel, prompt: tuple[int, ...]
) -> None:
    donor = make(stores, of=falcon_h1, settings=BY_PAGE)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)
    states = stores.pool(PoolName.MAMBA)
    for key in list(states)[8:11]:
        del states[key]
    heir = make(stores, of=falcon_h1, settings=BY_PAGE)
    generation = heir.generate(prompt, R1, NUM_NEW)
    assert generation.figures.restored_tokens == 8 * PAGE_SIZE
    assert generation.tokens == generate_without_cache(falcon_h1, prompt, NUM_NEW).tokens
    assert at_rest(heir)


# -- where states are kept ----------------------------------------------------------------------


def test_states_are_kept_at_the_models_chunks_and_behind_the_last_page(
    make: EngineMaker, falcon_h1: CausalModel
) -> None:
    engine = make(of=falcon_h1)
    prompt = other_prompt(5, 120)
    engine.generate(prompt, R1, 1)
    # Chunks of 32; 112 is the last page.
    on_device = {n: engine.num_tokens_on_device(prompt[: n + 1]) for n in range(15, 120, 16)}
    assert on_device == {15: 0, 31: 0, 47: 32, 63: 32, 79: 64, 95: 64, 111: 96}
    assert engine.num_tokens_on_device(prompt) == 112
    assert at_rest(engine)


def test_a_state_is_kept_where_prompts_part(make: EngineMaker, falcon_h1: CausalModel) -> None:
    settings = EngineSettings(state_interval_tokens=1024, poison_freed_pages=True)
    engine = make(of=falcon_h1, settings=settings)
    head = other_prompt(1, 100)
    prompts = [(*head, *other_prompt(seed, 40)) for seed in (2, 3, 4)]
    figures = [
        engine.generate(prompt, RequestId(f"{index}"), 1).figures
        for index, prompt in enumerate(prompts)
    ]
    # The second has nothing to go on from, sees where they part, and leaves a state there.
    assert [one.device_tokens for one in figures] == [0, 0, 96]
    assert at_rest(engine)


def test_an_answer_is_a_prefix_of_the_next_turn(
    make: EngineMaker, recurrent: CausalModel, prompt: tuple[int, ...]
) -> None:
    engine = make(of=recurrent)
    first = engine.generate(prompt, R1, 20)
    # 192 + 19 tokens have been run: the last state was moved to 208.
    turn = (*prompt, *first.tokens, 1, 2, 3)
    second = engine.generate(turn, R2, NUM_NEW)
    assert second.figures.device_tokens == 208
    assert second.tokens == generate_without_cache(recurrent, turn, NUM_NEW).tokens
    assert at_rest(engine)


def test_a_checkpoint_stays_as_it_was_when_requests_go_on_from_it(
    make: EngineMaker, recurrent: CausalModel, prompt: tuple[int, ...]
) -> None:
    engine = make(of=recurrent)
    engine.generate(prompt, R1, NUM_NEW)
    expected = engine.first_token_without_store(prompt)
    assert expected.figures.device_tokens == 176
    for seed in (1, 2):
        engine.generate((*prompt[:176], *other_prompt(seed, 30)), RequestId(f"{seed}"), NUM_NEW)
    again = engine.first_token_without_store(prompt)
    assert torch.equal(again.logits, expected.logits)
    control = engine.first_token_with_pages_swapped(prompt, page=3, other=7)
    assert _distance(control.logits, expected.logits) > 1e-3
    assert at_rest(engine)


# -- room ---------------------------------------------------------------------------------------


def test_requests_push_each_other_out_and_come_back_from_the_store(
    make: EngineMaker, stores: MemoryStores, recurrent: CausalModel
) -> None:
    # Two share 6 pages; a request needs 13 of 16 pages, and up to 8 of 9 states.
    head = other_prompt(9, 96)
    prompts = [(*head, *other_prompt(seed, 96)) for seed in (1, 2)] + [other_prompt(3)]
    engine = make(stores, of=recurrent, num_pages=16, num_states=9)
    for round_ in range(3):
        for index, prompt in enumerate(prompts):
            generation = engine.generate(prompt, RequestId(f"{round_}.{index}"), NUM_NEW)
            assert generation.tokens == generate_without_cache(recurrent, prompt, NUM_NEW).tokens
            if round_:
                figures = generation.figures
                assert figures.device_tokens + figures.restored_tokens == 176
                assert figures.restored_tokens > 0
            assert at_rest(engine)


def test_with_few_slots_the_last_states_are_kept(
    make: EngineMaker, falcon_h1: CausalModel, prompt: tuple[int, ...]
) -> None:
    engine = make(of=falcon_h1, num_states=3, settings=BY_PAGE)
    engine.generate(prompt, R1, 1)
    assert engine.num_tokens_on_device((*prompt, 1)) == 192
    assert engine.num_tokens_on_device(prompt) == 176
    assert engine.num_tokens_on_device(prompt[:176]) == 0
    again = engine.generate(prompt, R2, NUM_NEW)
    assert again.figures.device_tokens == 176
    assert again.tokens == generate_without_cache(falcon_h1, prompt, NUM_NEW).tokens
    assert at_rest(engine)


def test_going_on_from_a_state_without_a_second_slot_is_refused(
    make: EngineMaker, falcon_h1: CausalModel, prompt: tuple[int, ...]
) -> None:
    engine = make(of=falcon_h1, num_states=2, settings=BY_PAGE)
    engine.generate(prompt, R1, 1)
    states = engine._device.states
    assert states is not None
    held = [states.slots.alloc() for _ in range(states.slots.available_size)]
    with pytest.raises(CapacityError, match="a state in a pool of 2"):
        engine.generate((*prompt, 1), R2, 1)
    for slot in held:
        assert slot is not None
        states.slots.free(slot)
    assert at_rest(engine)
    with pytest.raises(ContractError, match="expected at least 1 slot, got 0"):
        make(of=falcon_h1, num_states=0)


def test_states_that_were_evicted_come_back_from_the_store(
    make: EngineMaker, stores: MemoryStores, recurrent: CausalModel, prompt: tuple[int, ...]
) -> None:
    engine = make(stores, of=recurrent)
    engine.generate(prompt, R1, 1)
    assert engine.settle(10)
    engine._cache.evict(EvictParams(mamba_num=100))
    assert engine.num_tokens_on_device(prompt) == 0
    again = engine.generate(prompt, R2, NUM_NEW)
    assert again.figures.restored_tokens == 176
    assert again.tokens == generate_without_cache(recurrent, prompt, NUM_NEW).tokens
    assert at_rest(engine)


# -- every way out ------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 5])
def test_an_abort_in_the_middle_leaves_locks_and_slots_as_they_were(
    make: EngineMaker,
    stores: MemoryStores,
    recurrent: CausalModel,
    prompt: tuple[int, ...],
    after: int,
) -> None:
    donor = make(stores, of=recurrent)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)
    heir = make(stores, of=recurrent)
    heir.generate(prompt[:40], R1, 1)
    left = after

    def interrupt(progress: Progress) -> None:
        nonlocal left
        if isinstance(progress, TokenGenerated):
            left -= 1
            if left < 0:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        heir.generate(prompt, R2, NUM_NEW, on_progress=interrupt)
    assert at_rest(heir)
    generation = heir.generate(prompt, R3, NUM_NEW)
    assert generation.tokens == generate_without_cache(recurrent, prompt, NUM_NEW).tokens
    assert at_rest(heir)


@pytest.mark.parametrize("inserted", [False, True])
@pytest.mark.parametrize("num_before", [0, 2])
def test_an_interrupted_insert_leaves_each_state_one_owner(
    make: EngineMaker,
    falcon_h1: CausalModel,
    prompt: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    *,
    inserted: bool,
    num_before: int,
) -> None:
    engine = make(of=falcon_h1)
    insert: Callable[[InsertParams], InsertResult] = engine._cache.insert
    left = num_before

    def interrupted(params: InsertParams) -> InsertResult:
        nonlocal left
        left -= 1
        if left >= 0:
            return insert(params)
        if inserted:
            insert(params)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine._cache, "insert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompt, R1, NUM_NEW)
    assert at_rest(engine)
    generation = engine.generate(prompt, R2, NUM_NEW)
    assert generation.figures.device_tokens == 32 * (num_before + inserted)
    assert generation.tokens == generate_without_cache(falcon_h1, prompt, NUM_NEW).tokens
    assert at_rest(engine)
