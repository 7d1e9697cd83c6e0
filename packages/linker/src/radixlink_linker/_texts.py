"""What was raised, for people, whatever it was: an exception of a backend may have no text that can be had."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def text_of(raised: BaseException, form: Callable[[BaseException], str]) -> str:
    """The text that a form gives an exception; its type's name where that raises in turn."""
    try:
        return form(raised)
    except Exception:  # noqa: BLE001 -- what a backend raised, told without its own text
        return type(raised).__name__


def named(raised: BaseException) -> str:
    """A form: the name of the type, then the message."""
    return f"{type(raised).__name__}: {raised}"
