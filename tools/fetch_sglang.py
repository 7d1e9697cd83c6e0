"""Unpack SGLang's wheel without its dependencies, for the tests of radixlink-sglang.

    python tools/fetch_sglang.py DIRECTORY

Does nothing where it is there. The wheel (39 MB) comes from the index that pip uses, in the version
that constraints.txt pins. Where there is none for this machine, or no index, it says so and ends
with 0: the tests then skip, and under RADIXLINK_CI a skip is a failure.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def pinned() -> str:
    """The requirement that constraints.txt has for SGLang."""
    found = re.search(r"^sglang==\S+$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        sys.exit(f"{CONSTRAINTS}: expected a pin of sglang, got none")
    return found[0]


def fetch(requirement: str, place: Path) -> str:
    """Unpack the wheel at a place; return what is to be said about it."""
    metadata = f"{requirement.replace('==', '-')}.dist-info"
    if (place / metadata).is_dir():
        return f"{requirement} is in {place}"
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as name:
        scratch = Path(name)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        options = ["--only-binary=:all:", "--dest", name, requirement]
        done = subprocess.run(
            [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if done.returncode:
            return f"{requirement} is not to be had: {done.stdout.decode().strip()}"
        (wheel,) = scratch.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch / "unpacked")
        shutil.rmtree(place, ignore_errors=True)
        (scratch / "unpacked").rename(place)
    return f"{requirement} was unpacked in {place}"


if __name__ == "__main__":
    print(fetch(pinned(), Path(sys.argv[1]).resolve()))
