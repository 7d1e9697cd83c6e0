from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

import attrs
import pytest
from packages.store.tests.conftest import NumberedLog

from radixlink_contracts import PageBits, PoolName, StoreConfig
from radixlink_contracts.errors import BackendUnavailableError
from radixlink_store import FileStoreFactory, PersistentSettings
from radixlink_store._locks import LockDescriptor
from radixlink_store._log_file import LogFormat
from radixlink_store.counters import StoreCounters
from radixlink_store.maintenance import (
    Cleared,
    ClearedLog,
    Damage,
    LogDamage,
    LogStatus,
    LogVerdict,
    SegmentStatus,
    Unreadable,
    Verdict,
    clear,
    inspect,
    verify,
)
from radixlink_testing import read_page_range, read_right
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from radixlink_contracts import PoolLayout
    from radixlink_store.segments import Segment, SegmentPageStore

    Found = SegmentStatus | LogStatus | Verdict | LogVerdict | Cleared | ClearedLog | Unreadable
    OpenStore = Callable[..., SegmentPageStore]

KEYS = page_keys(range(5))
NAME = "kv.0-of-1.segment"


@pytest.fixture
def open_store(tmp_path: Path, layout: PoolLayout) -> Iterator[OpenStore]:
    """Opens stores of 64 pages, each by a factory of its own."""
    factories: list[FileStoreFactory] = []

    def open_(
        *, location: Path = tmp_path, layout: PoolLayout = layout, checksums: bool = True
    ) -> SegmentPageStore:
        config = StoreConfig(location=str(location), capacity_bytes=64 * 64)
        factories.append(FileStoreFactory(config, checksums=checksums))
        return factories[-1].open(layout)

    yield open_
    for factory in factories:
        factory.close()


def put_all(store: SegmentPageStore) -> None:
    assert store.put(KEYS, page_parts(KEYS, store.layout)).complete


def segment_of(store: SegmentPageStore) -> Segment:
    segment = store._segment
    assert segment is not None
    return segment


def status_of(path: Path) -> SegmentStatus:
    (status,) = inspect(path)
    assert isinstance(status, SegmentStatus)
    return status


def verdict_of(path: Path) -> Verdict:
    (verdict,) = verify(path)
    assert isinstance(verdict, Verdict)
    return verdict


def test_status_says_what_a_segment_holds(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path
) -> None:
    store = open_store()
    put_all(store)
    store.open(page_keys([0, 1, 7]), 100)
    status = status_of(tmp_path)
    assert status.file == tmp_path / NAME
    assert status.layout == layout
    assert status.checksums
    assert status.total_bytes == (tmp_path / NAME).stat().st_size
    assert (status.num_pages, status.num_slots, status.num_leased) == (5, 64, 2)
    assert (status.num_unfinished, status.num_openers) == (0, 1)
    assert status.idle_s is not None
    assert 0 <= status.idle_s < 60


def test_counters_are_those_of_all_openers_also_of_earlier_ones(
    open_store: OpenStore, tmp_path: Path
) -> None:
    one, two = open_store(), open_store()
    put_all(one)
    put_all(two)
    assert status_of(tmp_path).num_openers == 2
    assert status_of(tmp_path).counters == StoreCounters(put=5, already_there=5)
    one.close()
    two.close()
    assert status_of(tmp_path).num_openers == 0
    again = open_store()
    read_right(again, again.open(KEYS, 0))
    put_all(again)
    assert status_of(tmp_path).counters == StoreCounters(put=5, already_there=10, read_ok=10)
    # An opener counts for itself.
    assert again.counters == StoreCounters(already_there=5, read_ok=10)


def test_more_openers_than_can_count_use_the_store_all_the_same(
    open_store: OpenStore, tmp_path: Path
) -> None:
    stores = [open_store() for _ in range(66)]
    for store in stores:
        put_all(store)
    status = status_of(tmp_path)
    assert status.num_openers == 64
    assert status.counters == StoreCounters(put=5, already_there=63 * 5)
    assert stores[65].counters == StoreCounters(already_there=5)
    for store in stores[:65]:
        store.close()
    # The last one has no row, and is still seen.
    assert clear(tmp_path) == [Cleared(file=tmp_path / NAME, num_pages=5, removed=False)]


