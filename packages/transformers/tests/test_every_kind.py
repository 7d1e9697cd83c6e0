"""What holds for a model of every kind, wherever it can be restored.

Windows are of 32 tokens, which look back 31: two pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
import torch

from radixlink_contracts import PoolName, RequestId
from radixlink_transformers import EngineSettings, TokenGenerated, generate_without_cache

from .conftest import (
    BY_PAGE,
    KINDS,
    PAGE_SIZE,
    at_rest,
    other_prompt,
    recompute_at_every_page,
)

if TYPE_CHECKING:
    from radixlink_transformers import CausalModel, Progress

    from .conftest import EngineMaker, MemoryStores

NUM_NEW = 8
R1, R2, R3 = RequestId("r1"), RequestId("r2"), RequestId("r3")
LONG = other_prompt(40, 40 * PAGE_SIZE)


@attrs.frozen(kw_only=True, eq=False)
class Kind:
    """A model of one kind.

    Attributes:
        model: It.
        tolerance: By so much logits differ at most where other forwards computed them.
    """

    model: CausalModel
    tolerance: float


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return _kind(request, request.param)


def _kind(request: pytest.FixtureRequest, family: str) -> Kind:
    # A delta net adds up more in each chunk than the others do.
    tolerance = 1e-4 if family == "qwen3_next" else 1e-5
    return Kind(model=request.getfixturevalue(family), tolerance=tolerance)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


def _store(
    make: EngineMaker,
    stores: MemoryStores,
    model: CausalModel,
    prompt: tuple[int, ...],
    settings: EngineSettings = BY_PAGE,
) -> None:
    donor = make(stores, of=model, settings=settings)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)


# -- restored logits ----------------------------------------------------------------------------


def test_restored_logits_equal_recomputed_ones_at_every_page_of_a_long_prompt(
    make: EngineMaker, stores: MemoryStores, kind: Kind
) -> None:
    _store(make, stores, kind.model, LONG)
    for recomputed in recompute_at_every_page(kind.model, LONG):
        heir = make(stores, of=kind.model, settings=BY_PAGE)
        restored = heir.generate(recomputed.prompt, R1, 1)
        assert restored.figures.restored_tokens == recomputed.num_shared
        assert torch.equal(restored.first_logits, recomputed.logits)
        assert at_rest(heir)
        heir.close()


def test_restored_logits_are_close_to_those_of_one_forward(
    make: EngineMaker, stores: MemoryStores, kind: Kind, prompt: tuple[int, ...]
) -> None:
    _store(make, stores, kind.model, prompt)
    whole = EngineSettings(poison_freed_pages=True)
    for num_tokens in (17, 32, 33, 49, 100, 192):
        generation = make(stores, of=kind.model, settings=whole).generate(
            prompt[:num_tokens], R1, NUM_NEW
        )
        reference = generate_without_cache(kind.model, prompt[:num_tokens], NUM_NEW)
        assert generation.figures.restored_tokens == (num_tokens - 1) // PAGE_SIZE * PAGE_SIZE
        assert _distance(generation.first_logits, reference.first_logits) < kind.tolerance
        assert generation.tokens == reference.tokens


#: A page of each pool of each kind, of 11 that are restored; of windows, those that are seen.
WRONG = [
    ("model", PoolName.KV, 0),
    ("model", PoolName.KV, 7),
    ("mistral", PoolName.KV, 9),
    ("mistral", PoolName.KV, 10),
    ("gemma", PoolName.KV, 0),
    ("gemma", PoolName.KV, 7),
    ("gemma", PoolName.SWA, 9),
    ("gemma", PoolName.SWA, 10),
    ("gpt_oss", PoolName.KV, 0),
    ("gpt_oss", PoolName.KV, 7),
    ("gpt_oss", PoolName.SWA, 9),
    ("gpt_oss", PoolName.SWA, 10),
    ("qwen3_next", PoolName.KV, 7),
    ("qwen3_next", PoolName.MAMBA, 10),
    ("falcon_h1", PoolName.KV, 7),
    ("falcon_h1", PoolName.MAMBA, 10),
    ("bamba", PoolName.KV, 7),
    ("bamba", PoolName.MAMBA, 10),
]


@pytest.mark.parametrize(("family", "pool", "page"), WRONG)
def test_one_wrong_page_or_state_shows_a_hundred_times_the_tolerance(
    make: EngineMaker,
    stores: MemoryStores,
    request: pytest.FixtureRequest,
    prompt: tuple[int, ...],
    family: str,
    pool: PoolName,
    page: int,
) -> None:
    kind = _kind(request, family)
    _store(make, stores, kind.model, prompt)
    right = make(stores, of=kind.model, settings=BY_PAGE).generate(prompt, R1, 1)
    pages = stores.pool(pool)
    keys = list(pages)
    pages[keys[page]] = pages[keys[page - 1 if page else 4]]
    wrong = make(stores, of=kind.model, settings=BY_PAGE).generate(prompt, R1, 1)
    assert right.figures.restored_tokens == wrong.figures.restored_tokens == 176
    reference = generate_without_cache(kind.model, prompt, 1)
    assert _distance(right.first_logits, reference.first_logits) < kind.tolerance
    assert _distance(wrong.first_logits, reference.first_logits) > 100 * kind.tolerance


def test_every_kind_has_a_wrong_page_in_each_of_its_pools(
    make: EngineMaker, request: pytest.FixtureRequest
) -> None:
    tried = {(family, pool) for family, pool, _ in WRONG}
    assert tried == {
        (family, pool)
        for family in KINDS
        for pool in make(of=request.getfixturevalue(family))._device.group.pools
    }


# -- on the device ------------------------------------------------------------------------------


def test_every_page_on_the_device_is_a_boundary(
    make: EngineMaker, kind: Kind, prompt: tuple[int, ...]
) -> None:
    engine = make(of=kind.model, settings=BY_PAGE)
    engine.generate(prompt, R1, NUM_NEW)
    for num_tokens in (192, 17, 33, 100, 160):
        again = engine.generate(prompt[:num_tokens], RequestId(f"{num_tokens}"), NUM_NEW)
        assert again.figures.device_tokens == (num_tokens - 1) // PAGE_SIZE * PAGE_SIZE
        reference = generate_without_cache(kind.model, prompt[:num_tokens], NUM_NEW)
        assert again.tokens == reference.tokens
    assert at_rest(engine)


def test_an_answer_is_a_prefix_of_the_next_turn(
    make: EngineMaker, kind: Kind, prompt: tuple[int, ...]
) -> None:
    engine = make(of=kind.model)
    first = engine.generate(prompt, R1, 20)
    # 192 + 19 tokens have been run: 13 whole pages, and the last state was moved to their end.
    turn = (*prompt, *first.tokens, 1, 2, 3)
    second = engine.generate(turn, R2, NUM_NEW)
    assert second.figures.device_tokens == 208
    assert second.tokens == generate_without_cache(kind.model, turn, NUM_NEW).tokens
    assert at_rest(engine)


def test_a_swapped_page_shows_in_the_logits(
    make: EngineMaker, kind: Kind, prompt: tuple[int, ...]
) -> None:
    engine = make(of=kind.model)
    engine.generate(prompt, R1, 1)
    right = engine.first_token_without_store(prompt)
    assert right.figures.device_tokens == 176
    # The last one is seen through every window.
    control = engine.first_token_with_pages_swapped(prompt, page=10, other=7)
    assert _distance(control.logits, right.logits) > 100 * kind.tolerance
    assert at_rest(engine)


# -- room ---------------------------------------------------------------------------------------


def test_requests_push_each_other_out_and_come_back_from_the_store(
    make: EngineMaker, stores: MemoryStores, kind: Kind
) -> None:
    # Two share 6 pages; a request needs 13 of 16 pages, of 9 with windows, and up to 8 of 9 states.
    head = other_prompt(9, 96)
    prompts = [(*head, *other_prompt(seed, 96)) for seed in (1, 2)] + [other_prompt(3)]
    engine = make(stores, of=kind.model, num_pages=16, num_window_pages=9, num_states=9)
    for round_ in range(3):
        for index, prompt in enumerate(prompts):
            generation = engine.generate(prompt, RequestId(f"{round_}.{index}"), NUM_NEW)
            assert generation.tokens == generate_without_cache(kind.model, prompt, NUM_NEW).tokens
            if round_:
                figures = generation.figures
                assert figures.device_tokens + figures.restored_tokens == 176
                assert figures.restored_tokens > 0
            assert at_rest(engine)


# -- every way out ------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 5])
def test_an_interrupt_in_the_middle_leaves_locks_and_slots_as_they_were(
    make: EngineMaker, stores: MemoryStores, kind: Kind, prompt: tuple[int, ...], after: int
) -> None:
    _store(make, stores, kind.model, prompt, EngineSettings())
    heir = make(stores, of=kind.model, num_window_pages=14)
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
    assert generation.tokens == generate_without_cache(kind.model, prompt, NUM_NEW).tokens
    assert at_rest(heir)
