"""A case that hangs is a failure with its name and its stack, not a run that never ends."""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


def within(deadline_s: float, what: str, step: Callable[[], _Result]) -> _Result:
    """Do a step in a thread of its own; what it returns or raises is what this does.

    Args:
        deadline_s: Seconds after which it counts as hanging. Its thread is left behind.
        what: Names it in the failure.
        step: What to do.

    Raises:
        pytest.fail.Exception: It did not end in time; the message says where it is.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(step())
        except BaseException as error:  # noqa: BLE001 - an outcome of pytest's too; raised below
            errors.append(error)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(deadline_s)
    if errors:
        raise errors[0]
    if not results:
        pytest.fail(f"{what}: hangs: it did not end within {deadline_s} s{_stack_of(thread)}")
    return results[0]


def run_at_once(deadline_s: float, what: str, steps: list[Callable[[], None]]) -> None:
    """Do steps in a thread each, all of them at the same time.

    Raises:
        BaseException: What the first of them to fail raised; a hang is a failure as in `within`.
    """
    start = threading.Barrier(len(steps))

    def run(step: Callable[[], None]) -> None:
        start.wait(deadline_s)
        step()

    errors: list[BaseException] = []

    def keep(number: int, step: Callable[[], None]) -> None:
        try:
            within(deadline_s, f"{what}, thread {number}", functools.partial(run, step))
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [
        threading.Thread(target=keep, args=(number, step), daemon=True)
        for number, step in enumerate(steps)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def with_deadline(
    case: Callable[_Arguments, _Result], deadline_s: Callable[_Arguments, float]
) -> Callable[_Arguments, _Result]:
    """The same case, failing when it hangs.

    Args:
        case: A test.
        deadline_s: Gives the seconds, of the test's own arguments.
    """

    @functools.wraps(case)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return within(
            deadline_s(*args, **kwargs), case.__name__, functools.partial(case, *args, **kwargs)
        )

    return run


def _stack_of(thread: threading.Thread) -> str:
    """Where a thread is, innermost call last; empty if it has just ended."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 - the documented way
    if frame is None:
        return ""
    return "; it is at\n" + "".join(traceback.format_stack(frame))
