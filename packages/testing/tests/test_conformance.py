"""The in-memory store against the suites that it ships with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from typing_extensions import override

from radixlink_contracts import StoreConfig
from radixlink_testing import (
    SUITE_CAPACITY_BYTES,
    InMemoryPlace,
    InMemoryStoreFactory,
    PageStoreMachine,
    PageStoreTests,
    StorePlace,
)
from radixlink_testing.store_peers import StorePeersTests

if TYPE_CHECKING:
    from radixlink_contracts import PoolLayout


class MemoryPlace(StorePlace):
    """A dict, opened by a factory for each opener."""

    def __init__(self) -> None:
        super().__init__()
        self._place = InMemoryPlace()

    @override
    def factory(self, capacity_bytes: int = SUITE_CAPACITY_BYTES) -> InMemoryStoreFactory:
        return InMemoryStoreFactory(StoreConfig(capacity_bytes=capacity_bytes), self._place)

    @override
    def corrupt(self, layout: PoolLayout, key: bytes, layer_range: int) -> None:
        self.factory().open(layout).corrupt(key, layer_range)

    @override
    def drop(self, layout: PoolLayout, key: bytes) -> None:
        self.factory().open(layout).drop(key)

    @override
    def pass_time(self, seconds: int) -> None:
        """Nothing: recency is an order."""


class TestInMemoryPageStore(PageStoreTests):
    @pytest.fixture
    @override
    def place(self) -> StorePlace:
        return MemoryPlace()


class TestInMemoryPeers(StorePeersTests):
    @pytest.fixture
    @override
    def place(self) -> StorePlace:
        return MemoryPlace()


class MemoryMachine(PageStoreMachine):
    @override
    def make_place(self) -> StorePlace:
        return MemoryPlace()


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(stateful_step_count=15)
