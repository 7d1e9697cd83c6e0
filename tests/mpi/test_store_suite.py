"""The store suites over 2 and 4 ranks, and over 2 and 4 nodes; `tox -e conformance` runs them beside all others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.mpi.conftest import Mpirun

SUITE = Path(__file__).parent / "programs" / "store_suite.py"


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (4, 1), (4, 2), (4, 4)])
def test_ranks_pass_the_suites(
    mpirun: Mpirun, monkeypatch: pytest.MonkeyPatch, ranks: int, nodes: int
) -> None:
    # Rank 0 does most of the work, and the others wait for it on the same cores.
    monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")
    monkeypatch.setenv("RADIXLINK_MPI_FAKE_NODES", str(nodes))
    # A late answer is a miss, and the suites' pages must be found on a busy machine too.
    monkeypatch.setenv("RADIXLINK_MPI_ANSWER_TIMEOUT_S", "30")
    job = mpirun(SUITE, ranks, timeout_s=290)
    # Anywhere: a launcher may put what another rank says into a line that pytest has not ended.
    said = sorted(re.findall(r"ok \d+", job.stdout))
    assert said == [f"ok {rank}" for rank in range(ranks)], f"{job.stdout}\n{job.stderr}"
    assert job.returncode == 0, job.stderr