def test_looking_changes_nothing(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    put_all(store)
    store.close()
    files = sorted(tmp_path.iterdir())
    before = (tmp_path / NAME).read_bytes()
    status_of(tmp_path)
    assert verdict_of(tmp_path) == Verdict(
        file=tmp_path / NAME, num_pages=5, damages=(), checksums=True
    )
    assert sorted(tmp_path.iterdir()) == files
    assert (tmp_path / NAME).read_bytes() == before


def test_scrub_names_what_is_damaged_and_empties_it(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    put_all(store)
    segment, slots = segment_of(store), store.open(KEYS, 0).slots
    segment.range_of(slots[0], 1)[3] ^= 1
    segment._header[slots[2] * segment.geometry.header_words] ^= 1 << 40
    # Another tag of the same page: it can no longer be found.
    segment._tags[slots[3]] ^= 0x81
    found = verdict_of(tmp_path)
    assert found.num_pages == 5
    assert set(found.damages) == {
        Damage(slot=slots[0], what="layer range 1"),
        Damage(slot=slots[2], what="header"),
        Damage(slot=slots[3], what="index"),
    }
    assert store.contains(KEYS) == PageBits.of([1, 4], 5)
    assert verdict_of(tmp_path) == Verdict(
        file=tmp_path / NAME, num_pages=2, damages=(), checksums=True
    )
    put_all(store)
    assert read_right(store, store.open(KEYS, 0)) == PageBits.all(5)


def test_scrub_without_checksums_looks_at_headers(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(checksums=False)
    put_all(store)
    segment, slots = segment_of(store), store.open(KEYS, 0).slots
    segment.range_of(slots[0], 1)[3] ^= 1
    segment._header[slots[2] * segment.geometry.header_words] ^= 1 << 40
    found = verdict_of(tmp_path)
    assert not found.checksums
    assert found.damages == (Damage(slot=slots[2], what="header"),)


def test_clearing_a_store_that_nobody_has_open_removes_its_segments_and_nothing_else(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path
) -> None:
    swa = attrs.evolve(layout, pool=PoolName.SWA)
    for each in (layout, swa):
        store = open_store(layout=each)
        put_all(store)
        store.close()
    (tmp_path / "notes.txt").write_text("mine", "utf-8")
    assert clear(tmp_path) == [
        Cleared(file=tmp_path / NAME, num_pages=5, removed=True),
        Cleared(file=tmp_path / "swa.0-of-1.segment", num_pages=5, removed=True),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["creation.lock", "notes.txt"]
    assert open_store().contains(KEYS) == PageBits.none(5)


def test_clearing_a_store_in_use_empties_it_for_everybody(
    open_store: OpenStore, tmp_path: Path
) -> None:
    store = open_store()
    put_all(store)
    handles = store.open(KEYS, 100)
    assert clear(tmp_path) == [Cleared(file=tmp_path / NAME, num_pages=5, removed=False)]
    assert read_page_range(store, handles, 0)[0] == PageBits.none(5)
    assert store.contains(KEYS) == PageBits.none(5)
    put_all(store)
    assert read_right(open_store(), store.open(KEYS, 0)) == PageBits.all(5)


def test_clearing_leaves_a_slot_to_whoever_writes_it(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    put_all(store)
    segment, slot = segment_of(store), store.open(KEYS, 0).slots[2]
    with segment.locks.lend() as lock:
        assert lock.try_lock(slot)
        clear(tmp_path)
        lock.unlock(slot)
    assert store.contains(KEYS) == PageBits.of([2], 5)


@pytest.mark.parametrize("do", [inspect, verify, clear])
def test_file_that_is_no_segment_is_named_and_left_alone(
    open_store: OpenStore,
    tmp_path: Path,
    do: Callable[[Path], list[Found]],
) -> None:
    store = open_store()
    put_all(store)
    other_version = bytearray((tmp_path / NAME).read_bytes())
    other_version[8] += 1
    contents = {"a.segment": b"my thesis\n" * 1000, "b.segment": bytes(other_version)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "c.segment")
    (tmp_path / "d.segment").symlink_to(tmp_path / NAME)
    (tmp_path / "e.segment").symlink_to("nowhere")
    (tmp_path / "f.segment").mkdir()
    found = do(tmp_path)
    told = [each for each in found if isinstance(each, Unreadable)]
    assert [each.file.name for each in told] == [f"{letter}.segment" for letter in "abcdef"]
    whys = ("something else", "format version", "plain file", "links", "links", "Is a directory")
    for each, why in zip(told, whys, strict=True):
        assert why in each.why
    assert len(found) == 7
    assert (tmp_path / "d.segment").exists()
    for name, content in contents.items():
        assert (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize("beside", [True, False])
def test_what_a_dead_maker_left_is_told_and_cleared(
    open_store: OpenStore, tmp_path: Path, *, beside: bool
) -> None:
    left = tmp_path / "swa.0-of-1.segment.new"
    segments = [tmp_path / NAME] if beside else []
    if beside:
        open_store().close()
    left.write_bytes(bytes(1 << 16))
    for do in (inspect, verify):
        *others, last = do(tmp_path)
        whole = [each.file for each in others if isinstance(each, SegmentStatus | Verdict)]
        assert whole == segments
        assert len(others) == len(segments)
        assert isinstance(last, Unreadable)
        assert last.file == left
        assert "whose maker died" in last.why
    assert left.exists()
    assert clear(tmp_path) == [
        Cleared(file=file, num_pages=0, removed=True) for file in (*segments, left)
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["creation.lock"]


def test_stores_of_several_models_are_found_below_their_directory(
    open_store: OpenStore, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        put_all(open_store(location=tmp_path / name))
    files = [tmp_path / name / NAME for name in ("one", "two")]
    for do, kind in ((inspect, SegmentStatus), (verify, Verdict), (clear, Cleared)):
        assert [each.file for each in do(tmp_path) if isinstance(each, kind)] == files


@pytest.mark.parametrize("name", ["missing", "file", "empty"])
def test_place_without_a_store_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for do in (inspect, verify, clear):
        with pytest.raises(BackendUnavailableError, match=f"{name} to be a directory"):
            do(tmp_path / name)
    assert not (tmp_path / "missing").exists()


# --- the files of a persistent tier ---------------------------------------------------------------


def put_in_files(path: Path, layout: PoolLayout, *, closed: bool = True) -> NumberedLog:
    """Five pages in files of three, in a directory of their own."""
    settings = PersistentSettings(
        path=path, capacity_bytes=1 << 20, file_bytes=LogFormat(layout).sealed_bytes(3)
    )
    log = NumberedLog(layout, settings, lambda: 0.0)
    for page in range(5):
        assert log.put(page)
    if closed:
        log.close()
    return log


def test_status_says_what_the_files_of_each_layout_hold(layout: PoolLayout, tmp_path: Path) -> None:
    swa = attrs.evolve(layout, pool=PoolName.SWA)
    files = tmp_path / "files"
    log = put_in_files(files, layout, closed=False)
    put_in_files(files, layout)
    put_in_files(files, swa)
    # A third page in a file that is not sealed, and torn.
    log.put(5)
    torn = max(files.iterdir(), key=lambda path: path.stat().st_mode)
    os.truncate(torn, torn.stat().st_size - 1)
    total_bytes = {
        each: sum(
            path.stat().st_size
            for path in files.iterdir()
            if path.name.startswith(each.fingerprint.hex()[:16])
        )
        for each in (layout, swa)
    }
    expected = [
        LogStatus(
            directory=files,
            layout=layout,
            num_files=4,
            num_unsealed=1,
            num_records=10,
            num_pages=5,
            num_torn=1,
            total_bytes=total_bytes[layout],
        ),
        LogStatus(
            directory=files,
            layout=swa,
            num_files=2,
            num_unsealed=0,
            num_records=5,
            num_pages=5,
            num_torn=0,
            total_bytes=total_bytes[swa],
        ),
    ]
    for path in (files, tmp_path):
        found = inspect(path)
        assert len(found) == 2
        for each in expected:
            assert each in found
    verdicts = verify(files)
    assert {
        (each.num_records, each.num_torn, each.damages)
        for each in verdicts
        if isinstance(each, LogVerdict)
    } == {(10, 1, ()), (5, 0, ())}
    log.close()


def test_scrub_of_files_names_each_damaged_record_and_changes_nothing(
    layout: PoolLayout, tmp_path: Path
) -> None:
    put_in_files(tmp_path, layout)
    format_ = LogFormat(layout)
    first, second = sorted(tmp_path.iterdir())
    for path, place in (
        (first, format_.offset(1) + format_.record.head_bytes + layout.range_bytes[0]),
        (first, format_.offset(2)),
        (second, format_.offset(0) + 9),
    ):
        data = bytearray(path.read_bytes())
        data[place] ^= 16
        path.chmod(0o600)
        path.write_bytes(data)
        path.chmod(0o400)
    expected = LogVerdict(
        directory=tmp_path,
        layout=layout,
        num_files=2,
        num_records=3,
        num_torn=0,
        damages=(
            LogDamage(file=first, record=1, what="layer range 1"),
            LogDamage(file=first, record=2, what="header"),
            LogDamage(file=second, record=0, what="header"),
        ),
    )
    for _ in range(2):
        assert verify(tmp_path) == [expected]


def test_scrub_of_a_disk_that_fails_names_what_cannot_be_read(
    layout: PoolLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_files(tmp_path, layout)
    preadv = os.preadv
    reads = iter(range(5))

    def fails(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if next(reads) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", fails)
    (verdict,) = verify(tmp_path)
    assert isinstance(verdict, LogVerdict)
    (damage,) = verdict.damages
    assert damage.record == 1
    assert "cannot be read" in damage.what


@pytest.mark.parametrize("action", [inspect, verify, clear])
def test_what_the_system_says_against_it_is_told_as_an_error_of_the_store(
    layout: PoolLayout,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    action: Callable[[Path], list[Found]],
) -> None:
    put_in_files(tmp_path, layout)
    pread = os.pread

    def fails(descriptor: int, length: int, offset: int) -> bytes:
        if offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", fails)
    with pytest.raises(BackendUnavailableError, match=f"{tmp_path}.*errno 5"):
        action(tmp_path)


@pytest.mark.parametrize("action", [inspect, verify, clear])
def test_directory_that_is_not_ours_alone_keeps_nobody_from_those_that_are(
    open_store: OpenStore,
    layout: PoolLayout,
    tmp_path: Path,
    action: Callable[[Path], list[Found]],
) -> None:
    put_in_files(tmp_path / "files", layout)
    open_store(location=tmp_path / "memory").close()
    others = tmp_path / "others"
    others.mkdir()
    for name in ("kv.0-of-1.segment", "a.pages"):
        (others / name).touch()
    others.chmod(0o777)
    found = action(tmp_path)
    unusable = [each for each in found if isinstance(each, Unreadable)]
    assert [each.file for each in unusable] == [others, others]
    assert all("others may write" in each.why for each in unusable)
    assert len(found) == 4
    with pytest.raises(BackendUnavailableError, match="others may write"):
        action(others)


def test_clearing_files_removes_ours_and_their_writer_goes_on(
    layout: PoolLayout, tmp_path: Path
) -> None:
    log = put_in_files(tmp_path, layout, closed=False)
    (written,) = (path for path in tmp_path.iterdir() if path.stat().st_mode & stat.S_IWUSR)
    strange = tmp_path / "a.pages"
    strange.write_bytes(b"my thesis")
    (tmp_path / "notes.txt").write_text("mine", "utf-8")
    with written.open("rb") as file:
        unreadable, cleared = clear(tmp_path)
        # Its room is free, though it is open here and where it is written.
        assert os.fstat(file.fileno()).st_size == 0
    assert cleared == ClearedLog(directory=tmp_path, layout=layout, num_files=2, num_records=5)
    assert isinstance(unreadable, Unreadable)
    assert "something else" in unreadable.why
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pages", "notes.txt"]
    assert log.put(7)
    log.close()
    status = next(each for each in inspect(tmp_path) if isinstance(each, LogStatus))
    assert status.num_records == 1


def test_what_is_being_made_is_no_fault(open_store: OpenStore, tmp_path: Path) -> None:
    open_store().close()
    (tmp_path / "swa.0-of-1.segment.new").write_bytes(bytes(1 << 16))
    descriptor = os.open(tmp_path / "creation.lock", os.O_RDWR)
    maker = LockDescriptor(descriptor)
    assert maker.try_lock(0)
    assert [each for each in inspect(tmp_path) if isinstance(each, Unreadable)] == []
    maker.close()
    (left,) = [each for each in inspect(tmp_path) if isinstance(each, Unreadable)]
    assert left.file.name == "swa.0-of-1.segment.new"
