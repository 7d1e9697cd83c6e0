from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from radixlink_contracts import PageKeys
from radixlink_store._write_behind import WriteBehind
from radixlink_testing.pages import page_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 30.0


class Disk:
    """What the thread writes to: it can be held, full, and asked what it got."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.ended = 0
        self.open = threading.Event()
        self.open.set()
        self.busy = threading.Event()
        #: So many pages are taken of each call; below 0 a call fails.
        self.takes = 1000
        self.pause_s = 0.0

    def write(self, keys: PageKeys) -> PageKeys:
        self.busy.set()
        assert self.open.wait(TIMEOUT_S)
        if self.takes < 0:
            raise MemoryError
        self.written += list(keys.span(0, self.takes))
        return keys.span(self.takes, len(keys))

    def end(self) -> None:
        self.ended += 1


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def behind(disk: Disk) -> Iterator[WriteBehind]:
    """A queue of ten pages."""
    behind = WriteBehind(disk.write, lambda: disk.pause_s, disk.end, 10)
    yield behind
    disk.open.set()
    behind.close(TIMEOUT_S)


def test_pages_are_written_in_their_order(disk: Disk, behind: WriteBehind) -> None:
    for first in range(0, 30, 3):
        assert behind.offer(page_keys(range(first, first + 3))) == 0
        assert behind.flush(TIMEOUT_S)
    assert disk.written == list(page_keys(range(30)))


def test_no_pages_start_no_thread(disk: Disk, behind: WriteBehind) -> None:
    before = threading.active_count()
    assert behind.offer(PageKeys()) == 0
    assert threading.active_count() == before
    assert behind.close(TIMEOUT_S) == 0
    assert disk.ended == 1


def test_what_is_too_much_is_refused_at_once(disk: Disk, behind: WriteBehind) -> None:
    disk.open.clear()
    assert behind.offer(page_keys(range(4))) == 0
    assert disk.busy.wait(TIMEOUT_S)
    # Those that are being written count.
    assert behind.offer(page_keys(range(4, 12))) == 2
    assert behind.offer(page_keys([12])) == 1
    assert not behind.flush(0)
    disk.open.set()
    assert behind.flush(TIMEOUT_S)
    assert disk.written == list(page_keys(range(10)))
    assert behind.offer(page_keys(range(12, 22))) == 0


def test_pages_that_have_to_wait_come_first(disk: Disk, behind: WriteBehind) -> None:
    disk.takes = 2
    behind.offer(page_keys(range(5)))
    behind.offer(page_keys(range(5, 8)))
    assert behind.flush(TIMEOUT_S)
    assert disk.written == list(page_keys(range(8)))


def test_nothing_is_written_in_a_pause(disk: Disk, behind: WriteBehind) -> None:
    disk.pause_s = 1000.0
    behind.offer(page_keys(range(5)))
    assert not behind.flush(0)
    disk.pause_s = 0.0
    # The next pages wake it.
    behind.offer(page_keys(range(5, 6)))
    assert behind.flush(TIMEOUT_S)
    assert disk.written == list(page_keys(range(6)))


def test_closing_writes_what_waits(disk: Disk, behind: WriteBehind) -> None:
    disk.open.clear()
    behind.offer(page_keys(range(5)))
    behind.offer(page_keys(range(5, 8)))
    disk.open.set()
    assert behind.close(TIMEOUT_S) == 0
    assert disk.written == list(page_keys(range(8)))
    assert disk.ended == 1
    assert behind.offer(page_keys([9])) == 1
    assert behind.flush(0)
    assert behind.close(TIMEOUT_S) == 0


def test_closing_in_a_pause_waits_for_nothing(disk: Disk, behind: WriteBehind) -> None:
    disk.pause_s = 1000.0
    behind.offer(page_keys(range(5)))
    before = time.monotonic()
    assert behind.close(1000.0) == 5
    assert time.monotonic() - before < TIMEOUT_S
    assert disk.written == []
    assert disk.ended == 1
    # Nobody waits for what will not come.
    assert not behind.flush(1000.0)


@pytest.mark.parametrize("seconds", [1e300, float("inf")])
def test_any_number_of_seconds_may_be_waited(
    disk: Disk, behind: WriteBehind, seconds: float
) -> None:
    disk.pause_s = seconds
    behind.offer(page_keys(range(3)))
    assert not behind.flush(0)
    disk.pause_s = 0.0
    behind.offer(page_keys(range(3, 6)))
    assert behind.flush(seconds)
    behind.offer(page_keys(range(6, 9)))
    assert behind.close(seconds) == 0
    assert disk.written == list(page_keys(range(9)))


def test_closing_gives_up_at_its_deadline(disk: Disk, behind: WriteBehind) -> None:
    disk.open.clear()
    behind.offer(page_keys(range(2)))
    assert disk.busy.wait(TIMEOUT_S)
    behind.offer(page_keys(range(2, 5)))
    assert behind.close(0.0) == 5
    assert disk.ended == 0
    disk.open.set()
    # The thread ends what it was at, and no more.
    assert not behind.flush(TIMEOUT_S)
    assert disk.written == list(page_keys(range(2)))


def test_thread_that_cannot_be_started_is_one_that_is_started_later(
    disk: Disk, behind: WriteBehind, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(threading.Thread, "start", fails)
    assert behind.offer(page_keys(range(3))) == 3
    assert behind.flush(0)
    monkeypatch.undo()
    assert behind.offer(page_keys(range(3, 6))) == 0
    assert behind.flush(TIMEOUT_S)
    assert disk.written == list(page_keys(range(3, 6)))


def test_a_signal_in_the_start_of_the_thread_leaves_one_thread(
    disk: Disk, behind: WriteBehind, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            behind.offer(page_keys(range(3)))
    before = threading.active_count()
    assert behind.offer(page_keys(range(3, 6))) == 0
    assert threading.active_count() == before
    assert behind.flush(TIMEOUT_S)
    behind.close(TIMEOUT_S)
    assert disk.ended == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nothing_is_taken_that_nobody_writes_any_more(disk: Disk, behind: WriteBehind) -> None:
    disk.takes = -1
    behind.offer(page_keys(range(3)))
    assert not behind.flush(TIMEOUT_S)
    assert behind.offer(page_keys(range(3, 6))) == 3
    assert behind.close(TIMEOUT_S) == 3
    assert disk.ended == 1
