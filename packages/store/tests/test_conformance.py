"""The file store against the suite that every page store must pass."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from typing_extensions import override

from radixlink_contracts import PageBits, StoreConfig, StoreFactory, Touchable
from radixlink_store import FileStoreFactory
from radixlink_store._layout import Geometry
from radixlink_testing import (
    SUITE_CAPACITY_BYTES,
    SUITE_LAYOUT,
    PageStoreMachine,
    PageStoreTests,
    StorePlace,
)
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radixlink_contracts import PageStore, PoolLayout


class DirectoryPlace(StorePlace):
    """A directory; each opener is a factory of its own, as in another process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._factories: list[FileStoreFactory] = []

    @override
    def open(self, layout: PoolLayout) -> PageStore:
        config = StoreConfig(location=str(self.path), capacity_bytes=SUITE_CAPACITY_BYTES)
        factory = FileStoreFactory(config)
        self._factories.append(factory)
        return factory.open(layout)

    @override
    def corrupt(self, layout: PoolLayout, key: bytes, layer_range: int) -> None:
        geometry = Geometry.within(SUITE_CAPACITY_BYTES, layout.range_bytes)
        shard = layout.shard
        file = self.path / f"{layout.pool.value}.{shard.index}-of-{shard.count}.segment"
        with file.open("r+b", buffering=0) as segment:
            content = segment.read()
            header = content.index(key, geometry.headers_offset, geometry.payload_offset)
            slot = (header - geometry.headers_offset) // (8 * geometry.header_words)
            damaged = (
                geometry.payload_offset
                + slot * geometry.slot_bytes
                + geometry.range_offsets[layer_range]
            )
            segment.seek(damaged)
            segment.write(bytes([content[damaged] ^ 1]))

    def close(self) -> None:
        for factory in self._factories:
            factory.close()


class TestFileStore(PageStoreTests):
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
TestFileMachine.settings = settings(stateful_step_count=25)


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
