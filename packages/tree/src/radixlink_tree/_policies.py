"""Eviction policies: what each says a leaf is worth.

A policy is a pure function from a node to an integer; the least goes first, ties by node id. An
integer, because it compares faster than a tuple: where two things count, the second is a tick in
the low bits.

Rules of the file:
1. Only replicated facts count: ticks, tokens, counts, ids. So all ranks evict the same.
2. A value may rise at any time: the queue looks again before it gives a leaf up. A value that falls
   must be offered to the queue again; `VALUES_FALL` names the policies where that happens, and
   `UnifiedTreeCore` offers at the two moments when it can: a use of a leaf, and a split.

Source: the policies of sglang 0.5.23 (`--radix-eviction-policy`), re-told; TLRU is Zhang et al.,
arXiv:2510.15152.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, TypeAlias, assert_never

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_tree._node import Node

    Value: TypeAlias = Callable[[Node], int]
    """What a leaf is worth; the least goes first."""


class EvictionPolicy(enum.Enum):
    """Which unlocked leaf goes first."""

    #: The least recently used: matched, or inserted through.
    LRU = "lru"
    #: The one that the fewest inserts passed; of these the least recently used.
    LFU = "lfu"
    #: The oldest, however much it is used.
    FIFO = "fifo"
    #: The newest.
    FILO = "filo"
    #: The most recently used: for scans that are longer than the cache.
    MRU = "mru"
    #: The one with the lowest `InsertParams.priority`; of these the least recently used.
    PRIORITY = "priority"
    #: Segmented: those that one insert alone has passed before those that came again; in each
    #: segment the least recently used.
    SLRU = "slru"
    #: Tail-optimised: first the ends of long conversations, which their next turn can do without;
    #: `tail_tokens` says how much of each. Then the least recently used.
    TLRU = "tlru"


#: Where `Node.uses` is counted.
COUNTS_USES: Final = frozenset({EvictionPolicy.LFU, EvictionPolicy.SLRU})
#: Where `Node.longest` is kept.
KEEPS_LONGEST: Final = frozenset({EvictionPolicy.TLRU})
#: Where the value of an unlocked leaf can fall: MRU by a use, TLRU by a split.
VALUES_FALL: Final = frozenset({EvictionPolicy.MRU, EvictionPolicy.TLRU})

#: Below this, a tick; above, what counts before it. Uses a microsecond apart reach it in 8 years.
_FIRST: Final = 1 << 48
#: Uses that make a leaf one that came again.
_CAME_AGAIN: Final = 2


def value_of(policy: EvictionPolicy, tail_tokens: int) -> Value:
    """The function of a policy.

    Args:
        policy: Which one.
        tail_tokens: For TLRU.
    """
    match policy:
        case EvictionPolicy.LRU:
            return lambda node: node.last_access
        case EvictionPolicy.LFU:
            return lambda node: node.uses * _FIRST + node.last_access
        case EvictionPolicy.FIFO:
            return lambda node: node.created
        case EvictionPolicy.FILO:
            return lambda node: -node.created
        case EvictionPolicy.MRU:
            return lambda node: -node.last_access
        case EvictionPolicy.PRIORITY:
            return lambda node: node.priority * _FIRST + node.last_access
        case EvictionPolicy.SLRU:
            return lambda node: (node.uses >= _CAME_AGAIN) * _FIRST + node.last_access
        case EvictionPolicy.TLRU:
            return lambda node: _needed(node, tail_tokens) * _FIRST + node.last_access
        case _:
            assert_never(policy)


def _needed(node: Node, tail_tokens: int) -> bool:
    """Whether the next turn of the longest conversation through a leaf would miss it.

    It does where what is left without the leaf is shorter than the conversation but for its tail.
    The length is the longest that there ever was: measured on what is left, a trimmed conversation
    would be trimmed again until nothing is left of it.
    """
    return node.end - node.num_tokens < max(node.longest - tail_tokens, 0)
