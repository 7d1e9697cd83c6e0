"""Files of pages: who finds them, who evicts them, and what becomes of them when the disk is full."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import resource
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest

from radixlink_contracts import PageBits, Shard
from radixlink_contracts.errors import BackendUnavailableError, CapacityError
from radixlink_store import _log_appender, _page_log
from radixlink_store._directory import names_in
from radixlink_store._log_file import LOG_SUFFIX, LogFile, LogFormat, LogWriter
from radixlink_store._log_maintenance import (
    ClearedLog,
    LogStatus,
    LogVerdict,
    clear_logs,
    inspect_logs,
    verify_logs,
)
from radixlink_store._log_room import FileSize, as_seen_by, sizes_in, to_evict
from radixlink_store.counters import TierCounters
from radixlink_testing.pages import page_key, page_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from packages.store.tests.conftest import MakeLog, NumberedLog, StillClock

    from radixlink_contracts import PoolLayout


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The directory of the logs."""
    return tmp_path / "files"


def paths(files: Path) -> list[Path]:
    """The files of pages, in order of their names."""
    return sorted(files.glob(f"*{LOG_SUFFIX}"))


def room_for(layout: PoolLayout, num_records: int) -> int:
    """How long a file of so many records is."""
    return LogFormat(layout).sealed_bytes(num_records)


def put_all(log: NumberedLog, pages: range) -> None:
    for page in pages:
        assert log.put(page)


def idle_and_other(make_log: MakeLog, layout: PoolLayout) -> tuple[NumberedLog, NumberedLog]:
    """Two logs with room for two files: one that has begun a file, with two pages, and one that may evict it."""
    one = room_for(layout, 4)
    idle, other = (make_log(capacity_bytes=2 * one, file_bytes=one) for _ in range(2))
    put_all(idle, range(2))
    return idle, other


# --- who finds what -------------------------------------------------------------------------------


def test_pages_are_found_by_the_next_job(make_log: MakeLog, layout: PoolLayout) -> None:
    first = make_log(file_bytes=room_for(layout, 4))
    put_all(first, range(10))
    assert first.held(range(12)) == list(range(10))
    first.close()
    again = make_log()
    assert len(again.log) == 10
    assert again.held(range(12)) == list(range(10))
    assert again.tally.counters.torn == 0


def test_pages_of_a_process_that_never_closed_are_found(make_log: MakeLog) -> None:
    put_all(make_log(), range(5))
    assert make_log().held(range(5)) == list(range(5))


def test_pages_that_others_write_are_found_when_it_is_time_to_look(
    make_log: MakeLog, layout: PoolLayout, clock: StillClock
) -> None:
    writer = make_log(file_bytes=room_for(layout, 3))
    reader = make_log(rescan_s=5.0)
    put_all(writer, range(7))
    assert reader.held(range(8)) == []
    clock.now += 5
    assert reader.held(range(8)) == list(range(7))
    # Into the same file, which is not sealed, and into new ones.
    put_all(writer, range(7, 16))
    assert reader.held(range(16)) == list(range(7))
    clock.now += 5
    assert reader.held(range(16)) == list(range(16))
    assert reader.tally.counters.torn == 0


