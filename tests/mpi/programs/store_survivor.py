"""Two ranks share a window; rank 1 is killed in the middle of a write. Rank 0 says `ok`."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from unittest import mock

import attrs
import pytest

from radixlink_contracts import PageBits, StoreConfig
from radixlink_contracts.errors import BackendUnavailableError
from radixlink_store.segments import Segment
from radixlink_store_mpi import MpiStoreFactory
from radixlink_store_mpi._mpi import MPI
from radixlink_testing import SUITE_CAPACITY_BYTES, SUITE_LAYOUT, read_right
from radixlink_testing.pages import page_keys, page_parts

WORLD = MPI.COMM_WORLD
CONFIG = StoreConfig(capacity_bytes=SUITE_CAPACITY_BYTES, timeout_s=20)
TINY = attrs.evolve(SUITE_LAYOUT, range_bytes=(SUITE_CAPACITY_BYTES,))
MINE, LOST = page_keys(range(20)), page_keys(range(1), "lost")


def die(*_: object) -> None:
    """Be gone, with a slot that says WRITING."""
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Be a rank."""
    factory = MpiStoreFactory(CONFIG)
    store = factory.open(SUITE_LAYOUT)
    # Room for one page: whoever writes has the only slot.
    tiny = factory.open(TINY)
    other = os.pidfd_open(WORLD.bcast(os.getpid(), 1))
    WORLD.Barrier()
    if WORLD.rank == 1:
        store.put(MINE, page_parts(MINE, SUITE_LAYOUT))
        with mock.patch.object(Segment, "fill", die):
            tiny.put(LOST, page_parts(LOST, TINY))
    select.select([other], [], [])

    assert read_right(store, store.open(MINE, 0)) == PageBits.all(20)
    assert tiny.contains(LOST) == PageBits.none(1)
    assert tiny.put(LOST, page_parts(LOST, TINY)) == PageBits.all(1)
    assert read_right(tiny, tiny.open(LOST, 0)) == PageBits.all(1)
    assert tiny.counters.rejected_busy == 0
    started = time.monotonic()
    with pytest.raises(BackendUnavailableError, match="died"):
        factory.open(SUITE_LAYOUT)
    assert read_right(store, store.open(MINE, 0)) == PageBits.all(20)
    factory.close()
    assert time.monotonic() - started < CONFIG.timeout_s
    sys.stdout.write(f"ok {WORLD.rank}\n")
    sys.stdout.flush()


main()
# Open MPI's MPI_Finalize sometimes waits for the dead process without an end.
os._exit(0)
