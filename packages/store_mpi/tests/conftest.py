"""MPI for a process that no `mpirun` started.

Without this choice such a process leaves a file in shared memory behind. It holds for MPI's
initialisation alone: programs that a later test starts must not inherit it.
"""

from __future__ import annotations

import os
from unittest import mock

with mock.patch.dict(os.environ, {"OMPI_MCA_btl": "self"}):
    import radixlink_store_mpi  # noqa: F401 - initialises MPI
