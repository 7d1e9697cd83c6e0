"""Stores with files behind them that have written everything when `put` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from typing_extensions import override

from radixlink_contracts import PageBits, PageStore
from radixlink_store import FileStoreFactory, PersistentSettings, TieredStore, TieredStoreFactory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import PageHandles, PageKeys, PoolLayout, StoreConfig, StoreFactory

TIMEOUT_S = 30.0


class DrainedStore(PageStore):
    """A tiered store; what is put is in a file, or was dropped, when `put` returns."""

    def __init__(self, store: TieredStore) -> None:
        self.tiered = store

    @property
    @override
    def layout(self) -> PoolLayout:
        return self.tiered.layout

    @override
    def contains(self, keys: PageKeys) -> PageBits:
        return self.tiered.contains(keys)

    def touch(self, keys: PageKeys) -> PageBits:
        return self.tiered.touch(keys)

    @override
    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        return self.tiered.open(keys, ttl_s)

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        return self.tiered.read(handles, layer_range, out)

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        stored = self.tiered.put(keys, parts)
        self.tiered.flush(TIMEOUT_S)
        return stored

    @override
    def close(self) -> None:
        self.tiered.close()


class DrainedFactory:
    """Opens such stores, which look at the directory with every look-up."""

    def __init__(self, memory: StoreFactory, settings: PersistentSettings) -> None:
        self._factory = TieredStoreFactory(memory, attrs.evolve(settings, rescan_s=0.0))

    def open(self, layout: PoolLayout) -> DrainedStore:
        return DrainedStore(self._factory.open(layout))

    def close(self) -> None:
        self._factory.close()


def drained_file_stores(config: StoreConfig) -> DrainedFactory:
    """As `file_stores`, for a configuration with a persistent tier."""
    settings = PersistentSettings.of_config(config)
    assert settings is not None
    plain = attrs.evolve(config, persistent_path="", persistent_bytes=0)
    return DrainedFactory(FileStoreFactory(plain), settings)
