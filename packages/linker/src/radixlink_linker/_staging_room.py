"""`StagingRoom`: how many slots of each pool staged loads hold, and may hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from radixlink_contracts import POOL_OF, ComponentType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from radixlink_contracts import PoolName, TreeCore


class StagingRoom:
    """A part of each pool, in tokens, or states for Mamba.

    Full attention is what a load can be cut short by; a window or a state it needs whole, so that
    one load at a time always fits.

    Ranks: all, the same.
    """

    def __init__(self, tree: TreeCore, sizes: Sequence[int], percent: int) -> None:
        """Nothing is held.

        Args:
            tree: Says which pools there are, and how long a window is.
            sizes: Slots of each pool, in the components' order.
            percent: Of each pool.
        """
        self._kinds = tree.components
        self._window = tree.sliding_window
        self._caps = tuple(size * percent // 100 for size in sizes)
        self._held = [0] * len(sizes)

    @property
    def cap(self) -> int:
        """Tokens of full attention that all loads together may hold."""
        return self._caps[0]

    @property
    def held(self) -> tuple[int, ...]:
        """What loads hold of each pool."""
        return tuple(self._held)

    def tokens_left(self, over: Sequence[Mapping[PoolName, int]] = ()) -> int | None:
        """Tokens of full attention that one more load may take, perhaps 0 beside a window or state.

        Args:
            over: What loads that are not over hold of each pool, to be counted as given back.

        Returns:
            None where there is no room for a window or a state.
        """
        held_of = self._held
        if over:
            held_of = [
                held - sum(slots.get(POOL_OF[kind], 0) for slots in over)
                for kind, held in zip(self._kinds, self._held, strict=True)
            ]
        for kind, held, cap in zip(self._kinds, held_of, self._caps, strict=True):
            if held and held + self._indivisible(kind) > cap:
                return None
        return self._caps[0] - held_of[0]

    def _indivisible(self, kind: ComponentType) -> int:
        """What a load may need of a pool at once."""
        match kind:
            case ComponentType.FULL:
                return 0
            case ComponentType.SWA:
                return self._window
            case ComponentType.MAMBA:
                return 1
            case _:
                assert_never(kind)

    def take(self, slots: Mapping[PoolName, int]) -> None:
        """A load of so many slots of each pool begins."""
        for place, kind in enumerate(self._kinds):
            self._held[place] += slots.get(POOL_OF[kind], 0)

    def give_back(self, slots: Mapping[PoolName, int]) -> None:
        """It is over."""
        for place, kind in enumerate(self._kinds):
            self._held[place] -= slots.get(POOL_OF[kind], 0)

    def clear(self) -> None:
        """All are over."""
        self._held = [0] * len(self._caps)
