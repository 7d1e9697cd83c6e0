"""Ranks that share pages through a window. Says `ok` for each rank that saw all that it must."""

from __future__ import annotations

import gc
import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import attrs
import pytest

from radixlink_contracts import PageBits, Shard, StoreConfig
from radixlink_contracts.errors import (
    BackendUnavailableError,
    CapacityError,
    IdentityError,
    LinkError,
    StaleHandleError,
)
from radixlink_store import _file
from radixlink_store_mpi import MpiStoreFactory
from radixlink_store_mpi._collective import all_or_none
from radixlink_store_mpi._mpi import MPI
from radixlink_testing import SUITE_CAPACITY_BYTES, SUITE_LAYOUT, read_right
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from radixlink_contracts import PoolLayout

WORLD = MPI.COMM_WORLD
CONFIG = StoreConfig(capacity_bytes=SUITE_CAPACITY_BYTES)


def pages_of_one_rank_are_read_by_all() -> None:
    factory = MpiStoreFactory(CONFIG)
    store = factory.open(SUITE_LAYOUT)
    mine = page_keys(range(20), f"rank {WORLD.rank}")
    assert store.put(mine, page_parts(mine, SUITE_LAYOUT)).complete
    WORLD.Barrier()
    for rank in range(WORLD.size):
        keys = page_keys(range(20), f"rank {rank}")
        handles = store.open(keys, 0)
        assert read_right(store, handles) == PageBits.all(20)
        assert set(handles.writers) == {WORLD.bcast(os.getpid(), rank)}
    # One rank that closes does not close for the others, and may come back.
    if WORLD.rank == 0:
        store.close()
    WORLD.Barrier()
    again = factory.open(SUITE_LAYOUT)
    assert read_right(again, again.open(mine, 0)) == PageBits.all(20)
    factory.close()


def ranks_that_write_the_same_slots_never_mix_bytes() -> None:
    factory = MpiStoreFactory(CONFIG)
    store = factory.open(SUITE_LAYOUT)
    WORLD.Barrier()
    hits = 0
    for turn in range(60):
        # Far more pages than fit, half of them the other rank's too.
        first = (turn * 24 + WORLD.rank * 12) % 300
        keys = page_keys(range(first, first + 24))
        store.put(keys, page_parts(keys, SUITE_LAYOUT))
        hits += read_right(store, store.open(keys, 0)).total
    assert hits > 0
    assert store.counters.read_corrupt == 0
    assert store.counters.evicted > 0
    factory.close()


def nothing_has_a_name_once_it_is_open() -> None:
    factory = MpiStoreFactory(CONFIG)
    store = factory.open(SUITE_LAYOUT)
    keys = page_keys(range(3))
    store.put(keys, page_parts(keys, SUITE_LAYOUT))
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    locks = [link for link in links if link.endswith((".locks", ".locks (deleted)"))]
    assert locks
    assert all(link.endswith("(deleted)") for link in locks)
    maps = Path("/proc/self/maps").read_text("utf-8").splitlines()
    # As Open MPI calls them, and MPICH.
    windows = [line for line in maps if "osc_sm" in line or "mpich_shar" in line]
    assert windows
    assert all(line.endswith("(deleted)") for line in windows)
    factory.close()


def layouts_that_differ_are_refused_on_all_ranks() -> None:
    factory = MpiStoreFactory(CONFIG)
    shard = Shard(index=WORLD.rank, count=WORLD.size)
    expect(IdentityError, factory, attrs.evolve(SUITE_LAYOUT, shard=shard), "rank 1: shard is")
    # Nothing was left half done.
    assert factory.open(SUITE_LAYOUT).num_slots == 64
    factory.close()


def shards_have_communicators_of_their_own() -> None:
    comm = WORLD.Split(WORLD.rank % 2, WORLD.rank)
    assert isinstance(comm, MPI.Intracomm)
    factory = MpiStoreFactory(CONFIG, comm)
    shard = Shard(index=WORLD.rank % 2, count=2)
    store = factory.open(attrs.evolve(SUITE_LAYOUT, shard=shard))
    keys = page_keys(range(5))
    assert store.put(keys, page_parts(keys, SUITE_LAYOUT, f"shard {shard.index}")).complete
    WORLD.Barrier()
    assert read_right(store, store.open(keys, 0), f"shard {shard.index}") == PageBits.all(5)
    factory.close()


