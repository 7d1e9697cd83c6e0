"""Runs a suite without pytest, for suites that must fail: which cases do, and why."""

from __future__ import annotations

import inspect
import itertools
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from radixlink_testing._store_suite import StoreSuite


def failures_of(
    suite: type[StoreSuite], make: Callable[[], Mapping[str, Callable[[], object]]]
) -> dict[str, list[BaseException]]:
    """The cases that fail, without their `test_`, and why; expected failures are none.

    Args:
        suite: Whose cases run, each in each of its parametrizations.
        make: Gives new fixtures for a case, by name.
    """
    failures: dict[str, list[BaseException]] = {}
    for name in cases_of(suite):
        case = getattr(suite(), f"test_{name}")
        for arguments in _runs_of(case):
            fixtures = make()
            wanted = inspect.signature(case).parameters
            given = {key: fixtures[key]() for key in wanted if key not in arguments}
            try:
                case(**given, **arguments)
            except pytest.xfail.Exception:
                continue
            except (Exception, pytest.fail.Exception) as failure:  # noqa: BLE001 - what is counted
                failures.setdefault(name, []).append(failure)
    return failures


def cases_of(suite: type[StoreSuite]) -> list[str]:
    """The names of all cases, without their `test_`."""
    return [name.removeprefix("test_") for name in dir(suite) if name.startswith("test_")]


def _runs_of(case: Callable[..., object]) -> Iterator[dict[str, Any]]:
    """The arguments of each run of a parametrized case, as pytest makes them."""
    marks: list[pytest.Mark] = getattr(case, "pytestmark", [])
    named = [
        [(mark.args[0], value) for value in mark.args[1]]
        for mark in marks
        if mark.name == "parametrize"
    ]
    for values in itertools.product(*named):
        yield dict(values)
