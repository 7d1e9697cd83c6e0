"""What a store and its parts count, added up."""

from __future__ import annotations

import threading
from typing import Final

from radixlink_store_mooncake.counters import MooncakeCounters


class Tally:
    """The counters of one opened store.

    Thread: any.
    """

    def __init__(self) -> None:
        """Start at nothing."""
        self._mutex: Final = threading.Lock()
        self._counters = MooncakeCounters()

    def add(self, counts: MooncakeCounters) -> None:
        """Count these too."""
        with self._mutex:
            self._counters += counts

    @property
    def counters(self) -> MooncakeCounters:
        """What was counted so far."""
        return self._counters
