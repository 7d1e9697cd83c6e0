"""Files, directories and what the operating system says about them."""

from __future__ import annotations

import errno
import functools
import gc
import os
import platform
import resource
import stat
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest

from radixlink_contracts import PageBits, PoolName, Shard, StoreConfig
from radixlink_contracts.errors import (
    BackendUnavailableError,
    CapacityError,
    ContractError,
    IdentityError,
    IntegrityError,
    StaleHandleError,
)
from radixlink_store import FileStoreFactory, default_directory
from radixlink_store._room import Room, room_at
from radixlink_store._superblock import write_boot_id
from radixlink_store.segments import Geometry, SlotLocks
from radixlink_testing import read_right
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from radixlink_contracts import PoolLayout
    from radixlink_store.segments import SegmentPageStore

    OpenStore = Callable[..., SegmentPageStore]

CAPACITY = 64 * 64
NAME = "kv.0-of-1.segment"
KEYS = page_keys(range(5))


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    """Opens stores in the test's directory, each by a factory of its own."""
    factories: list[FileStoreFactory] = []

    def open_(
        layout: PoolLayout,
        *,
        capacity_bytes: int = CAPACITY,
        timeout_s: float = 30.0,
        location: Path = tmp_path,
        checksums: bool = True,
    ) -> SegmentPageStore:
        config = StoreConfig(
            location=str(location), capacity_bytes=capacity_bytes, timeout_s=timeout_s
        )
        factory = FileStoreFactory(config, checksums=checksums)
        factories.append(factory)
        return factory.open(layout)

    yield open_
    for factory in factories:
        factory.close()


def put_all(store: SegmentPageStore) -> None:
    assert store.put(KEYS, page_parts(KEYS, store.layout)).complete


def boot_of_the_node(file: Path) -> None:
    """Make a segment one of an earlier boot."""
    with file.open("r+b") as segment:
        head = bytearray(segment.read(100))
        write_boot_id(memoryview(head), "the boot before")
        segment.seek(0)
        segment.write(head)


def test_files_are_for_the_owner_alone_and_allocated(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path
) -> None:
    open_store(layout)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["creation.lock", NAME]
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    status = (tmp_path / NAME).stat()
    assert status.st_size == Geometry.within(CAPACITY, layout.range_bytes).total_bytes
    assert status.st_blocks * 512 >= status.st_size


def test_missing_last_part_of_the_location_is_made(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path
) -> None:
    put_all(open_store(layout, location=tmp_path / "store"))
    assert (tmp_path / "store" / NAME).exists()


def test_pages_stay_when_everybody_closed(open_store: OpenStore, layout: PoolLayout) -> None:
    store = open_store(layout)
    put_all(store)
    store.close()
    again = open_store(layout)
    assert read_right(again, again.open(KEYS, 0)) == PageBits.all(5)


def test_segment_keeps_the_size_that_it_was_made_with(
    open_store: OpenStore, layout: PoolLayout
) -> None:
    store = open_store(layout)
    put_all(store)
    other = open_store(layout, capacity_bytes=10 * CAPACITY)
    assert other.num_slots == store.num_slots == 64
    assert read_right(other, other.open(KEYS, 0)) == PageBits.all(5)


def test_each_pool_and_shard_has_a_file(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path
) -> None:
    open_store(layout)
    open_store(attrs.evolve(layout, pool=PoolName.SWA, range_bytes=(8,)))
    open_store(attrs.evolve(layout, shard=Shard(index=1, count=2)))
    names = sorted(path.name for path in tmp_path.glob("*.segment"))
    assert names == [NAME, "kv.1-of-2.segment", "swa.0-of-1.segment"]


def test_pages_of_another_identity_are_refused_whatever_the_pool(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path
) -> None:
    open_store(layout)
    identity = attrs.evolve(layout.identity, model="another", dtype="float16")
    other = attrs.evolve(layout, identity=identity, pool=PoolName.MAMBA)
    with pytest.raises(IdentityError) as caught:
        open_store(other)
    for part in (
        str(tmp_path / NAME),
        "model is 'tiny' there and 'another' here",
        "dtype is 'uint8' there and 'float16' here",
        "choose another location",
    ):
        assert part in str(caught.value)
    assert "revision" not in str(caught.value)


