"""What was raised, for people, whatever it was: an exception of others may have no text that can be had.

Who tells of one goes by these, so that no exception of its text's takes the place of what is to be
done: a verdict is noted, a thread goes on, a group is marked. What they return can be encoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def text_of(raised: BaseException) -> str:
    """The `repr` of an exception; its type's name where that raises in turn."""
    return _told(raised, repr)


def named(raised: BaseException) -> str:
    """The name of an exception's type, then its message where that can be had."""
    return _told(raised, _name_and_message)


def _name_and_message(raised: BaseException) -> str:
    return f"{type(raised).__name__}: {raised}"


def _told(raised: BaseException, form: Callable[[BaseException], str]) -> str:
    try:
        # A path that is no UTF-8 has surrogates in it.
        return form(raised).encode(errors="backslashreplace").decode()
    except Exception:  # noqa: BLE001 -- what others raise, told without its own text
        return type(raised).__name__
