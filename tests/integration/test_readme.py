"""The example of the README runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

_README = Path(__file__).parents[2] / "README.md"


def test_the_second_engine_of_the_example_restores(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", _README.read_text(), flags=re.DOTALL)
    result = subprocess.run(
        [sys.executable, "-c", example],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    restored = re.search(r"restored_tokens=(\d+)", result.stdout)
    assert restored is not None, result.stdout
    assert int(restored[1]) > 0
