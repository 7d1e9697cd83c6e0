"""What a `StoreLinker` moved, in numbers. Local: no decision is made of them."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping


@attrs.frozen(kw_only=True)
class StoreLinkerCounters:
    """What a `StoreLinker` moved.

    Attributes:
        pages_loaded: Objects copied to the device by loads that came through here, whatever other
            ranks said; a page that is stored as several objects counts as so many.
        pages_stored: Pages that offloads which landed put, or found there.
        pages_touched: Pages of touches that found all of theirs.
        pages_by_writer: Pages loaded, by the process that had written them (0: unknown).
        refused: Loads, offloads and touches that failed at once because a store hangs.
        last_error: What the last failed transfer said, for people; one that was only given up says
            nothing.
    """

    pages_loaded: int = 0
    pages_stored: int = 0
    pages_touched: int = 0
    pages_by_writer: Mapping[int, int] = attrs.field(factory=dict)
    refused: int = 0
    last_error: str = ""


class StoreLinkerTally:
    """The counting of them. Thread: any."""

    def __init__(self) -> None:
        """Start at nothing."""
        #: Guards all below.
        self._lock = threading.Lock()
        self._loaded = self._stored = self._touched = self._refused = 0
        self._by_writer: Counter[int] = Counter()
        self._last_error = ""

    def count_loaded(self, num_pages: int, writers: Counter[int]) -> None:
        """Pages are on the device; by who had written them."""
        with self._lock:
            self._loaded += num_pages
            self._by_writer.update(writers)

    def count_stored(self, num_pages: int) -> None:
        """Pages of an offload are in the store."""
        with self._lock:
            self._stored += num_pages

    def count_touched(self, num_pages: int) -> None:
        """Pages of touches are in the store."""
        with self._lock:
            self._touched += num_pages

    def count_refused(self, num_operations: int, why: str) -> None:
        """Operations failed at once."""
        with self._lock:
            self._refused += num_operations
            self._last_error = why

    def count_failure(self, why: str) -> None:
        """A transfer failed."""
        with self._lock:
            self._last_error = why

    def counters(self) -> StoreLinkerCounters:
        """All of it so far."""
        with self._lock:
            return StoreLinkerCounters(
                pages_loaded=self._loaded,
                pages_stored=self._stored,
                pages_touched=self._touched,
                pages_by_writer=dict(self._by_writer),
                refused=self._refused,
                last_error=self._last_error,
            )
