"""Four ranks on two nodes; one is killed, and the others go on. Arguments: its rank, a directory.

Rank 2 leads its node: without it, that node's pages are its own. Those that are left say `ok`.
With a dead rank `close` waits for nobody, and who asks a node that has closed finds nothing: so
each holds a lock in the directory until it has read, and closes when it was given all of them.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
from pathlib import Path
from typing import Final

import attrs

from radixlink_contracts import PageBits, StoreConfig
from radixlink_store_mpi import MpiStoreFactory, NodeSettings, NodesPageStore
from radixlink_store_mpi._mpi import MPI
from radixlink_testing import SUITE_CAPACITY_BYTES, SUITE_LAYOUT, put_pages, read_right
from radixlink_testing.pages import page_keys

WORLD: Final = MPI.COMM_WORLD
CONFIG: Final = StoreConfig(capacity_bytes=SUITE_CAPACITY_BYTES, timeout_s=20)
NODES: Final = attrs.evolve(NodeSettings.from_environment(), answer_timeout_s=5)
LEADERS: Final = (0, 2)
KILLED: Final = int(sys.argv[1])
READING: Final = [Path(sys.argv[2]) / f"rank {rank}" for rank in range(WORLD.size)]


def main() -> None:
    """Be a rank."""
    factory = MpiStoreFactory(CONFIG, nodes=NODES)
    store = factory.open(SUITE_LAYOUT)
    assert isinstance(store, NodesPageStore)
    keys = [page_keys(range(10), f"node {node}") for node in range(2)]
    if WORLD.rank in LEADERS:
        put_pages(store, keys[LEADERS.index(WORLD.rank)])
    reading = READING[WORLD.rank].open("w")
    fcntl.flock(reading, fcntl.LOCK_EX)
    killed = os.pidfd_open(WORLD.bcast(os.getpid(), KILLED))
    WORLD.Barrier()
    if WORLD.rank == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    select.select([killed], [], [])

    node = WORLD.rank // 2
    # What is on its own node every rank reads, whoever wrote it.
    assert read_right(store, store.open(keys[node], 0)) == PageBits.all(10)
    other = LEADERS[1 - node]
    expected = PageBits.none(10) if other == KILLED else PageBits.all(10)
    handles = store.open(keys[1 - node], 0)
    assert read_right(store, handles) == expected
    fresh = page_keys(range(5), f"rank {WORLD.rank}")
    assert put_pages(store, fresh) == PageBits.all(5)
    assert read_right(store, store.open(fresh, 0)) == PageBits.all(5)
    reading.close()
    for other_rank in READING:
        with other_rank.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
    factory.close()
    sys.stdout.write(f"ok {WORLD.rank}\n")
    sys.stdout.flush()


main()
# Open MPI's MPI_Finalize sometimes waits for the dead process without an end.
os._exit(0)
