"""The examples of READMEs run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
#: Where an example leaves what would outlive the test.
_STORE = "/dev/shm/my-store"
#: Whose examples each run as they stand, by themselves.
_PACKAGES = ("comm", "linker", "pools", "store", "store_mpi", "tree")
#: Ends well where mpi4py finds its library; starts nothing of MPI.
_LOADS_MPI = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"


def _examples(readme: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", readme.read_text(), flags=re.DOTALL)


def _run(example: str, directory: Path) -> str:
    """What an example prints; skips one that needs MPI, where there is none."""
    if "mpi4py" in example:
        loaded = _ended(_LOADS_MPI, directory)
        if loaded.returncode:
            pytest.skip(f"MPI cannot be loaded: {loaded.stderr.strip().splitlines()[-1]}")
    result = _ended(example, directory)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _ended(program: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=directory,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            # What an MPI library leaves there goes with the directory.
            "OMPI_MCA_btl_sm_backing_directory": str(directory),
            "PRTE_MCA_prte_tmpdir_base": str(directory),
        },
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )


def _restored(output: str) -> list[int]:
    return [int(number) for number in re.findall(r"restored_tokens=(\d+)", output)]


def test_an_example_that_needs_mpi_is_skipped_without_it_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", str(tmp_path / "libmpi.so"))
    with pytest.raises(pytest.skip.Exception, match=r"MPI cannot be loaded: .*mpi"):
        _run("from mpi4py import MPI", tmp_path)


def test_the_second_engine_of_the_example_restores(tmp_path: Path) -> None:
    (example,) = _examples(_ROOT / "README.md")
    (restored,) = _restored(_run(example, tmp_path))
    assert restored > 0


def test_the_second_process_of_five_minutes_restores(tmp_path: Path) -> None:
    make_model, serve = _examples(_ROOT / "packages/transformers/README.md")
    _run(make_model, tmp_path)
    assert _restored(_run(serve, tmp_path)) == [0, 0, 0]
    # One loads the document, and those that waited have it from there.
    restored = _restored(_run(serve, tmp_path))
    assert restored == [400, 400, 400]


@pytest.mark.parametrize(
    ("package", "number"),
    [
        (package, number)
        for package in _PACKAGES
        for number, _ in enumerate(_examples(_ROOT / f"packages/{package}/README.md"))
    ],
)
def test_each_example_of_a_package_runs_by_itself(
    package: str, number: int, tmp_path: Path
) -> None:
    example = _examples(_ROOT / f"packages/{package}/README.md")[number]
    _run(example.replace(_STORE, str(tmp_path / "store")), tmp_path)
