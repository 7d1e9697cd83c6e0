from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import pytest
import torch
from transformers import BambaConfig

from radixlink_transformers import generate_without_cache, load_model
from radixlink_transformers.errors import ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    from pathlib import Path

    from radixlink_transformers import CausalModel


class Saveable(Protocol):
    def save_pretrained(self, directory: Path) -> None: ...


@pytest.fixture(scope="module")
def saved(model: CausalModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    cast("Saveable", model).save_pretrained(directory)
    return directory


def test_a_loaded_model_answers_like_the_one_that_was_saved(
    saved: Path, model: CausalModel, prompt: tuple[int, ...]
) -> None:
    loaded = load_model(saved)
    assert loaded.dtype is torch.float32
    expected = generate_without_cache(model, prompt, 4)
    got = generate_without_cache(loaded, prompt, 4)
    assert got.tokens == expected.tokens
    # Not to the bit: weights in a mapped file are aligned otherwise, and summed otherwise.
    torch.testing.assert_close(got.first_logits, expected.first_logits, atol=1e-4, rtol=0)


def test_a_model_is_loaded_in_the_dtype_asked_for(saved: Path) -> None:
    assert load_model(saved, torch.bfloat16).dtype is torch.bfloat16


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere, which does not exist"):
        load_model(tmp_path / "nowhere")


def test_a_file_is_no_model_directory(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    with pytest.raises(ModelLoadError, match="is no directory"):
        load_model(tmp_path / "model")


def test_a_directory_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"without config\.json"):
        load_model(tmp_path)


def test_a_config_that_nobody_knows_is_named_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelLoadError, match="no-such-model") as caught:
        load_model(tmp_path)
    assert caught.value.__cause__ is not None


def test_a_config_without_weights_is_named(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    with pytest.raises(ModelLoadError, match="weights"):
        load_model(tmp_path)


def test_an_unsupported_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    config = BambaConfig(
        hidden_size=32,
        num_hidden_layers=6,
        attn_layer_indices=[],
        mamba_n_heads=4,
        mamba_d_head=16,
    )
    cast("Saveable", config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="6 linear_attention"):
        load_model(tmp_path)


def test_tensor_parallel_without_a_launch_says_what_is_missing(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ModelLoadError, match=r"none of RANK.*torchrun"):
        load_model(saved, tensor_parallel=True)
