"""A model directory that the user brings: looked at, never written to or copied."""

from pathlib import Path
from typing import Final

from radixlink.models._manifest import FileRecord, Manifest, file_digest, is_identity
from radixlink.models._source import PreparedModel, Progress
from radixlink.models.errors import ModelNotFoundError

__all__ = ["local_model"]

_TOKENIZER_NAMES: Final = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def local_model(name: str, known_names: tuple[str, ...], progress: Progress) -> PreparedModel:
    """The path `name` is a model directory, and its digest is known.

    Raises:
        ModelNotFoundError: The path is not there, no directory, not readable, or lacks files.

    Cost: O(bytes of the weights), which are digested anew each time.
    """
    directory = Path(name).absolute()
    try:
        directory = Path(name).expanduser().absolute()
        missing = _missing(directory)
        if missing is None:
            progress(f"checking the weights in {directory}")
            records = {
                path.name: FileRecord(num_bytes=path.stat().st_size, sha256=file_digest(path))
                for path in sorted(directory.iterdir())
                if is_identity(path.name)
            }
            digest = Manifest(files=records).digest()
            return PreparedModel(directory=directory, digest=digest, name=name)
        cause = None
    except (OSError, RuntimeError) as exc:
        missing, cause = f"which cannot be read ({exc})", exc
    raise ModelNotFoundError(
        f"no model {name!r}: expected one of the known names ({', '.join(known_names)}), or the "
        f"path of a directory with config.json, *.safetensors and a tokenizer; "
        f"got {directory}, {missing}"
    ) from cause


def _missing(directory: Path) -> str | None:
    if not directory.exists():
        return "which does not exist"
    if not directory.is_dir():
        return "which is not a directory"
    names = {path.name for path in directory.iterdir() if path.is_file()}
    if "config.json" not in names:
        return "which has no config.json"
    if not any(name.endswith(".safetensors") for name in names):
        return "which has no *.safetensors"
    if names.isdisjoint(_TOKENIZER_NAMES):
        return f"which has none of {', '.join(_TOKENIZER_NAMES)}"
    return None
