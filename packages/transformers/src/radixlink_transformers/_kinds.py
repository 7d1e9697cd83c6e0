"""`ModelKind`: which layers of a model keep what, and which models this engine can run.

| transformers' layer type | keeps                                      | component   |
|--------------------------|--------------------------------------------|-------------|
| full_attention           | keys and values of every token             | FULL        |
| sliding_attention        | keys and values of one window              | SWA         |
| linear_attention         | convolution and recurrent states           | MAMBA       |
| hybrid                   | states, and keys and values of every token | FULL, MAMBA |

A model of windows alone keeps the pages of every token all the same, as one of full attention does,
and a forward sees the last of them: so it can go on behind every page.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, Self

import attrs

from radixlink_contracts import ComponentType
from radixlink_transformers._hugging_face import layer_settings, setting
from radixlink_transformers._prefixes import require_prefixes
from radixlink_transformers.errors import UnsupportedModelError

if TYPE_CHECKING:
    from radixlink_transformers._hugging_face import DecoderConfig, ModelConfig

_FULL, _SWA, _MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA

_KEPT_BY: Final = {
    "full_attention": frozenset({_FULL}),
    "sliding_attention": frozenset({_SWA}),
    "linear_attention": frozenset({_MAMBA}),
    "hybrid": frozenset({_FULL, _MAMBA}),
}

#: Kinds of models that were tried; what else could be combined of these was not.
_SUPPORTED: Final = (
    frozenset({_FULL}),
    frozenset({_SWA}),
    frozenset({_FULL, _SWA}),
    frozenset({_FULL, _MAMBA}),
)

#: Tokens of a chunk of linear attention where no setting says how many.
_USUAL_STATE_CHUNK: Final = 64


@attrs.frozen(kw_only=True)
class ModelKind:
    """Which layers of a model keep what. Indices are ascending.

    Attributes:
        num_layers: Layers of the model.
        full_layers: Keep keys and values of every token.
        window_layers: Keep those of one window.
        state_layers: Keep recurrent states.
        sliding_window: Tokens that a window layer sees, the newest one included; 0 without.
        state_chunk_tokens: A recurrence is computed in chunks of so many tokens; 0 without.
    """

    num_layers: int
    full_layers: tuple[int, ...]
    window_layers: tuple[int, ...] = ()
    state_layers: tuple[int, ...] = ()
    sliding_window: int = 0
    state_chunk_tokens: int = 0

    @classmethod
    def of_config(cls, config: ModelConfig) -> Self:
        """The kind of a model.

        Raises:
            UnsupportedModelError: This engine cannot run it; the message names what its layers are,
                or what makes a prefix depend on what follows it.
        """
        decoder = config.get_text_config(decoder=True)
        require_prefixes(decoder)
        types, windows = layer_settings(decoder)
        unknown = set(types) - _KEPT_BY.keys()
        kept = frozenset[ComponentType]().union(*(_KEPT_BY.get(one, ()) for one in types))
        if unknown or kept not in _SUPPORTED:
            raise UnsupportedModelError(
                f"{decoder.model_type}: expected full_attention or sliding_attention or both, or "
                "full_attention beside recurrent states (linear_attention, hybrid), "
                f"got {_counted(types)}"
            )
        if setting(decoder, "kv_lora_rank") is not None:
            raise UnsupportedModelError(
                f"{decoder.model_type}: expected keys and values of one shape, got latent "
                "attention (kv_lora_rank is set), which is not supported yet"
            )
        sizes = sorted({window for window in windows if window is not None})
        if len(sizes) > 1 or (sizes and sizes[0] < 2):  # noqa: PLR2004 - looks back at least a token
            raise UnsupportedModelError(
                f"{decoder.model_type}: expected windows of one size of at least 2 tokens, "
                f"got {sizes}"
            )
        states = _layers(types, _MAMBA)
        return cls(
            num_layers=len(types),
            full_layers=_layers(types, _FULL),
            window_layers=_layers(types, _SWA),
            state_layers=states,
            sliding_window=sizes[0] if sizes else 0,
            state_chunk_tokens=_state_chunk(decoder) if states else 0,
        )

    @property
    def has_window_pages(self) -> bool:
        """Windows have pages of their own, beside those of full attention."""
        return bool(self.full_layers and self.window_layers)

    @property
    def lookback(self) -> int:
        """Tokens before a token whose window pages it needs; 0 where there are none."""
        return self.sliding_window - 1 if self.has_window_pages else 0

    @property
    def layout(self) -> str:
        """What is kept beside full attention, for a store that must never mix two kinds of model.

        Empty where that is nothing.
        """
        parts = ""
        if self.window_layers:
            parts += f";window={self.sliding_window}@{_joined(self.window_layers)}"
        if self.state_layers:
            parts += f";states@{_joined(self.state_layers)};full@{_joined(self.full_layers)}"
        return parts


def _layers(types: tuple[str, ...], component: ComponentType) -> tuple[int, ...]:
    """The layers that keep something of a component."""
    return tuple(index for index, one in enumerate(types) if component in _KEPT_BY[one])


def _counted(types: tuple[str, ...]) -> str:
    """How many layers there are of each type, for people."""
    return ", ".join(f"{count} {one}" for one, count in sorted(Counter(types).items()))


def _joined(layers: tuple[int, ...]) -> str:
    """Layer indices, in one word."""
    return ",".join(map(str, layers))


def _state_chunk(config: DecoderConfig) -> int:
    # Mamba 2 has the setting; gated delta nets have the default of their function.
    value = setting(config, "mamba_chunk_size")
    return value if isinstance(value, int) else _USUAL_STATE_CHUNK
