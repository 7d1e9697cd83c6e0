"""What one rank knows of pages beyond what the store says: facts for its own lookups and offloads."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from radixlink_contracts import Clock, PageKeys, PoolName, PoolTransfer

_MAX_PAGES: Final = 1 << 16
"""Of each kind. What is forgotten costs a second failure, or a second copy."""


class FailedPages:
    """Pages of loads that failed, which count as missing for a while.

    The store may go on saying that it has them. Without this, SGLang would load them for the next
    request too, and end that one with an error as well.

    Thread: one.
    """

    def __init__(self, clock: Clock, miss_s: float) -> None:
        """Have none; forget each after `miss_s` seconds."""
        self._clock: Final = clock
        self._miss_s: Final = miss_s
        #: Until when, oldest first.
        self._until: Final[OrderedDict[bytes, float]] = OrderedDict()
        self._all_until = float("-inf")

    def add(self, transfers: Iterable[PoolTransfer]) -> None:
        """These failed just now."""
        until = self._clock.now() + self._miss_s
        for transfer in transfers:
            for key in transfer.keys.resolve():
                self._until[key] = until
                self._until.move_to_end(key)
        while len(self._until) > _MAX_PAGES:
            self._until.popitem(last=False)

    def add_all(self) -> None:
        """The store is late: every page counts as missing, for as long."""
        self._all_until = self._clock.now() + self._miss_s

    @property
    def all_missing(self) -> bool:
        """True for a while after the store was late."""
        return self._clock.now() < self._all_until

    def leading(self, keys: PageKeys) -> int:
        """How many of these pages come before the first that failed."""
        now = self._clock.now()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        if not self._until:
            return len(keys)
        return next((page for page, key in enumerate(keys) if key in self._until), len(keys))


class RestoredPages:
    """Pages that came out of the store and were not offered to it since.

    SGLang offers restored pages to the store like computed ones. They are there already, so that
    they need not be copied out of the device again.

    Thread: one.
    """

    def __init__(self) -> None:
        """Have none."""
        self._pages: Final[OrderedDict[tuple[PoolName, bytes], None]] = OrderedDict()

    def add(self, transfers: Iterable[PoolTransfer]) -> None:
        """These were restored."""
        for transfer in transfers:
            for key in transfer.keys.resolve():
                self._pages[transfer.name, key] = None
        while len(self._pages) > _MAX_PAGES:
            self._pages.popitem(last=False)

    def take(self, transfer: PoolTransfer) -> AbstractSet[bytes]:
        """Which pages of an offload are among them; they are forgotten."""
        return {
            key
            for key in transfer.keys.resolve()
            if self._pages.pop((transfer.name, key), _ABSENT) is not _ABSENT
        }


_ABSENT: Final = object()
