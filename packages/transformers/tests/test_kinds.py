from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
from transformers import (
    BambaConfig,
    DeepseekV3Config,
    FalconH1Config,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from radixlink_transformers import ModelKind
from radixlink_transformers.errors import UnsupportedModelError

if TYPE_CHECKING:
    from radixlink_transformers._hugging_face import ModelConfig


def _kind(config: object) -> ModelKind:
    return ModelKind.of_config(cast("ModelConfig", config))


@pytest.mark.parametrize(
    "config", [LlamaConfig(), Qwen2Config(), Qwen3Config(), MistralConfig(sliding_window=None)]
)
def test_a_model_of_full_attention_alone_has_nothing_else(config: object) -> None:
    kind = _kind(config)
    assert kind.full_layers == tuple(range(kind.num_layers))
    assert (kind.window_layers, kind.state_layers, kind.lookback, kind.layout) == ((), (), 0, "")


def test_a_gemma_has_windows_beside() -> None:
    kind = _kind(Gemma3TextConfig(num_hidden_layers=12, sliding_window=512))
    assert kind.full_layers == (5, 11)
    assert kind.window_layers == (0, 1, 2, 3, 4, 6, 7, 8, 9, 10)
    # A token sees itself and 511 before.
    assert (kind.sliding_window, kind.lookback) == (512, 511)


def test_windows_alone_have_no_pages_beside() -> None:
    kind = _kind(MistralConfig(num_hidden_layers=4, sliding_window=4096))
    assert (kind.full_layers, kind.window_layers) == ((), (0, 1, 2, 3))
    assert (kind.sliding_window, kind.lookback, kind.has_window_pages) == (4096, 0, False)
    # They are not the pages of a model that sees all of them.
    assert kind.layout


@pytest.mark.parametrize(
    ("config", "full", "states", "chunk"),
    [
        (Qwen3NextConfig(num_hidden_layers=8), (3, 7), (0, 1, 2, 4, 5, 6), 64),
        (BambaConfig(num_hidden_layers=3, attn_layer_indices=[1]), (1,), (0, 2), 256),
        (FalconH1Config(num_hidden_layers=2, mamba_chunk_size=128), (0, 1), (0, 1), 128),
    ],
)
def test_recurrent_models_have_states_beside(
    config: object, full: tuple[int, ...], states: tuple[int, ...], chunk: int
) -> None:
    kind = _kind(config)
    assert (kind.full_layers, kind.state_layers) == (full, states)
    assert (kind.window_layers, kind.state_chunk_tokens) == ((), chunk)
    assert kind.layout


def test_models_of_other_windows_do_not_share_pages() -> None:
    layouts = {
        _kind(Gemma3TextConfig(num_hidden_layers=layers, sliding_window=window)).layout
        for layers, window in ((6, 512), (12, 512), (12, 256))
    }
    assert len(layouts) == 3


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (BambaConfig(attn_layer_indices=[]), "got 32 linear_attention"),
        (Lfm2Config(num_hidden_layers=4, full_attn_idxs=[1, 3]), "2 conv, 2 full_attention"),
        (DeepseekV3Config(), "kv_lora_rank"),
        (GptOssConfig(sliding_window=1), r"at least 2 tokens, got \[1\]"),
    ],
)
def test_other_models_are_refused_by_what_their_layers_are(config: object, found: str) -> None:
    with pytest.raises(UnsupportedModelError, match=found):
        _kind(config)
