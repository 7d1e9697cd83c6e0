from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
from transformers import (
    BambaConfig,
    DeepseekV3Config,
    FalconH1Config,
    Gemma3TextConfig,
    GptOssConfig,
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


def test_models_of_other_windows_do_not_share_pages() -> None:
    layouts = {
        _kind(Gemma3TextConfig(num_hidden_layers=layers, sliding_window=window)).layout
        for layers, window in ((6, 512), (12, 512), (12, 256))
    }
    assert len(layouts) == 3


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (MistralConfig(sliding_window=4096), "mistral: .* got 32 sliding_attention"),
        (Qwen3NextConfig(), "12 full_attention, 36 linear_attention"),
        (BambaConfig(), "linear_attention"),
        (FalconH1Config(), "hybrid"),
        (DeepseekV3Config(), "kv_lora_rank"),
        (GptOssConfig(sliding_window=1), r"at least 2 tokens, got \[1\]"),
    ],
)
def test_other_models_are_refused_by_what_their_layers_are(config: object, found: str) -> None:
    with pytest.raises(UnsupportedModelError, match=found):
        _kind(config)
