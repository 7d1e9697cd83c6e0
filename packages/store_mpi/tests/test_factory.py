"""The MPI store in one process; what more ranks do is in tests/mpi."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest

from radixlink_contracts import PageBits, PoolName, StoreConfig, StoreFactory
from radixlink_contracts.errors import (
    BackendUnavailableError,
    CapacityError,
    StaleHandleError,
)
from radixlink_store import TieredStore
from radixlink_store_mpi import MpiStoreFactory, _window, mpi_stores
from radixlink_store_mpi._collective import wait
from radixlink_store_mpi._mpi import MPI
from radixlink_testing import (
    SUITE_CAPACITY_BYTES,
    SUITE_LAYOUT,
    read_right,
)
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt

    from radixlink_contracts import PageStore

CONFIG = StoreConfig(capacity_bytes=SUITE_CAPACITY_BYTES)
KEYS = page_keys(range(5))


@pytest.fixture
def factory() -> Iterator[MpiStoreFactory]:
    """A factory for this process alone."""
    factory = MpiStoreFactory(CONFIG)
    yield factory
    factory.close()


def put_all(store: PageStore) -> None:
    assert store.put(KEYS, page_parts(KEYS, store.layout)).complete


def test_factory_is_a_store_factory(factory: MpiStoreFactory) -> None:
    opened: StoreFactory = factory
    assert opened.open(SUITE_LAYOUT).layout == SUITE_LAYOUT


def test_files_behind_a_window_outlive_the_job(tmp_path: Path) -> None:
    config = attrs.evolve(CONFIG, persistent_path=str(tmp_path), persistent_bytes=1 << 20)
    with pytest.raises(BackendUnavailableError, match="mpi_stores"):
        MpiStoreFactory(config)
    for promoted in (0, 5):
        # Each factory has windows of its own: the second one stands for the next job.
        factory = mpi_stores(config)
        store = factory.open(SUITE_LAYOUT)
        assert isinstance(store, TieredStore)
        assert store.contains(KEYS).total == promoted
        assert store.put(KEYS, page_parts(KEYS, SUITE_LAYOUT)).complete
        assert read_right(store, store.open(KEYS, 0)).complete
        factory.close()
        assert store.counters.promoted == promoted
        assert store.counters.written == 5 - promoted


def test_configuration_without_a_tier_makes_windows_alone() -> None:
    assert isinstance(mpi_stores(CONFIG), MpiStoreFactory)


def test_opening_a_layout_again_finds_its_pages(factory: MpiStoreFactory) -> None:
    store = factory.open(SUITE_LAYOUT)
    put_all(store)
    store.close()
    again = factory.open(SUITE_LAYOUT)
    assert read_right(again, again.open(KEYS, 0)) == PageBits.all(5)


def test_layouts_have_windows_of_their_own(factory: MpiStoreFactory) -> None:
    put_all(factory.open(SUITE_LAYOUT))
    other = factory.open(attrs.evolve(SUITE_LAYOUT, pool=PoolName.SWA))
    assert other.contains(KEYS) == PageBits.none(5)


def test_communicator_may_be_given() -> None:
    factory = MpiStoreFactory(CONFIG, MPI.COMM_SELF)
    put_all(factory.open(SUITE_LAYOUT))
    factory.close()


def test_memory_is_formatted_whatever_was_in_it(
    factory: MpiStoreFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dirty(memory: npt.NDArray[np.uint8]) -> None:
        memory[:] = 0xFF

    monkeypatch.setattr(_window, "populate", dirty)
    store = factory.open(SUITE_LAYOUT)
    put_all(store)
    assert read_right(store, store.open(KEYS, 0)) == PageBits.all(5)


def test_closing_closes_the_stores_and_their_files() -> None:
    before = _open_files()
    factory = MpiStoreFactory(CONFIG, MPI.COMM_SELF)
    store = factory.open(SUITE_LAYOUT)
    put_all(store)
    assert _open_files() > before
    factory.close()
    factory.close()
    assert _open_files() == before
    with pytest.raises(StaleHandleError):
        store.contains(KEYS)
    with pytest.raises(StaleHandleError, match="was closed"):
        factory.open(SUITE_LAYOUT)


@pytest.mark.parametrize("timeout_s", [0.01, float("nan")])
def test_what_does_not_come_is_not_waited_for(timeout_s: float) -> None:
    request = MPI.COMM_SELF.Irecv([bytearray(1), MPI.BYTE], 0, 7)
    assert not wait(request, timeout_s)
    request.Cancel()
    request.Wait()


def test_forked_child_reads_the_window_and_closes_and_opens_nothing(
    factory: MpiStoreFactory,
) -> None:
    store = factory.open(SUITE_LAYOUT)
    put_all(store)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert read_right(store, store.open(KEYS, 0)).complete
            with pytest.raises(StaleHandleError, match="forked child"):
                store.put(page_keys([9]), page_parts(page_keys([9]), SUITE_LAYOUT))
            for unused in (factory, MpiStoreFactory(CONFIG)):
                with pytest.raises(StaleHandleError, match="forked child"):
                    unused.open(SUITE_LAYOUT)
                unused.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read_right(store, store.open(KEYS, 0)).complete
    put_all(factory.open(SUITE_LAYOUT))


def test_location_is_refused() -> None:
    with pytest.raises(BackendUnavailableError, match="file store"):
        MpiStoreFactory(StoreConfig(location="/somewhere"))


def test_capacity_below_one_page_is_refused_and_does_no_harm() -> None:
    factory = MpiStoreFactory(attrs.evolve(CONFIG, capacity_bytes=1000))
    wide = attrs.evolve(SUITE_LAYOUT, range_bytes=(1001,))
    with pytest.raises(CapacityError) as caught:
        factory.open(wide)
    assert caught.value.available == 1000
    put_all(factory.open(attrs.evolve(SUITE_LAYOUT, range_bytes=(100,))))
    factory.close()


def test_window_that_mpi_does_not_give_is_no_capacity() -> None:
    factory = MpiStoreFactory(attrs.evolve(CONFIG, capacity_bytes=1 << 60), free_bytes=lambda: 77)
    with pytest.raises(CapacityError, match="capacity_bytes") as caught:
        factory.open(SUITE_LAYOUT)
    assert caught.value.needed > 1 << 60
    assert caught.value.available == 77


def test_memory_that_the_system_does_not_give_is_no_capacity(
    factory: MpiStoreFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))

    with monkeypatch.context() as patch:
        patch.setattr(_window, "populate", full)
        with pytest.raises(CapacityError):
            factory.open(SUITE_LAYOUT)
    put_all(factory.open(SUITE_LAYOUT))


def test_lock_file_that_cannot_be_made_says_where(
    factory: MpiStoreFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
        with pytest.raises(BackendUnavailableError, match="TMPDIR") as caught:
            factory.open(SUITE_LAYOUT)
        assert str(tmp_path / "file") in str(caught.value)
        assert caught.value.rank == 0
    put_all(factory.open(SUITE_LAYOUT))


def test_lock_file_has_no_name(
    factory: MpiStoreFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    put_all(factory.open(SUITE_LAYOUT))
    assert list(tmp_path.iterdir()) == []


def test_lock_file_that_keeps_its_name_is_none_the_worse(
    factory: MpiStoreFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        put_all(factory.open(SUITE_LAYOUT))
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0]


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
