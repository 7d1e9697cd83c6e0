"""`WriteOffs`: operations whose slots some rank never let go of, and how many such slots there may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from radixlink_contracts import PoolName
    from radixlink_linker._operation import AnyOperation


class WriteOffs:
    """What nobody gets before `reset`: the slots, and the lock on their path.

    Ranks: all, the same.
    """

    def __init__(self, sizes: Mapping[PoolName, int], percent: int) -> None:
        """Nothing is written off.

        Args:
            sizes: Slots of each pool.
            percent: How much of a pool may be.
        """
        self._caps = {pool: size * percent // 100 for pool, size in sizes.items()}
        self._ranks: dict[AnyOperation, tuple[int, ...]] = {}

    def __iter__(self) -> Iterator[AnyOperation]:
        """The operations, in the order in which they were written off."""
        return iter(self._ranks)

    def __len__(self) -> int:
        """How many operations."""
        return len(self._ranks)

    def add(self, operation: AnyOperation, ranks: tuple[int, ...]) -> None:
        """Write one off that these ranks did not let go of."""
        self._ranks[operation] = ranks

    def ranks_of(self, operation: AnyOperation) -> tuple[int, ...]:
        """Who did not let go of an operation, ascending."""
        return self._ranks[operation]

    @property
    def slots(self) -> dict[PoolName, int]:
        """How many of each pool."""
        slots = dict.fromkeys(self._caps, 0)
        for operation in self._ranks:
            for pool, count in operation.slots.items():
                slots[pool] += count
        return slots

    @property
    def too_many(self) -> bool:
        """True once more than may be of some pool."""
        # Asked after each frame, and there is hardly ever one.
        return bool(self._ranks) and any(
            count > self._caps[pool] for pool, count in self.slots.items()
        )

    def newest(self) -> AnyOperation | None:
        """The last that was added; None where there is none."""
        return next(reversed(self._ranks), None)

    def remove(self, operation: AnyOperation) -> None:
        """It is written off no more."""
        del self._ranks[operation]
