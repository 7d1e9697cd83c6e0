"""A process that ends before every single line of writing and sealing a file of pages."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

import pytest
from packages.store.tests.conftest import STRESS

from radixlink_store import _log_file
from radixlink_store._log_file import LogWriter

if TYPE_CHECKING:
    from types import FrameType

    from packages.store.tests.conftest import MakeLog

PAGES = 6
WROTE = 7
WRITE = {
    LogWriter.__init__.__code__,
    LogWriter.begin.__code__,
    LogWriter.append.__code__,
    LogWriter.seal.__code__,
    _log_file._write_all.__code__,
}


class KilledBefore:
    """Kills its own process before one line of writing a file is run."""

    def __init__(self, line: int) -> None:
        self._left = line

    def __call__(self, frame: FrameType, event: str, arg: object) -> KilledBefore | None:
        if frame.f_code not in WRITE:
            return None
        if event == "line":
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1
        return self


def write_and_end(make_log: MakeLog, line: int, told: int) -> NoReturn:
    """Be a process that writes pages 1.. to its own file, and tells of each that is written."""
    code = 1
    try:
        log = make_log()
        sys.settrace(KilledBefore(line))
        for page in range(1, PAGES):
            if log.put(page):
                os.write(told, b".")
        log.log.close()
        sys.settrace(None)
        code = WROTE
    finally:
        os._exit(code)


@pytest.mark.timeout(1800 if STRESS else 60)
def test_writer_killed_before_any_line_loses_the_tail_alone(make_log: MakeLog) -> None:
    first = make_log()
    assert first.put(0)
    kills = 0
    for line in range(0, 10_000, 1 if STRESS else 3):
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            write_and_end(make_log, line, tell)
        os.close(tell)
        _, status = os.waitpid(child, 0)
        written = len(os.read(told, PAGES))
        os.close(told)
        log = make_log(capacity_bytes=1 << 30)
        held = log.held(range(PAGES))
        # What it said it wrote is there, perhaps the page that it was at, and what others wrote.
        assert held in (list(range(written + 1)), list(range(written + 2)))
        for path in (log.log._settings.path).iterdir():
            if path.name not in {file.name for file in first.log._index.files if file.ours}:
                path.unlink()
        log.close()
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == WROTE
            assert written == PAGES - 1
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        kills += 1
    # Five pages and a list of keys have about this many lines.
    assert kills > (120 if STRESS else 40)
    sys.stdout.write(f"{kills:,} writers killed\n")
