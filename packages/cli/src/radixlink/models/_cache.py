"""The cache of prepared models: entries appear whole or not at all.

Rules of this file:

1. An entry is built in a hidden workspace beside it, `.NAME.*.partial`, and renamed into place.
2. Only the holder of `.NAME.lock` builds. The lock is the kernel's (flock): a dead process holds
   none, and a workspace seen by the holder belongs to a dead one and is removed.
3. An entry is used only after its manifest was checked. That needs no lock and no write, so a
   complete cache may be read-only.
4. A damaged entry is moved into the workspace, never repaired in place.
"""

import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Final

from radixlink.models._manifest import Defect, Manifest, read_verified, write_manifest
from radixlink.models._source import ModelSource, PreparedModel, Progress
from radixlink.models.errors import ModelCacheError

__all__ = ["cached_model"]

#: A download may take ten minutes and a conversion one or two on a busy machine.
_LOCK_TIMEOUT_S: Final = 1200.0
_LOCK_POLL_S: Final = 0.1
_MEGABYTE: Final = 1_000_000


def cached_model(source: ModelSource, cache_dir: Path, progress: Progress) -> PreparedModel:
    """The entry of `source` is complete and checked; it was built if it was not.

    Args:
        source: Builds the entry at most once, however many processes ask at the same time.
        cache_dir: Created where it is not there.
        progress: Told of waiting, of damage found, and of what the source does.

    Raises:
        ModelCacheError: No room, no permission, or the lock was held for twenty minutes.
        CommandError: What the source raises.
    """
    directory = cache_dir / source.directory_name
    try:
        found = read_verified(directory)
        if isinstance(found, Defect):
            cache_dir.mkdir(parents=True, exist_ok=True)
            with _lock(cache_dir / f".{source.directory_name}.lock", progress):
                found = _build_unless_complete(source, directory, progress)
    except OSError as exc:
        raise ModelCacheError(
            f"model {source.name!r} could not be prepared in {directory}: {exc}"
        ) from exc
    return PreparedModel(directory=directory, digest=found.digest(), name=source.name)


def _build_unless_complete(source: ModelSource, directory: Path, progress: Progress) -> Manifest:
    found = read_verified(directory)
    if isinstance(found, Manifest):
        return found
    if directory.exists():
        progress(f"{directory} is damaged ({found.reason}): building it again")
    cache_dir = directory.parent
    _remove_leftovers(cache_dir, directory.name)
    _require_room(source, cache_dir)
    with TemporaryDirectory(
        prefix=f".{directory.name}.", suffix=".partial", dir=cache_dir, ignore_cleanup_errors=True
    ) as path:
        workspace = Path(path)
        built = workspace / "model"
        built.mkdir()
        source.build(built, workspace, progress)
        manifest = write_manifest(built)
        if directory.exists():
            directory.replace(workspace / "replaced")
        built.replace(directory)
    return manifest


def _remove_leftovers(cache_dir: Path, directory_name: str) -> None:
    for leftover in cache_dir.glob(f".{directory_name}.*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)


def _require_room(source: ModelSource, cache_dir: Path) -> None:
    free_bytes = shutil.disk_usage(cache_dir).free
    if free_bytes < source.required_bytes:
        raise ModelCacheError(
            f"not enough room for model {source.name!r} in {cache_dir}: "
            f"expected {_megabytes(source.required_bytes)} free, got {_megabytes(free_bytes)}; "
            f"free some, or choose another cache directory"
        )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes // _MEGABYTE:,} MB"


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("ab") as file:
        if not _try_lock(file):
            progress(f"waiting for another process that prepares this model ({path})")
            while not _try_lock(file):
                if time.monotonic() > deadline_s:
                    raise ModelCacheError(
                        f"another process holds {path} for over {_LOCK_TIMEOUT_S:.0f} s"
                    )
                time.sleep(_LOCK_POLL_S)
        yield


def _try_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
