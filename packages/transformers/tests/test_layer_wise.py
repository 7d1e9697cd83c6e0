"""Loads that a forward waits for layer by layer."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import attrs
import pytest
import torch

from radixlink_contracts import LoadMode, PoolName, RequestId
from radixlink_linker import StoreLinkerSettings, UnifiedRadixCache
from radixlink_transformers import (
    EngineSettings,
    LoadStarted,
    LookupStarted,
    PrefillStarted,
    TokenGenerated,
    generate_without_cache,
)
from radixlink_transformers._hugging_face import decoder_layers

from .conftest import LAYERED, at_rest, other_prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from radixlink_transformers import CausalModel, Progress

    from .conftest import EngineMaker, MemoryStores

NUM_NEW = 8
R1, R2, R3 = RequestId("r1"), RequestId("r2"), RequestId("r3")
LAYER_WISE = EngineSettings(load_mode=LoadMode.LAYER_WISE, poison_freed_pages=True)


@pytest.fixture(params=LAYERED)
def layered(request: pytest.FixtureRequest) -> CausalModel:
    """Models of full attention and of windows, alone and beside each other."""
    found: CausalModel = request.getfixturevalue(request.param)
    return found


def _places(model: CausalModel, make: EngineMaker) -> dict[tuple[PoolName, int], int]:
    """The layer of each range of each pool."""
    group = make(of=model)._device.group
    return {
        (name, layer_range): layer
        for name in group.pools
        for layer_range, layer in enumerate(group.pool(name).layers)
    }


@pytest.fixture
def ran(layered: CausalModel) -> Iterator[Callable[[Callable[[int], None]], None]]:
    """Has a function told each layer that a forward ran."""
    with ExitStack() as hooks:

        def tell(listen: Callable[[int], None]) -> None:
            for index, layer in enumerate(decoder_layers(layered)):
                handle = layer.register_forward_hook(
                    lambda module, args, output, index=index: listen(index)
                )
                hooks.callback(handle.remove)

        yield tell


def _store(
    make: EngineMaker, stores: MemoryStores, model: CausalModel, prompt: tuple[int, ...]
) -> None:
    donor = make(stores, of=model)
    donor.generate(prompt, R1, 1)
    assert donor.settle(10)


# -- the order of events ------------------------------------------------------------------------


def test_the_first_layer_runs_while_the_last_one_still_loads(
    make: EngineMaker,
    stores: MemoryStores,
    layered: CausalModel,
    prompt: tuple[int, ...],
    ran: Callable[[Callable[[int], None]], None],
) -> None:
    _store(make, stores, layered, prompt)
    places = _places(layered, make)
    events: list[tuple[str, int]] = []
    first_ran = threading.Event()

    def listen(layer: int) -> None:
        events.append(("ran", layer))
        first_ran.set()

    def may_read(pool: PoolName, layer_range: int) -> bool:
        layer = places[pool, layer_range]
        # Were anything to wait for all layers, this one would never come.
        arrives = layer < 3 or first_ran.wait(20)
        events.append(("read", layer))
        return arrives

    heir = make(stores, of=layered, settings=LAYER_WISE)
    reference = generate_without_cache(layered, prompt, NUM_NEW)
    ran(listen)
    stores.may_read = may_read
    generation = heir.generate(prompt, R1, NUM_NEW)
    assert generation.figures.restored_tokens == 176
    assert generation.tokens == reference.tokens
    assert events.index(("ran", 0)) < events.index(("read", 3))
    for layer in range(4):
        assert events.index(("read", layer)) < events.index(("ran", layer))
    assert at_rest(heir)


def test_it_is_told_what_starts_and_no_token_before_all_layers_landed(
    make: EngineMaker, stores: MemoryStores, layered: CausalModel, prompt: tuple[int, ...]
) -> None:
    _store(make, stores, layered, prompt)
    places = _places(layered, make)
    told: list[Progress | int] = []

    def may_read(pool: PoolName, layer_range: int) -> bool:
        told.append(places[pool, layer_range])
        return True

    stores.may_read = may_read
    heir = make(stores, of=layered, settings=LAYER_WISE)
    (token,) = heir.generate(prompt, R1, 1, on_progress=told.append).tokens
    layers = [one for one in told if isinstance(one, int)]
    assert layers == sorted(layers)
    assert [one for one in told if not isinstance(one, int)] == [
        LookupStarted(num_device_tokens=0),
        LoadStarted(num_tokens=176),
        PrefillStarted(num_cached_tokens=176, num_tokens=16),
        TokenGenerated(token=token),
    ]
    assert told[-1] == TokenGenerated(token=token)


# -- what is computed ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [17, 33, 100, 192])
def test_logits_are_those_of_a_staged_load_to_the_bit(
    make: EngineMaker,
    stores: MemoryStores,
    layered: CausalModel,
    prompt: tuple[int, ...],
    num_tokens: int,
) -> None:
    _store(make, stores, layered, prompt)
    head = prompt[:num_tokens]
    staged = make(stores, of=layered).generate(head, R1, NUM_NEW)
    engine = make(stores, of=layered, settings=LAYER_WISE)
    layer_wise = engine.generate(head, R1, NUM_NEW)
    assert layer_wise.figures.restored_tokens == staged.figures.restored_tokens > 0
    assert torch.equal(layer_wise.first_logits, staged.first_logits)
    assert layer_wise.tokens == staged.tokens
    assert at_rest(engine)
    # What landed is in the tree, and what was computed behind it.
    again = engine.generate(head, R2, NUM_NEW)
    assert again.figures.device_tokens == (num_tokens - 1) // 16 * 16
    assert again.tokens == staged.tokens


@pytest.mark.parametrize("on_device", [48, 160])
def test_device_and_store_each_give_a_part(
    make: EngineMaker,
    stores: MemoryStores,
    layered: CausalModel,
    prompt: tuple[int, ...],
    on_device: int,
) -> None:
    _store(make, stores, layered, prompt)
    settings = attrs.evolve(LAYER_WISE, chunk_tokens=10)
    heir = make(stores, of=layered, settings=settings)
    assert heir.generate(prompt[: on_device + 1], R1, 1).figures.restored_tokens == on_device
    # Behind 160 tokens one page is loaded, and the window begins on the device.
    generation = heir.generate(prompt, R2, NUM_NEW)
    assert generation.figures.device_tokens == on_device
    assert generation.figures.restored_tokens == 176 - on_device
    assert generation.tokens == generate_without_cache(layered, prompt, NUM_NEW).tokens
    assert at_rest(heir)


def test_requests_push_each_other_out_and_come_back_from_the_store(
    make: EngineMaker, stores: MemoryStores, layered: CausalModel
) -> None:
    engine = make(stores, of=layered, num_pages=16, num_window_pages=14, settings=LAYER_WISE)
    prompts = [other_prompt(seed) for seed in (1, 2)]
    for round_ in range(3):
        for index, prompt in enumerate(prompts):
            generation = engine.generate(prompt, RequestId(f"{round_}.{index}"), NUM_NEW)
            assert generation.tokens == generate_without_cache(layered, prompt, NUM_NEW).tokens
            if round_:
                figures = generation.figures
                assert figures.device_tokens + figures.restored_tokens == 176
                assert figures.restored_tokens > 0
            assert at_rest(engine)


def test_room_for_two_windows_is_enough_to_restore_and_to_compute(
    make: EngineMaker, stores: MemoryStores, gemma: CausalModel, prompt: tuple[int, ...]
) -> None:
    _store(make, stores, gemma, prompt)
    for num_window_pages, restored in ((4, 176), (3, 0)):
        heir = make(stores, of=gemma, num_window_pages=num_window_pages, settings=LAYER_WISE)
        generation = heir.generate((*prompt, *other_prompt(1, 30)), R1, NUM_NEW)
        assert generation.figures.restored_tokens == restored + (16 if restored else 0)
        expected = generate_without_cache(gemma, (*prompt, *other_prompt(1, 30)), NUM_NEW)
        assert generation.tokens == expected.tokens
        assert at_rest(heir)


def test_a_model_with_states_is_staged_all_the_same(
    make: EngineMaker, stores: MemoryStores, falcon_h1: CausalModel, prompt: tuple[int, ...]
) -> None:
    _store(make, stores, falcon_h1, prompt)
    heir = make(stores, of=falcon_h1, settings=LAYER_WISE)
    generation = heir.generate(prompt, R1, NUM_NEW)
    assert generation.figures.restored_tokens == 176
    assert generation.tokens == generate_without_cache(falcon_h1, prompt, NUM_NEW).tokens
    assert at_rest(heir)


# -- layers that do not come --------------------------------------------------------------------


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_layer_that_fails_leads_to_a_recompute_and_never_to_a_token(
    make: EngineMaker,
    stores: MemoryStores,
    layered: CausalModel,
    prompt: tuple[int, ...],
    failing: int,
) -> None:
    _store(make, stores, layered, prompt)
    places = _places(layered, make)
    stores.may_read = lambda pool, layer_range: places[pool, layer_range] != failing
    told: list[Progress] = []
    # The request takes 13 pages, so it has to have given back those of the load.
    heir = make(stores, of=layered, num_pages=14, settings=LAYER_WISE)
    generation = heir.generate(prompt, R1, NUM_NEW, on_progress=told.append)
    reference = generate_without_cache(layered, prompt, NUM_NEW)
    assert generation.tokens == reference.tokens
    assert torch.equal(generation.first_logits, reference.first_logits)
    figures = generation.figures
    assert (figures.restored_tokens, figures.computed_tokens) == (0, 192)
    assert told == [
        LookupStarted(num_device_tokens=0),
        LoadStarted(num_tokens=176),
        PrefillStarted(num_cached_tokens=176, num_tokens=16),
        PrefillStarted(num_cached_tokens=0, num_tokens=192),
        *(TokenGenerated(token=token) for token in reference.tokens),
    ]
    assert at_rest(heir)
    # What was computed is not what was loaded: the next request has it from the device.
    again = heir.generate(prompt, R2, NUM_NEW)
    assert again.figures.device_tokens == 176
    assert again.tokens == reference.tokens


def test_a_layer_that_does_not_come_in_time_leads_to_a_recompute(
    make: EngineMaker, stores: MemoryStores, layered: CausalModel, prompt: tuple[int, ...]
) -> None:
    _store(make, stores, layered, prompt)
    places = _places(layered, make)
    late = threading.Event()
    stores.may_read = lambda pool, layer_range: places[pool, layer_range] < 2 or late.wait(20)
    heir = make(
        stores,
        of=layered,
        settings=LAYER_WISE,
        store_settings=StoreLinkerSettings(layer_timeout_s=0.05),
    )
    generation = heir.generate(prompt, R1, NUM_NEW)
    assert not late.is_set()
    assert generation.figures.restored_tokens == 0
    assert generation.tokens == generate_without_cache(layered, prompt, NUM_NEW).tokens
    late.set()
    assert at_rest(heir)


def test_a_layer_that_came_after_its_forward_went_on_leads_to_a_recompute(
    make: EngineMaker,
    stores: MemoryStores,
    layered: CausalModel,
    prompt: tuple[int, ...],
    ran: Callable[[Callable[[int], None]], None],
) -> None:
    _store(make, stores, layered, prompt)
    places = _places(layered, make)
    went_on = threading.Event()
    stores.may_read = lambda pool, layer_range: places[pool, layer_range] != 1 or went_on.wait(20)
    heir = make(
        stores,
        of=layered,
        settings=LAYER_WISE,
        store_settings=StoreLinkerSettings(layer_timeout_s=0.05),
    )
    reference = generate_without_cache(layered, prompt, NUM_NEW)
    assert isinstance(heir._cache, UnifiedRadixCache)
    wrapper = heir._cache._wrapper
    assert wrapper is not None
    first = True

    def listen(layer: int) -> None:
        nonlocal first
        if layer == 1:
            # The gate let it run without its bytes; now they come, and all others.
            went_on.set()
        deadline = time.monotonic() + 20
        while layer == 3 and first and not wrapper.linker.num_completed_loads():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        first = first and layer < 3

    ran(listen)
    generation = heir.generate(prompt, R1, NUM_NEW)
    assert generation.figures.restored_tokens == 0
    assert generation.tokens == reference.tokens
    assert at_rest(heir)


@pytest.mark.parametrize("layer", [0, 2])
def test_an_abort_while_layers_load_leaves_locks_and_slots_as_they_were(
    make: EngineMaker,
    stores: MemoryStores,
    layered: CausalModel,
    prompt: tuple[int, ...],
    ran: Callable[[Callable[[int], None]], None],
    layer: int,
) -> None:
    _store(make, stores, layered, prompt)
    heir = make(stores, of=layered, settings=LAYER_WISE)
    interrupting = True

    def interrupt(index: int) -> None:
        nonlocal interrupting
        if interrupting and index == layer:
            interrupting = False
            raise KeyboardInterrupt

    ran(interrupt)
    with pytest.raises(KeyboardInterrupt):
        heir.generate(prompt, R1, NUM_NEW)
    assert at_rest(heir)
    # The load ended for nobody: it was kept, or the next launch came before its last layer.
    generation = heir.generate(prompt, R2, NUM_NEW)
    assert generation.figures.device_tokens in {0, 176}
    assert generation.tokens == generate_without_cache(layered, prompt, NUM_NEW).tokens
    assert at_rest(heir)


def test_a_load_that_is_refused_at_its_start_is_computed(
    make: EngineMaker,
    stores: MemoryStores,
    layered: CausalModel,
    prompt: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _store(make, stores, layered, prompt)
    heir = make(stores, of=layered, settings=LAYER_WISE)

    def refuse(*args: object) -> None:
        raise OSError("no")

    assert isinstance(heir._cache, UnifiedRadixCache)
    wrapper = heir._cache._wrapper
    assert wrapper is not None
    monkeypatch.setattr(wrapper.linker, "start_layer_wise_loading", refuse)
    generation = heir.generate(prompt, R1, NUM_NEW)
    assert generation.figures.restored_tokens == 0
    assert generation.tokens == generate_without_cache(layered, prompt, NUM_NEW).tokens
    assert at_rest(heir)
