"""What a prepared model is, and what something that can build one promises."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

import attrs

__all__ = ["ModelSource", "PreparedModel", "Progress"]

#: Told one line of text for the person who waits; never called from another thread.
Progress: TypeAlias = Callable[[str], None]


@attrs.frozen(kw_only=True)
class PreparedModel:
    """A directory that `from_pretrained` of transformers loads without a network."""

    #: Holds config.json, the weights as safetensors, and a tokenizer.
    directory: Path
    #: SHA-256 over the configuration and the weights, in hex: equal digests make equal KV.
    digest: str
    #: As the user gave it: a known name, or a path.
    name: str


class ModelSource(Protocol):
    """Builds the files of one known model, anew each time, with equal bytes for equal versions."""

    @property
    def name(self) -> str:
        """What the user types, for example `tiny`."""
        ...

    @property
    def directory_name(self) -> str:
        """The entry of the cache: differs whenever the files to build differ."""
        ...

    @property
    def required_bytes(self) -> int:
        """The most that a build occupies at once in the cache, intermediate files included."""
        ...

    def build(self, directory: Path, workspace: Path, progress: Progress) -> None:
        """`directory` holds the complete model.

        Args:
            directory: Exists and is empty.
            workspace: For intermediate files; exists, is on the same file system, and is removed by
                the caller whether the build succeeds or not.
            progress: Told of each step that takes more than a second.

        Raises:
            CommandError: The model cannot be built; the message says why.
            OSError: A file could not be written.
        """
        ...
