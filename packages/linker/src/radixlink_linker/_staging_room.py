"""`StagingRoom`: how many slots of each pool staged loads hold, and may hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from radixlink_contracts import ComponentType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import TreeCore


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

    def tokens_left(self) -> int:
        """Tokens of full attention that one more load may take; 0 where there is no other room."""
        for held, cap, need in list(
            zip(self._held, self._caps, self.needs(self._window), strict=True)
        )[1:]:
            if held and held + need > cap:
                return 0
        return self._caps[0] - self._held[0]

    def needs(self, num_tokens: int) -> tuple[int, ...]:
        """What a load of so many tokens takes of each pool."""
        return tuple(self._need(kind, num_tokens) for kind in self._kinds)

    def _need(self, kind: ComponentType, num_tokens: int) -> int:
        match kind:
            case ComponentType.FULL:
                return num_tokens
            case ComponentType.SWA:
                return min(num_tokens, self._window)
            case ComponentType.MAMBA:
                return 1
            case _:
                assert_never(kind)

    def take(self, num_tokens: int) -> None:
        """A load of so many tokens begins."""
        for place, need in enumerate(self.needs(num_tokens)):
            self._held[place] += need

    def give_back(self, num_tokens: int) -> None:
        """It is over."""
        for place, need in enumerate(self.needs(num_tokens)):
            self._held[place] -= need

    def clear(self) -> None:
        """All are over."""
        self._held = [0] * len(self._caps)