def window_that_does_not_fit_is_refused_on_all_ranks() -> None:
    large = attrs.evolve(CONFIG, capacity_bytes=1 << 50)
    expect(CapacityError, MpiStoreFactory(large), SUITE_LAYOUT, "capacity_bytes")
    # The capacity is the first rank's; what another would like does not matter.
    mine = large if WORLD.rank else CONFIG
    factory = MpiStoreFactory(mine)
    assert factory.open(SUITE_LAYOUT).num_slots == 64
    factory.close()


def rank_without_descriptors_is_refused_on_all_ranks() -> None:
    factory = MpiStoreFactory(CONFIG)
    factory.open(SUITE_LAYOUT)
    open_files = num_open_files()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    for room in (0, 1):
        if WORLD.rank == 1:
            unused = os.dup(0)
            os.close(unused)
            resource.setrlimit(resource.RLIMIT_NOFILE, (unused + room, before[1]))
        try:
            expect(BackendUnavailableError, factory, SUITE_LAYOUT, "errno 24")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    # Nor does the rank that had some keep a store that nobody has.
    assert num_open_files() == open_files
    assert factory.open(SUITE_LAYOUT).num_slots == 64
    factory.close()


def window_that_cannot_be_used_is_given_back() -> None:
    shared = num_shared_mappings()
    factory = MpiStoreFactory(CONFIG)
    factory.open(SUITE_LAYOUT)
    assert num_shared_mappings() > shared
    another = attrs.evolve(SUITE_LAYOUT, range_bytes=(64,))
    tempfile.tempdir = "/dev/null/missing"
    left = []
    for _ in range(2):
        expect(BackendUnavailableError, factory, another, "file for locks in /dev/null/missing")
        left.append((num_shared_mappings(), num_open_files()))
    tempfile.tempdir = None
    # An MPI may keep what the first one gave back, for the next window.
    assert left[1] == left[0]
    assert factory.open(another).num_slots
    factory.close()


def rank_that_cannot_read_the_boot_id_keeps_nobody_waiting() -> None:
    for rank in reversed(range(WORLD.size)):
        factory = MpiStoreFactory(CONFIG)
        missing = Path("/dev/null/missing") if WORLD.rank == rank else _file._BOOT_ID
        with mock.patch.object(_file, "_BOOT_ID", missing):
            if rank == 0:
                expect(BackendUnavailableError, factory, SUITE_LAYOUT, "boot id")
            else:
                # Who makes the segment reads it for all.
                assert factory.open(SUITE_LAYOUT).num_slots == 64
        assert factory.open(SUITE_LAYOUT).num_slots == 64
        factory.close()


def step_that_cannot_be_undone_is_raised_as_it_failed_elsewhere() -> None:
    def step() -> int:
        if WORLD.rank == 1:
            raise CapacityError("full", needed=2, available=1)
        return os.dup(0)

    def undo(descriptor: int) -> None:
        os.close(descriptor)
        # Such an error, if not for such a reason.
        os.close(descriptor)

    with pytest.raises(CapacityError, match="full") as caught:
        all_or_none(WORLD, step, undo)
    assert caught.value.rank == 1


def error_that_nobody_foresaw_on_one_rank_is_raised_on_all() -> None:
    def asked() -> int:
        raise ZeroDivisionError("of whoever was asked")

    factory = MpiStoreFactory(CONFIG, free_bytes=asked)
    expect(BackendUnavailableError, factory, SUITE_LAYOUT, "ZeroDivisionError: of whoever")
    factory.close()


def rank_that_does_not_open_is_not_waited_for_longer_than_agreed() -> None:
    factory = MpiStoreFactory(attrs.evolve(CONFIG, timeout_s=0.2))
    if WORLD.rank == 0:
        expect(BackendUnavailableError, factory, SUITE_LAYOUT, "within 0.2 s")
        expect(StaleHandleError, factory, SUITE_LAYOUT, "lost a rank")
        factory.close()
    WORLD.Barrier()


def num_open_files() -> int:
    """Descriptors of this process."""
    gc.collect()
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def num_shared_mappings() -> int:
    """Pieces of memory that this process shares with others, and may write."""
    maps = Path("/proc/self/maps").read_text("utf-8")
    return sum(1 for line in maps.splitlines() if line.split()[1] == "rw-s")


def expect(
    kind: type[LinkError], factory: MpiStoreFactory, layout: PoolLayout, message: str
) -> None:
    """Open a store that must be refused."""
    with pytest.raises(kind, match=message):
        factory.open(layout)


globals()[sys.argv[1]]()
sys.stdout.write(f"ok {WORLD.rank}\n")
sys.stdout.flush()
