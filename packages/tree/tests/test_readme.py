"""The README's example is true."""

from __future__ import annotations

import re
from pathlib import Path


def test_example_in_the_readme_runs() -> None:
    readme = Path(__file__).parents[1] / "README.md"
    examples = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 1
    exec(compile(examples[0], str(readme), "exec"), {})
