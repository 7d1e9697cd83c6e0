"""What an insert into a tree with windows does where nodes are there already, and how it cuts leaves.

The value of an insert has full slots for all its tokens, and window slots beside those from its
floor on: below it the request's own window had moved on. A tombstone that lies above the floor gets
its window back.
"""

from __future__ import annotations

import enum
from itertools import pairwise
from typing import TYPE_CHECKING

import attrs

from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from radixlink_tree._node import Node


class Fate(enum.Enum):
    """What becomes of a stretch of an insert's value."""

    #: The tree has these tokens, and keeps its own slots: full and window slots go back.
    DUPLICATE = enum.auto()
    #: The same, but there are no window slots beside.
    DUPLICATE_FULL = enum.auto()
    #: A tombstone gets its window back.
    RECOVERS = enum.auto()


@attrs.frozen(kw_only=True)
class Stretch:
    """A stretch of an insert's value, in tokens from the start of the sequence.

    Attributes:
        fate: What becomes of it.
        start: First token.
        stop: Token behind the last.
        node: The tombstone, for RECOVERS; the stretch goes up to its end.
    """

    fate: Fate
    start: int
    stop: int
    node: Node | None = None


def overlap(end: Node, stop: int, start: int, floor: int) -> list[Stretch]:
    """Say what becomes of the value between `start` and `stop`, first tokens first.

    Args:
        end: The node at whose end `stop` is.
        stop: Token where what was there before ends.
        start: Token up to which the value is the tree's own.
        floor: Token from which on the value has window slots.

    Cost: O(nodes between).
    """
    path: list[tuple[Node, int, int]] = []
    node, at = end, stop
    while at > start and node.parent is not None:
        first = at - node.num_tokens
        path.append((node, max(first, start), at))
        node, at = node.parent, first
    stretches: list[Stretch] = []
    for node, first, last in reversed(path):
        for stretch in _of_node(node, first, last, min(max(floor, first), last)):
            before = stretches[-1] if stretches else None
            if (
                before is not None
                and before.fate is stretch.fate
                and stretch.fate is not Fate.RECOVERS
            ):
                stretches[-1] = attrs.evolve(before, stop=stretch.stop)
            else:
                stretches.append(stretch)
    return stretches


def _of_node(node: Node, first: int, last: int, floor: int) -> Iterator[Stretch]:
    """The stretches of the value over one node."""
    if first < floor:
        yield Stretch(fate=Fate.DUPLICATE_FULL, start=first, stop=floor)
    if floor == last:
        return
    if node.has_swa:
        yield Stretch(fate=Fate.DUPLICATE, start=floor, stop=last)
    else:
        yield Stretch(fate=Fate.RECOVERS, start=floor, stop=last, node=node)


@attrs.frozen(kw_only=True)
class LateStretch:
    """A tombstone, or the lower part of one, whose window has come back.

    Attributes:
        node: The tombstone.
        start: First token; inside the node where its upper part stays without.
        stop: Token behind the node's last.
    """

    node: Node
    start: int
    stop: int


def late_stretches(end: Node, stop: int, ranges: tuple[tuple[int, int], ...]) -> list[LateStretch]:
    """Say which tombstones on a path get their window back beside their own full slots.

    Args:
        end: The node at whose end `stop` is.
        stop: Token where what was there before ends.
        ranges: Tokens with a window that came late, ascending.

    Raises:
        ContractError: A range is not made of tombstones up to the end of one.

    Cost: O(nodes behind the first token of the ranges).
    """
    stretches: list[LateStretch] = []
    node, at = end, stop
    for first, last in reversed(ranges):
        while at > last and node.parent is not None:
            node, at = node.parent, at - node.num_tokens
        reached = last
        while reached > first and at == reached and not node.has_swa and node.parent is not None:
            start = max(first, at - node.num_tokens)
            stretches.append(LateStretch(node=node, start=start, stop=at))
            node, at = node.parent, at - node.num_tokens
            reached = start
        if reached > first:
            msg = (
                f"insert: expected tombstones for the late window of tokens {first} to {last}, "
                f"up to the end of one, got none that ends at {reached}"
            )
            raise ContractError(msg)
    return stretches


def pieces(start: int, stop: int, cuts: Iterable[int]) -> list[tuple[int, int]]:
    """The half-open range [start, stop), cut at those of `cuts` that lie inside."""
    bounds = sorted({start, stop, *(cut for cut in cuts if start < cut < stop)})
    return list(pairwise(bounds))
