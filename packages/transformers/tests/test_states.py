"""Models with recurrent states beside full attention: where states are kept, and by whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from radixlink_contracts import EvictParams, PoolName, RequestId
from radixlink_contracts.errors import CapacityError, ContractError
from radixlink_transformers import EngineSettings, generate_without_cache

from .conftest import BY_PAGE, PAGE_SIZE, at_rest, other_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import InsertParams, InsertResult
    from radixlink_transformers import CausalModel

    from .conftest import EngineMaker, MemoryStores

NUM_NEW = 8
R1, R2, R3 = RequestId("r1"), RequestId("r2"), RequestId("r3")


@pytest.fixture(params=["qwen3_next", "falcon_h1", "bamba"])
def recurrent(request: pytest.FixtureRequest) -> CausalModel:
    found: CausalModel = request.getfixturevalue(request.param)
    return found


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


# -- where states are kept ----------------------------------------------------------------------


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


def test_without_a_second_slot_to_go_on_from_a_state_it_is_computed_from_nothing(
    make: EngineMaker, falcon_h1: CausalModel, prompt: tuple[int, ...]
) -> None:
    engine = make(of=falcon_h1, num_states=2, settings=BY_PAGE)
    engine.generate(prompt, R1, 1)
    states = engine._device.states
    assert states is not None
    held = [states.slots.alloc() for _ in range(states.slots.available_size)]
    assert len(held) == 1
    assert engine.num_tokens_on_device((*prompt, 1)) == 192
    generation = engine.generate((*prompt, 1), R2, NUM_NEW)
    assert generation.figures.computed_tokens == len(prompt) + 1
    assert generation.tokens == generate_without_cache(falcon_h1, (*prompt, 1), NUM_NEW).tokens
    for slot in held:
        assert slot is not None
        states.slots.free(slot)
    assert at_rest(engine)


def test_a_request_without_any_slot_for_its_state_is_refused(
    make: EngineMaker, falcon_h1: CausalModel, prompt: tuple[int, ...]
) -> None:
    engine = make(of=falcon_h1, num_states=2, settings=BY_PAGE)
    states = engine._device.states
    assert states is not None
    held = [states.slots.alloc() for _ in range(2)]
    with pytest.raises(CapacityError, match="a state in a pool of 2"):
        engine.generate(prompt, R1, 1)
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
