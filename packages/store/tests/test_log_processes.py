"""Several processes that write and evict in one small directory, and one that reads all the while."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from radixlink_store._log_file import LogFormat

if TYPE_CHECKING:
    from pathlib import Path

    from packages.store.tests.conftest import MakeLog

    from radixlink_contracts import PoolLayout

WRITERS = 3
PAGES_EACH = 400
RECORDS_A_FILE = 5
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
    assert sum(sizes) <= capacity + (WRITERS - 1) * file_bytes
    # What is left is what the last ones wrote, and a new process finds it.
    held = make_log().held(range(WRITERS * PAGES_EACH))
    assert held
    assert held == reader.held(range(WRITERS * PAGES_EACH))
