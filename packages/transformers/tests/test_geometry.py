from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from radixlink_contracts.errors import ContractError
from radixlink_transformers import KVGeometry, ModelKind, cache_identity
from radixlink_transformers.errors import UnsupportedModelError

if TYPE_CHECKING:
    from radixlink_transformers import CausalModel


def test_geometry_of_a_llama(model: CausalModel) -> None:
    geometry = KVGeometry.of_model(model, page_size=16)
    assert geometry == KVGeometry(
        layers=(0, 1, 2, 3), num_kv_heads=2, head_dim=16, dtype=torch.float32, page_size=16
    )
    assert geometry.page_shape == (2, 2, 16, 16)
    assert geometry.range_bytes == (4096, 4096, 4096, 4096)


def test_each_rank_has_its_share_of_the_heads(model: CausalModel) -> None:
    whole = KVGeometry.of_model(model, page_size=16)
    half = KVGeometry.of_model(model, page_size=16, tensor_parallel_size=2)
    assert half.num_kv_heads == 1
    assert 2 * half.range_bytes[0] == whole.range_bytes[0]
    kind = ModelKind.of_config(model.config)
    of_half, of_whole = (cache_identity("m", "r", one, kind) for one in (half, whole))
    assert of_half.fingerprint != of_whole.fingerprint


def test_heads_that_cannot_be_shared_evenly_are_refused(model: CausalModel) -> None:
    with pytest.raises(UnsupportedModelError, match=r"its 2 KV heads .* got 3 ranks"):
        KVGeometry.of_model(model, page_size=16, tensor_parallel_size=3)


def test_an_identity_says_what_the_bytes_are(model: CausalModel) -> None:
    geometry = KVGeometry.of_model(model, page_size=16)
    identity = cache_identity("tiny", "abc", geometry, ModelKind.of_config(model.config))
    assert identity.dtype == "float32"
    assert identity.num_layers == 4
    assert identity.layout.startswith("k|v;heads=2;dim=16")


def test_elements_that_cannot_be_nan_are_refused() -> None:
    with pytest.raises(ContractError, match="floating point"):
        KVGeometry(layers=(0,), num_kv_heads=1, head_dim=1, dtype=torch.int8, page_size=1)