def test_another_layout_of_the_same_pool_is_refused(
    open_store: OpenStore, layout: PoolLayout
) -> None:
    open_store(layout)
    with pytest.raises(IdentityError, match=r"range_bytes is \[40, 24\] there and \[64\] here"):
        open_store(attrs.evolve(layout, range_bytes=(64,)))


def test_too_little_room_is_known_before_a_file_is_made(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path
) -> None:
    with pytest.raises(CapacityError) as caught:
        open_store(layout, capacity_bytes=1 << 60)
    assert caught.value.needed > 1 << 60
    status = os.statvfs(tmp_path)
    assert 0 < caught.value.available <= status.f_blocks * status.f_frsize
    assert list(tmp_path.glob("*.segment*")) == []


def test_room_that_is_gone_when_it_is_taken_leaves_no_file(
    open_store: OpenStore,
    layout: PoolLayout,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CapacityError) as caught:
            open_store(layout)
    assert isinstance(caught.value.__cause__, OSError)
    assert list(tmp_path.glob("*.segment*")) == []
    put_all(open_store(layout))


def test_limit_that_only_the_allocation_meets_is_told_and_leaves_no_file(
    layout: PoolLayout, tmp_path: Path
) -> None:
    # A limit on the size of files: like a quota, no file system tells it beforehand.
    child = os.fork()
    if child == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
            config = StoreConfig(location=str(tmp_path), capacity_bytes=1 << 20)
            FileStoreFactory(config).open(layout)
        except CapacityError as error:
            code = 0 if error.needed > 1 << 20 else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert list(tmp_path.glob("*.segment*")) == []


def test_free_room_is_asked_where_the_store_is(layout: PoolLayout, tmp_path: Path) -> None:
    asked: list[Path] = []

    def room(path: Path) -> Room:
        asked.append(path)
        return Room(num_bytes=7, limit="a quota")

    factory = FileStoreFactory(StoreConfig(location=str(tmp_path)), room)
    with pytest.raises(CapacityError, match="got 7 within a quota") as caught:
        factory.open(layout)
    assert caught.value.available == 7
    assert asked == [tmp_path]


def test_what_a_dead_maker_left_is_removed(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path
) -> None:
    (tmp_path / f"{NAME}.new").write_bytes(b"half a superblock")
    put_all(open_store(layout))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["creation.lock", NAME]


def test_what_a_dead_maker_of_another_segment_left_is_removed(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path
) -> None:
    put_all(open_store(layout))
    (tmp_path / "swa.0-of-1.segment.new").write_bytes(bytes(1 << 16))
    put_all(open_store(layout))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["creation.lock", NAME]


