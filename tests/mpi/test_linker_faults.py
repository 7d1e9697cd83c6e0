"""A rank is lost in the middle of its work: all others are told which, in time, and leave nothing.

What ranks do unlike each other while all of them go on is among the cases: see tests/integration/linker.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.mpi.job import Job

if TYPE_CHECKING:
    from tests.mpi.conftest import Mpirun, Spawn

PROGRAM = Path(__file__).parent / "programs" / "linker_faults.py"
JOB_S = 60.0
#: As in the program.
STEP_TIMEOUT_S = 1.0
#: The roll call, and other processes on the cores.
SLACK_S = 5.0


def check_others_were_told(job: Job, lost: int, fault: str) -> None:
    """In time, by name, of the step and of the reset; and they gave everything back."""
    for rank in set(range(job.ranks)) - {lost}:
        for call in (f"{fault}: step", f"{fault}: reset"):
            told = job.of_rank(rank, call)[call]
            assert isinstance(told, dict)
            said = told["by_rank"]
            assert set(said) == {str(one) for one in range(job.ranks)}, job.log
            assert said[str(lost)].startswith(("no answer", "not reached")), job.log
            assert f"rank {lost}: {said[str(lost)]}" in told["message"], job.log
            assert told["after_s"] < STEP_TIMEOUT_S + SLACK_S, job.log


def check_all_work_again(job: Job, fault: str) -> None:
    for rank in range(job.ranks):
        assert job.of_rank(rank, f"{fault}: works again"), job.log


def check_all_recover(job: Job) -> None:
    """From a rank that stops, which hears of it as well, and from one whose loop raises."""
    assert job.statuses == (0,) * len(job.statuses), job.log
    for fault in ("stops", "raises"):
        check_others_were_told(job, 1, fault)
        check_all_work_again(job, fault)
    late = job.of_rank(1, "stops: late")["stops: late"]
    assert isinstance(late, dict)
    assert "message" in late, job.log


def test_mpi_ranks_recover_from_one_that_stops_and_from_one_that_raises(mpirun: Mpirun) -> None:
    result = mpirun(PROGRAM, 3, "mpi", "1", "stops", "raises", timeout_s=JOB_S)
    check_all_recover(Job.of(3, [result]))


def test_gloo_ranks_recover_from_one_that_stops_and_from_one_that_raises(spawn: Spawn) -> None:
    results = spawn(PROGRAM, 2, "gloo", "1", "stops", "raises", timeout_s=JOB_S)
    check_all_recover(Job.of(2, results))


# Rank 0 hosts the store where ranks meet, so with it the others lose their roll call as well.
@pytest.mark.parametrize(("lost", "fault"), [(0, "dies"), (1, "dies"), (1, "exits")])
def test_a_gloo_rank_whose_process_ends_is_named(spawn: Spawn, lost: int, fault: str) -> None:
    job = Job.of(2, spawn(PROGRAM, 2, "gloo", f"{lost}", fault, timeout_s=JOB_S))
    check_others_were_told(job, lost, fault)
    assert job.statuses[1 - lost] == 0, job.log
    # A thread of gloo that still runs when its process exits aborts it, now and then.
    assert job.statuses[lost] in ({-9} if fault == "dies" else {1, -6}), job.log


def test_an_mpi_rank_that_dies_is_named_where_mpi_tolerates_faults(mpirun: Mpirun) -> None:
    job = Job.of(3, [mpirun(PROGRAM, 3, "mpi", "1", "dies", timeout_s=JOB_S, ft=True)])
    check_others_were_told(job, 1, "dies")


def test_an_mpi_rank_that_raises_ends_the_job(mpirun: Mpirun) -> None:
    """Else the others would wait for it in MPI's own end: `python -m mpi4py` sees to it."""
    job = Job.of(2, [mpirun(PROGRAM, 2, "mpi", "1", "exits", timeout_s=JOB_S)])
    assert job.statuses != (0,), job.log
    assert "LoopError" in job.log
