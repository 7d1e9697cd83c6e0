"""Where the suites open stores, and how they write and read pages there."""

from __future__ import annotations

import abc
import importlib
from typing import TYPE_CHECKING, Final

import attrs
import pytest

from radixlink_contracts import CacheIdentity, PageBits, PoolLayout, PoolName, StoreConfig
from radixlink_testing.pages import page_column, page_keys, page_parts

if TYPE_CHECKING:
    from radixlink_contracts import PageHandles, PageKeys, PageStore, StoreFactory

SUITE_IDENTITY: Final = CacheIdentity(
    model="radixlink-testing",
    revision="1",
    dtype="uint8",
    page_size=4,
    num_layers=3,
    layout="bytes",
)

SUITE_LAYOUT: Final = PoolLayout(
    identity=SUITE_IDENTITY, pool=PoolName.KV, range_bytes=(96, 33, 160)
)
"""The layout of most cases: ranges of different sizes, one of them odd."""

SUITE_CAPACITY_BYTES: Final = 64 * 320
"""The capacity of the stores of a `StorePlace`: 64 pages of the suite's layout, or somewhat less.

A store that cannot be made that small may be larger, up to 32 times; the cases about pressure take
longer then.
"""

MAX_PAGES_TO_FILL: Final = 32 * 64
"""So many other pages must evict any page."""


@attrs.frozen(kw_only=True)
class ProcessOpener:
    """How another process opens the stores of a place.

    Attributes:
        factory: What makes a `StoreFactory` of a `StoreConfig`, as an entry point names it:
            "package.module:name".
        config: What it is given.
    """

    factory: str
    config: StoreConfig

    def load(self) -> StoreFactory:
        """Make the factory, in the process that calls."""
        module, _, name = self.factory.partition(":")
        made: StoreFactory = getattr(importlib.import_module(module), name)(self.config)
        return made


class StorePlace(abc.ABC):
    """A place where stores are opened, empty at first: a directory, a server, a dict.

    `factory` is all that a backend must give. The raw helpers below it reach the pages behind the
    store's back; without one of them the cases that need it are expected failures.
    """

    def __init__(self) -> None:
        self._factories: list[StoreFactory] = []

    @abc.abstractmethod
    def factory(self, capacity_bytes: int = SUITE_CAPACITY_BYTES) -> StoreFactory:
        """Make another factory for this place. What several of them open shares the pages."""

    def open(self, layout: PoolLayout) -> PageStore:
        """Open a store of this place, by a factory of its own."""
        factory = self.factory()
        self._factories.append(factory)
        return factory.open(layout)

    def close(self) -> None:
        """Close what `open` opened; a subclass then removes the place."""
        factories, self._factories = self._factories, []
        for factory in factories:
            factory.close()

    def corrupt(self, layout: PoolLayout, key: bytes, layer_range: int) -> None:
        """Flip a bit of one layer range of a page that is there, behind the store's back."""
        del layout, key, layer_range
        pytest.xfail("this place gives no way to damage a page behind its store's back")

    def drop(self, layout: PoolLayout, key: bytes) -> None:
        """Remove a page that is there, behind the store's back, as an eviction by others does."""
        del layout, key
        pytest.xfail("this place gives no way to remove a page behind its store's back")

    def pass_time(self, seconds: int) -> None:
        """Let time pass for the recency of pages; nothing to do where recency is an order."""
        del seconds
        pytest.xfail("this place gives no way to let time pass")

    def unusable_factory(self) -> StoreFactory:
        """Make a factory whose place cannot be used, for example a directory that is a file."""
        pytest.xfail("this place gives no way to be unusable")

    def process_opener(self) -> ProcessOpener:
        """Say how another process opens stores here."""
        pytest.xfail("no other process can open this place")

    @classmethod
    def gives(cls, helper: str) -> bool:
        """True if a subclass gives that raw helper."""
        return getattr(cls, helper) is not getattr(StorePlace, helper)


def put_pages(store: PageStore, keys: PageKeys, variant: str = "") -> PageBits:
    """Put pages with the bytes that their keys say, or those of another variant."""
    return store.put(keys, page_parts(keys, store.layout, variant))


def read_page_range(
    store: PageStore, handles: PageHandles, layer_range: int
) -> tuple[PageBits, bytes]:
    """One layer range of pages as the store reads it: which rows are right, and all rows."""
    out = bytearray(b"\xee" * (len(handles.keys) * store.layout.range_bytes[layer_range]))
    return store.read(handles, layer_range, out), bytes(out)


def read_right(store: PageStore, handles: PageHandles, variant: str = "") -> PageBits:
    """The pages of which every layer range is right; fails if a row is not that is said to be."""
    right = PageBits.all(len(handles.keys))
    for layer_range, size in enumerate(store.layout.range_bytes):
        bits, rows = read_page_range(store, handles, layer_range)
        expected = page_column(handles.keys, store.layout, layer_range, variant)
        for page in bits:
            row = slice(page * size, (page + 1) * size)
            assert rows[row] == expected[row], f"page {page}, layer range {layer_range}"
        right &= bits
    return right


def read_variants(store: PageStore, handles: PageHandles, variants: list[str]) -> list[str | None]:
    """Of which variant each page is, the same in all its layer ranges; None for a miss.

    Fails if a row that is said to be right is of no variant, or a page has two.
    """
    found: list[set[str | None]] = [set() for _ in handles.keys]
    for layer_range, size in enumerate(store.layout.range_bytes):
        bits, rows = read_page_range(store, handles, layer_range)
        columns = {
            page_column(handles.keys, store.layout, layer_range, variant): variant
            for variant in variants
        }
        for page in range(len(handles.keys)):
            row = slice(page * size, (page + 1) * size)
            names = [name for column, name in columns.items() if column[row] == rows[row]]
            assert page not in bits or names, f"page {page}, layer range {layer_range}: wrong bytes"
            found[page].add(names[0] if page in bits else None)
    for page, names_of_page in enumerate(found):
        assert len(names_of_page - {None}) <= 1, f"page {page} is of {names_of_page} at once"
    return [None if None in names_of_page else names_of_page.pop() for names_of_page in found]


def evict(store: PageStore, keys: PageKeys) -> None:
    """Put other pages until none of these is there.

    Raises:
        pytest.fail.Exception: `MAX_PAGES_TO_FILL` of them were not enough.
    """
    for first in range(0, MAX_PAGES_TO_FILL, 32):
        if not store.contains(keys).mask:
            return
        put_pages(store, page_keys(range(first, first + 32), "filler"))
    pytest.fail(f"{MAX_PAGES_TO_FILL} other pages did not evict these")
