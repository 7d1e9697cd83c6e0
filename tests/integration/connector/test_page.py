"""The code of the page about connectors runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent


def test_the_example_stores_and_loads(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "packages/linker/CONNECTOR.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL)
    paths = os.pathsep.join([str(_HERE), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", example],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )
    assert result.returncode == 0, result.stderr
