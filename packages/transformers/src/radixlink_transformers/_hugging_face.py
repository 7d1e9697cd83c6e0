"""Everything of transformers that this package touches, narrowed to Protocols.

transformers is untyped where it matters, and following its sources costs a type checker most of a
minute. So its names are looked up here, by name, and come out as the types below.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from radixlink_transformers.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch


class DecoderConfig(Protocol):
    """The configuration of a text decoder. Families differ in what else there is: ask `setting`."""

    @property
    def model_type(self) -> str:
        """The family, for example "llama"."""
        ...

    @property
    def num_hidden_layers(self) -> int:
        """Layers."""
        ...

    @property
    def num_attention_heads(self) -> int:
        """Query heads."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        ...


class ModelConfig(Protocol):
    """The configuration of a model, perhaps with other parts beside its text decoder."""

    def get_text_config(self, decoder: bool) -> DecoderConfig:  # noqa: FBT001 - theirs
        """The part that describes the text decoder; itself where there is only one."""
        ...


class CausalOutput(Protocol):
    """What a forward returns."""

    @property
    def logits(self) -> torch.Tensor:
        """Shape: (batch, kept positions, vocabulary)."""
        ...


class KVLayer(Protocol):
    """A layer of a `DynamicCache` that keeps keys and values. RoPE is in the keys already.

    Attributes:
        is_initialized: False until the first token.
        keys: Shape: (1, KV heads, tokens, head dim). Replaced, not changed, by each forward.
        values: Likewise.
    """

    is_initialized: bool
    keys: torch.Tensor
    values: torch.Tensor

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take device and dtype from the first states; holds no token yet."""
        ...


class WindowLayer(KVLayer, Protocol):
    """One that keeps them for a window only: all but the first token of it.

    Attributes:
        cumulative_length: Tokens so far, those that left the window included.
    """

    cumulative_length: int

    def activate_past_recording(self) -> None:
        """Let nothing leave the layer from now on; a forward still sees its window only."""
        ...


class StateLayer(Protocol):
    """A layer that keeps states, in dicts by their number. A forward changes them in place.

    Attributes:
        device: None until the first forward.
        dtype: Likewise.
        number_of_states: States of each of both sorts.
        conv_states: Shape of each: (1, channels, kernel); None before the first forward.
        recurrent_states: Shape of each: (1, ...); None before the first forward.
        is_conv_states_initialized: There is such a tensor.
        is_recurrent_states_initialized: Likewise.
        conv_kernel_size: The last size of a convolution's state.
        has_previous_state: It stands for tokens, so that a forward goes on from it.
    """

    device: torch.device | None
    dtype: torch.dtype | None
    number_of_states: int
    conv_states: dict[int, torch.Tensor | None]
    recurrent_states: dict[int, torch.Tensor | None]
    is_conv_states_initialized: dict[int, bool]
    is_recurrent_states_initialized: dict[int, bool]
    conv_kernel_size: dict[int, int | None]
    has_previous_state: dict[int, bool]


class CacheLayer(Protocol):
    """Any layer of a cache; what it keeps, its place in the model says: see the functions below."""


class KVCache(Protocol):
    """What one sequence has of each layer, as a forward reads and extends it."""

    @property
    def layers(self) -> Sequence[CacheLayer]:
        """In layer order."""
        ...


class CausalModel(Protocol):
    """A causal language model: the calls and facts that the engine uses."""

    @property
    def config(self) -> ModelConfig:
        """What it is."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What its parameters, and with them its keys and values, are made of."""
        ...

    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cache: KVCache,
        use_cache: bool,
        logits_to_keep: int,
    ) -> CausalOutput:
        """Run the tokens behind those in `cache`, and append theirs to it."""
        ...


class _LoadableModel(CausalModel, Protocol):
    def eval(self) -> object: ...


class _ConfigLoader(Protocol):
    def from_pretrained(self, directory: Path, *, local_files_only: bool) -> ModelConfig: ...


