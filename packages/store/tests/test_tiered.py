"""What happens between the two tiers, and what is told of it."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import resource
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
from typing_extensions import override

from radixlink_contracts import PageBits, PageKeys, StoreConfig
from radixlink_contracts.errors import BackendUnavailableError, ContractError, StaleHandleError
from radixlink_store import (
    FileStoreFactory,
    PersistentSettings,
    TieredStore,
    TieredStoreFactory,
    file_stores,
)
from radixlink_store._log_file import LOG_SUFFIX
from radixlink_store._page_log import PageLog
from radixlink_store._tier_tally import TierTally
from radixlink_store.counters import TierCounters
from radixlink_testing import InMemoryPlace, InMemoryStoreFactory, put_pages, read_right
from radixlink_testing.faults import Fault, FaultKind, FaultyStore, StoreCall
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from packages.store.tests.conftest import StillClock

    from radixlink_contracts import PageStore, PoolLayout, StoreFactory, Touchable
    from radixlink_testing import InMemoryPageStore

    OpenStore = Callable[..., TieredStore]

TIMEOUT_S = 30.0
SLOTS = 64


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The directory of the files."""
    return tmp_path / "files"


@pytest.fixture
def settings(files: Path) -> PersistentSettings:
    """Room for everything."""
    return PersistentSettings(path=files, capacity_bytes=1 << 24, rescan_s=0.0, close_s=TIMEOUT_S)


@pytest.fixture
def open_store(
    tmp_path: Path, layout: PoolLayout, settings: PersistentSettings
) -> Iterator[OpenStore]:
    """Opens stores of 64 pages in memory, each by a factory of its own."""
    factories: list[TieredStoreFactory] = []

    def open_(
        memory: str = "memory", queue_bytes: int = 1 << 24, retry_s: float = 10.0
    ) -> TieredStore:
        config = StoreConfig(location=str(tmp_path / memory), capacity_bytes=SLOTS * 64)
        factory = TieredStoreFactory(
            FileStoreFactory(config, prefault=False),
            attrs.evolve(settings, queue_bytes=queue_bytes, retry_s=retry_s),
        )
        factories.append(factory)
        return factory.open(layout)

    yield open_
    for factory in factories:
        factory.close()


def put(store: TieredStore, pages: range, variant: str = "") -> None:
    """Put pages, and wait until they are in files."""
    for first in range(pages.start, pages.stop, 8):
        keys = page_keys(range(first, min(pages.stop, first + 8)))
        assert put_pages(store, keys, variant).complete
        assert store.flush(TIMEOUT_S)


def held(store: PageStore, pages: range) -> PageBits:
    """Which pages can be opened and read."""
    return read_right(store, store.open(page_keys(pages), 0))


def test_new_job_finds_the_pages_of_the_last_one(open_store: OpenStore) -> None:
    first = open_store("memory of the first")
    put(first, range(20))
    first.close()
    second = open_store("memory of the second")
    assert second.contains(page_keys(range(24))) == PageBits.all(24) & PageBits((1 << 20) - 1, 24)
    assert second.memory.contains(page_keys(range(24))) == PageBits.none(24)
    assert held(second, range(20)) == PageBits.all(20)
    assert second.counters == TierCounters(promoted=20)
    # From now on they are memory's.
    assert read_right(second.memory, second.memory.open(page_keys(range(20)), 0)).complete


def test_replicas_find_each_others_pages(open_store: OpenStore) -> None:
    stores = [open_store(f"memory {number}") for number in range(3)]
    for number, store in enumerate(stores):
        put(store, range(number * 10, number * 10 + 10))
    for store in stores:
        assert held(store, range(30)).complete
        assert store.counters.promoted == 20


def test_pages_that_memory_evicted_are_read_from_files(open_store: OpenStore) -> None:
    store = open_store()
    put(store, range(4 * SLOTS))
    assert store.counters.gone == 0
    assert store.memory.contains(page_keys(range(SLOTS))).total < SLOTS
    for first in range(0, 4 * SLOTS, 16):
        assert held(store, range(first, first + 16)).complete
    assert store.counters.written == 4 * SLOTS


