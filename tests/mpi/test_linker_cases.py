"""Every case of the linker over ranks that are processes: MPI at 2 and 4, gloo at 2.

The cases are those of tests/integration/linker, which has them over one process and threads. One job
runs all of a group's cases: starting it takes longer than most of them do.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from tests.integration.linker.cases.all_runs import RUNS
from tests.mpi.job import Job

if TYPE_CHECKING:
    from tests.mpi.conftest import Mpirun, Spawn

PROGRAM = Path(__file__).parent / "programs" / "linker_cases.py"
JOB_S = 240.0


@pytest.fixture(scope="module", params=["mpirun -n 2", "mpirun -n 4", "gloo at 2"])
def job(request: pytest.FixtureRequest, mpirun: Mpirun, spawn: Spawn) -> Job:
    group = cast("str", request.param)
    num_ranks = int(group[-1])
    if group.startswith("gloo"):
        return Job.of(num_ranks, spawn(PROGRAM, num_ranks, "gloo", timeout_s=JOB_S))
    return Job.of(num_ranks, [mpirun(PROGRAM, num_ranks, "mpi", timeout_s=JOB_S)])


@pytest.mark.parametrize("name", RUNS)
def test_all_ranks_pass(job: Job, name: str) -> None:
    assert job.passed(name), job.log[-10_000:]


def test_the_job_ends_by_itself(job: Job) -> None:
    assert not any(job.statuses), job.log[-10_000:]
