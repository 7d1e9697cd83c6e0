"""What a complete model directory holds: the size and SHA-256 of each file, in `radixlink.json`.

The manifest is the last file that a build writes, so a directory without one is not complete.
It finds damage, not malice: whoever can write the cache can write a manifest too.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import attrs

__all__ = ["Defect", "FileRecord", "Manifest", "file_digest", "read_verified", "write_manifest"]

MANIFEST_NAME: Final = "radixlink.json"

#: Raised when a build writes other files than before: older entries of the cache are built again.
_FORMAT: Final = 1


@attrs.frozen(kw_only=True)
class FileRecord:
    """One file as it was when the build ended."""

    num_bytes: int
    sha256: str


@attrs.frozen(kw_only=True)
class Defect:
    """Why a directory cannot be used; a value, because the answer is to build it again."""

    reason: str


@attrs.frozen(kw_only=True)
class Manifest:
    """The files of a model directory by name, without the manifest itself."""

    files: Mapping[str, FileRecord]

    @classmethod
    def of_directory(cls, directory: Path) -> "Manifest":
        """Every file of `directory` has been measured and digested.

        Raises:
            OSError: A file could not be read.
        """
        paths = sorted(path for path in directory.iterdir() if path.is_file())
        return cls(
            files={
                path.name: FileRecord(num_bytes=path.stat().st_size, sha256=file_digest(path))
                for path in paths
                if path.name != MANIFEST_NAME
            }
        )

    def digest(self) -> str:
        """The identity of the model: the configuration and the weights, not the tokenizer.

        A tokenizer decides which tokens are asked for, not what their KV is.
        """
        whole = hashlib.sha256()
        for name in sorted(self.files):
            if is_identity(name):
                whole.update(f"{name}\0{self.files[name].sha256}\n".encode())
        return whole.hexdigest()


def is_identity(name: str) -> bool:
    """Whether the file decides what KV the model computes.

    >>> [is_identity(name) for name in ("config.json", "model.safetensors", "tokenizer.json")]
    [True, True, False]
    """
    return name == "config.json" or name.endswith(".safetensors")


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, in hex.

    Raises:
        OSError: The file could not be read.

    Cost: O(bytes), about 0.8 s for a gigabyte that is in memory.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(directory: Path) -> Manifest:
    """The directory is complete: its manifest lists every file in it.

    Raises:
        OSError: A file could not be read or written.
    """
    manifest = Manifest.of_directory(directory)
    document = {
        "format": _FORMAT,
        "files": {name: attrs.asdict(record) for name, record in manifest.files.items()},
    }
    text = json.dumps(document, indent=2) + "\n"
    (directory / MANIFEST_NAME).write_text(text, encoding="utf-8")
    return manifest


def read_verified(directory: Path) -> Manifest | Defect:
    """Every file that the manifest lists is there, with the size and digest it had.

    Files that are not listed are ignored.

    Returns:
        The manifest, or the first defect found; sizes are compared before anything is digested.
    """
    try:
        text = (directory / MANIFEST_NAME).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return Defect(reason=f"{MANIFEST_NAME} is not readable")
    manifest = _parse(text)
    if isinstance(manifest, Defect):
        return manifest
    for name, record in manifest.files.items():
        path = directory / name
        if not path.is_file():
            return Defect(reason=f"{name} is missing")
        if path.stat().st_size != record.num_bytes:
            return Defect(
                reason=f"{name} has {path.stat().st_size} bytes instead of {record.num_bytes}"
            )
    for name, record in manifest.files.items():
        found = file_digest(directory / name)
        if found != record.sha256:
            return Defect(reason=f"{name} has sha256 {found} instead of {record.sha256}")
    return manifest


def _parse(text: str) -> Manifest | Defect:
    try:
        document: object = json.loads(text)
    except ValueError:
        return Defect(reason=f"{MANIFEST_NAME} is not JSON")
    match document:
        case {"format": int(version), "files": dict(entries)} if version == _FORMAT:
            files: dict[str, FileRecord] = {}
            for name, entry in entries.items():
                match entry:
                    case {"num_bytes": int(num_bytes), "sha256": str(sha256)} if _is_plain(name):
                        files[name] = FileRecord(num_bytes=num_bytes, sha256=sha256)
                    case _:
                        return Defect(reason=f"{MANIFEST_NAME} has a bad entry for {name!r}")
            return _with_model(Manifest(files=files))
        case _:
            return Defect(reason=f"{MANIFEST_NAME} is not of format {_FORMAT}")


def _with_model(manifest: Manifest) -> Manifest | Defect:
    if "config.json" in manifest.files and any(
        name.endswith(".safetensors") for name in manifest.files
    ):
        return manifest
    return Defect(reason=f"{MANIFEST_NAME} lists no model")


def _is_plain(name: str) -> bool:
    return Path(name).name == name