def test_page_is_written_once_whoever_puts_it(open_store: OpenStore) -> None:
    one, two = open_store(), open_store()
    put(one, range(10))
    put(one, range(10))
    put(two, range(20))
    assert one.counters.written == 10
    assert two.counters.written == 10
    other_node = open_store("another memory")
    put(other_node, range(20))
    assert other_node.counters == TierCounters(promoted=20)


def test_first_writer_wins_also_where_its_page_is_in_a_file_only(open_store: OpenStore) -> None:
    put(open_store(), range(5))
    other = open_store("another memory")
    put(other, range(5), "second")
    assert held(other, range(5)).complete


def test_damaged_record_is_a_miss_and_is_written_again(
    open_store: OpenStore, files: Path, layout: PoolLayout
) -> None:
    first = open_store()
    put(first, range(5))
    first.close()
    (path,) = files.glob(f"*{LOG_SUFFIX}")
    data = bytearray(path.read_bytes())
    part = b"".join(page_parts(page_keys([2]), layout))
    assert data.count(part) == 1
    data[data.index(part) + 7] ^= 4
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(0o400)
    second = open_store("another memory")
    assert second.contains(page_keys(range(5))).complete
    assert held(second, range(5)) == PageBits.of([0, 1, 3, 4], 5)
    assert second.counters.corrupt == 1
    assert second.contains(page_keys(range(5))) == PageBits.of([0, 1, 3, 4], 5)
    put(second, range(5))
    assert second.counters.written == 1
    assert held(open_store("a third memory"), range(5)).complete


def test_page_without_room_in_memory_is_a_miss(open_store: OpenStore) -> None:
    put(open_store(), range(5))
    full = open_store("a full memory")
    others = page_keys(range(SLOTS), "others")
    there = put_pages(full.memory, others)
    full.memory.open(others, 3600)
    assert there.total == SLOTS
    assert full.contains(page_keys(range(5))).complete
    assert full.open(page_keys(range(5)), 0).found == PageBits.none(5)
    assert full.counters.not_promoted == 5


def test_page_without_room_in_memory_is_not_read_from_its_file_again_at_once(
    open_store: OpenStore,
    tmp_path: Path,
    layout: PoolLayout,
    settings: PersistentSettings,
    clock: StillClock,
) -> None:
    put(open_store(), range(5))
    config = StoreConfig(location=str(tmp_path / "a full memory"), capacity_bytes=SLOTS * 64)
    memory = FileStoreFactory(config, prefault=False).open(layout)
    others = page_keys(range(SLOTS), "others")
    put_pages(memory, others)
    memory.open(others, 3600)
    tally = TierTally()
    store = TieredStore(memory, PageLog(layout, settings, tally), tally, settings, clock)
    keys = page_keys(range(5))
    for again in range(3):
        assert store.open(keys, 0).found == PageBits.none(5)
        assert not store.put(keys, page_parts(keys, layout)).total
        assert store.counters == TierCounters(not_promoted=5, put_off=5 + 10 * again)
    clock.now += 1
    assert store.open(keys, 0).found == PageBits.none(5)
    assert store.counters.not_promoted == 10
    # They can be found all the while.
    assert store.contains(keys).complete
    store.close()


