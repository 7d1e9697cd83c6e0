"""Jobs that share a directory. Arguments: what to do, and the directory.

`write until killed`: rank 1 is killed in the middle of a write, which ends its job.
`go on`: the ranks of another job wait for that, and then read and write.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import attrs

from radixlink_contracts import PageBits, PoolName, StoreConfig
from radixlink_store import FileStoreFactory
from radixlink_store.segments import Segment
from radixlink_store_mpi._mpi import MPI
from radixlink_testing import SUITE_CAPACITY_BYTES, SUITE_LAYOUT, put_pages, read_right
from radixlink_testing.pages import page_keys

WORLD = MPI.COMM_WORLD
PLACE = Path(sys.argv[2])
CONFIG = StoreConfig(location=str(PLACE / "store"), capacity_bytes=SUITE_CAPACITY_BYTES)
#: Room for one page: whoever writes has the only slot.
TINY = attrs.evolve(SUITE_LAYOUT, pool=PoolName.SWA, range_bytes=(SUITE_CAPACITY_BYTES,))
LOST = page_keys(range(1), "lost")


def die(*_: object) -> None:
    """Be gone, with a slot that says WRITING."""
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(name: str) -> None:
    """Wait for a file; the job's deadline is this one's."""
    while not (PLACE / name).exists():
        time.sleep(0.01)


factory = FileStoreFactory(CONFIG)
store, tiny = factory.open(SUITE_LAYOUT), factory.open(TINY)
if sys.argv[1] == "go on":
    mine = page_keys(range(5), f"rank {WORLD.rank}")
    put_pages(store, mine)
    WORLD.Barrier()
    (PLACE / "ready").touch()
    wait_for("ended")
    assert read_right(store, store.open(mine, 0)) == PageBits.all(5)
    theirs = page_keys(range(20), "theirs")
    assert read_right(store, store.open(theirs, 0)) == PageBits.all(20)
    if WORLD.rank == 0:
        assert tiny.contains(LOST) == PageBits.none(1)
        assert put_pages(tiny, LOST) == PageBits.all(1)
        assert tiny.counters.rejected_busy == 0
    WORLD.Barrier()
    assert read_right(tiny, tiny.open(LOST, 0)) == PageBits.all(1)
    factory.close()
    sys.stdout.write(f"ok {WORLD.rank}\n")
    sys.stdout.flush()
else:
    wait_for("ready")
    if WORLD.rank == 1:
        put_pages(store, page_keys(range(20), "theirs"))
        with mock.patch.object(Segment, "fill", die):
            put_pages(tiny, LOST)
    WORLD.Barrier()
