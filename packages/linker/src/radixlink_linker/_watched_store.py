"""`WatchedStore`: a page store whose calls are known to a `Breaker` while they run."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from typing_extensions import override

from radixlink_contracts import LendingStore, PageStore, Touchable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import (
        LentFrames,
        PageBits,
        PageFrames,
        PageHandles,
        PageKeys,
        PoolLayout,
    )
    from radixlink_linker._breaker import Breaker


class WatchedStore(PageStore, Touchable):
    """Another store, call by call.

    Thread: as the other store's.
    """

    def __init__(self, inner: PageStore, breaker: Breaker) -> None:
        """Hand every call on.

        Args:
            inner: The other store; its owner closes it.
            breaker: Learns when each call begins and ends.
        """
        self._inner = inner
        self.breaker = breaker

    @property
    @override
    def layout(self) -> PoolLayout:
        """What its objects are."""
        return self._inner.layout

    @override
    def contains(self, keys: PageKeys) -> PageBits:
        """Which pages are there."""
        with self._call("contains"):
            return self._inner.contains(keys)

    @override
    def touch(self, keys: PageKeys) -> PageBits:
        """Raise recency, by what the other store has for it."""
        with self._call("touch"):
            if isinstance(self._inner, Touchable):
                return self._inner.touch(keys)
            return self._inner.contains(keys)

    @override
    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        """Find pages for a load."""
        with self._call("open"):
            return self._inner.open(keys, ttl_s)

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        """Read one layer range of each page that was found."""
        with self._call("read"):
            return self._inner.read(handles, layer_range, out)

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        """Store pages."""
        with self._call("put"):
            return self._inner.put(keys, parts)

    @override
    def close(self) -> None:
        """Close the other store."""
        self._inner.close()

    @contextmanager
    def _call(self, what: str) -> Iterator[None]:
        number = self.breaker.begin(what)
        try:
            yield
        finally:
            self.breaker.end(number)


class WatchedLendingStore(WatchedStore, LendingStore):
    """Another store that lends, call by call.

    Thread: as the other store's.
    """

    def __init__(self, inner: LendingStore, breaker: Breaker) -> None:
        """Hand every call on; see `WatchedStore`."""
        super().__init__(inner, breaker)
        self._lender = inner

    @property
    @override
    def frames(self) -> PageFrames:
        """How pages lie in what it lends."""
        return self._lender.frames

    @override
    def lend(self, num_pages: int) -> LentFrames | None:
        """Lend memory; waits for nothing."""
        return self._lender.lend(num_pages)

    @override
    def put_lent(self, keys: PageKeys, lent: LentFrames) -> PageBits:
        """Store pages that lie in lent memory."""
        with self._call("put"):
            return self._lender.put_lent(keys, lent)

    @override
    def open_lent(self, keys: PageKeys, ttl_s: float, lent: LentFrames) -> PageHandles:
        """Find pages for a load, and fetch them into lent memory."""
        with self._call("open"):
            return self._lender.open_lent(keys, ttl_s, lent)

    @override
    def verify(self, handles: PageHandles, layer_range: int, lent: LentFrames) -> PageBits:
        """Verify one layer range of each page that was found, where it lies."""
        with self._call("read"):
            return self._lender.verify(handles, layer_range, lent)


def watched(store: PageStore, breaker: Breaker) -> WatchedStore:
    """A store whose calls a breaker knows; one that lends if the store does."""
    if isinstance(store, LendingStore):
        return WatchedLendingStore(store, breaker)
    return WatchedStore(store, breaker)