def test_making_that_is_interrupted_leaves_no_file(
    open_store: OpenStore,
    layout: PoolLayout,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocate = os.posix_fallocate

    def interrupted(descriptor: int, offset: int, length: int) -> None:
        allocate(descriptor, offset, length)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            open_store(layout)
    assert [path.name for path in tmp_path.iterdir()] == ["creation.lock"]
    put_all(open_store(layout))


def test_child_that_is_forked_while_a_segment_is_made_keeps_nobody_out(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path
) -> None:
    end, keep = os.pipe()
    children: list[int] = []

    def fork(path: Path) -> Room:
        child = os.fork()
        if child == 0:
            os.close(keep)
            os.read(end, 1)
            os._exit(0)
        children.append(child)
        return room_at(path)

    config = StoreConfig(location=str(tmp_path), capacity_bytes=CAPACITY)
    factory = FileStoreFactory(config, fork)
    factory.open(layout)
    put_all(open_store(layout, timeout_s=0))
    factory.close()
    os.close(keep)
    for child in children:
        os.waitpid(child, 0)
    os.close(end)
    assert len(children) == 1


@pytest.mark.parametrize("keep", [0, 8, 5000, -4096, -1])
def test_truncated_file_is_refused(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path, keep: int
) -> None:
    open_store(layout).close()
    file = tmp_path / NAME
    os.truncate(file, keep if keep >= 0 else file.stat().st_size + keep)
    with pytest.raises((IntegrityError, IdentityError), match="remove"):
        open_store(layout)


def test_foreign_file_is_refused_and_left_alone(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path
) -> None:
    content = b"my thesis\n" * 10_000
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(IdentityError, match="something else"):
        open_store(layout)
    assert (tmp_path / NAME).read_bytes() == content


def test_damaged_superblock_is_refused(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path
) -> None:
    open_store(layout).close()
    with (tmp_path / NAME).open("r+b") as file:
        file.seek(200)
        file.write(b"\xff")
    with pytest.raises(IntegrityError, match="remove"):
        open_store(layout)


def test_link_in_place_of_the_file_is_refused(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path
) -> None:
    directory = tmp_path / "store"
    open_store(layout).close()
    directory.mkdir(mode=0o700)
    (directory / NAME).symlink_to(tmp_path / NAME)
    with pytest.raises(BackendUnavailableError, match=os.strerror(errno.ELOOP)):
        open_store(layout, location=directory)


def test_pipe_in_place_of_the_file_is_refused(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(BackendUnavailableError, match="plain file"):
        open_store(layout)


@pytest.mark.parametrize("location", ["/proc/self/task", "/sys/kernel"])
def test_directory_that_takes_no_files_is_unavailable(
    open_store: OpenStore, layout: PoolLayout, location: str
) -> None:
    # Even root cannot make a file there.
    with pytest.raises(BackendUnavailableError, match=f"{location}.*location"):
        open_store(layout, location=Path(location))


def test_location_below_a_plain_file_is_unavailable(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BackendUnavailableError, match=os.strerror(errno.ENOTDIR)):
        open_store(layout, location=tmp_path / "file" / "store")


def test_opener_that_waits_too_long_for_another_says_for_what(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path
) -> None:
    locks = SlotLocks(os.open(tmp_path / "creation.lock", os.O_RDWR | os.O_CREAT, 0o600))
    with locks.lend() as lock:
        assert lock.try_lock(0)
        with pytest.raises(
            BackendUnavailableError, match=r"creation\.lock within 0\.01 s"
        ) as caught:
            open_store(layout, timeout_s=0.01)
        assert caught.value.transient
        lock.unlock(0)
        put_all(open_store(layout, timeout_s=0.01))
    locks.close()


def test_boot_of_the_node_starts_the_stamps_over(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path
) -> None:
    store = open_store(layout, capacity_bytes=64)
    keys, others = page_keys([0]), page_keys([1])
    store.put(keys, page_parts(keys, layout))
    store.open(keys, 1000)
    assert store.put(others, page_parts(others, layout)) == PageBits.none(1)
    store.close()
    boot_of_the_node(tmp_path / NAME)
    again = open_store(layout)
    assert again.contains(keys) == PageBits.all(1)
    assert again.put(others, page_parts(others, layout)) == PageBits.all(1)
    # Not over and over: the lease of now stays.
    again.open(others, 1000)
    assert open_store(layout).put(keys, page_parts(keys, layout)) == PageBits.none(1)


def test_segment_without_checksums_serves_those_who_ask_for_none(
    open_store: OpenStore, layout: PoolLayout
) -> None:
    store = open_store(layout, checksums=False)
    put_all(store)
    again = open_store(layout, checksums=False)
    assert read_right(again, again.open(KEYS, 0)) == PageBits.all(5)


@pytest.mark.parametrize("made_with", [True, False])
def test_segment_made_with_another_setting_is_refused(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path, *, made_with: bool
) -> None:
    put_all(open_store(layout, checksums=made_with))
    with pytest.raises(IdentityError) as caught:
        open_store(layout, checksums=not made_with)
    for part in (str(tmp_path / NAME), f"checksums={made_with}", f"checksums={not made_with}"):
        assert part in str(caught.value)
    assert open_store(layout, checksums=made_with).contains(KEYS) == PageBits.all(5)


def test_missing_checksums_are_refused_where_loads_and_stores_may_be_reordered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ContractError, match="checksums on a aarch64"):
        FileStoreFactory(StoreConfig(), checksums=False)
    FileStoreFactory(StoreConfig())


@pytest.mark.parametrize("checksums", [True, False])
def test_boot_of_the_node_keeps_only_pages_that_can_be_verified(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path, *, checksums: bool
) -> None:
    store = open_store(layout, checksums=checksums)
    put_all(store)
    before = store.open(KEYS, 0)
    store.close()
    boot_of_the_node(tmp_path / NAME)
    again = open_store(layout, checksums=checksums)
    kept = PageBits.all(5) if checksums else PageBits.none(5)
    assert again.contains(KEYS) == kept
    assert read_right(again, before) == kept
    put_all(again)
    # A generation is never used again, so what was opened before stays a miss.
    assert read_right(again, before) == kept


def test_prefault_is_at_work_until_the_store_is_closed(layout: PoolLayout, tmp_path: Path) -> None:
    before = threading.active_count()
    config = StoreConfig(location=str(tmp_path), capacity_bytes=CAPACITY)
    for prefault in (True, False):
        factory = FileStoreFactory(config, prefault=prefault)
        put_all(factory.open(layout))
        factory.close()
        assert threading.active_count() == before


def test_store_is_opened_also_where_no_more_threads_are_to_be_had(
    open_store: OpenStore, layout: PoolLayout
) -> None:
    # More than there are addresses.
    before = threading.stack_size(1 << 47)
    try:
        with pytest.raises(RuntimeError):
            threading.Thread(target=int).start()
        store = open_store(layout)
    finally:
        threading.stack_size(before)
    assert store.wait_prefault(0)
    put_all(store)


def test_store_that_is_opened_while_its_factory_is_closed_is_closed_as_well(
    layout: PoolLayout, tmp_path: Path
) -> None:
    def close(path: Path) -> Room:
        factory.close()
        return room_at(path)

    config = StoreConfig(location=str(tmp_path), capacity_bytes=CAPACITY)
    factory = FileStoreFactory(config, close)
    before = _open_files()
    with pytest.raises(StaleHandleError, match="closed"):
        factory.open(layout)
    assert _open_files() == before


def test_closing_unmaps_the_file_and_closes_it(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path
) -> None:
    before = _open_files()
    store = open_store(layout)
    put_all(store)
    assert str(tmp_path) in Path("/proc/self/maps").read_text("utf-8")
    assert _open_files() > before
    store.close()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text("utf-8")
    assert _open_files() == before


@pytest.mark.parametrize("head", [b"", b"not a segment"])
def test_failed_opening_leaves_nothing_open(
    open_store: OpenStore, layout: PoolLayout, tmp_path: Path, head: bytes
) -> None:
    (tmp_path / NAME).write_bytes(head)
    before = _open_files()
    with pytest.raises(IdentityError):
        open_store(layout)
    assert _open_files() == before


def test_closing_the_factory_closes_its_stores(layout: PoolLayout, tmp_path: Path) -> None:
    factory = FileStoreFactory(StoreConfig(location=str(tmp_path), capacity_bytes=CAPACITY))
    store = factory.open(layout)
    factory.close()
    factory.close()
    with pytest.raises(StaleHandleError):
        store.contains(KEYS)
    with pytest.raises(StaleHandleError):
        factory.open(layout)


def test_default_location_keeps_identities_apart(
    layout: PoolLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    chooser = functools.partial(default_directory, shared_memory=tmp_path / "none")
    monkeypatch.setattr("radixlink_store._file.default_directory", chooser)
    config = StoreConfig(capacity_bytes=CAPACITY)
    factory, second = FileStoreFactory(config), FileStoreFactory(config)
    another = attrs.evolve(layout, identity=attrs.evolve(layout.identity, model="another"))
    store = factory.open(layout)
    put_all(store)
    assert factory.open(another).contains(KEYS) == PageBits.none(5)
    assert second.open(layout).contains(KEYS) == PageBits.all(5)
    base = tmp_path / f"radixlink-{os.geteuid()}"
    assert len(list(base.iterdir())) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in (base, *base.iterdir())} == {0o700}
    factory.close()
    second.close()


def _open_files() -> int:
    # What earlier tests left to the collector would go in between.
    gc.collect()
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
