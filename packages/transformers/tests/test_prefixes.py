"""What is kept of a prefix does not depend on what follows it, and a model where it does is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
from transformers import BertConfig, Gemma3TextConfig, LlamaConfig, Phi3Config

from radixlink_transformers import ModelKind
from radixlink_transformers._forward import prefill
from radixlink_transformers._hugging_face import kv_layer, new_cache
from radixlink_transformers.errors import UnsupportedModelError

from .conftest import other_prompt, tiny

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from radixlink_transformers import CausalModel
    from radixlink_transformers._hugging_face import ModelConfig

#: Fewer than the long prompt has, more than the short one.
_LIMIT = 64
_SHORT, _LONG, _SHARED = 60, 200, 48
_ROPE: Mapping[str, Mapping[str, object]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": _LIMIT},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": _LIMIT,
    },
    "dynamic": {"factor": 4.0},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": _LIMIT,
    },
}


def _llama(rope_type: str) -> CausalModel:
    rope = {"rope_type": rope_type, "rope_theta": 10_000.0, **_ROPE[rope_type]}
    return tiny("llama", max_position_embeddings=_LIMIT, rope_parameters=rope)


def _keys(model: CausalModel, prompt: tuple[int, ...]) -> torch.Tensor:
    """What the last layer keeps of the shared tokens."""
    cache = new_cache(model.config)
    prefill(model, cache, prompt, 0)
    return kv_layer(cache, 3).keys[:, :, :_SHARED].clone()


def _change_with_what_follows(model: CausalModel) -> float:
    prompt = other_prompt(1, _LONG)
    return float((_keys(model, prompt[:_SHORT]) - _keys(model, prompt)).abs().max())


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
def test_a_model_that_is_taken_keeps_the_same_of_a_prefix(rope_type: str) -> None:
    model = _llama(rope_type)
    ModelKind.of_config(model.config)
    assert _change_with_what_follows(model) < 1e-4


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_that_the_length_of_a_forward_chooses_are_refused(rope_type: str) -> None:
    model = _llama(rope_type)
    assert _change_with_what_follows(model) > 1e-2
    with pytest.raises(UnsupportedModelError, match=rf"llama: .* got '{rope_type}'.* how long"):
        ModelKind.of_config(model.config)


def test_attention_to_what_follows_is_refused() -> None:
    model = tiny("llama", is_causal=False)
    assert _change_with_what_follows(model) > 1e-2
    with pytest.raises(UnsupportedModelError, match="causal attention, got is_causal=False"):
        ModelKind.of_config(model.config)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (Gemma3TextConfig(use_bidirectional_attention=True), "use_bidirectional_attention=True"),
        (BertConfig(), "is_decoder=False"),
        (
            Phi3Config(
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 10_000.0,
                    "short_factor": [1.0] * 48,
                    "long_factor": [4.0] * 48,
                    "original_max_position_embeddings": 4096,
                }
            ),
            "'longrope'",
        ),
        # By the type of a layer.
        (
            Gemma3TextConfig(
                rope_parameters={
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
                }
            ),
            "'dynamic'",
        ),
    ],
)
def test_wherever_it_is_said(config: object, found: str) -> None:
    with pytest.raises(UnsupportedModelError, match=found):
        ModelKind.of_config(cast("ModelConfig", config))


def test_what_says_nothing_of_it_is_taken() -> None:
    config = LlamaConfig()
    config.rope_parameters = None
    assert ModelKind.of_config(cast("ModelConfig", config)).full_layers
