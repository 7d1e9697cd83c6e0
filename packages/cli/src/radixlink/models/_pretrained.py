"""The few calls of transformers that this package makes, narrowed to Protocols.

transformers is untyped and takes seconds to import, so it is imported by the functions here when
they are called, and nowhere else in the package.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

from radixlink.models.errors import MissingExtraError

__all__ = [
    "GgufModel",
    "PretrainedTokenizer",
    "Saveable",
    "load_gguf_model",
    "load_gguf_tokenizer",
    "load_saved_tokenizer",
    "new_llama",
    "require_modules",
]


class Saveable(Protocol):
    """Anything that transformers can write as a directory."""

    def save_pretrained(self, save_directory: Path) -> None:
        """The files lie in `save_directory`."""
        ...


class PretrainedTokenizer(Saveable, Protocol):
    """The part of a transformers tokenizer that is used."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""
        ...

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """The text of token ids."""
        ...


class GgufConfig(Protocol):
    """The configuration of a model that was read from GGUF."""

    quantization_config: object


class GgufModel(Saveable, Protocol):
    """A model that was read from GGUF, with the fields that mark it as quantized."""

    hf_quantizer: object | None
    is_quantized: bool
    config: GgufConfig


class _TokenizerClass(Protocol):
    def from_pretrained(
        self, directory: Path, *, gguf_file: str | None = None, local_files_only: bool
    ) -> PretrainedTokenizer: ...


class _ModelClass(Protocol):
    def from_pretrained(
        self, directory: Path, *, gguf_file: str, dtype: str, local_files_only: bool
    ) -> GgufModel: ...


class _ConfigClass(Protocol):
    def __call__(self, **settings: float | bool | None) -> object: ...


class _LlamaClass(Protocol):
    def __call__(self, config: object) -> Saveable: ...


def require_modules(extra: str, modules: Sequence[str], purpose: str) -> None:
    """All modules can be found; none is imported.

    Args:
        extra: The extra of radixlink that brings them.
        modules: Their top-level names.
        purpose: What needs them, for the message.

    Raises:
        MissingExtraError: At least one is not installed.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{purpose} needs {', '.join(modules)}; not installed: {', '.join(missing)}. "
            f"Install the extra `{extra}` of the package radixlink (packages/cli of the checkout)"
        )


def load_saved_tokenizer(directory: Path) -> PretrainedTokenizer:
    """The tokenizer of a model directory is loaded, without a network.

    Raises:
        Exception: Files are missing or not understood; transformers and tokenizers promise no type.
    """
    loader = cast("_TokenizerClass", _transformers("AutoTokenizer"))
    return loader.from_pretrained(directory, local_files_only=True)


def load_gguf_tokenizer(path: Path) -> PretrainedTokenizer:
    """The tokenizer inside a GGUF file is loaded.

    Cost: 3 to 7 s for SmolLM2.
    """
    loader = cast("_TokenizerClass", _transformers("AutoTokenizer"))
    return loader.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


def load_gguf_model(path: Path) -> GgufModel:
    """The model inside a GGUF file is loaded, its weights expanded to float32.

    Cost: 11 to 21 s and 1.4 GB of memory for SmolLM2.
    """
    loader = cast("_ModelClass", _transformers("AutoModelForCausalLM"))
    return loader.from_pretrained(
        path.parent, gguf_file=path.name, dtype="float32", local_files_only=True
    )


def new_llama(seed: int, **settings: float | bool | None) -> Saveable:
    """A Llama with random weights that depend on nothing but the arguments.

    Mutates: nothing; torch's own random state is as before.
    """
    import torch

    config = cast("_ConfigClass", _transformers("LlamaConfig"))(**settings)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return cast("_LlamaClass", _transformers("LlamaForCausalLM"))(config)


def _transformers(name: str) -> object:
    found: object = getattr(import_module("transformers"), name)
    return found
