"""Text to token ids and back, for a prepared model."""

from collections.abc import Sequence
from typing import Protocol

import attrs

from radixlink.models._pretrained import PretrainedTokenizer, load_saved_tokenizer
from radixlink.models._source import PreparedModel
from radixlink.models.errors import ModelNotFoundError

__all__ = ["TextCodec", "load_tokenizer"]


class TextCodec(Protocol):
    """What the commands need of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, with nothing added in front or behind.

        Special tokens that are spelled out in the text, such as `<|im_start|>`, become one token.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens spelled out.

        Bytes that are not UTF-8, such as half a letter at the end, become U+FFFD.
        """
        ...


@attrs.frozen
class _PretrainedCodec:
    _tokenizer: PretrainedTokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def load_tokenizer(prepared: PreparedModel) -> TextCodec:
    """The tokenizer of a prepared model is loaded, without a network.

    Raises:
        ModelNotFoundError: The files are no tokenizer that transformers understands.

    Cost: under a second, after the import of transformers.
    """
    try:
        tokenizer = load_saved_tokenizer(prepared.directory)
    except Exception as exc:  # a file that is none makes it raise KeyError, bare Exception, ...
        raise ModelNotFoundError(
            f"model {prepared.name!r}: expected a tokenizer in {prepared.directory}, got: {exc}"
        ) from exc
    return _PretrainedCodec(tokenizer)
