"""Stores with files behind them against the suite that every page store must pass."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from packages.store.tests.drained_stores import DrainedFactory, drained_file_stores
from packages.store.tests.test_conformance import DirectoryPlace
from typing_extensions import override

from radixlink_contracts import PageKeys, StoreConfig
from radixlink_store import FileStoreFactory, PersistentSettings
from radixlink_store._log_file import LOG_SUFFIX, LogFile
from radixlink_testing import (
    SUITE_CAPACITY_BYTES,
    InMemoryPlace,
    InMemoryStoreFactory,
    PageStoreMachine,
    PageStoreTests,
    ProcessOpener,
    StorePlace,
)
from radixlink_testing.store_peers import StorePeersTests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radixlink_contracts import PoolLayout, StoreFactory

#: Some 250 records, in files of 16.
PERSISTENT_BYTES = 1 << 17


class TieredPlace(DirectoryPlace):
    """A directory of segments, and one of files behind them."""

    @override
    def factory(self, capacity_bytes: int = SUITE_CAPACITY_BYTES) -> StoreFactory:
        return drained_file_stores(self._both(capacity_bytes))

    @override
    def process_opener(self) -> ProcessOpener:
        return ProcessOpener(
            factory="packages.store.tests.drained_stores:drained_file_stores",
            config=self._both(SUITE_CAPACITY_BYTES),
        )

    @override
    def unusable_factory(self) -> StoreFactory:
        file = self.path / "file"
        file.touch()
        return drained_file_stores(
            StoreConfig(
                location=str(self.path), persistent_path=str(file), persistent_bytes=1 << 20
            )
        )

    @override
    def corrupt(self, layout: PoolLayout, key: bytes, layer_range: int) -> None:
        """Damage the page in memory, where alone it is then: files have tests of their own."""
        factory = self.factory()
        factory.open(layout).open(PageKeys(key), 0.0)
        factory.close()
        self._remove_files_with(key)
        super().corrupt(layout, key, layer_range)

    @override
    def drop(self, layout: PoolLayout, key: bytes) -> None:
        """Remove the page from memory, and with all their pages the files that have it."""
        self._remove_files_with(key)
        memory = FileStoreFactory(self._config(self.path, SUITE_CAPACITY_BYTES))
        if memory.open(layout).contains(PageKeys(key)).complete:
            super().drop(layout, key)
        memory.close()

    def _remove_files_with(self, key: bytes) -> None:
        files = self.path / "files"
        directory = os.open(files, os.O_RDONLY)
        for path in list(files.glob(f"*{LOG_SUFFIX}")):
            file = LogFile.open(directory, path)
            if key in file.scan().keys:
                path.unlink()
            file.close()
        os.close(directory)

    def _both(self, capacity_bytes: int) -> StoreConfig:
        return StoreConfig(
            location=str(self.path),
            capacity_bytes=capacity_bytes,
            persistent_path=str(self.path / "files"),
            persistent_bytes=PERSISTENT_BYTES,
        )


class BehindMemoryPlace(StorePlace):
    """Files behind a store that is no segment, and gives away nothing of itself."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._memory = InMemoryPlace()
        self._settings = PersistentSettings(path=path, capacity_bytes=PERSISTENT_BYTES)

    @override
    def factory(self, capacity_bytes: int = SUITE_CAPACITY_BYTES) -> StoreFactory:
        config = StoreConfig(capacity_bytes=capacity_bytes)
        return DrainedFactory(InMemoryStoreFactory(config, self._memory), self._settings)


class TestTieredStore(PageStoreTests):
    @pytest.fixture
    @override
    def place(self, tmp_path: Path) -> Iterator[StorePlace]:
        place = TieredPlace(tmp_path)
        yield place
        place.close()


class TestTieredStorePeers(StorePeersTests):
    @pytest.fixture
    @override
    def place(self, tmp_path: Path) -> Iterator[StorePlace]:
        place = TieredPlace(tmp_path)
        yield place
        place.close()


class TestFilesBehindAnotherStore(PageStoreTests):
    @pytest.fixture
    @override
    def place(self, tmp_path: Path) -> Iterator[StorePlace]:
        place = BehindMemoryPlace(tmp_path)
        yield place
        place.close()


class TieredMachine(PageStoreMachine):
    pages_move = True

    @override
    def make_place(self) -> StorePlace:
        return TieredPlace(Path(tempfile.mkdtemp(prefix="radixlink-test-")))

    @override
    def discard_place(self, place: StorePlace) -> None:
        assert isinstance(place, TieredPlace)
        place.close()
        shutil.rmtree(place.path)


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(stateful_step_count=15)
