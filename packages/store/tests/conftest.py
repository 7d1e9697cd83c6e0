"""A clock that stands still, and segments small enough to say where a page goes."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Protocol

import pytest

from radixlink_contracts import CacheIdentity, PoolLayout, PoolName
from radixlink_store import PersistentSettings
from radixlink_store._page_log import PageLog
from radixlink_store._tier_tally import TierTally
from radixlink_store.segments import Geometry, Segment, SegmentPageStore, SlotLocks, Superblock
from radixlink_testing.pages import page_key, page_keys, page_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

#: `tox -e stress` asks for the numbers that take minutes; the normal run does a part of each.
STRESS = bool(os.environ.get("RADIXLINK_STRESS"))

IDENTITY = CacheIdentity(
    model="tiny", revision="1", dtype="uint8", page_size=1, num_layers=2, layout="bytes"
)


class StillClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class MakeStore(Protocol):
    """The type of the fixture `make_store`."""

    def __call__(
        self, num_buckets: int, ways: int, *, checksums: bool = True
    ) -> tuple[SegmentPageStore, Segment]:
        """A store of so many slots, over plain memory, and the segment behind it."""
        ...


class MakeLog(Protocol):
    """The type of the fixture `make_log`."""

    def __call__(
        self,
        *,
        capacity_bytes: int = 1 << 20,
        file_bytes: int | None = None,
        layout: PoolLayout | None = None,
        rescan_s: float = 0.0,
        retry_s: float = 10.0,
    ) -> NumberedLog:
        """A log in the test's directory, as another process would open it."""
        ...


class NumberedLog:
    """A log, and what it counted and told."""

    def __init__(
        self, layout: PoolLayout, settings: PersistentSettings, clock: Callable[[], float]
    ) -> None:
        self.layout = layout
        self.tally = TierTally()
        self.told: list[str] = []
        self._closed = False
        self.log = PageLog(layout, settings, self.tally, clock, self.told.append)

    def put(self, page: int, variant: str = "") -> bool:
        """Append a numbered page."""
        parts = page_parts(page_keys([page]), self.layout, variant)
        return self.log.append(page_key(page), [memoryview(part) for part in parts])

    def held(self, pages: Iterable[int]) -> list[int]:
        """Which pages can be found and read; a wrong byte fails the test."""
        pages = list(pages)
        keys = page_keys(pages)
        found = self.log.find(keys)
        columns = [memoryview(bytearray(len(keys) * size)) for size in self.layout.range_bytes]
        right = self.log.read(keys, columns)
        assert right & found == right
        expected = page_parts(keys, self.layout)
        for page in right:
            for column, data, size in zip(columns, expected, self.layout.range_bytes, strict=True):
                row = slice(page * size, (page + 1) * size)
                assert column[row] == data[row]
        return [pages[page] for page in right]

    def close(self) -> None:
        """Close it, once."""
        if not self._closed:
            self._closed = True
            self.log.close()


@pytest.fixture
def make_log(tmp_path: Path, layout: PoolLayout, clock: StillClock) -> Iterator[MakeLog]:
    """Opens logs, and closes them with the test."""
    default = layout
    with contextlib.ExitStack() as stack:

        def make(
            *,
            capacity_bytes: int = 1 << 20,
            file_bytes: int | None = None,
            layout: PoolLayout | None = None,
            rescan_s: float = 0.0,
            retry_s: float = 10.0,
        ) -> NumberedLog:
            settings = PersistentSettings(
                path=tmp_path / "files",
                capacity_bytes=capacity_bytes,
                file_bytes=file_bytes,
                rescan_s=rescan_s,
                retry_s=retry_s,
            )
            made = NumberedLog(layout or default, settings, clock)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def layout() -> PoolLayout:
    """Two layer ranges of different size."""
    return PoolLayout(identity=IDENTITY, pool=PoolName.KV, range_bytes=(40, 24))


@pytest.fixture
def clock() -> StillClock:
    """The clock of the stores that `make_store` makes."""
    return StillClock()


def store_in_memory(
    layout: PoolLayout,
    clock: StillClock,
    locks: SlotLocks,
    num_buckets: int,
    ways: int,
    *,
    checksums: bool = True,
) -> tuple[SegmentPageStore, Segment]:
    """A store of so many slots, over plain memory, and its segment. It closes the locks."""
    geometry = Geometry(num_buckets=num_buckets, ways=ways, range_bytes=layout.range_bytes)
    superblock = Superblock(layout=layout, geometry=geometry, boot_id="now", checksums=checksums)
    buffer = memoryview(bytearray(geometry.total_bytes))
    segment = Segment.format(buffer, superblock, locks)
    return SegmentPageStore(segment, "the test's segment", clock), segment


@pytest.fixture
def make_store(tmp_path: Path, layout: PoolLayout, clock: StillClock) -> Iterator[MakeStore]:
    """Makes stores of any geometry; their locks are in one file."""
    with contextlib.ExitStack() as stack:

        def make(
            num_buckets: int, ways: int, *, checksums: bool = True
        ) -> tuple[SegmentPageStore, Segment]:
            locks = SlotLocks(os.open(tmp_path / "locks", os.O_RDWR | os.O_CREAT, 0o600))
            store, segment = store_in_memory(
                layout, clock, locks, num_buckets, ways, checksums=checksums
            )
            stack.callback(store.close)
            return store, segment

        yield make
