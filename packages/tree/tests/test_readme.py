"""The README's examples are true, read from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path


def test_examples_in_the_readme_run() -> None:
    readme = Path(__file__).parents[1] / "README.md"
    examples = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    assert examples
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, str(readme), "exec"), names)
