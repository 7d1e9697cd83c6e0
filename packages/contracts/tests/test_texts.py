from __future__ import annotations

from typing import Never

import pytest
from typing_extensions import override

from radixlink_contracts.errors import StorageError
from radixlink_contracts.texts import named, text_of


class Nameless(BaseException):
    """An exception of which no text can be had."""

    @override
    def __str__(self) -> Never:
        raise ValueError("no text")

    @override
    def __repr__(self) -> Never:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("raised", "text", "name"),
    [
        (StorageError("full"), "StorageError('full')", "StorageError: full"),
        (KeyboardInterrupt(), "KeyboardInterrupt()", "KeyboardInterrupt: "),
        (Nameless(), "Nameless", "Nameless"),
        (OSError("\udcff"), "OSError('\\udcff')", "OSError: \\udcff"),
    ],
    ids=["one of ours", "a signal's", "without a text", "of no UTF-8"],
)
def test_what_was_raised_is_told_whatever_it_is(
    raised: BaseException, text: str, name: str
) -> None:
    assert text_of(raised) == text
    assert named(raised) == name
    assert text_of(raised).encode()
    assert named(raised).encode()
