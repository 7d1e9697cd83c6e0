"""Windows as a place for the suites: in one process, or on every rank of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
from packages.store.tests.raw_segment import RawSegment
from typing_extensions import override

from radixlink_contracts import StoreConfig
from radixlink_store_mpi import MpiStoreFactory
from radixlink_testing import SUITE_CAPACITY_BYTES, SUITE_LAYOUT, StorePlace

if TYPE_CHECKING:
    from radixlink_contracts import PageStore, PoolLayout, StoreFactory

CONFIG = StoreConfig(capacity_bytes=SUITE_CAPACITY_BYTES)


class WindowPlace(StorePlace):
    """The windows of one factory: they end with it, so all openers are its."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = MpiStoreFactory(CONFIG)

    @override
    def factory(self, capacity_bytes: int = SUITE_CAPACITY_BYTES) -> StoreFactory:
        return MpiStoreFactory(attrs.evolve(CONFIG, capacity_bytes=capacity_bytes))

    @override
    def open(self, layout: PoolLayout) -> PageStore:
        return self.shared.open(layout)

    @override
    def close(self) -> None:
        self.shared.close()

    @override
    def corrupt(self, layout: PoolLayout, key: bytes, layer_range: int) -> None:
        self._segment(layout).corrupt(key, layer_range)

    @override
    def drop(self, layout: PoolLayout, key: bytes) -> None:
        self._segment(layout).drop(key)

    @override
    def pass_time(self, seconds: int) -> None:
        self._segment(SUITE_LAYOUT).pass_time(seconds)

    def _segment(self, layout: PoolLayout) -> RawSegment:
        return self.segment_of(self.shared, layout)

    @staticmethod
    def segment_of(factory: MpiStoreFactory, layout: PoolLayout) -> RawSegment:
        """The window of a layout, as bytes."""
        window = factory._windows[layout.fingerprint]
        return RawSegment(np.frombuffer(window.memory, np.uint8), window.superblock.geometry)
