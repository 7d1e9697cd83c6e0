"""A clock that stands still, and segments small enough to say where a page goes."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Protocol

import pytest

from radixlink_contracts import CacheIdentity, PoolLayout, PoolName
from radixlink_store import Geometry, Segment, SegmentPageStore, SlotLocks, Superblock

if TYPE_CHECKING:
    from collections.abc import Iterator
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


@pytest.fixture
def layout() -> PoolLayout:
    """Two layer ranges of different size."""
    return PoolLayout(identity=IDENTITY, pool=PoolName.KV, range_bytes=(40, 24))


@pytest.fixture
def clock() -> StillClock:
    """The clock of the stores that `make_store` makes."""
    return StillClock()


@pytest.fixture
def make_store(tmp_path: Path, layout: PoolLayout, clock: StillClock) -> Iterator[MakeStore]:
    """Makes stores of any geometry."""
    with contextlib.ExitStack() as stack:

        def make(
            num_buckets: int, ways: int, *, checksums: bool = True
        ) -> tuple[SegmentPageStore, Segment]:
            geometry = Geometry(num_buckets=num_buckets, ways=ways, range_bytes=layout.range_bytes)
            locks = SlotLocks(os.open(tmp_path / "locks", os.O_RDWR | os.O_CREAT, 0o600))
            superblock = Superblock(
                layout=layout, geometry=geometry, boot_id="now", checksums=checksums
            )
            buffer = memoryview(bytearray(geometry.total_bytes))
            segment = Segment.format(buffer, superblock, locks)
            store = SegmentPageStore(segment, "the test's segment", clock)
            stack.callback(store.close)
            return store, segment

        yield make
