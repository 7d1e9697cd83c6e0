"""What a model's configuration says about sizes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import attrs

from radixlink.models import ModelNotFoundError

if TYPE_CHECKING:
    from radixlink.models import PreparedModel

_BYTES_OF_FP32: Final = 4
_KEY_AND_VALUE: Final = 2


@attrs.frozen(kw_only=True)
class ModelShape:
    """Sizes of a model in fp32.

    Attributes:
        token_bytes: Of one token's keys and values.
        max_tokens: The longest sequence that it takes; None where it does not say.
    """

    token_bytes: int
    max_tokens: int | None


def read_shape(prepared: PreparedModel) -> ModelShape:
    """The sizes that a model's `config.json` names.

    Raises:
        ModelNotFoundError: It is not the configuration of a causal model.
    """
    path = prepared.directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        elements = int(config["num_hidden_layers"]) * int(heads) * int(head_dim) * _KEY_AND_VALUE
        longest = config.get("max_position_embeddings")
        max_tokens = None if longest is None else int(longest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ModelNotFoundError(
            f"model {prepared.name!r}: expected the configuration of a causal model in {path}, "
            f"got: {type(error).__name__}: {error}"
        ) from error
    return ModelShape(token_bytes=elements * _BYTES_OF_FP32, max_tokens=max_tokens)
