"""The file store against the suite that every page store must pass."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from packages.store.tests.raw_segment import RawSegment
from typing_extensions import override

from radixlink_contracts import PageBits, StoreConfig, StoreFactory, Touchable
from radixlink_store import FileStoreFactory
from radixlink_store._layout import Geometry
from radixlink_testing import (
    SUITE_CAPACITY_BYTES,
    SUITE_LAYOUT,
    PageStoreMachine,
    PageStoreTests,
    ProcessOpener,
    StorePlace,
)
from radixlink_testing.pages import page_keys, page_parts
from radixlink_testing.store_peers import StorePeersTests

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from radixlink_contracts import PageStore, PoolLayout


class DirectoryPlace(StorePlace):
    """A directory; each opener is a factory of its own, as in another process."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @override
    def factory(self, capacity_bytes: int = SUITE_CAPACITY_BYTES) -> StoreFactory:
        return FileStoreFactory(self._config(self.path, capacity_bytes))

    @override
    def process_opener(self) -> ProcessOpener:
        return ProcessOpener(
            factory="radixlink_store:FileStoreFactory",
            config=self._config(self.path, SUITE_CAPACITY_BYTES),
        )

    @override
    def unusable_factory(self) -> StoreFactory:
        file = self.path / "file"
        file.touch()
        return FileStoreFactory(self._config(file, SUITE_CAPACITY_BYTES))

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
        """A segment, mapped once more."""
        shard = layout.shard
        path = self.path / f"{layout.pool.value}.{shard.index}-of-{shard.count}.segment"
        memory: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r+")
        return RawSegment(memory, Geometry.within(SUITE_CAPACITY_BYTES, layout.range_bytes))

    @staticmethod
    def _config(location: Path, capacity_bytes: int) -> StoreConfig:
        return StoreConfig(location=str(location), capacity_bytes=capacity_bytes)


class TestFileStore(PageStoreTests):
    @pytest.fixture
    @override
    def place(self, tmp_path: Path) -> Iterator[StorePlace]:
        place = DirectoryPlace(tmp_path)
        yield place
        place.close()


class TestFileStorePeers(StorePeersTests):
    @pytest.fixture
    @override
    def place(self, tmp_path: Path) -> Iterator[StorePlace]:
        place = DirectoryPlace(tmp_path)
        yield place
        place.close()


class FileMachine(PageStoreMachine):
    @override
    def make_place(self) -> StorePlace:
        return DirectoryPlace(Path(tempfile.mkdtemp(prefix="radixlink-test-")))

    @override
    def discard_place(self, place: StorePlace) -> None:
        assert isinstance(place, DirectoryPlace)
        place.close()
        shutil.rmtree(place.path)


TestFileMachine = FileMachine.TestCase
TestFileMachine.settings = settings(stateful_step_count=15)


def test_factory_and_store_are_what_the_contracts_say(tmp_path: Path) -> None:
    config = StoreConfig(location=str(tmp_path), capacity_bytes=SUITE_CAPACITY_BYTES)
    opened = FileStoreFactory(config)
    factory: StoreFactory = opened
    store: PageStore = factory.open(SUITE_LAYOUT)
    touchable: Touchable = opened.open(SUITE_LAYOUT)
    keys = page_keys(range(2))
    assert store.put(keys.span(0, 1), page_parts(keys.span(0, 1), SUITE_LAYOUT)).complete
    assert touchable.touch(keys) == PageBits.of([0], 2)
    opened.close()
