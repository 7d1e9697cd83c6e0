"""The groups over MPI and gloo pass the suite of every rank group, and outlive what ranks do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.mpi.job import Job

from radixlink_testing.ports import free_port
from radixlink_testing.rank_groups import CASES, ManyRanksTests, RunCase

if TYPE_CHECKING:
    from tests.mpi.conftest import Mpirun, Spawn

PROGRAM = Path(__file__).parent / "programs" / "rank_groups.py"
JOB_S = 120.0
#: The roll call, and other processes on the cores.
SLACK_S = 5.0


@pytest.fixture(scope="module")
def mpi_job(mpirun: Mpirun) -> Job:
    """One job runs all cases: starting it takes longer than they do."""
    return Job.of(2, [mpirun(PROGRAM, 2, "cases", "mpi", *CASES, timeout_s=JOB_S)])


@pytest.fixture(scope="module")
def gloo_job(spawn: Spawn) -> Job:
    return Job.of(2, spawn(PROGRAM, 2, "cases", "gloo", *CASES, timeout_s=JOB_S))


class TestMpiTwoRanks(ManyRanksTests):
    @pytest.fixture
    def run_case(self, mpi_job: Job) -> RunCase:
        return lambda case: mpi_job.check(case.__name__)


class TestGlooTwoRanks(ManyRanksTests):
    @pytest.fixture
    def run_case(self, gloo_job: Job) -> RunCase:
        return lambda case: gloo_job.check(case.__name__)


@pytest.mark.parametrize(
    "case", ["a_rank_that_does_not_come_is_named", "split_gives_the_ranks_of_a_color"]
)
def test_four_mpi_ranks_pass(mpirun: Mpirun, case: str) -> None:
    result = mpirun(PROGRAM, 4, "cases", "mpi", case, timeout_s=JOB_S)
    Job.of(4, [result]).check(case)


def test_three_gloo_ranks_fail_together(spawn: Spawn) -> None:
    case = "all_that_wait_fail_together"
    Job.of(3, spawn(PROGRAM, 3, "cases", "gloo", case, timeout_s=JOB_S)).check(case)


def test_gloo_ranks_may_be_started_by_mpirun(
    mpirun: Mpirun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    case = "gather_gives_every_value_by_rank"
    result = mpirun(PROGRAM, 2, "cases", "gloo", case, timeout_s=JOB_S)
    Job.of(2, [result]).check(case)


def test_words_of_different_lengths_are_no_agreement(mpirun: Mpirun) -> None:
    job = Job.of(2, [mpirun(PROGRAM, 2, "lengths", "mpi", timeout_s=JOB_S)])
    for rank in range(2):
        assert "message" in str(job.of_rank(rank, "failure")["failure"]), job.log


def test_a_stopped_mpi_rank_is_named(mpirun: Mpirun) -> None:
    result = mpirun(PROGRAM, 3, "absent", "mpi", "SIGSTOP", "1", timeout_s=JOB_S)
    job = Job.of(3, [result])
    check_others_name(job, 1, "no answer")
    assert job.of_rank(1, "late_rank_failed")["late_rank_failed"]
    assert job.statuses == (0,), job.log


@pytest.mark.open_mpi
def test_a_killed_mpi_rank_is_named_where_mpi_tolerates_faults(mpirun: Mpirun) -> None:
    result = mpirun(PROGRAM, 3, "absent", "mpi", "SIGKILL", "1", timeout_s=JOB_S, ft=True)
    job = Job.of(3, [result])
    check_others_name(job, 1, "not reached")
    assert job.statuses == (0,), job.log
    for rank in (0, 2):
        check_names(job, job.of_rank(rank, "renewal")["renewal"], 1, "not reached")


# Rank 0 hosts the store, so with it the others lose their roll call as well.
@pytest.mark.parametrize("absent", [0, 1])
@pytest.mark.parametrize("how", ["SIGSTOP", "SIGKILL"])
def test_an_absent_gloo_rank_is_named(spawn: Spawn, how: str, absent: int) -> None:
    results = spawn(PROGRAM, 2, "absent", "gloo", how, str(absent), timeout_s=JOB_S)
    job = Job.of(2, results)
    check_others_name(job, absent, "no answer")
    assert job.statuses[1 - absent] == 0, job.log


def test_an_interrupted_mpi_rank_goes_on_after_a_renewal(mpirun: Mpirun) -> None:
    job = Job.of(2, [mpirun(PROGRAM, 2, "interrupted", "mpi", timeout_s=JOB_S)])
    check_interrupted(job)


def test_an_interrupted_gloo_rank_goes_on_after_a_renewal(spawn: Spawn) -> None:
    job = Job.of(2, spawn(PROGRAM, 2, "interrupted", "gloo", timeout_s=JOB_S))
    check_interrupted(job)
    # Who gave up making a group asks the store for the others no more.
    created = job.of_rank(0, "left_create")
    assert (created["left_create"], created["errands"]) == (True, 0), job.log


def check_interrupted(job: Job) -> None:
    """The group that a rank left was used no more, and what followed waited for nothing of it."""
    left = [line for line in job.told if "left" in line]
    assert [line["left"] for line in left] == [True, True], job.log
    for line in left:
        assert "left by KeyboardInterrupt" in str(line["refused"]), job.log
    for rank in range(2):
        after_s = job.of_rank(rank, "renewed_after_s")["renewed_after_s"]
        assert isinstance(after_s, float), job.log
        # The deadline of what was left is 60 s away.
        assert after_s < 30.0, job.log
    assert set(job.statuses) == {0}, job.log


def check_others_name(job: Job, absent: int, said: str) -> None:
    """Every rank but one failed in time and told what it knows of that one."""
    for rank in set(range(job.ranks)) - {absent}:
        check_names(job, job.of_rank(rank, "message"), absent, said)


def check_names(job: Job, failure: object, absent: int, said: str) -> None:
    """A failure came in time and says something of a rank."""
    assert isinstance(failure, dict), job.log
    assert said in failure["by_rank"][str(absent)], job.log
    assert f"rank {absent}: {said}" in failure["message"], job.log
    assert failure["after_s"] < 1.0 + SLACK_S, job.log
