"""Names of what is cached: components of a model's attention, and the physical pools that hold them."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping


class ComponentType(enum.IntEnum):
    """A kind of attention state. The number is the place of its data in a node.

    FULL is the base: it decides whether a node exists. SWA is a sliding window, MAMBA a recurrent state of any kind.
    """

    FULL = 0
    SWA = 1
    MAMBA = 2


class PoolName(enum.StrEnum):
    """A physical pool that pages are stored for. The value is part of a store's identity and never changes.

    A component's transfer names one of the first three; the others are sidecars, which hold more for the same pages and
    borrow their indices from one of the three.
    """

    KV = "kv"
    SWA = "swa"
    MAMBA = "mamba"
    #: Keys of a sparse-attention indexer, beside KV.
    INDEXER = "indexer"
    #: KV of a draft model, beside the target's.
    DRAFT = "draft"


class PoolHitPolicy(enum.StrEnum):
    """Which pages of a pool must exist so that a prefix of L pages can be restored."""

    #: Every page in [0, L).
    ALL_PAGES = "all_pages"
    #: Every page in [max(0, L - T), L), T being the number of keys in that pool's lookup (at least 1): they say only
    #: how long the trail is. The pages are those of the lookup's KV transfer, which has them all.
    TRAILING_PAGES = "trailing_pages"


POOL_OF: Final[Mapping[ComponentType, PoolName]] = {
    ComponentType.FULL: PoolName.KV,
    ComponentType.SWA: PoolName.SWA,
    ComponentType.MAMBA: PoolName.MAMBA,
}
"""The pool that a component's transfers name."""
