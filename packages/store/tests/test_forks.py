"""What a forked child may do with the stores of its parent, and what of them it does not keep."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from radixlink_contracts import PageBits, StoreConfig
from radixlink_contracts.errors import StaleHandleError
from radixlink_store import PersistentSettings, TieredStore, TieredStoreFactory
from radixlink_store._directory import open_directory
from radixlink_store._file import FileStoreFactory, creation_lock
from radixlink_store._log_file import LOG_SUFFIX
from radixlink_store._log_room import sizes_in
from radixlink_testing import put_pages, read_right
from radixlink_testing.forks import in_a_child_while_held
from radixlink_testing.pages import page_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from packages.store.tests.conftest import MakeLog

    from radixlink_contracts import PoolLayout
    from radixlink_store._page_log import PageLog

    Held = Callable[[TieredStore], AbstractContextManager[object]]

TIMEOUT_S = 30.0


@pytest.fixture
def factory(tmp_path: Path) -> Iterator[TieredStoreFactory]:
    """Files behind a store in memory."""
    memory = StoreConfig(location=str(tmp_path / "memory"), capacity_bytes=1 << 12)
    settings = PersistentSettings(path=tmp_path / "files", capacity_bytes=1 << 24, rescan_s=0.0)
    factory = TieredStoreFactory(FileStoreFactory(memory), settings)
    yield factory
    factory.close()


def log_of(store: TieredStore) -> PageLog:
    assert store._log is not None
    return store._log


#: Whatever a thread of the parent may hold of a tier.
LOCKS: dict[str, Held] = {
    "store": lambda store: store._mutex,
    "refusals": lambda store: store._refusals._mutex,
    "queue": lambda store: store._behind._changed,
    "scan": lambda store: log_of(store)._scanning,
    "index": lambda store: log_of(store)._index._mutex,
    "directory": lambda store: log_of(store)._directory._mutex,
    "counters": lambda store: store._tally._mutex.lock,
}


@pytest.mark.parametrize("name", LOCKS)
def test_child_reads_memory_and_opens_a_store_of_its_own_whatever_another_thread_held(
    factory: TieredStoreFactory, layout: PoolLayout, name: str
) -> None:
    store = factory.open(layout)
    assert put_pages(store, page_keys(range(3))).complete
    assert store.flush(TIMEOUT_S)
    keys, there = page_keys(range(4)), PageBits.of(range(3), 4)

    def use_all_of_it() -> int:
        assert store.contains(keys) == there
        assert store.touch(keys) == there
        assert read_right(store, store.open(keys, 1.0)) == there
        with pytest.raises(StaleHandleError):
            put_pages(store, page_keys([3]))
        assert store.flush(0.0)
        assert store.counters.written == 3
        store.close()
        # As the message says: open the store again in the child.
        another = factory.open(layout)
        assert put_pages(another, page_keys([3])).complete
        assert another.flush(TIMEOUT_S)
        assert another.counters.written == 1
        factory.close()
        return 0

    assert in_a_child_while_held(LOCKS[name](store), use_all_of_it) == 0
    # The child closed what was its own.
    assert put_pages(store, page_keys([4])).complete
    assert store.flush(TIMEOUT_S)
    assert store.counters.written == 4


def open_log_files() -> list[str]:
    """The files of a log that this process has open."""
    files: list[str] = []
    for path in Path("/proc/self/fd").iterdir():
        # The list's own descriptor is gone already.
        with contextlib.suppress(FileNotFoundError):
            files.append(str(path.readlink()))
    return [file for file in files if LOG_SUFFIX in file]


def test_child_has_no_file_open_that_its_parent_writes(make_log: MakeLog) -> None:
    log = make_log()
    assert log.put(0)
    assert len(open_log_files()) == 1
    child = os.fork()
    if child == 0:
        os._exit(len(open_log_files()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert log.put(1)
    assert log.held(range(2)) == [0, 1]


def test_file_of_a_writer_that_died_is_left_though_its_child_lives(
    make_log: MakeLog, tmp_path: Path
) -> None:
    alive, tell = os.pipe()
    wait, end = os.pipe()
    writer = os.fork()
    if writer == 0:
        try:
            assert make_log().put(0)
            if os.fork() == 0:
                os.close(end)
                os.write(tell, b".")
                # Until the test has seen enough, or ended.
                os.read(wait, 1)
                os._exit(0)
            os.close(tell)
            signal.pause()
        finally:
            os._exit(1)
    os.close(tell)
    os.close(wait)
    assert os.read(alive, 1) == b"."
    directory = open_directory(tmp_path / "files")
    (written,) = sizes_in(directory)
    assert not written.final
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    (left,) = sizes_in(directory)
    assert left.final
    assert left.num_bytes < written.num_bytes
    os.close(directory)
    os.close(end)
    # It ended, too.
    assert os.read(alive, 1) == b""
    os.close(alive)


def test_child_keeps_no_lock_of_whoever_was_opening_a_store(tmp_path: Path) -> None:
    path = tmp_path / "store"
    directory = open_directory(path)
    wait, end = os.pipe()
    with creation_lock(directory, path, 0.0):
        child = os.fork()
        if child == 0:
            os.close(end)
            os.read(wait, 1)
            os._exit(0)
    os.close(wait)
    # The child lives, with all that it inherited.
    with creation_lock(directory, path, 0.0):
        os.close(end)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(directory)