def test_put_never_waits_for_the_disk_and_what_is_too_much_is_counted(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    pwritev = os.pwritev

    def held_back(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        assert gate.wait(TIMEOUT_S)
        return pwritev(descriptor, buffers, offset)

    store = open_store(queue_bytes=10 * 64)
    monkeypatch.setattr(os, "pwritev", held_back)
    for first in range(0, 40, 8):
        assert put_pages(store, page_keys(range(first, first + 8))).complete
    assert store.counters.dropped == 30
    gate.set()
    assert store.flush(TIMEOUT_S)
    assert store.counters.written == 10


def test_touch_says_what_is_in_files_too(open_store: OpenStore, files: Path) -> None:
    put(open_store(), range(3))
    other = open_store("another memory")
    (path,) = files.glob(f"*{LOG_SUFFIX}")
    os.utime(path, (1000, 1000))
    assert other.touch(page_keys(range(1, 5))) == PageBits.of([0, 1], 4)
    assert path.stat().st_mtime > 1000
    assert other.counters == TierCounters()


def test_full_disk_is_logged_once_and_what_waits_is_written_when_there_is_room(
    open_store: OpenStore, files: Path
) -> None:
    class Log(logging.Handler):
        """Keeps what is logged, and says when something is."""

        def __init__(self) -> None:
            super().__init__()
            self.told: list[str] = []
            self.heard = threading.Event()

        @override
        def emit(self, record: logging.LogRecord) -> None:
            self.told.append(record.getMessage())
            self.heard.set()

    log, logger = Log(), logging.getLogger("radixlink_store")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = open_store(retry_s=0.01)
    logger.addHandler(log)
    try:
        # No file may be longer than that: not even its head fits.
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        assert put_pages(store, page_keys(range(8))).complete
        assert log.heard.wait(TIMEOUT_S)
        assert held(store, range(8)).complete
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert store.flush(TIMEOUT_S)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        logger.removeHandler(log)
    full, again = log.told
    assert "there is no room" in full
    assert again == f"{files}: pages are written again"
    assert store.counters.write_failed >= 1
    assert store.counters.written == 8


@pytest.mark.parametrize("foreign", [False, True])
def test_memory_that_fails_is_no_end_of_writing(
    files: Path,
    layout: PoolLayout,
    settings: PersistentSettings,
    monkeypatch: pytest.MonkeyPatch,
    *,
    foreign: bool,
) -> None:
    class Faulty:
        """Opens one faulty store."""

        def __init__(self) -> None:
            self.store = FaultyStore(InMemoryStoreFactory(place=InMemoryPlace()).open(layout))

        def open(self, layout: PoolLayout) -> PageStore:
            return self.store

        def close(self) -> None:
            self.store.close()

    memory = Faulty()
    factory = TieredStoreFactory(memory, settings)
    store = factory.open(layout)
    if foreign:

        def fails(*_: object) -> PageBits:
            raise RuntimeError("of a library that the store is made of")

        monkeypatch.setattr(memory.store, "read", fails)
    else:
        memory.store.plan(Fault(StoreCall.READ, FaultKind.FAILS))
    put(store, range(4))
    assert store.counters == TierCounters(gone=4)
    monkeypatch.undo()
    memory.store.plan()
    put(store, range(4, 8))
    assert store.counters == TierCounters(gone=4, written=4)
    factory.close()


def test_no_memory_to_move_pages_with_is_a_miss_and_no_end_of_writing(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(open_store(), range(4))
    store = open_store("another memory")

    def fails(*_: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", fails)
    assert held(store, range(4)) == PageBits.none(4)
    assert put_pages(store, page_keys(range(4, 8))).complete
    assert store.flush(TIMEOUT_S)
    assert store.counters == TierCounters(read_failed=1, write_failed=1, dropped=4)
    monkeypatch.undo()
    put(store, range(8, 12))
    assert held(store, range(12)).complete
    assert store.counters.written == 4


def test_forked_child_sees_memory_alone_and_leaves_the_rest_to_its_parent(
    open_store: OpenStore,
) -> None:
    put(open_store(), range(3))
    store = open_store("another memory")
    put(store, range(3, 6))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            right = held(store, range(6)) == PageBits.of([3, 4, 5], 6)
            try:
                put_pages(store, page_keys([9]))
            except StaleHandleError:
                code = 0 if right and store.flush(0) else 2
            store.close()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    put(store, range(6, 9))
    assert held(store, range(9)).complete


def test_closing_leaves_no_thread_and_no_descriptor(open_store: OpenStore, files: Path) -> None:
    before = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    store = open_store()
    put(store, range(20))
    held(store, range(20))
    store.close()
    store.close()
    assert (threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))) == before
    with pytest.raises(StaleHandleError):
        store.contains(PageKeys(bytes(32)))
    assert store.counters.written == 20


def test_store_that_is_opened_while_its_factory_is_closed_is_closed_as_well(
    tmp_path: Path, layout: PoolLayout, settings: PersistentSettings
) -> None:
    class Memory(InMemoryStoreFactory):
        """Opens what is closed meanwhile."""

        @override
        def open(self, layout: PoolLayout) -> InMemoryPageStore:
            opened = super().open(layout)
            factory.close()
            return opened

    before = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    factory = TieredStoreFactory(Memory(), settings)
    with pytest.raises(StaleHandleError, match="closed"):
        factory.open(layout)
    assert (threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))) == before


