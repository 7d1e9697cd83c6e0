"""Several processes at one store, and what is left when one is stopped or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from radixlink_contracts import PageBits, StoreConfig
from radixlink_store import FileStoreFactory
from radixlink_testing import read_right
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radixlink_contracts import PoolLayout

WRITER = Path(__file__).parent / "programs" / "writer.py"
POINTS = ["claimed", "copied", "written"]


class Writer:
    """A process that runs `programs/writer.py`."""

    def __init__(self, location: Path, capacity_bytes: int, *args: object) -> None:
        command = [sys.executable, str(WRITER), str(location), str(capacity_bytes)]
        self.process = subprocess.Popen(
            [*command, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def go(self) -> None:
        """Let it open the store and write."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def hears(self) -> str:
        """The next line it says."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        """Kill it, if it is still there, and wait for its end."""
        self.process.kill()
        self.process.communicate()


class Writers:
    """Starts writers, and ends them with the test."""

    def __init__(self, location: Path) -> None:
        self._location = location
        self._started: list[Writer] = []

    def start(self, capacity_bytes: int, *args: object) -> Writer:
        """Start one and wait until it is about to open the store."""
        writer = Writer(self._location, capacity_bytes, *args)
        self._started.append(writer)
        return writer

    def end(self) -> None:
        """End all."""
        for writer in self._started:
            writer.end()


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[Writers]:
    """Starts writers in the test's directory."""
    writers = Writers(tmp_path)
    yield writers
    writers.end()


def test_processes_that_open_at_once_share_one_segment(
    writers: Writers, tmp_path: Path, layout: PoolLayout
) -> None:
    capacity = 256 * 64
    started = [writers.start(capacity, 20 * number, 20, "nowhere") for number in range(3)]
    for writer in started:
        assert writer.hears() == "started"
    for writer in started:
        writer.go()
    for writer in started:
        assert writer.hears() == "stored 20"
        assert writer.process.wait() == 0
    factory = FileStoreFactory(StoreConfig(location=str(tmp_path), capacity_bytes=capacity))
    store = factory.open(layout)
    handles = store.open(page_keys(range(60)), 0)
    assert read_right(store, handles) == PageBits.all(60)
    assert {handles.writers[20 * number] for number in range(3)} == {
        writer.process.pid for writer in started
    }
    factory.close()


@pytest.mark.parametrize("point", POINTS)
def test_writer_that_stops_keeps_its_slot_and_one_that_is_killed_loses_it(
    writers: Writers, tmp_path: Path, layout: PoolLayout, point: str
) -> None:
    # Two slots: the writer pauses in one of them.
    factory = FileStoreFactory(StoreConfig(location=str(tmp_path), capacity_bytes=2 * 64))
    store = factory.open(layout)
    keys = page_keys(range(5))
    store.put(keys.span(4, 5), page_parts(keys.span(4, 5), layout))
    before = store.open(keys, 0)
    writer = writers.start(2 * 64, 0, 1, point)
    assert writer.hears() == "started"
    writer.go()
    assert writer.hears() == "paused"
    writer.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, writer.process.pid, os.WSTOPPED | os.WNOWAIT)

    def put(page: int) -> PageBits:
        one = keys.span(page, page + 1)
        return store.put(one, page_parts(one, layout))

    # Stopped: its page is not there, its slot is not ours, the other slot is.
    assert put(1).complete
    assert put(2).complete
    assert store.contains(keys) == PageBits.of([2], 5)
    assert store.counters.evicted == 2
    writer.end()
    # Killed: its page never shows, its slot is free at once, and nothing else has to go for it.
    assert store.contains(keys) == PageBits.of([2], 5)
    assert put(3).complete
    assert store.contains(keys) == PageBits.of([2, 3], 5)
    assert store.counters.evicted == 2
    handles = store.open(keys, 0)
    assert read_right(store, handles) == PageBits.of([2, 3], 5)
    assert read_right(store, before) == PageBits.none(5)
    factory.close()


def test_only_slot_of_a_stopped_writer_is_no_room_until_it_goes_on(
    writers: Writers, tmp_path: Path, layout: PoolLayout
) -> None:
    factory = FileStoreFactory(StoreConfig(location=str(tmp_path), capacity_bytes=64))
    store = factory.open(layout)
    writer = writers.start(64, 0, 1, "claimed")
    assert writer.hears() == "started"
    writer.go()
    assert writer.hears() == "paused"
    keys = page_keys([1])
    assert store.put(keys, page_parts(keys, layout)) == PageBits.none(1)
    assert store.counters.rejected_busy == 1
    writer.end()
    assert store.put(keys, page_parts(keys, layout)) == PageBits.all(1)
    factory.close()