class _ModelLoader(Protocol):
    def from_pretrained(
        self,
        directory: Path,
        *,
        dtype: torch.dtype,
        local_files_only: bool,
        distributed_config: object | None,
    ) -> _LoadableModel: ...


class _CacheMaker(Protocol):
    def __call__(self, *, config: ModelConfig) -> KVCache: ...


class _DistributedConfigMaker(Protocol):
    def __call__(self, *, tp_plan: str) -> object: ...


class _LayerTypeReader(Protocol):
    def __call__(self, config: DecoderConfig) -> tuple[list[str], list[dict[str, object]]]: ...


class _ModelWithDecoder(Protocol):
    def get_decoder(self) -> torch.nn.Module: ...


def setting(config: DecoderConfig, name: str) -> object:
    """The value of a setting that only some families have; None where it is absent."""
    found: object = getattr(config, name, None)
    return found


def vocabulary_size(config: ModelConfig) -> int | None:
    """How many token ids a model has, from 0 on; None where it does not say."""
    found = setting(config.get_text_config(decoder=True), "vocab_size")
    return found if isinstance(found, int) else None


def layer_settings(config: DecoderConfig) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """What each layer keeps, in transformers' own words, for example "sliding_attention".

    Returns:
        The types, and the window of each layer that has one.
    """
    read = cast("_LayerTypeReader", _find("transformers.cache_utils", "get_layer_types_and_kwargs"))
    types, arguments = read(config)
    windows = (one.get("sliding_window") for one in arguments)
    return tuple(types), tuple(one if isinstance(one, int) else None for one in windows)


def kv_layer(cache: KVCache, layer: int) -> KVLayer:
    """A layer that keeps keys and values."""
    return cast("KVLayer", cache.layers[layer])


def window_layer(cache: KVCache, layer: int) -> WindowLayer:
    """A layer that keeps those of a window."""
    return cast("WindowLayer", cache.layers[layer])


def state_layer(cache: KVCache, layer: int) -> StateLayer:
    """A layer that keeps states."""
    return cast("StateLayer", cache.layers[layer])


def decoder_layers(model: CausalModel) -> Sequence[torch.nn.Module]:
    """The layers of the decoder, in the order in which a forward runs them.

    Raises:
        UnsupportedModelError: It keeps them elsewhere, as older families do.
    """
    decoder = cast("_ModelWithDecoder", model).get_decoder()
    layers: Sequence[torch.nn.Module] | None = getattr(decoder, "layers", None)
    if layers is None:
        raise UnsupportedModelError(
            f"{type(decoder).__name__}: expected its layers in `layers`, got no such list; its loads "
            "can be staged, not layer by layer"
        )
    return layers


def new_cache(config: ModelConfig) -> KVCache:
    """An empty cache of one sequence."""
    make = cast("_CacheMaker", _find("transformers", "DynamicCache"))
    return make(config=config)


def read_config(directory: Path) -> ModelConfig:
    """The configuration of a saved model. No network.

    Raises:
        Exception: Files are missing or not understood; transformers promises no type.
    """
    loader = cast("_ConfigLoader", _find("transformers", "AutoConfig"))
    return loader.from_pretrained(directory, local_files_only=True)


def read_model(directory: Path, dtype: torch.dtype, *, tensor_parallel: bool) -> CausalModel:
    """A saved model, ready to run. No network.

    Raises:
        Exception: Files are missing or not understood; transformers promises no type.
    """
    loader = cast("_ModelLoader", _find("transformers", "AutoModelForCausalLM"))
    distributed: object | None = None
    if tensor_parallel:
        configure = cast(
            "_DistributedConfigMaker", _find("transformers.distributed", "DistributedConfig")
        )
        distributed = configure(tp_plan="auto")
    model = loader.from_pretrained(
        directory, dtype=dtype, local_files_only=True, distributed_config=distributed
    )
    model.eval()
    return model


def _find(module: str, name: str) -> object:
    found: object = getattr(import_module(module), name)
    return found
