"""`KVGeometry`: the shape of one rank's keys and values in one pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import attrs

from radixlink_contracts import CacheIdentity
from radixlink_contracts.errors import ContractError
from radixlink_transformers._hugging_face import kv_layer, setting
from radixlink_transformers._kinds import ModelKind
from radixlink_transformers.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch

    from radixlink_transformers._hugging_face import CausalModel, DecoderConfig, KVCache
    from radixlink_transformers._states import StateGeometry


@attrs.frozen(kw_only=True)
class KVGeometry:
    """The KV of one rank in one pool: which layers, how many heads, how wide, of what, in what pages.

    Attributes:
        layers: Indices of its layers in the model, ascending.
        num_kv_heads: KV heads of this rank.
        head_dim: Elements of a head.
        dtype: Of keys and values.
        page_size: Tokens of a page.
        sliding_window: Tokens that these layers see, the newest one included; 0 for all.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int
    sliding_window: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuse a geometry without bytes, or of elements that cannot be NaN."""
        sizes = (len(self.layers), self.num_kv_heads, self.head_dim, self.page_size)
        if min(sizes) < 1:
            raise ContractError(f"KVGeometry: expected sizes of at least 1, got {self}")
        if not self.dtype.is_floating_point:
            raise ContractError(f"KVGeometry: expected a floating point dtype, got {self.dtype}")

    @classmethod
    def of_model(cls, model: CausalModel, *, page_size: int, tensor_parallel_size: int = 1) -> Self:
        """The geometry on each rank of the pages that a loaded model keeps of every token.

        Those of full attention; of windows in a model that has nothing else. It is what the settings
        say; `require_of` holds the model against it.

        Args:
            model: The model.
            page_size: Tokens of a page.
            tensor_parallel_size: Over how many ranks its heads are spread.

        Raises:
            UnsupportedModelError: It is of a kind that this engine cannot run; or its heads cannot
                be spread evenly.
        """
        kind = ModelKind.of_config(model.config)
        config = model.config.get_text_config(decoder=True)
        num_kv_heads = _count(config, "num_key_value_heads", config.num_attention_heads)
        for heads, what in ((num_kv_heads, "KV"), (config.num_attention_heads, "query")):
            if heads % tensor_parallel_size:
                raise UnsupportedModelError(
                    f"{config.model_type}: expected its {heads} {what} heads to be spread evenly "
                    f"over the tensor-parallel ranks, got {tensor_parallel_size} ranks"
                )
        return cls(
            layers=kind.full_layers or kind.window_layers,
            num_kv_heads=num_kv_heads // tensor_parallel_size,
            head_dim=_count(config, "head_dim", config.hidden_size // config.num_attention_heads),
            dtype=model.dtype,
            page_size=page_size,
            sliding_window=0 if kind.full_layers else kind.sliding_window,
        )

    def require_of(self, model: CausalModel, kind: ModelKind, kept: KVCache) -> None:
        """Refuse a model that keeps something else than its settings say: families differ in them.

        Args:
            model: The model, spread where it is.
            kind: Of that model.
            kept: What it keeps of one token.

        Raises:
            UnsupportedModelError: Names the layer.
        """
        expected = (1, self.num_kv_heads, 1, self.head_dim)
        for index in sorted({*kind.full_layers, *kind.window_layers}):
            layer = kv_layer(kept, index)
            for what, states in (("keys", layer.keys), ("values", layer.values)):
                if tuple(states.shape) != expected or states.dtype != self.dtype:
                    raise UnsupportedModelError(
                        f"{model.config.get_text_config(decoder=True).model_type}: expected {what} "
                        f"of one token of shape {expected} and {self.dtype}, got "
                        f"{tuple(states.shape)} and {states.dtype} in layer {index}"
                    )

    def of_windows(self, kind: ModelKind) -> Self:
        """The geometry of the same model's sliding-window attention."""
        return attrs.evolve(self, layers=kind.window_layers, sliding_window=kind.sliding_window)

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.layers)

    def held_of(self, num_tokens: int) -> int:
        """How many tokens of a sequence of `num_tokens` its layers still look back at."""
        return min(num_tokens, self.sliding_window - 1) if self.sliding_window else num_tokens

    def pages_of(self, num_tokens: int) -> int:
        """In how many pages these are; the first may have older tokens too."""
        return -(-self.held_of(num_tokens) // self.page_size)

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


def cache_identity(
    model_name: str,
    revision: str,
    geometry: KVGeometry,
    kind: ModelKind,
    states: StateGeometry | None = None,
) -> CacheIdentity:
    """What the pages of such a model mean. Two engines share pages if and only if this is equal.

    Args:
        model_name: The model.
        revision: Which weights: a commit or a digest of them.
        geometry: The shape of a rank's full attention.
        kind: What the model's layers keep.
        states: The shape of its recurrent states, where it has them.
    """
    of_states = "" if states is None else states.layout
    return CacheIdentity(
        model=model_name,
        revision=revision,
        dtype=str(geometry.dtype).removeprefix("torch."),
        page_size=geometry.page_size,
        num_layers=kind.num_layers,
        layout=geometry.layout + kind.layout + of_states,
    )


def _count(config: DecoderConfig, name: str, default: int) -> int:
    # Older families lack the setting, or have it as None for "the usual".
    value = setting(config, name)
    return value if isinstance(value, int) else default
