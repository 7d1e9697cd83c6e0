"""The guard of the suites: a case that a subclass replaces proves nothing, unless it says why."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest


def unexplained_overrides(subclass: type, suites: Iterable[type]) -> tuple[str, ...]:
    """The cases of some suites that a subclass replaces without `xfail(reason=)`.

    Args:
        subclass: Whose cases run.
        suites: The classes that the cases come from.
    """
    return tuple(
        name
        for suite in suites
        for name, case in vars(suite).items()
        if name.startswith("test_")
        and getattr(subclass, name) is not case
        and not _says_why(getattr(subclass, name))
    )


def _says_why(test: object) -> bool:
    """True if a test is marked as expected to fail, with a reason."""
    marks: list[pytest.Mark] = getattr(test, "pytestmark", [])
    return any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks)