def test_file_of_our_own_is_known_whoever_looks_while_it_is_made(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log(rescan_s=1000.0)

    class SlowWriter(LogWriter):
        """Somebody asks for a page just before the file has its name."""

        def __init__(self, directory: int, name: str, file_id: int, format_: LogFormat) -> None:
            log.log.refresh()
            super().__init__(directory, name, file_id, format_)

    monkeypatch.setattr(_log_appender, "LogWriter", SlowWriter)
    put_all(log, range(3))
    assert log.held(range(3)) == [0, 1, 2]


def test_logs_of_one_directory_write_files_of_their_own(make_log: MakeLog, files: Path) -> None:
    logs = [make_log() for _ in range(3)]
    for page in range(9):
        assert logs[page % 3].put(page)
    assert len(paths(files)) == 3
    for log in logs:
        assert log.held(range(9)) == list(range(9))


def test_layouts_of_one_directory_are_kept_apart(make_log: MakeLog, layout: PoolLayout) -> None:
    identity = attrs.evolve(layout.identity, revision="2")
    others = [
        attrs.evolve(layout, identity=identity),
        attrs.evolve(layout, shard=Shard(index=1, count=2)),
    ]
    put_all(make_log(), range(5))
    for other in others:
        log = make_log(layout=other)
        assert log.held(range(5)) == []
        assert log.tally.counters.refused == 0
        put_all(log, range(2))
    assert make_log().held(range(5)) == list(range(5))


# --- what files are -------------------------------------------------------------------------------


def test_file_that_is_read_just_before_it_is_sealed_is_known_as_sealed_later(
    make_log: MakeLog, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = make_log(), make_log()
    put_all(writer, range(3))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fchmod", lambda *_: None)
        writer.close()
    assert reader.held(range(3)) == list(range(3))
    (path,) = paths(files)
    path.chmod(0o400)
    reader.log.refresh()
    (file,) = reader.log._index.files
    assert file.sealed


def test_files_are_for_the_owner_alone_and_read_only_once_sealed(
    make_log: MakeLog, layout: PoolLayout, files: Path
) -> None:
    log = make_log(file_bytes=room_for(layout, 2))
    put_all(log, range(3))
    assert stat.S_IMODE(files.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths(files)] == [0o400, 0o600]
    log.close()
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths(files)] == [0o400, 0o400]
    assert paths(files)[0].stat().st_size == room_for(layout, 2)


def test_directory_that_is_a_symbolic_link_is_refused(make_log: MakeLog, files: Path) -> None:
    files.with_name("real").mkdir(mode=0o700)
    files.symlink_to(files.with_name("real"))
    with pytest.raises(BackendUnavailableError, match="symbolic link"):
        make_log()


@pytest.mark.parametrize("what", ["text", "version", "link", "fifo", "directory"])
def test_file_that_is_none_of_ours_is_left_alone_and_counted(
    make_log: MakeLog, files: Path, what: str
) -> None:
    first = make_log()
    put_all(first, range(3))
    (ours,) = paths(files)
    strange = ours.with_name(ours.name.replace(LOG_SUFFIX, f"0{LOG_SUFFIX}"))
    match what:
        case "text":
            strange.write_bytes(b"my thesis\n" * 1000)
        case "version":
            data = bytearray(ours.read_bytes())
            data[8] += 1
            strange.write_bytes(data)
        case "link":
            strange.symlink_to(ours)
        case "fifo":
            os.mkfifo(strange)
        case _:
            strange.mkdir()
    log = make_log()
    assert log.held(range(3)) == [0, 1, 2]
    assert log.tally.counters.refused == (what != "fifo")
    assert strange.exists()


def test_file_whose_head_is_not_written_yet_is_found_later(
    make_log: MakeLog, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_all(make_log(), range(3))
    (path,) = paths(files)
    whole, open_ = path.read_bytes(), LogFile.open

    def late(directory: int, path: Path) -> LogFile:
        """The rest of the head comes just after somebody looked at what there is."""
        try:
            return open_(directory, path)
        finally:
            path.write_bytes(whole)

    monkeypatch.setattr(LogFile, "open", late)
    for length in (0, 10, 100):
        path.write_bytes(whole[:length])
        assert make_log(rescan_s=1000.0).held(range(3)) == []
        path.write_bytes(whole[:length])
        log = make_log()
        assert log.held(range(3)) == [0, 1, 2]


def test_file_is_read_again_only_when_it_was_written_since(
    make_log: MakeLog, layout: PoolLayout, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of writers that died are in a directory for long, and opening one may be slow."""
    writer = make_log()
    put_all(writer, range(1))
    (path,) = paths(files)
    whole = path.read_bytes()
    os.truncate(path, LogFormat(layout).offset(0) + 10)
    reader = make_log()
    assert reader.tally.counters.torn == 1
    with monkeypatch.context() as patch:
        patch.delattr(LogFile, "reopen")
        for _ in range(3):
            reader.log.refresh()
    assert reader.tally.counters.torn == 1
    path.write_bytes(whole)
    assert reader.held(range(1)) == [0]


def test_file_that_could_not_be_opened_for_once_is_found_later(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_all(make_log(), range(3))

    def fails(*_: object) -> LogFile:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(LogFile, "open", fails)
    log = make_log()
    assert log.held(range(3)) == []
    assert log.tally.counters.read_failed
    monkeypatch.undo()
    assert log.held(range(3)) == [0, 1, 2]
    assert log.tally.counters.refused == 0


# --- room -----------------------------------------------------------------------------------------


def test_directory_stays_within_its_capacity_and_the_oldest_files_go(
    make_log: MakeLog, layout: PoolLayout, files: Path
) -> None:
    capacity = 4 * room_for(layout, 5)
    log = make_log(capacity_bytes=capacity, file_bytes=room_for(layout, 5))
    for page in range(60):
        assert log.put(page)
        assert sum(path.stat().st_size for path in paths(files)) <= capacity
        # Three whole files, and what there is of the fourth.
        assert log.held(range(60)) == list(range(max(0, page // 5 * 5 - 15), page + 1))
    assert log.tally.counters.files_evicted == 8
    log.close()
    assert make_log().held(range(60)) == list(range(40, 60))


def test_file_that_is_read_from_outlives_those_that_are_not(
    make_log: MakeLog, layout: PoolLayout, files: Path
) -> None:
    one = room_for(layout, 2)
    writer = make_log(capacity_bytes=4 * one, file_bytes=one)
    put_all(writer, range(6))
    for number, path in enumerate(paths(files)):
        os.utime(path, (1000 + number, 1000 + number))
    reader = make_log()
    assert reader.held([0]) == [0]
    put_all(writer, range(6, 10))
    assert make_log().held(range(10)) == [0, 1, 4, 5, 6, 7, 8, 9]


def test_two_that_make_room_at_once_are_both_right(
    make_log: MakeLog, layout: PoolLayout, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = room_for(layout, 2)
    logs = [make_log(capacity_bytes=3 * one, file_bytes=one) for _ in range(2)]
    put_all(logs[0], range(4))
    unlink = os.unlink

    def both(name: str, *, dir_fd: int) -> None:
        monkeypatch.setattr(os, "unlink", unlink)
        # The other one comes in between, and removes what this one chose.
        assert logs[1].put(100)
        unlink(name, dir_fd=dir_fd)

    put_all(logs[0], range(4, 6))
    monkeypatch.setattr(os, "unlink", both)
    assert logs[0].put(6)
    for log in logs:
        # Two files that are being written, and count whole, and one more.
        assert log.held([*range(7), 100]) == [4, 5, 6, 100]
    assert [log.tally.counters.files_evicted for log in logs] == [0, 2]


def test_file_that_is_being_written_counts_as_long_as_it_may_get(
    make_log: MakeLog, layout: PoolLayout, files: Path
) -> None:
    one = room_for(layout, 4)
    logs = [make_log(capacity_bytes=3 * one, file_bytes=one) for _ in range(4)]
    for page, log in enumerate(logs):
        assert log.put(page)
    assert len(paths(files)) == 3
    assert logs[0].held(range(4)) == [1, 2, 3]
    # Once sealed it counts as what it is, and there is room for another.
    for log in logs[1:]:
        log.close()
    put_all(logs[0], range(4, 8))
    assert logs[0].held(range(8)) == [1, 2, 3, 4, 5, 6, 7]


def test_writer_gives_way_to_files_made_after_its_own(
    make_log: MakeLog, layout: PoolLayout, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = room_for(layout, 4)
    logs = [make_log(capacity_bytes=2 * one, file_bytes=one) for _ in range(3)]

    def others_begin(directory: int) -> list[FileSize]:
        """Just after this one has made its file."""
        monkeypatch.setattr(_log_appender, "sizes_in", sizes_in)
        (mine,) = paths(files)
        os.utime(mine, (1000, 1000))
        assert logs[1].put(1)
        assert logs[2].put(2)
        return sizes_in(directory)

    monkeypatch.setattr(_log_appender, "sizes_in", others_begin)
    assert logs[0].put(0)
    assert len(paths(files)) == 2
    # By an eviction of its own, with another file, it has gone before one of them.
    assert logs[0].held(range(3)) == [0, 2]


def test_file_that_is_evicted_while_it_is_written_takes_no_room_any_more(
    make_log: MakeLog, layout: PoolLayout, files: Path
) -> None:
    idle, other = idle_and_other(make_log, layout)
    reader = make_log(rescan_s=1000.0)
    opened = LogFile.open(other.log._directory.descriptor, paths(files)[0])
    with contextlib.closing(opened):
        put_all(other, range(2, 10))
        assert not opened.is_linked
        assert opened.num_bytes == 0
    # Who has found it before has a miss, and no damage.
    assert reader.held(range(2)) == []
    assert reader.tally.counters.corrupt == 0
    put_all(idle, range(10, 11))
    assert idle.held([0, 1, 10]) == [10]


def test_file_that_is_cut_off_while_it_is_read_is_a_miss_and_no_damage(
    make_log: MakeLog,
    layout: PoolLayout,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, other = idle_and_other(make_log, layout)
    reader = make_log()
    reopen = LogFile.reopen

    def evicted_then(directory: int, path: Path, file_id: int, format_: LogFormat) -> LogFile:
        opened = reopen(directory, path, file_id, format_)
        if paths(files)[0].stat().st_size:
            put_all(other, range(2, 10))
        return opened

    monkeypatch.setattr(LogFile, "reopen", evicted_then)
    assert reader.held(range(2)) == []
    monkeypatch.undo()
    assert reader.tally.counters.corrupt == 0
    assert reader.held(range(10)) == list(range(2, 10))


@pytest.mark.parametrize("sealed", [True, False])
def test_file_of_any_length_is_read_as_far_as_it_goes(
    make_log: MakeLog, layout: PoolLayout, files: Path, *, sealed: bool
) -> None:
    """Whoever evicts one that somebody writes cuts it off, also below its head."""
    log, format_ = make_log(), LogFormat(layout)
    put_all(log, range(3))
    if sealed:
        log.close()
    (path,) = paths(files)
    ranges = [memoryview(bytearray(size)) for size in layout.range_bytes]
    with contextlib.closing(LogFile.open(make_log().log._directory.descriptor, path)) as opened:
        path.chmod(0o600)
        whole = path.stat().st_size
        for length in range(whole - 1, -1, -1):
            os.truncate(path, length)
            ends = [format_.offset(number + 1) for number in range(3)]
            held = sum(end <= length for end in ends)
            scan = opened.scan()
            assert scan.keys == tuple(map(page_key, range(held)))
            assert scan.rest in (0, 1)
            if length <= format_.start:
                assert scan.rest == 0
            assert opened.listed_keys() is None
            read = [opened.read(number, ranges) for number in range(3)]
            # Nothing is read of what fills a record up.
            bytes_read = format_.record.head_bytes + layout.page_bytes
            readable = sum(format_.offset(number) + bytes_read <= length for number in range(3))
            assert [head.key for head in read if head] == [*map(page_key, range(readable))]


@pytest.fixture(params=range(4), ids=["its head", "a record", "another", "what is left"])
def evicted_at_a_look(
    request: pytest.FixtureRequest,
    make_log: MakeLog,
    layout: PoolLayout,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A file of two pages, not sealed, that goes as somebody is about to read something of it."""
    _, other = idle_and_other(make_log, layout)
    (path,) = paths(files)
    number, pread, looks = path.stat().st_ino, os.pread, itertools.count()

    def evicted_then(descriptor: int, size: int, offset: int) -> bytes:
        if os.fstat(descriptor).st_ino == number and next(looks) == request.param:
            monkeypatch.undo()
            put_all(other, range(2, 10))
            assert not os.fstat(descriptor).st_size
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", evicted_then)
    return path


def test_file_that_goes_while_it_is_looked_at_counts_as_nothing(
    make_log: MakeLog, evicted_at_a_look: Path
) -> None:
    reader = make_log()
    assert not evicted_at_a_look.exists()
    assert reader.tally.counters == TierCounters()
    assert reader.held(range(10)) == list(range(2, 10))


@pytest.mark.parametrize("look", [inspect_logs, verify_logs, clear_logs])
def test_maintenance_says_nothing_of_a_file_that_goes_while_it_is_read(
    evicted_at_a_look: Path,
    files: Path,
    look: Callable[[Path], Iterator[object]],
) -> None:
    assert list(look(files)) == []
    assert not evicted_at_a_look.exists()


def test_page_whose_file_goes_while_it_is_written_is_written_to_another(
    make_log: MakeLog, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log()
    put_all(log, range(2))
    append = LogWriter.append

    def evicted_first(writer: LogWriter, key: bytes, ranges: Sequence[memoryview]) -> int:
        monkeypatch.setattr(LogWriter, "append", append)
        paths(files)[0].unlink()
        return append(writer, key, ranges)

    monkeypatch.setattr(LogWriter, "append", evicted_first)
    assert log.put(2)
    assert log.held(range(3)) == [2]
    assert make_log().held(range(3)) == [2]
    assert log.tally.counters.written == 3


def test_writer_whose_file_others_evicted_begins_another(make_log: MakeLog, files: Path) -> None:
    log = make_log()
    put_all(log, range(2))
    paths(files)[0].unlink()
    put_all(log, range(2, 4))
    assert log.held(range(4)) == [2, 3]
    assert make_log().held(range(4)) == [2, 3]


def test_file_that_goes_between_look_up_and_read_is_a_miss(make_log: MakeLog, files: Path) -> None:
    put_all(make_log(), range(2))
    reader = make_log(rescan_s=1000.0)
    paths(files)[0].unlink()
    assert reader.log.find(page_keys(range(2))) == PageBits.all(2)
    assert reader.held(range(2)) == []
    assert reader.log.find(page_keys(range(2))) == PageBits.none(2)


def test_capacity_below_one_page_is_refused(make_log: MakeLog, layout: PoolLayout) -> None:
    least = room_for(layout, 1)
    with pytest.raises(CapacityError, match="room for a file of one page") as caught:
        make_log(capacity_bytes=least - 1)
    assert (caught.value.needed, caught.value.available) == (least, least - 1)
    log = make_log(capacity_bytes=least)
    put_all(log, range(3))
    assert log.held(range(3)) == [2]


def test_what_goes_is_least_recently_used_and_no_more_than_is_needed() -> None:
    sizes = [FileSize(used_ns=age, name=str(age), num_bytes=10, final=True) for age in range(5)]
    assert to_evict(sizes, capacity_bytes=50) == []
    assert to_evict(sizes, capacity_bytes=49) == sizes[:1]
    assert to_evict(sizes, capacity_bytes=30) == sizes[:2]
    assert to_evict(sizes, capacity_bytes=5) == sizes


def test_two_capacities_keep_neither_writer_from_going_on(
    make_log: MakeLog, layout: PoolLayout, files: Path
) -> None:
    one = room_for(layout, 3)
    capacities = (9 * one, 3 * one)
    large, small = (make_log(capacity_bytes=each, file_bytes=one) for each in capacities)
    for first in range(0, 60, 6):
        put_all(large, range(first, first + 5))
        assert sum(path.stat().st_size for path in paths(files)) <= capacities[0]
        before = set(paths(files))
        put_all(small, range(first + 5, first + 6))
        # Whoever begins a file makes room by its own number.
        if set(paths(files)) - before:
            assert sum(path.stat().st_size for path in paths(files)) <= capacities[1]
        assert first + 5 in large.held([first + 5])
    assert [log.tally.counters.write_failed for log in (large, small)] == [0, 0]
    assert [log.tally.counters.corrupt for log in (large, small)] == [0, 0]


def test_a_clock_that_went_back_does_not_end_writing(
    make_log: MakeLog, layout: PoolLayout, files: Path
) -> None:
    one = room_for(layout, 2)
    first = make_log(capacity_bytes=4 * one, file_bytes=one)
    put_all(first, range(20))
    first.close()
    for path in paths(files):
        ahead = path.stat().st_mtime + 3600
        os.utime(path, (ahead, ahead))
    second = make_log(capacity_bytes=4 * one, file_bytes=one)
    put_all(second, range(100, 110))
    assert 109 in second.held(range(100, 110))


def test_what_nobody_writes_goes_before_what_was_made_now() -> None:
    own = FileSize(used_ns=5, name="own", num_bytes=10, final=False)
    ahead = FileSize(used_ns=9, name="ahead", num_bytes=10, final=True)
    newer = FileSize(used_ns=7, name="newer", num_bytes=10, final=False)
    old = FileSize(used_ns=1, name="old", num_bytes=10, final=True)
    further = FileSize(used_ns=11, name="a", num_bytes=10, final=True)
    assert as_seen_by(own, [old, own, newer, ahead, further]) == [old, ahead, further, own, newer]


def test_file_that_somebody_looks_at_as_it_is_made_is_given_up_for_another(
    make_log: MakeLog, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log()
    looked_at: list[Path] = []

    def look(descriptor: int, operation: int) -> None:
        """Somebody else holds the first file in the moment that it is made."""
        if not looked_at:
            looked_at.extend(paths(files))
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
        flock(descriptor, operation)

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", look)
    assert log.put(1)
    (made,) = paths(files)
    assert looked_at != []
    assert made not in looked_at
    assert log.held([1]) == [1]


# --- a disk that says no --------------------------------------------------------------------------


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond; only in here, for pytest may write to a file as well."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_room_ends_writing_until_there_is_some_and_is_told_once(
    make_log: MakeLog, layout: PoolLayout, files: Path, clock: StillClock
) -> None:
    log = make_log()
    put_all(log, range(2))
    # In the middle of the third record.
    with files_of_at_most(LogFormat(layout).offset(2) + 100):
        assert not log.put(2)
        assert paths(files)[0].stat().st_size == LogFormat(layout).offset(2)
        # Not tried again for a while, and then in vain.
        assert log.log.pause_s() == 10
        assert not log.put(3)
        clock.now += 10
        assert log.log.pause_s() == 0
        assert not log.put(3)
    assert log.tally.counters.write_failed == 2
    assert log.held(range(4)) == [0, 1]
    (told,) = log.told
    assert "there is no room" in told
    assert str(files) in told
    assert not log.put(3)
    clock.now += 10
    put_all(log, range(3, 6))
    assert log.told[1:] == [f"{files}: pages are written again"]
    assert make_log().held(range(6)) == [0, 1, 3, 4, 5]


def test_files_are_no_longer_than_the_process_may_write(
    make_log: MakeLog, layout: PoolLayout, files: Path
) -> None:
    with files_of_at_most(room_for(layout, 3)):
        log = make_log(file_bytes=room_for(layout, 10))
        put_all(log, range(8))
    assert len(paths(files)) == 3
    assert log.held(range(8)) == list(range(8))


def test_no_room_for_a_new_file_leaves_none(make_log: MakeLog, files: Path) -> None:
    log = make_log()
    with files_of_at_most(10):
        assert not log.put(0)
    assert paths(files) == []


def test_no_room_for_the_list_of_keys_leaves_the_records(
    make_log: MakeLog, layout: PoolLayout
) -> None:
    log = make_log()
    put_all(log, range(2))
    with files_of_at_most(LogFormat(layout).offset(2) + 20):
        log.close()
    assert len(log.told) == 1
    assert make_log().held(range(2)) == [0, 1]


def test_disk_that_fails_is_tried_again_in_another_file(
    make_log: MakeLog, files: Path, clock: StillClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log()
    put_all(log, range(2))

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", fails)
    assert not log.put(2)
    monkeypatch.undo()
    assert "the disk fails" in log.told[0]
    clock.now += 10
    put_all(log, range(2, 4))
    assert len(paths(files)) == 2
    assert log.held(range(4)) == [0, 1, 2, 3]
    assert make_log().held(range(4)) == [0, 1, 2, 3]


def test_disk_that_fails_at_the_first_record_is_not_filled_with_heads(
    make_log: MakeLog, files: Path, clock: StillClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log()
    pwritev = os.pwritev

    def fails(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pwritev(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", fails)
    for tries in range(1, 4):
        assert not log.put(0)
        assert log.tally.counters.write_failed == tries
        assert paths(files) == []
        clock.now += 10
    monkeypatch.undo()
    put_all(log, range(2))
    assert log.held(range(2)) == [0, 1]
    assert len(paths(files)) == 1


def test_disk_that_fails_as_a_file_is_closed_ends_writing_for_a_while(
    make_log: MakeLog, clock: StillClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS tells of a write that failed before."""
    log = make_log()
    put_all(log, range(2))
    close = LogWriter.close

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def closes_and_fails(writer: LogWriter) -> None:
        close(writer)
        fails()

    monkeypatch.setattr(os, "pwritev", fails)
    monkeypatch.setattr(LogWriter, "close", closes_and_fails)
    assert not log.put(2)
    assert log.log.pause_s() == 10
    monkeypatch.undo()
    clock.now += 10
    put_all(log, range(2, 4))
    assert make_log().held(range(4)) == [0, 1, 2, 3]


# --- files without a page -------------------------------------------------------------------------


def test_log_that_wrote_nothing_leaves_no_file(make_log: MakeLog, files: Path) -> None:
    make_log().close()
    assert paths(files) == []


def test_file_that_got_no_page_is_removed_as_the_log_is_closed(
    make_log: MakeLog, layout: PoolLayout, files: Path
) -> None:
    log = make_log()
    with files_of_at_most(LogFormat(layout).offset(0) + 10):
        assert not log.put(0)
    # It is kept for when there is room again.
    assert len(paths(files)) == 1
    log.close()
    assert paths(files) == []


@pytest.fixture
def left_behind(make_log: MakeLog, files: Path) -> Path:
    """The file of a writer that died before it had written a byte to it."""
    child = os.fork()
    if child == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LogWriter, "begin", lambda _: os._exit(0))
            make_log().put(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (path,) = paths(files)
    assert path.stat().st_size == 0
    return path


def test_next_writer_removes_what_a_dead_one_left_without_a_byte(
    make_log: MakeLog, left_behind: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, other = make_log(), make_log()
    begin = LogWriter.begin

    def another_begins_meanwhile(writer: LogWriter) -> None:
        monkeypatch.setattr(LogWriter, "begin", begin)
        assert not left_behind.exists()
        (mine,) = paths(files)
        assert other.put(1)
        # It has a writer that lives.
        assert mine.exists()
        begin(writer)

    monkeypatch.setattr(LogWriter, "begin", another_begins_meanwhile)
    assert log.put(0)
    assert len(paths(files)) == 2
    assert log.held(range(2)) == [0, 1]
    assert [each.tally.counters.files_evicted for each in (log, other)] == [0, 0]


def test_maintenance_passes_over_a_file_without_a_byte_and_clearing_removes_it(
    make_log: MakeLog, left_behind: Path, files: Path
) -> None:
    put_all(make_log(), range(2))
    # That one removed it.
    left_behind.touch(0o600)
    (status,) = inspect_logs(files)
    assert isinstance(status, LogStatus)
    assert status.num_files == 1
    (verdict,) = verify_logs(files)
    assert isinstance(verdict, LogVerdict)
    assert verdict.num_records == 2
    (cleared,) = clear_logs(files)
    assert isinstance(cleared, ClearedLog)
    assert cleared.num_files == 1
    assert paths(files) == []


# --- a directory that goes ------------------------------------------------------------------------


def test_directory_that_was_removed_is_made_anew_and_that_is_told_once(
    make_log: MakeLog, files: Path
) -> None:
    log, reader = make_log(), make_log()
    put_all(log, range(2))
    assert reader.held(range(2)) == [0, 1]
    shutil.rmtree(files)
    assert reader.held(range(2)) == []
    # Who reads makes none.
    assert not files.exists()
    put_all(log, range(2, 5))
    assert stat.S_IMODE(files.stat().st_mode) == 0o700
    for each in (log, reader):
        assert each.held(range(5)) == [2, 3, 4]
        assert each.tally.counters.reopened == 1
        (told,) = each.told
        assert "removed or replaced" in told
        assert str(files) in told
    assert log.tally.counters.write_failed == 0
    assert reader.tally.counters.read_failed == 0
    assert make_log().held(range(5)) == [2, 3, 4]


def test_directory_that_another_one_replaced_is_left(make_log: MakeLog, files: Path) -> None:
    log = make_log()
    put_all(log, range(2))
    files.rename(files.with_name("away"))
    other = make_log()
    put_all(other, range(2, 4))
    assert log.held(range(4)) == [2, 3]
    put_all(log, range(4, 6))
    assert make_log().held(range(6)) == [2, 3, 4, 5]
    assert len(list(files.with_name("away").iterdir())) == 1


@pytest.mark.parametrize("what", ["symbolic link", "nothing", "others may write"])
def test_directory_that_is_none_of_ours_any_more_is_not_followed(
    make_log: MakeLog, tmp_path: Path, files: Path, clock: StillClock, what: str
) -> None:
    log = make_log()
    put_all(log, range(2))
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    shutil.rmtree(files)
    match what:
        case "symbolic link":
            files.symlink_to(other)
        case "nothing":
            tmp_path.rename(tmp_path.with_name("elsewhere"))
        case _:
            files.mkdir()
            files.chmod(0o777)
    try:
        assert not log.put(2)
        assert log.held(range(3)) == []
        (told,) = log.told
        assert "the directory is gone or may not be written" in told
        assert log.tally.counters.reopened == 0
    finally:
        if what == "nothing":
            tmp_path.with_name("elsewhere").rename(tmp_path)
    assert list(other.iterdir()) == []
    if what == "symbolic link":
        files.unlink()
    elif what == "others may write":
        files.chmod(0o700)
    clock.now += 10
    put_all(log, range(3, 5))
    assert log.held(range(5)) == [3, 4]


# --- an end ---------------------------------------------------------------------------------------


def descriptors_of(directory: Path) -> int:
    """How many descriptors of a directory this process has."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        # The one of the list itself is gone when it is asked for.
        with contextlib.suppress(FileNotFoundError):
            count += link.readlink() == directory
    return count


def test_close_takes_the_directory_from_nobody_who_reads(
    make_log: MakeLog, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_all(make_log(), range(2))
    log = make_log(rescan_s=1000.0)
    before = descriptors_of(files)
    reopen = LogFile.reopen

    def closed_first(directory: int, path: Path, file_id: int, format_: LogFormat) -> LogFile:
        log.close()
        assert descriptors_of(files) == before
        return reopen(directory, path, file_id, format_)

    monkeypatch.setattr(LogFile, "reopen", closed_first)
    assert log.held(range(2)) == [0, 1]
    assert descriptors_of(files) == before - 1
    monkeypatch.undo()
    assert log.held(range(2)) == []
    log.log.use(page_keys(range(2)))
    assert log.tally.counters.read_failed == 0


def test_close_takes_the_directory_from_nobody_who_looks_at_it(
    make_log: MakeLog, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, log = make_log(), make_log()
    put_all(writer, range(2))
    before = descriptors_of(files)

    def closed_first(directory: int) -> list[str]:
        log.close()
        return names_in(directory)

    monkeypatch.setattr(_page_log, "names_in", closed_first)
    assert log.log.find(page_keys(range(2))) == PageBits.all(2)
    monkeypatch.undo()
    assert descriptors_of(files) == before - 1
    put_all(writer, range(2, 4))
    assert log.log.find(page_keys(range(4))).total == 2
    assert log.tally.counters.read_failed == 0


# --- a disk that cannot be read -------------------------------------------------------------------


def test_disk_that_cannot_be_read_is_a_miss_and_a_counter(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log()
    put_all(log, range(2))

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fails)
    assert log.held(range(2)) == []
    assert log.tally.counters.read_failed == 2
    monkeypatch.undo()
    assert log.held(range(2)) == [0, 1]
    assert log.tally.counters.corrupt == 0


def test_key_is_that_of_the_page(make_log: MakeLog) -> None:
    log = make_log()
    put_all(log, range(1))
    assert page_key(0) in log.log
    assert page_key(1) not in log.log
