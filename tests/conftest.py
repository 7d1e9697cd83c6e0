"""What tests of several packages share: the command, run as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from pathlib import Path

_TIMEOUT_S = 240.0
COMMAND = [sys.executable, "-c", "import radixlink, sys; sys.exit(radixlink.main())", "demo"]


class RunDemo(Protocol):
    """The type of the fixture `run_demo`."""

    def __call__(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `radixlink demo` in the test's own directory, with a deadline.

        Args:
            *arguments: Of the command.
            **environment: Variables beside those of the test.
        """
        ...


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the command keeps models, for all tests of a run."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run_demo(model_cache: Path, tmp_path: Path) -> RunDemo:
    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments],
            cwd=tmp_path,
            env={**os.environ, "XDG_CACHE_HOME": str(model_cache), **environment},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )

    return run
