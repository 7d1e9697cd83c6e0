"""Where RADIXLINK_CI is set a skipped test fails the run, and says why it was skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SKIPS = """
import pytest

@pytest.mark.skip(reason="no such device")
def test_skips():
    pass

@pytest.mark.xfail(reason="not yet", strict=True)
def test_fails_as_expected():
    assert False
"""
PASSES = "def test_passes(): pass\n"
SKIPS_ITSELF = 'import pytest\npytest.importorskip("no_such_module_anywhere")\n'


def run(where: Path, source: str, ci: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on one test file, alone, with the plugin."""
    (where / "pytest.ini").write_text("[pytest]\n")
    (where / "test_it.py").write_text(source)
    (where / "test_other.py").write_text(PASSES)
    environment = os.environ | {
        "PYTEST_PLUGINS": "pytest_no_skips",
        "PYTHONPATH": str(TOOLS),
        "RADIXLINK_CI": ci,
    }
    return subprocess.run(
        [sys.executable, "-m", "pytest", str(where), "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (SKIPS, "test_it.py::test_skips: Skipped: no such device"),
        (SKIPS_ITSELF, "could not import"),
    ],
)
def test_a_skip_fails_the_run_and_tells_its_reason(
    tmp_path: Path, source: str, reason: str
) -> None:
    done = run(tmp_path, source, ci="1")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert reason in done.stdout


def test_without_skips_the_run_passes(tmp_path: Path) -> None:
    done = run(tmp_path, PASSES, ci="1")
    assert done.returncode == pytest.ExitCode.OK, done.stdout


def test_elsewhere_a_skip_is_a_skip(tmp_path: Path) -> None:
    done = run(tmp_path, SKIPS, ci="")
    assert done.returncode == pytest.ExitCode.OK, done.stdout
