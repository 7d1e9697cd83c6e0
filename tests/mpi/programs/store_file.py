"""Ranks of one job write pages to a directory, those of a later job read all of them.

Arguments: write or read, and the directory.
"""

from __future__ import annotations

import sys

from radixlink_contracts import PageBits, StoreConfig
from radixlink_store import FileStoreFactory
from radixlink_store_mpi._mpi import MPI
from radixlink_testing import SUITE_CAPACITY_BYTES, SUITE_LAYOUT, read_right
from radixlink_testing.pages import page_keys, page_parts

WORLD = MPI.COMM_WORLD

factory = FileStoreFactory(StoreConfig(location=sys.argv[2], capacity_bytes=SUITE_CAPACITY_BYTES))
store = factory.open(SUITE_LAYOUT)
if sys.argv[1] == "write":
    keys = page_keys(range(20), f"rank {WORLD.rank}")
    assert store.put(keys, page_parts(keys, SUITE_LAYOUT)).complete
else:
    for rank in range(WORLD.size):
        keys = page_keys(range(20), f"rank {rank}")
        assert read_right(store, store.open(keys, 0)) == PageBits.all(20)
factory.close()
sys.stdout.write(f"ok {WORLD.rank}\n")
sys.stdout.flush()
