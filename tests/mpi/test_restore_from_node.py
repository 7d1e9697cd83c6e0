"""A whole replica that restores what one on another node computed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest
    from tests.mpi.conftest import Mpirun

PROGRAM = Path(__file__).parent / "programs" / "restore_from_node.py"


def test_replica_restores_what_one_on_another_node_computed(
    mpirun: Mpirun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # One replica waits in MPI while the other computes.
    monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")
    monkeypatch.setenv("RADIXLINK_MPI_FAKE_NODES", "2")
    job = mpirun(PROGRAM, 2, str(tmp_path), timeout_s=120)
    said = sorted(line for line in job.stdout.splitlines() if line.startswith("ok "))
    assert said == ["ok 0", "ok 1"], f"{job.stdout}\n{job.stderr}"
    assert job.returncode == 0, job.stderr
