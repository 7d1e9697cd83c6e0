"""Huge pages: as many as the kernel gives whoever asks for them, and none needed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from radixlink_contracts import PageBits, StoreConfig
from radixlink_contracts.errors import CapacityError
from radixlink_store import FileStoreFactory
from radixlink_store._huge_pages import allocate_huge, huge_page_bytes, map_file
from radixlink_testing import read_right
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from radixlink_contracts import PoolLayout

SHARED_MEMORY = Path("/dev/shm")
HUGE = huge_page_bytes()
SIZE = HUGE or 1 << 21
CAPACITY = 3 * SIZE
KEYS = page_keys(range(5))
#: Of linux/mman.h and linux/prctl.h.
COLLAPSE, SET_THP_DISABLE = 25, 41

needs_huge_pages = pytest.mark.skipif(
    not 0 < HUGE <= 1 << 21, reason="this machine has no huge pages of 2 MiB"
)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory in shared memory."""
    if not SHARED_MEMORY.is_dir():
        pytest.skip("this machine has no /dev/shm")
    with tempfile.TemporaryDirectory(prefix="radixlink-test-", dir=SHARED_MEMORY) as directory:
        yield Path(directory)


def huge_bytes_of(file: Path) -> int:
    """How much of a file this process has mapped by huge pages."""
    lines = iter(Path("/proc/self/smaps").read_text("utf-8").splitlines())
    assert any(line.endswith(f" {file}") for line in lines)
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("ShmemPmdMapped:"))


def huge_bytes_to_be_had(directory: Path, num_bytes: int) -> int:
    """How much of a file of this length the kernel puts into huge pages once it is written."""
    file = directory / "probe"
    with file.open("w+b") as opened:
        opened.write(bytes(num_bytes))
        opened.flush()
        with map_file(opened.fileno(), num_bytes) as mapping:
            with contextlib.suppress(OSError):
                mapping.madvise(COLLAPSE)
            return huge_bytes_of(file)


def exit_code_of(work: Callable[[], int]) -> int:
    """What a child says, whose limits are its own."""
    child = os.fork()
    if child == 0:
        code = 255
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def store_and_read(directory: Path, layout: PoolLayout) -> int:
    """Bytes of a new segment in huge pages, once its pages were put and read right."""
    factory = FileStoreFactory(StoreConfig(location=str(directory), capacity_bytes=CAPACITY))
    store = factory.open(layout)
    assert store.wait_prefault(60.0)
    (file,) = directory.glob("*.segment")
    status = file.stat()
    assert status.st_blocks * 512 >= status.st_size > CAPACITY
    assert store.put(KEYS, page_parts(KEYS, layout)).complete
    assert read_right(store, store.open(KEYS, 0.0)) == PageBits.all(len(KEYS))
    found = huge_bytes_of(file)
    factory.close()
    return found


@needs_huge_pages
def test_segment_in_memory_has_the_huge_pages_that_the_kernel_gives(
    layout: PoolLayout, in_memory: Path
) -> None:
    found = store_and_read(in_memory, layout)
    (file,) = in_memory.glob("*.segment")
    # How many are to be had may change from moment to moment, and by other ways than asking.
    assert found or not huge_bytes_to_be_had(in_memory, file.stat().st_size)


@needs_huge_pages
def test_store_without_huge_pages_has_small_ones(layout: PoolLayout, in_memory: Path) -> None:
    def work() -> int:
        assert ctypes.CDLL(None).prctl(SET_THP_DISABLE, 1, 0, 0, 0) == 0
        return store_and_read(in_memory, layout) >> 20

    assert exit_code_of(work) == 0


@needs_huge_pages
def test_limit_that_only_the_allocation_meets_is_told(layout: PoolLayout, in_memory: Path) -> None:
    def work() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (HUGE, HUGE))
        with pytest.raises(CapacityError):
            store_and_read(in_memory, layout)
        return 0

    assert exit_code_of(work) == 0
    assert list(in_memory.glob("*.segment*")) == []


@pytest.mark.parametrize("num_bytes", [1, 4096, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE + 4096])
def test_mapping_begins_at_a_huge_page_and_is_the_file(num_bytes: int, tmp_path: Path) -> None:
    file = tmp_path / "mapped"
    content = np.random.default_rng(num_bytes).bytes(num_bytes)
    file.write_bytes(content)
    with file.open("r+b") as opened:
        # Each moves where the next one would begin.
        mappings = [map_file(opened.fileno(), num_bytes) for _ in range(3)]
    for mapping in mappings:
        if num_bytes >= HUGE > 0:
            assert np.frombuffer(mapping, np.uint8).ctypes.data % HUGE == 0
        assert mapping[:] == content
        mapping.close()


@pytest.mark.parametrize("num_bytes", [1, SIZE, 2 * SIZE + 4097])
def test_allocated_file_is_as_long_as_was_said_and_zero(num_bytes: int, in_memory: Path) -> None:
    with (in_memory / "allocated").open("w+b") as file:
        allocate_huge(file.fileno(), num_bytes)
        assert file.read() == bytes(num_bytes)


def test_size_of_huge_pages_that_nobody_tells_is_0(tmp_path: Path) -> None:
    assert huge_page_bytes(tmp_path / "none") == 0
    (tmp_path / "odd").write_text("no number", "ascii")
    assert huge_page_bytes(tmp_path / "odd") == 0


def test_process_that_may_map_no_more_maps_the_file_anywhere(tmp_path: Path) -> None:
    file = tmp_path / "mapped"
    num_bytes = 64 * SIZE
    with file.open("w+b") as opened:
        opened.truncate(num_bytes)

        def work() -> int:
            status = Path("/proc/self/statm").read_text("ascii")
            mapped = int(status.split()[0]) * os.sysconf("SC_PAGE_SIZE")
            # Enough for the file, and for not one page of a gap beside it.
            resource.setrlimit(resource.RLIMIT_AS, (mapped + num_bytes, mapped + num_bytes))
            mapping = map_file(opened.fileno(), num_bytes)
            return len(mapping) // SIZE

        assert exit_code_of(work) == 64
