"""What a tier of files counts."""

from __future__ import annotations

from collections import Counter
from typing import Final

from radixlink_store._process_mutex import ProcessMutex
from radixlink_store.counters import TierCounters


class TierTally:
    """The counters of one opened tier.

    Thread: any.
    """

    def __init__(self) -> None:
        """Start at nothing."""
        self._mutex: Final = ProcessMutex()
        self._counts: Final[Counter[str]] = Counter()

    def add(self, **counts: int) -> None:
        """Add to counters by the names that `TierCounters` gives them."""
        with self._mutex.lock:
            self._counts.update(counts)

    @property
    def counters(self) -> TierCounters:
        """What was counted so far."""
        with self._mutex.lock:
            return TierCounters(**self._counts)
