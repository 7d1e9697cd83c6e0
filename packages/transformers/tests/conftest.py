"""A tiny Llama with random weights, big enough that a wrong page shows: logits reach 3 to 7."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radixlink_transformers import CausalModel


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    # Tests run beside each other, and bits must not depend on how a sum is split.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model() -> CausalModel:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.15,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(20_260)
        return cast("CausalModel", LlamaForCausalLM(config).train(mode=False))


@pytest.fixture(scope="session")
def prompt() -> tuple[int, ...]:
    """192 tokens: 12 pages of 16."""
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randint(0, 256, (192,), generator=generator).tolist())
