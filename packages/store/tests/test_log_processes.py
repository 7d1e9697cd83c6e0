"""Several processes that write and evict in one small directory, and one that reads all the while."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest
from packages.store.tests.conftest import STRESS

from radixlink_store._log_file import LogFormat

if TYPE_CHECKING:
    from pathlib import Path

    from packages.store.tests.conftest import MakeLog

    from radixlink_contracts import PoolLayout

PAGES_EACH = 400
RECORDS_A_FILE = 5


WRITERS = 3
FILES = 6


def test_processes_that_evict_at_once_lose_no_write_and_read_no_wrong_byte(
    make_log: MakeLog, layout: PoolLayout, tmp_path: Path
) -> None:
    file_bytes = LogFormat(layout).sealed_bytes(RECORDS_A_FILE)
    capacity = FILES * file_bytes
    reader = make_log(capacity_bytes=capacity, file_bytes=file_bytes)
    children = []
    for writer in range(WRITERS):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                log = make_log(capacity_bytes=capacity, file_bytes=file_bytes)
                mine = range(writer * PAGES_EACH, (writer + 1) * PAGES_EACH)
                for page in mine:
                    assert log.put(page)
                # Others may have evicted all of them but that.
                assert log.held([mine[-1]]) in ([mine[-1]], [])
                assert log.tally.counters.write_failed == 0
                log.log.close()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    left = set(children)
    while left:
        for child in list(left):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                left.discard(child)
                assert status == 0
        # A wrong byte fails the test.
        reader.held(range(WRITERS * PAGES_EACH))
    assert reader.tally.counters.corrupt == 0
    assert reader.tally.counters.read_failed == 0
    sizes = [path.stat().st_size for path in (tmp_path / "files").iterdir()]
    assert sum(sizes) <= capacity
    # What is left is what the last ones wrote, and a new process finds it.
    held = make_log().held(range(WRITERS * PAGES_EACH))
    assert held
    assert held == reader.held(range(WRITERS * PAGES_EACH))


class Writers:
    """Processes that write until they are killed."""

    def __init__(self, make_log: MakeLog, count: int, capacity: int, file_bytes: int) -> None:
        self._children: list[int] = []
        parent = os.getpid()
        for writer in range(count):
            child = os.fork()
            if child == 0:
                try:
                    log = make_log(capacity_bytes=capacity, file_bytes=file_bytes)
                    page = writer
                    # While the test lives; it kills them.
                    while os.getppid() == parent:
                        log.put(page)
                        page += count
                finally:
                    os._exit(1)
            self._children.append(child)

    def stop(self) -> None:
        """Stop all of them where they are."""
        for child in self._children:
            os.kill(child, signal.SIGSTOP)
        for child in self._children:
            _, status = os.waitpid(child, os.WUNTRACED)
            assert os.WIFSTOPPED(status)

    def go_on(self) -> None:
        for child in self._children:
            os.kill(child, signal.SIGCONT)

    def kill(self) -> None:
        for child in self._children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@pytest.mark.timeout(700 if STRESS else 60)
@pytest.mark.parametrize("num_files", [64, 16, 8])
def test_directory_stays_within_its_capacity_at_every_moment_of_16_writers(
    make_log: MakeLog, layout: PoolLayout, tmp_path: Path, num_files: int
) -> None:
    """Also where there are fewer files than writers."""
    file_bytes = LogFormat(layout).sealed_bytes(RECORDS_A_FILE)
    capacity = num_files * file_bytes
    reader = make_log(capacity_bytes=capacity, file_bytes=file_bytes)
    writers = Writers(make_log, 16, capacity, file_bytes)
    seen: set[str] = set()
    most, looks = 0, 0
    try:
        while len(seen) < (100 if STRESS else 10) * num_files:
            # What they do meanwhile differs; nothing depends on how long it is.
            time.sleep(0.01)
            writers.stop()
            # Nothing moves now.
            files = list((tmp_path / "files").iterdir())
            most = max(most, sum(path.stat().st_size for path in files))
            assert most <= capacity
            seen |= {path.name for path in files}
            looks += 1
            # A wrong byte fails the test.
            reader.held(range(0, 3200, 7))
            writers.go_on()
    finally:
        writers.kill()
    sys.stdout.write(
        f"16 writers, {num_files} files: {most / capacity:.1%} of the capacity at most, at "
        f"{looks} moments; {len(seen):,} files seen\n"
    )
    # Otherwise they were never at the limit.
    assert most > capacity // 2
    assert reader.tally.counters.corrupt == 0
    assert reader.tally.counters.read_failed == 0


def test_writers_that_die_with_an_open_file_cost_no_more_than_they_wrote(
    make_log: MakeLog, layout: PoolLayout
) -> None:
    file_bytes = LogFormat(layout).sealed_bytes(50)
    capacity = 16 * file_bytes
    first = make_log(capacity_bytes=capacity, file_bytes=file_bytes)
    pages = range(14 * 50)
    for page in pages:
        assert first.put(page)
    first.close()
    for crash in range(20):
        child = os.fork()
        if child == 0:
            kept = make_log(capacity_bytes=capacity, file_bytes=file_bytes).put(10_000 + crash)
            os._exit(not kept)
        _, status = os.waitpid(child, 0)
        assert status == 0
    # 20 files of a page each, and room for 14 whole ones beside.
    assert make_log(capacity_bytes=capacity).held(pages) == list(pages)
