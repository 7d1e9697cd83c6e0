"""No `with` enters a `threading.Condition`: it is entered in Python, a lock in C.

A signal's exception can come between the acquiring and the body of the one, and the lock is kept for
ever; it cannot of the other. So a condition has a lock beside it, and `with` names that.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
WRONG = """
class Board:
    def __init__(self):
        self._changed: Final = threading.Condition()

    def tell(self):
        with other, self._changed:
            self._changed.notify_all()
"""
RIGHT = WRONG.replace("Condition()", "Condition(self._lock)").replace(
    "other, self._changed:", "other, self._lock:"
)


def entered_conditions(source: str) -> list[int]:
    """The lines in which a `with` enters what the same file makes as a condition."""
    nodes = list(ast.walk(ast.parse(source)))
    conditions = {
        ast.unparse(target)
        for node in nodes
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).endswith("Condition")
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.With)
        if any(ast.unparse(item.context_expr) in conditions for item in node.items)
    ]


def test_it_is_seen_where_it_is() -> None:
    assert entered_conditions(WRONG) == [7]
    assert entered_conditions(RIGHT) == []


def test_no_package_does_it() -> None:
    sources = sorted(ROOT.glob("packages/*/src/**/*.py"))
    assert len(sources) > 200
    found = {
        str(path.relative_to(ROOT)): lines
        for path in sources
        if (lines := entered_conditions(path.read_text("utf-8")))
    }
    assert found == {}
