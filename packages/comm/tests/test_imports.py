"""Whoever needs neither torch nor MPI loads neither."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import radixlink_comm
loaded = {"torch", "mpi4py", "numpy"} & set(sys.modules)
assert not loaded, loaded
print(radixlink_comm.SingleRank().size)
"""


def test_importing_the_package_loads_neither_torch_nor_mpi() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "1\n"
