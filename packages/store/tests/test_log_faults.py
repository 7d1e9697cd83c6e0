"""Each call of a log to the operating system fails once, in turn: nothing is lost but what was told."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
from typing import TYPE_CHECKING

import pytest
from packages.store.tests.conftest import STRESS

from radixlink_store._log_file import LogFormat

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from packages.store.tests.conftest import MakeLog, StillClock

    from radixlink_contracts import PoolLayout

PAGES = range(14 if STRESS else 6)
RECORDS_A_FILE = 2
ERRORS = [errno.ENOSPC, errno.EIO, *([errno.EMFILE, errno.ESTALE] if STRESS else [])]
#: Files that there is room for: more than are made, and no more than are being written.
MANY, FEW = 100, 2
#: Those of the module `os`, and `flock`.
CALLS = [
    "open",
    "close",
    "fstat",
    "stat",
    "listdir",
    "unlink",
    "pwritev",
    "ftruncate",
    "fchmod",
    "utime",
    "pread",
    "preadv",
    "flock",
]


class FailsOnce:
    """A call of the operating system, one of whose calls fails."""

    def __init__(self, call: Callable[..., object], number: int, error: int) -> None:
        self._call = call
        self._closes = call is os.close
        self._number = number
        self._error = error
        self.calls = 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        if self.calls - 1 != self._number:
            return self._call(*args, **kwargs)
        if self._closes:
            # It closes whatever it says.
            self._call(*args)
        raise OSError(self._error, os.strerror(self._error))


@pytest.mark.parametrize("num_files", [MANY, FEW])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", CALLS)
def test_log_goes_on_whichever_call_fails(
    make_log: MakeLog,
    layout: PoolLayout,
    tmp_path: Path,
    clock: StillClock,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    error: int,
    num_files: int,
) -> None:
    file_bytes = LogFormat(layout).sealed_bytes(RECORDS_A_FILE)
    capacity = num_files * file_bytes
    files = tmp_path / "files"
    number = 0
    while True:
        other = make_log(capacity_bytes=capacity, file_bytes=file_bytes)
        log = make_log(capacity_bytes=capacity, file_bytes=file_bytes)
        module = fcntl if name == "flock" else os
        fails = FailsOnce(getattr(module, name), number, error)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fails)
            said = []
            for page in PAGES:
                if log.put(page):
                    said.append(page)
                else:
                    clock.now += 10
                # Others write, and whatever is read has to be right.
                if page % 3 == 0:
                    other.put(100 + page)
                    log.held([*PAGES, 100 + page])
            log.close()
        assert sum(path.stat().st_size for path in files.iterdir()) <= capacity
        other.close()
        assert len(said) >= len(PAGES) - 1
        held = make_log().held(PAGES)
        if num_files == MANY:
            assert held == said
        else:
            assert set(held) <= set(said)
        shutil.rmtree(files)
        clock.now += 100
        if fails.calls <= number:
            break
        number += 1
    sys.stdout.write(f"{name}: {number} calls\n")
    # Where nothing is evicted, nothing has to be removed.
    assert number or num_files == MANY
