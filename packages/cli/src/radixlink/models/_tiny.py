"""A tiny Llama with random weights and one token for each byte: nothing is downloaded.

It says nothing sensible, but a wrong page of its KV shows: the raised initializer range makes its
logits reach 4.7 on a line of text, where the default would leave them at 0.6.
"""

import hashlib
import json
from pathlib import Path
from typing import Final

import attrs

from radixlink.models._pretrained import new_llama
from radixlink.models._source import Progress

__all__ = ["TinySource", "byte_tokenizer"]

_SEED: Final = 20_260

#: No begin, end or padding token: every id is a byte, and generation never ends by itself.
_SETTINGS: Final[dict[str, float | bool | None]] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32_768,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_RECIPE: Final = hashlib.sha256(json.dumps([_SEED, _SETTINGS]).encode()).hexdigest()


@attrs.frozen(kw_only=True)
class TinySource:
    """Builds a Llama of 0.2 million parameters: 4 layers, 2 KV heads of 16, 256 tokens."""

    name: str = "tiny"
    directory_name: str = f"tiny-{_RECIPE[:12]}"
    required_bytes: int = 8_000_000

    def build(self, directory: Path, workspace: Path, progress: Progress) -> None:
        """`directory` holds the random model and its byte tokenizer; see `ModelSource.build`.

        Raises:
            OSError: A file could not be written.
        """
        del workspace
        progress("building a tiny random model (1 MB)")
        new_llama(_SEED, **_SETTINGS).save_pretrained(directory)
        documents = {
            "tokenizer.json": byte_tokenizer(),
            "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        }
        for name, document in documents.items():
            text = json.dumps(document, indent=1) + "\n"
            (directory / name).write_text(text, encoding="utf-8")


def byte_tokenizer() -> dict[str, object]:
    """A `tokenizer.json` in which the id of a token is the value of its byte.

    It is byte-pair encoding without a single merge, so that every text can be encoded and the
    ordinary loader of transformers reads it.

    Source: the format of Hugging Face tokenizers 0.2x, version "1.0".
    """
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": _byte_letters(),
            "merges": [],
        },
    }


def _byte_letters() -> dict[str, int]:
    # Byte-level tokenizers write each byte as one printable letter: itself where it is printable in
    # Latin-1, else the next free letter from U+0100 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(0x100 + rank) for rank, byte in enumerate(others)}
    return {letters.get(byte, chr(byte)): byte for byte in range(256)}
