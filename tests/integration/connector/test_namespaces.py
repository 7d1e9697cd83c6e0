"""Who may share KV: what a prompt's token ids do not say keeps requests apart."""

from __future__ import annotations

import pytest
import torch
from tests.integration.connector.fake_vllm import FakeAdapter, FakeImage, answer_of
from tests.integration.connector.world import PROMPT, World, settle

from radixlink_contracts import LoadMode, Namespace

FRENCH, LEGAL = FakeAdapter(lora_name="french", bias=5), FakeAdapter(lora_name="legal", bias=6)


def test_adapters_do_not_share_and_each_finds_its_own(world: World, mode: LoadMode) -> None:
    world.fill(PROMPT)
    for _, num_run in ("computed", 37 + 1), ("loaded", 1 + 1):
        engine = world.engine(mode)
        for adapter in FRENCH, LEGAL:
            request = engine.add(adapter.lora_name, PROMPT, 2, lora_request=adapter)
            settle(engine)
            assert request.answer == answer_of(PROMPT, 2, adapter.bias)
            assert request.num_run == num_run
    for adapter in FRENCH, LEGAL:
        namespace = Namespace(extra_key=adapter.lora_name)
        assert world.pages_of(PROMPT[:36], namespace=namespace, bias=adapter.bias) == [9, 9]


def test_salts_do_not_share_and_each_finds_its_own(world: World, mode: LoadMode) -> None:
    world.fill(PROMPT)
    for num_run in 37 + 1, 1 + 1:
        engine = world.engine(mode)
        for salt in "mine", "yours":
            request = engine.add(salt, PROMPT, 2, cache_salt=salt)
            settle(engine)
            assert (request.answer, request.num_run) == (answer_of(PROMPT, 2), num_run)


def test_images_neither_load_nor_store(world: World, mode: LoadMode) -> None:
    world.fill(PROMPT)
    for worker in range(2):
        world.drop(worker, PROMPT[:8])
        assert world.pages_of(PROMPT[:36])[worker] == 7
    engine = world.engine(mode)
    cat = engine.add("cat", PROMPT, 2, mm_features=[FakeImage(bias=5)])
    settle(engine)
    assert (cat.answer, cat.num_run) == (answer_of(PROMPT, 2, 5), 37 + 1)
    # What it would have stored under these keys would not be theirs.
    assert world.pages_of(PROMPT[:36]) == [7, 7]
    world.fill(PROMPT)
    dog = engine.add("dog", PROMPT, 2, mm_features=[FakeImage(bias=6)])
    settle(engine)
    assert (dog.answer, dog.num_run) == (answer_of(PROMPT, 2, 6), 37 + 1)


def test_embeddings_neither_load_nor_store(world: World, mode: LoadMode) -> None:
    engine = world.engine(mode)
    for name in "first", "second":
        request = engine.add(name, PROMPT, 2, prompt_embeds=torch.zeros(37, 8))
        settle(engine)
        assert request.num_run == 37 + 1
    assert world.pages_of(PROMPT[:36]) == [0, 0]


@pytest.mark.parametrize("stored", [True, False])
def test_a_request_for_the_logprobs_of_its_prompt_loads_nothing_and_stores(
    world: World, mode: LoadMode, *, stored: bool
) -> None:
    if stored:
        world.fill(PROMPT)
    engine = world.engine(mode)
    request = engine.add("r", PROMPT, 2, skip_reading_prefix_cache=True)
    settle(engine)
    assert (request.answer, request.num_run) == (answer_of(PROMPT, 2), 37 + 1)
    assert world.pages_of(PROMPT[:36]) == [9, 9]
