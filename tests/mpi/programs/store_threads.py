"""Ranks of two nodes whose MPI allows one thread at a time: refused, on all. Says `ok` for each.

MPI4PY_RC_THREAD_LEVEL says what mpi4py asks for.
"""

from __future__ import annotations

import sys

import pytest

from radixlink_contracts import StoreConfig
from radixlink_contracts.errors import BackendUnavailableError
from radixlink_store_mpi import MpiStoreFactory
from radixlink_store_mpi._mpi import MPI
from radixlink_testing import SUITE_CAPACITY_BYTES, SUITE_LAYOUT

factory = MpiStoreFactory(StoreConfig(capacity_bytes=SUITE_CAPACITY_BYTES))
with pytest.raises(BackendUnavailableError, match="MPI_THREAD_MULTIPLE"):
    factory.open(SUITE_LAYOUT)
factory.close()
sys.stdout.write(f"ok {MPI.COMM_WORLD.rank}\n")
sys.stdout.flush()
