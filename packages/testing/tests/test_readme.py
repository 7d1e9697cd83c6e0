"""The examples of the README run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
STORE, FAULTS = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), flags=re.DOTALL)


def test_store_of_the_example_passes_the_suites(tmp_path: Path) -> None:
    (tmp_path / "test_my_store.py").write_text(STORE, "utf-8")
    # A directory of its own, as a backend author has: none of our settings.
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    summary = run.stdout.splitlines()[-1]
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (\w+)", summary)}
    # What needs `corrupt`, `pass_time`, other processes or an unusable place is not checked.
    assert counts["passed"] > 70
    assert counts["xfailed"] > 0


def test_faults_come_as_planned_in_the_example() -> None:
    exec(compile(FAULTS, str(README), "exec"), {})
