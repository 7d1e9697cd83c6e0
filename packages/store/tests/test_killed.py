"""A writer that ends, or stops, before every single line of a write."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

import attrs
import pytest
from packages.store.tests.conftest import STRESS

from radixlink_contracts import PageBits, StoreConfig
from radixlink_store import FileStoreFactory
from radixlink_store._writes import write_group, write_one
from radixlink_store.segments import Segment, SegmentPageStore
from radixlink_testing import read_right
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import FrameType

    from radixlink_contracts import PoolLayout

SLOTS = 4
ROUNDS = 20 if STRESS else 4
#: What a child ends with if it was neither killed nor stopped.
WROTE, FAILED = 0, 1
WRITE = {
    step.__code__
    for step in (
        write_one,
        write_group,
        Segment.claim,
        Segment.fill,
        Segment.publish,
    )
}


class Before:
    """Sends a signal to its own process before one line of a write is run.

    Lines count as they are run, so that the last number with an effect is the number of seams.
    """

    def __init__(self, line: int, number: signal.Signals) -> None:
        self._left = line
        self._number = number

    def __call__(self, frame: FrameType, event: str, arg: object) -> Before | None:
        if frame.f_code not in WRITE:
            return None
        if event == "line":
            if self._left == 0:
                os.kill(os.getpid(), self._number)
            self._left -= 1
        return self


class Place:
    """A directory with a store of a few slots, and children that write to it."""

    def __init__(self, path: Path, layout: PoolLayout) -> None:
        self._config = StoreConfig(location=str(path), capacity_bytes=SLOTS * 64)
        self._layout = layout
        self._factory = FileStoreFactory(self._config)
        self.store: SegmentPageStore = self._factory.open(layout)
        self._children: set[int] = set()

    def put(self, page: int) -> PageBits:
        """Put one page, by this process."""
        keys = page_keys([page])
        return self.store.put(keys, page_parts(keys, self._layout))

    def held(self, pages: range) -> list[int]:
        """Which pages can be read; a wrong byte fails the test.

        Looking leases them until the second that it is now. That is taken back: to a writer that was
        stopped in an earlier second they would all be leased.
        """
        held = [pages[i] for i in read_right(self.store, self.store.open(page_keys(pages), 0))]
        segment = self.store._segment
        assert segment is not None
        segment.leases[:] = 0
        return held

    def fork(self, pages: range, before: Before) -> int:
        """Let a child open the store anew and put pages by one call; its process number."""
        child = os.fork()
        if child == 0:
            self._be_writer(pages, before)
        self._children.add(child)
        return child

    def _be_writer(self, pages: range, before: Before) -> NoReturn:
        code = FAILED
        try:
            store = FileStoreFactory(self._config, prefault=False).open(self._layout)
            keys = page_keys(pages)
            parts = page_parts(keys, self._layout)
            sys.settrace(before)
            stored = store.put(keys, parts)
            sys.settrace(None)
            code = WROTE if stored.complete else FAILED
        finally:
            os._exit(code)

    def wait(self, child: int) -> int:
        """How a child ended, or that it stopped."""
        _, status = os.waitpid(child, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self._children.discard(child)
        return status

    def close(self) -> None:
        """End everything."""
        for child in self._children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self._factory.close()


@pytest.fixture
def place(tmp_path: Path, layout: PoolLayout) -> Iterator[Place]:
    """A store of four slots."""
    place = Place(tmp_path, attrs.evolve(layout, range_bytes=(40, 24)))
    yield place
    place.close()


@pytest.mark.parametrize(("count", "write"), [(1, "write_one"), (3, "write_group")])
def test_lines_of_every_step_of_a_write_count(place: Place, count: int, write: str) -> None:
    """One page and several take different ways; what they share is counted in both."""
    entered: set[str] = set()

    def trace(frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code in WRITE:
            entered.add(frame.f_code.co_name)

    keys = page_keys(range(count))
    parts = page_parts(keys, place.store.layout)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        assert place.store.put(keys, parts).complete
    finally:
        sys.settrace(before)
    assert entered == {write, "claim", "fill", "publish"}


@pytest.mark.timeout(1800 if STRESS else 60)
@pytest.mark.parametrize(("pages_before", "count"), [(0, 1), (SLOTS, 1), (SLOTS, 3)])
def test_writer_killed_before_any_line_leaves_pages_or_free_slots(
    place: Place, pages_before: int, count: int
) -> None:
    """Into free slots, and over pages that are there; one page, and several by one call."""
    page, kills = 0, 0
    for _ in range(ROUNDS):
        line = 0
        while True:
            for _ in range(pages_before):
                assert place.put(page).complete
                page += 1
            first = page
            child = place.fork(range(page, page + count), Before(line, signal.SIGKILL))
            status = place.wait(child)
            page += count - 1
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == WROTE
                break
            assert os.WTERMSIG(status) == signal.SIGKILL
            kills += 1
            # Nothing is locked any more: as many pages as there are slots can be put at once.
            before = place.held(range(max(0, first - SLOTS), page + 1))
            assert len(before) >= pages_before - count
            for _ in range(SLOTS):
                page += 1
                assert place.put(page).complete
            assert len(place.held(range(first, page + 1))) == SLOTS
            assert place.store.counters.rejected_busy == 0
            assert place.store.counters.read_corrupt == 0
            page += 1
            line += 1
        page += 1
        # A write has about this many lines; fewer would mean that they are not counted.
        assert line > 45
    assert kills > 45 * ROUNDS
    sys.stdout.write(f"{kills:,} writers killed, over {pages_before} pages, {ROUNDS} rounds\n")


@pytest.mark.timeout(1800 if STRESS else 60)
def test_slot_of_a_writer_that_stopped_before_any_line_is_never_taken(place: Place) -> None:
    """And the writer goes on as if nothing had been."""
    page, held_back, rounds, line, stops = 0, 0, 0, 0, 0
    while rounds < ROUNDS:
        child = place.fork(range(page, page + 1), Before(line, signal.SIGSTOP))
        status = place.wait(child)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == WROTE
            rounds, line = rounds + 1, 0
            page += 1
            continue
        assert os.WIFSTOPPED(status)
        stops += 1
        stopped = page
        for _ in range(2 * SLOTS):
            page += 1
            assert place.put(page).complete
        held = place.held(range(stopped, page + 1))
        # Its slot holds no page of ours, unless it has not locked it yet or is done with it.
        others = len(set(held) - {stopped})
        assert others in {SLOTS - 1, SLOTS}
        locked = others < SLOTS
        held_back += locked
        os.kill(child, signal.SIGCONT)
        status = place.wait(child)
        assert os.WIFEXITED(status)
        assert os.WEXITSTATUS(status) == WROTE
        assert stopped in place.held(range(stopped, stopped + 1)) or not locked
        assert place.store.counters.read_corrupt == 0
        page += 1
        line += 1
    assert held_back > 35 * ROUNDS
    sys.stdout.write(f"{stops:,} writers stopped, {held_back:,} of them with a slot locked\n")
