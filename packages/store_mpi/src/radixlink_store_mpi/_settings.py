"""What of the exchange between nodes can be set, and the one place that reads the environment."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Final, Self, TypeVar

import attrs

from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FAKE_NODES: Final = "RADIXLINK_MPI_FAKE_NODES"
ANSWER_TIMEOUT: Final = "RADIXLINK_MPI_ANSWER_TIMEOUT_S"

_Number = TypeVar("_Number", int, float)


@attrs.frozen(kw_only=True)
class NodeSettings:
    """How nodes ask each other for pages.

    Attributes:
        fake_nodes: Into how many nodes the ranks of one machine are split, each with memory of its
            own, so that what happens between nodes happens on one machine; 1 is what is really
            there.
        answer_timeout_s: Seconds until a node that did not answer is a miss.
        max_answer_bytes: Bytes of pages in one answer, though at least one page. What more was asked
            for is asked for again.
    """

    fake_nodes: int = 1
    answer_timeout_s: float = 1.0
    max_answer_bytes: int = 32 << 20

    def __attrs_post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if (
            self.fake_nodes < 1
            or not 0 < self.answer_timeout_s < math.inf
            or self.max_answer_bytes < 1
        ):
            raise ContractError(
                f"NodeSettings: expected fake_nodes and max_answer_bytes of at least 1 and an "
                f"answer_timeout_s above 0 that ends, got {self}"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """The defaults, but for what the environment says.

        Raises:
            ContractError: A variable is no such number.
        """
        return cls(
            fake_nodes=_number(environ, FAKE_NODES, int, 1),
            answer_timeout_s=_number(environ, ANSWER_TIMEOUT, float, 1.0),
        )


def _number(
    environ: Mapping[str, str], name: str, kind: Callable[[str], _Number], default: _Number
) -> _Number:
    text = environ.get(name)
    if text is None:
        return default
    try:
        return kind(text)
    except ValueError as error:
        raise ContractError(f"{name}: expected a number, got {text!r}") from error
