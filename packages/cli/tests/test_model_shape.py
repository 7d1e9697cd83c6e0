from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from radixlink.demo._model_shape import ModelShape, read_shape
from radixlink.models import ModelNotFoundError, PreparedModel

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32}


def shape_of(directory: Path, text: str) -> ModelShape:
    (directory / "config.json").write_text(text)
    return read_shape(PreparedModel(directory=directory, digest="d", name="mine"))


def test_sizes_follow_from_the_configuration(tmp_path: Path) -> None:
    assert shape_of(tmp_path, json.dumps(SETTINGS)) == ModelShape(
        token_bytes=3 * 4 * 8 * 2 * 4, max_tokens=None
    )
    few_heads = {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 99}
    assert shape_of(tmp_path, json.dumps({**SETTINGS, **few_heads})) == ModelShape(
        token_bytes=3 * 1 * 16 * 2 * 4, max_tokens=99
    )


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", json.dumps({**SETTINGS, "hidden_size": "wide"})],
)
def test_what_is_no_configuration_of_a_causal_model_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"model 'mine': .*config\.json"):
        shape_of(tmp_path, text)
