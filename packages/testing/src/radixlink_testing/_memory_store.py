"""`InMemoryPageStore`: what tests use where the store is not what is tested. A dict."""

from __future__ import annotations

import os
import threading
import zlib
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import attrs

from radixlink_contracts import PageBits, PageHandles, StoreConfig
from radixlink_contracts.errors import (
    CapacityError,
    ContractError,
    IdentityError,
    StaleHandleError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import CacheIdentity, PageKeys, PoolLayout


@attrs.frozen(kw_only=True, eq=False)
class _Page:
    """One write of a page.

    Attributes:
        generation: Which write of its pool; no two are equal.
        ranges: The bytes of each layer range.
        checksums: One for each.
    """

    generation: int
    ranges: tuple[bytearray, ...]
    checksums: tuple[int, ...]


class _Pool:
    """The pages of one layout, least recently used first.

    Thread: any; one lock.
    """

    def __init__(self, layout: PoolLayout, capacity_bytes: int) -> None:
        self.layout: Final = layout
        self.capacity: Final = capacity_bytes // layout.page_bytes
        self.pages: Final[OrderedDict[bytes, _Page]] = OrderedDict()
        self.mutex: Final = threading.RLock()
        self._generation = 0

    def write(self, key: bytes, ranges: tuple[bytearray, ...]) -> None:
        """Keep a page, whatever that evicts."""
        self._generation += 1
        self.pages[key] = _Page(
            generation=self._generation,
            ranges=ranges,
            checksums=tuple(zlib.crc32(data) for data in ranges),
        )
        while len(self.pages) > self.capacity:
            self.pages.popitem(last=False)

    def touch(self, keys: PageKeys) -> PageBits:
        """Make pages recent; say which are there."""
        there = [page for page, key in enumerate(keys) if key in self.pages]
        for page in there:
            self.pages.move_to_end(keys[page])
        return PageBits.of(there, len(keys))


class InMemoryPlace:
    """What in-memory factories share: the stand-in for a directory, with one model's pages.

    Thread: any.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._identity: CacheIdentity | None = None
        self._pools: dict[bytes, _Pool] = {}

    def pool(self, layout: PoolLayout, capacity_bytes: int) -> _Pool:
        """The pages of a layout, of this capacity if nobody asked before.

        Raises:
            IdentityError: It holds pages of another identity.
            CapacityError: Not one page fits.
        """
        if capacity_bytes < layout.page_bytes:
            raise CapacityError(
                f"in-memory store: expected room for a page of {layout.page_bytes} bytes, got "
                f"capacity_bytes={capacity_bytes}",
                needed=layout.page_bytes,
                available=capacity_bytes,
            )
        with self._mutex:
            if self._identity not in {None, layout.identity}:
                raise IdentityError(
                    f"in-memory store: expected pages of {layout.identity}, got a place with those "
                    f"of {self._identity}"
                )
            self._identity = layout.identity
            return self._pools.setdefault(layout.fingerprint, _Pool(layout, capacity_bytes))


class InMemoryPageStore:
    """Pages in a dict, the least recently used evicted first. Also `Touchable`.

    Leases are not kept: they are advice.

    Thread: any; one lock for each layout.
    """

    def __init__(self, pool: _Pool) -> None:
        """Serve the pages that `InMemoryStoreFactory.open` found."""
        self._pool: Final = pool
        self._closed = False

    @property
    def layout(self) -> PoolLayout:
        """What its objects are."""
        return self._pool.layout

    @property
    def num_slots(self) -> int:
        """Pages that fit."""
        return self._pool.capacity

    def contains(self, keys: PageKeys) -> PageBits:
        """Which pages are there. Changes no recency."""
        pool = self._opened()
        with pool.mutex:
            there = [page for page, key in enumerate(keys) if key in pool.pages]
        return PageBits.of(there, len(keys))

    def touch(self, keys: PageKeys) -> PageBits:
        """Raise recency; say which pages are there."""
        pool = self._opened()
        with pool.mutex:
            return pool.touch(keys)

    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        """Find pages and raise their recency."""
        del ttl_s
        pool = self._opened()
        with pool.mutex:
            found = pool.touch(keys)
            generations = array("Q", bytes(8 * len(keys)))
            for page in found:
                generations[page] = pool.pages[keys[page]].generation
        return PageHandles(
            keys=keys,
            found=found,
            slots=array("Q", bytes(8 * len(keys))),
            generations=generations,
            writers=array("Q", [os.getpid()] * len(keys)),
        )

    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        """Read one layer range of each page that was found.

        Raises:
            ContractError: `out` does not fit, or there is no such range.
        """
        pool = self._opened()
        sizes = pool.layout.range_bytes
        if not 0 <= layer_range < len(sizes):
            raise ContractError(
                f"in-memory store: expected a layer range in 0..{len(sizes) - 1}, got {layer_range}"
            )
        size = sizes[layer_range]
        rows = _bytes_of(out, len(handles.keys) * size, what="out", writable=True)
        right = []
        with pool.mutex:
            for page in handles.found:
                key = handles.keys[page]
                kept = pool.pages.get(key)
                if kept is None or kept.generation != handles.generations[page]:
                    continue
                data = kept.ranges[layer_range]
                if zlib.crc32(data) != kept.checksums[layer_range]:
                    del pool.pages[key]
                    continue
                rows[page * size : (page + 1) * size] = data
                right.append(page)
        return PageBits.of(right, len(handles.keys))

    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        """Store pages; those that are there only become recent.

        Raises:
            ContractError: The parts do not fit keys and layout.
        """
        pool = self._opened()
        sizes = pool.layout.range_bytes
        if len(parts) != len(sizes):
            raise ContractError(f"in-memory store: expected {len(sizes)} parts, got {len(parts)}")
        columns = [
            _bytes_of(part, len(keys) * size, what=f"part {layer_range}", writable=False)
            for layer_range, (part, size) in enumerate(zip(parts, sizes, strict=True))
        ]
        with pool.mutex:
            pool.touch(keys)
            for page, key in enumerate(keys):
                if key not in pool.pages:
                    ranges = tuple(
                        bytearray(column[page * size : (page + 1) * size])
                        for column, size in zip(columns, sizes, strict=True)
                    )
                    pool.write(key, ranges)
            return self.contains(keys)

    def close(self) -> None:
        """Refuse further calls; the pages stay. Idempotent."""
        self._closed = True

    def corrupt(self, key: bytes, layer_range: int) -> None:
        """Flip a bit of a page that is there, so that the next read of that range sees the damage.

        Raises:
            KeyError: It is not there.
        """
        with self._pool.mutex:
            self._pool.pages[key].ranges[layer_range][0] ^= 1

    def drop(self, key: bytes) -> None:
        """Forget a page that is there, as if it had been evicted.

        Raises:
            KeyError: It is not there.
        """
        with self._pool.mutex:
            del self._pool.pages[key]

    def _opened(self) -> _Pool:
        if self._closed:
            raise StaleHandleError("in-memory store: expected an open store, got a closed one")
        return self._pool


class InMemoryStoreFactory:
    """Opens in-memory stores of one place.

    Thread: any.
    """

    def __init__(
        self, config: StoreConfig | None = None, place: InMemoryPlace | None = None
    ) -> None:
        """Opens nothing yet.

        Args:
            config: Its capacity counts; the default is that of `StoreConfig`.
            place: Where the pages are. Factories that are given the same one share their pages, as
                processes that open the same directory do. The default is a place of its own.
        """
        self._config: Final = config or StoreConfig()
        self._place: Final = place or InMemoryPlace()
        self._stores: list[InMemoryPageStore] = []
        self._closed = False

    def open(self, layout: PoolLayout) -> InMemoryPageStore:
        """Open the store of one layout.

        Raises:
            IdentityError: The place holds pages of another identity.
            CapacityError: Not one page fits.
            StaleHandleError: The factory was closed.
        """
        if self._closed:
            raise StaleHandleError("in-memory store: expected an open factory, got a closed one")
        store = InMemoryPageStore(self._place.pool(layout, self._config.capacity_bytes))
        self._stores.append(store)
        return store

    def close(self) -> None:
        """Close every store it opened; the place keeps the pages. Idempotent."""
        self._closed = True
        stores, self._stores = self._stores, []
        for store in stores:
            store.close()


def _bytes_of(buffer: Buffer, length: int, *, what: str, writable: bool) -> memoryview:
    """A buffer as plain bytes.

    Raises:
        ContractError: It is of another length, not contiguous, or cannot be written.
    """
    view = memoryview(buffer)
    if view.nbytes != length or not view.c_contiguous or (writable and view.readonly):
        raise ContractError(
            f"in-memory store: expected {what} of {length} contiguous"
            f"{' writable' if writable else ''} bytes, got {view.nbytes}, "
            f"contiguous={view.c_contiguous}, readonly={view.readonly}"
        )
    # A view without bytes cannot be cast if it has a shape with a zero.
    return view.cast("B") if length else memoryview(bytearray())