def test_factory_and_store_are_what_the_contracts_say(
    settings: PersistentSettings, layout: PoolLayout
) -> None:
    opened = TieredStoreFactory(InMemoryStoreFactory(), settings)
    factory: StoreFactory = opened
    store: PageStore = factory.open(layout)
    touchable: Touchable = opened.open(layout)
    assert put_pages(store, page_keys([0])).complete
    assert touchable.touch(page_keys(range(2))) == PageBits.of([0], 2)
    opened.close()


# --- settings -------------------------------------------------------------------------------------


def test_configuration_makes_the_store_that_it_asks_for(tmp_path: Path, layout: PoolLayout) -> None:
    plain = StoreConfig(location=str(tmp_path / "memory"), capacity_bytes=SLOTS * 64)
    factory = file_stores(plain)
    assert not isinstance(factory.open(layout), TieredStore)
    factory.close()
    both = attrs.evolve(plain, persistent_path=str(tmp_path / "files"), persistent_bytes=1 << 20)
    for _ in range(2):
        factory = file_stores(both)
        store = factory.open(layout)
        assert isinstance(store, TieredStore)
        put(store, range(5))
        factory.close()
        with pytest.raises(StaleHandleError):
            factory.open(layout)
    assert len(list((tmp_path / "files").iterdir())) == 1


@pytest.mark.parametrize(("path", "num_bytes"), [("/somewhere", 0), ("", 1 << 20)])
def test_half_a_configuration_is_refused(path: str, num_bytes: int) -> None:
    with pytest.raises(ContractError, match="persistent_path and persistent_bytes together"):
        file_stores(StoreConfig(persistent_path=path, persistent_bytes=num_bytes))


def test_relative_path_is_refused() -> None:
    with pytest.raises(ContractError, match="an absolute path"):
        file_stores(StoreConfig(persistent_path="files", persistent_bytes=1 << 20))


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_capacity_and_queue_of_nothing_are_refused(
    settings: PersistentSettings, num_bytes: int
) -> None:
    with pytest.raises(ContractError, match="at least 1 byte"):
        attrs.evolve(settings, capacity_bytes=num_bytes)
    with pytest.raises(ContractError, match="at least 1 byte"):
        attrs.evolve(settings, queue_bytes=num_bytes)


@pytest.mark.parametrize("num_bytes", [0, (1 << 24) + 1])
def test_files_larger_than_all_of_them_are_refused(
    settings: PersistentSettings, num_bytes: int
) -> None:
    with pytest.raises(ContractError, match="file_bytes in"):
        attrs.evolve(settings, file_bytes=num_bytes)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_seconds_that_are_none_are_refused(settings: PersistentSettings, seconds: float) -> None:
    with pytest.raises(ContractError, match="rescan_s"):
        attrs.evolve(settings, rescan_s=seconds)
    with pytest.raises(ContractError, match="retry_s"):
        attrs.evolve(settings, retry_s=seconds)
    with pytest.raises(ContractError, match="close_s"):
        attrs.evolve(settings, close_s=seconds)


def test_factory_of_segments_alone_refuses_what_it_would_not_do(tmp_path: Path) -> None:
    config = StoreConfig(
        location=str(tmp_path), persistent_path=str(tmp_path / "files"), persistent_bytes=1 << 20
    )
    with pytest.raises(ContractError, match="file_stores"):
        FileStoreFactory(config)


def test_directory_that_cannot_be_used_leaves_no_store_open(
    open_store: OpenStore, files: Path
) -> None:
    files.touch()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(BackendUnavailableError, match="directory"):
        open_store()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
