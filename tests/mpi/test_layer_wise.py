"""Layer-wise loads over MPI: one verdict on all ranks, and a name for who never lets go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.mpi.conftest import Mpirun

PROGRAM = Path(__file__).parent / "programs" / "layer_wise.py"
RANKS = 2


@pytest.mark.parametrize("case", ["lands", "step first", "fails", "written off"])
def test_ranks_agree(mpirun: Mpirun, case: str) -> None:
    job = mpirun(PROGRAM, RANKS, case)
    said = sorted(line for line in job.stdout.splitlines() if line.startswith("ok "))
    assert said == [f"ok {rank}" for rank in range(RANKS)], f"{job.stdout}\n{job.stderr}"
    assert job.returncode == 0, job.stderr
