from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
import torch
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

from radixlink_contracts.errors import ContractError
from radixlink_transformers import KVGeometry, cache_identity, require_full_attention
from radixlink_transformers.errors import UnsupportedModelError

if TYPE_CHECKING:
    from radixlink_transformers import CausalModel
    from radixlink_transformers._hugging_face import ModelConfig


def test_geometry_of_a_llama(model: CausalModel) -> None:
    geometry = KVGeometry.of_model(model, page_size=16)
    assert geometry == KVGeometry(
        num_layers=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, page_size=16
    )
    assert geometry.page_shape == (2, 2, 16, 16)
    assert geometry.range_bytes == (4096, 4096, 4096, 4096)


def test_each_rank_has_its_share_of_the_heads(model: CausalModel) -> None:
    whole = KVGeometry.of_model(model, page_size=16)
    half = KVGeometry.of_model(model, page_size=16, tensor_parallel_size=2)
    assert half.num_kv_heads == 1
    assert 2 * half.range_bytes[0] == whole.range_bytes[0]
    assert cache_identity("m", "r", half).fingerprint != cache_identity("m", "r", whole).fingerprint


def test_heads_that_cannot_be_shared_evenly_are_refused(model: CausalModel) -> None:
    with pytest.raises(UnsupportedModelError, match=r"its 2 KV heads .* got 3 ranks"):
        KVGeometry.of_model(model, page_size=16, tensor_parallel_size=3)


@pytest.mark.parametrize("config", [LlamaConfig(), Qwen2Config(), Qwen3Config()])
def test_models_of_full_attention_alone_are_taken(config: object) -> None:
    require_full_attention(cast("ModelConfig", config))


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (MistralConfig(), "mistral: .* got 32 sliding_attention"),
        (Gemma3TextConfig(), "4 full_attention, 22 sliding_attention"),
        (GptOssConfig(), "18 full_attention, 18 sliding_attention"),
        (Qwen3NextConfig(), "12 full_attention, 36 linear_attention"),
        (BambaConfig(), "linear_attention"),
        (FalconH1Config(), "hybrid"),
        (DeepseekV3Config(), "kv_lora_rank"),
    ],
)
def test_other_models_are_refused_by_what_their_layers_are(config: object, found: str) -> None:
    with pytest.raises(UnsupportedModelError, match=found):
        require_full_attention(cast("ModelConfig", config))


def test_an_identity_says_what_the_bytes_are(model: CausalModel) -> None:
    identity = cache_identity("tiny", "abc", KVGeometry.of_model(model, page_size=16))
    assert identity.dtype == "float32"
    assert identity.num_layers == 4
    assert identity.layout.startswith("k|v;heads=2;dim=16")


def test_elements_that_cannot_be_nan_are_refused() -> None:
    with pytest.raises(ContractError, match="floating point"):
        KVGeometry(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.int8, page_size=1)
