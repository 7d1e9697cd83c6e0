"""`KVGeometry`: the shape of one rank's KV, and which models have such a shape at all."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, Self

import attrs

from radixlink_contracts import CacheIdentity
from radixlink_contracts.errors import ContractError
from radixlink_transformers._hugging_face import layer_types, setting
from radixlink_transformers.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch

    from radixlink_transformers._hugging_face import CausalModel, DecoderConfig, ModelConfig

SUPPORTED_LAYER_TYPE: Final = "full_attention"


@attrs.frozen(kw_only=True)
class KVGeometry:
    """The KV of one rank: how many layers and heads, how wide, of what, in pages of what size.

    Attributes:
        num_layers: Layers.
        num_kv_heads: KV heads of this rank.
        head_dim: Elements of a head.
        dtype: Of keys and values.
        page_size: Tokens of a page.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int

    def __attrs_post_init__(self) -> None:
        """Refuse a geometry without bytes, or of elements that cannot be NaN."""
        sizes = (self.num_layers, self.num_kv_heads, self.head_dim, self.page_size)
        if min(sizes) < 1:
            raise ContractError(f"KVGeometry: expected sizes of at least 1, got {self}")
        if not self.dtype.is_floating_point:
            raise ContractError(f"KVGeometry: expected a floating point dtype, got {self.dtype}")

    @classmethod
    def of_model(cls, model: CausalModel, *, page_size: int, tensor_parallel_size: int = 1) -> Self:
        """The geometry of a loaded model's KV on each of its ranks.

        Args:
            model: The model.
            page_size: Tokens of a page.
            tensor_parallel_size: Over how many ranks its heads are spread.

        Raises:
            UnsupportedModelError: It keeps more, or other, than keys and values of every token;
                or its heads cannot be spread evenly.
        """
        require_full_attention(model.config)
        config = model.config.get_text_config(decoder=True)
        num_kv_heads = _count(config, "num_key_value_heads", config.num_attention_heads)
        for heads, what in ((num_kv_heads, "KV"), (config.num_attention_heads, "query")):
            if heads % tensor_parallel_size:
                raise UnsupportedModelError(
                    f"{config.model_type}: expected its {heads} {what} heads to be spread evenly "
                    f"over the tensor-parallel ranks, got {tensor_parallel_size} ranks"
                )
        return cls(
            num_layers=config.num_hidden_layers,
            num_kv_heads=num_kv_heads // tensor_parallel_size,
            head_dim=_count(config, "head_dim", config.hidden_size // config.num_attention_heads),
            dtype=model.dtype,
            page_size=page_size,
        )

    @property
    def page_shape(self) -> tuple[int, int, int, int]:
        """One page in one layer: keys and values, heads, tokens, elements."""
        return (2, self.num_kv_heads, self.page_size, self.head_dim)

    @property
    def range_bytes(self) -> tuple[int, ...]:
        """Bytes of a page in each layer."""
        elements = 2 * self.num_kv_heads * self.page_size * self.head_dim
        return (elements * self.dtype.itemsize,) * self.num_layers

    @property
    def layout(self) -> str:
        """What `page_shape` means, for a store that must never mix two layouts."""
        return f"k|v;heads={self.num_kv_heads};dim={self.head_dim};order=head,token;rope=applied"


def cache_identity(model_name: str, revision: str, geometry: KVGeometry) -> CacheIdentity:
    """What the pages of such a model mean. Two engines share pages if and only if this is equal.

    Args:
        model_name: The model.
        revision: Which weights: a commit or a digest of them.
        geometry: The shape of a rank's KV.
    """
    return CacheIdentity(
        model=model_name,
        revision=revision,
        dtype=str(geometry.dtype).removeprefix("torch."),
        page_size=geometry.page_size,
        num_layers=geometry.num_layers,
        layout=geometry.layout,
    )


def require_full_attention(config: ModelConfig) -> None:
    """The model keeps keys and values of every token in every layer, and nothing else.

    Raises:
        UnsupportedModelError: It does not; the message names what its layers are.
    """
    decoder = config.get_text_config(decoder=True)
    found = Counter(layer_types(decoder))
    if set(found) != {SUPPORTED_LAYER_TYPE}:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found.items()))
        raise UnsupportedModelError(
            f"{decoder.model_type}: expected {SUPPORTED_LAYER_TYPE} in every layer, got {kinds}. "
            "Sliding-window, linear, recurrent and hybrid layers are not supported yet; "
            "Llama, Qwen2, Qwen3 and SmolLM2 are examples of models that are"
        )
    if setting(decoder, "kv_lora_rank") is not None:
        raise UnsupportedModelError(
            f"{decoder.model_type}: expected keys and values of one shape, got latent attention "
            "(kv_lora_rank is set), which is not supported yet"
        )


def _count(config: DecoderConfig, name: str, default: int) -> int:
    # Older families lack the setting, or have it as None for "the usual".
    value = setting(config, name)
    return value if isinstance(value, int) else default
