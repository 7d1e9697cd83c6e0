"""Ranks of two nodes that answer each other, of which rank 1 ends as the argument says."""

from __future__ import annotations

import os
import signal
import sys

from radixlink_contracts import StoreConfig
from radixlink_store_mpi import MpiStoreFactory
from radixlink_store_mpi._mpi import MPI
from radixlink_testing import SUITE_CAPACITY_BYTES, SUITE_LAYOUT

WORLD = MPI.COMM_WORLD

factory = MpiStoreFactory(StoreConfig(capacity_bytes=SUITE_CAPACITY_BYTES))
factory.open(SUITE_LAYOUT)
match sys.argv[1]:
    case "raise" if WORLD.rank == 1:
        raise RuntimeError("rank 1 has a bug")
    case "kill" if WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    case "leave open":
        pass
    case _:
        # Waits for rank 1, which does not come.
        WORLD.Barrier()
sys.stdout.write(f"ok {WORLD.rank}\n")
sys.stdout.flush()
