"""A store that SGLang opens by its import path, and that a test of the same process reaches into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
from typing_extensions import override

from radixlink_contracts import PageBits
from radixlink_store import FileStoreFactory
from radixlink_testing.faults import FaultyStore

if TYPE_CHECKING:
    from radixlink_contracts import PageHandles, PageKeys, PageStore, PoolLayout, StoreConfig

NAME: Final = f"{__name__}:factory"
"""What a configuration calls it."""


class HookedStore(FaultyStore):
    """Another store, with faults, and with pages that it has lost."""

    def __init__(self, inner: PageStore) -> None:
        super().__init__(inner)
        self.lost: set[bytes] = set()

    @override
    def contains(self, keys: PageKeys) -> PageBits:
        return super().contains(keys) & self._kept(keys)

    @override
    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        handles = super().open(keys, ttl_s)
        return attrs.evolve(handles, found=handles.found & self._kept(keys))

    def _kept(self, keys: PageKeys) -> PageBits:
        return PageBits.of(
            (page for page, key in enumerate(keys) if key not in self.lost), len(keys)
        )


class HookedFactory:
    """Opens file stores and hooks into them."""

    def __init__(self, config: StoreConfig) -> None:
        self._inner = FileStoreFactory(config)
        self.stores: list[HookedStore] = []

    def open(self, layout: PoolLayout) -> HookedStore:
        store = HookedStore(self._inner.open(layout))
        self.stores.append(store)
        return store

    def close(self) -> None:
        self._inner.close()


OPENED: Final[list[HookedFactory]] = []


def factory(config: StoreConfig) -> HookedFactory:
    """What the configuration names."""
    made = HookedFactory(config)
    OPENED.append(made)
    return made


def opened() -> list[HookedStore]:
    """The stores of the engine that was made last."""
    return OPENED[-1].stores
