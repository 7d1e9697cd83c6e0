"""`require_prefixes`: what a forward keeps of a token must not depend on the tokens behind it.

Pages are shared by all that begin alike, whatever comes behind. That is so of causal attention with
positions that are counted from the first token. It is not where a token sees those behind it, and
where the frequencies of RoPE are chosen by the length of the forward: keys of a short prompt are
others than those of the same tokens in a long one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from radixlink_transformers._hugging_face import setting
from radixlink_transformers.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radixlink_transformers._hugging_face import DecoderConfig

#: Those whose frequencies are of the configuration alone. "dynamic" and "longrope" are none of them.
_FIXED_ROPE: Final = frozenset({"default", "linear", "llama3", "proportional", "yarn"})

#: Settings by which a token sees those behind it. "vision" is about images, which no prompt here has.
_SEES_AHEAD: Final[Mapping[str, tuple[object, ...]]] = {
    "is_causal": (False,),
    "is_decoder": (False,),
    "use_bidirectional_attention": (True, "all"),
}


def require_prefixes(decoder: DecoderConfig) -> None:
    """Refuse a model whose pages would be wrong behind another prompt.

    Raises:
        UnsupportedModelError: Names the setting.
    """
    for name, values in _SEES_AHEAD.items():
        value = setting(decoder, name)
        if value in values:
            raise UnsupportedModelError(
                f"{decoder.model_type}: expected causal attention, got {name}={value!r}: what is kept "
                "of a prefix would depend on what follows it"
            )
    for rope_type in _rope_types(setting(decoder, "rope_parameters")):
        if rope_type not in _FIXED_ROPE:
            raise UnsupportedModelError(
                f"{decoder.model_type}: expected rope_type of {', '.join(sorted(_FIXED_ROPE))}, got "
                f"{rope_type!r}: the keys of a prefix would depend on how long the prompt is"
            )


def _rope_types(parameters: object) -> Iterator[object]:
    """All that are named, for the whole model or by the type of a layer."""
    if not isinstance(parameters, Mapping):
        return
    if "rope_type" in parameters:
        yield parameters["rope_type"]
    for of_layer_type in parameters.values():
        yield from _rope_types(of_layer_type)
