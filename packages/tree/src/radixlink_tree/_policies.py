"""Eviction policies: what each says a leaf is worth.

A policy is a pure function from a node to an integer; the least goes first, ties by node id. An
integer, because it compares faster than a tuple: where two things count, the second is a tick in
the low bits. Beside a node's last use a policy may go by one more number, `Node.standing`, which
`new_standing`, `note_insert` and `split_standing` keep for it; one, so that a node is small:

| policy    | standing                                                                     |
|-----------|------------------------------------------------------------------------------|
| LFU, SLRU | inserts that passed                                                          |
| FIFO/FILO | the tick at which its tokens came                                            |
| PRIORITY  | the highest priority of an insert that passed                                |
| TLRU      | tokens of the longest path that ever led on from its end                     |

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

    from radixlink_contracts import InsertParams
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


#: Where `Node.standing` says anything.
KEEPS_STANDING: Final = frozenset(EvictionPolicy) - {EvictionPolicy.LRU, EvictionPolicy.MRU}
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
            return lambda node: node.standing * _FIRST + node.last_access
        case EvictionPolicy.FIFO:
            return lambda node: node.standing
        case EvictionPolicy.FILO:
            return lambda node: -node.standing
        case EvictionPolicy.MRU:
            return lambda node: -node.last_access
        case EvictionPolicy.PRIORITY:
            return lambda node: node.standing * _FIRST + node.last_access
        case EvictionPolicy.SLRU:
            return lambda node: (node.standing >= _CAME_AGAIN) * _FIRST + node.last_access
        case EvictionPolicy.TLRU:
            return lambda node: _needed(node, tail_tokens) * _FIRST + node.last_access
        case _:
            assert_never(policy)


def _needed(node: Node, tail_tokens: int) -> bool:
    """Whether the next turn of the longest conversation through a leaf would miss it.

    It does where the leaf begins before that conversation's tail. The conversation is as long as it
    ever was: measured on what is left, a trimmed one would be trimmed again until nothing is left.
    """
    return node.num_tokens + node.standing > tail_tokens


def new_standing(policy: EvictionPolicy, tick: int, priority: int) -> int:
    """The standing of a leaf before its insert is noted."""
    match policy:
        case EvictionPolicy.FIFO | EvictionPolicy.FILO:
            return tick
        case EvictionPolicy.PRIORITY:
            return priority
        case _:
            return 0


def split_standing(policy: EvictionPolicy, lower: Node) -> int:
    """The standing of the new upper half of a node, when the lower has its final length."""
    if policy is EvictionPolicy.TLRU:
        return lower.standing + lower.num_tokens
    return lower.standing


def note_insert(policy: EvictionPolicy, end: Node, total: int, params: InsertParams) -> None:
    """Note an insert of `total` tokens on the path to its end.

    A parent's priority is never below a child's, and its longest path never shorter than what leads
    on through a child: a walk that raises them ends where they are high enough.

    Cost: O(nodes on the path); for all but LFU and SLRU mostly O(1).
    """
    node: Node | None = end
    match policy:
        case EvictionPolicy.LFU | EvictionPolicy.SLRU:
            at = total
            while node is not None and at > params.inserted_len:
                node.standing += 1
                at -= node.num_tokens
                node = node.parent
        case EvictionPolicy.PRIORITY:
            node = end.parent if end.standing == params.priority else end
            while node is not None and node.standing < params.priority:
                node.standing = params.priority
                node = node.parent
        case EvictionPolicy.TLRU:
            beyond = end.num_tokens
            node = end.parent
            while node is not None and node.standing < beyond:
                node.standing = beyond
                beyond += node.num_tokens
                node = node.parent
        case EvictionPolicy.LRU | EvictionPolicy.MRU | EvictionPolicy.FIFO | EvictionPolicy.FILO:
            pass
        case _:
            assert_never(policy)


def standings_agree(policy: EvictionPolicy, parent: Node, child: Node) -> bool:
    """Whether a node's standing and its child's can be of one history: an invariant."""
    match policy:
        case EvictionPolicy.PRIORITY:
            return parent.standing >= child.standing
        case EvictionPolicy.TLRU:
            return parent.standing >= child.standing + child.num_tokens
        case EvictionPolicy.FIFO | EvictionPolicy.FILO:
            return parent.standing <= child.standing
        case _:
            return True
