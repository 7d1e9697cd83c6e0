"""Stores that span nodes: the ranks of one machine, split into nodes that share nothing but messages."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable

    from tests.mpi.conftest import Mpirun

PROGRAMS = Path(__file__).parent / "programs"
RANKS = 4
# Not imported: that would initialise MPI here.
FAKE_NODES = "RADIXLINK_MPI_FAKE_NODES"


CASES = [
    "page_of_one_node_is_found_by_all_and_then_local",
    "every_rank_reads_what_every_rank_put",
    "large_pages_come_in_several_answers",
    "damaged_page_of_another_node_is_a_miss",
    "stopped_leader_is_a_miss_until_it_goes_on",
    "slow_leader_is_a_miss_and_its_answer_is_dropped",
    "answer_that_is_none_is_a_miss",
    "page_evicted_on_one_node_comes_from_another",
    "forked_child_reads_its_node_and_asks_no_other",
    "closing_leaves_no_thread_and_no_file",
    "rank_that_does_not_close_is_not_waited_for_longer_than_agreed",
    "leader_that_cannot_start_a_thread_is_refused_on_all_ranks",
    "layouts_that_differ_are_refused_on_all_ranks",
]


@pytest.fixture(scope="module", params=[2, 4])
def job(mpirun: Mpirun, request: pytest.FixtureRequest) -> subprocess.CompletedProcess[str]:
    """One job of so many nodes runs all cases: starting it takes longer than they do."""
    before = shared_memory()
    with pytest.MonkeyPatch.context() as patch:
        job = run_on_nodes(mpirun, patch, request.param, "store_nodes.py", *CASES)
    assert shared_memory() <= before
    return job


@pytest.mark.parametrize("case", CASES)
def test_nodes(job: subprocess.CompletedProcess[str], case: str) -> None:
    passed = {line for line in job.stdout.splitlines() if line.endswith(f" {case}")}
    assert passed == {f"ok {rank} {case}" for rank in range(RANKS)}, job.stderr


def test_jobs_end_well(job: subprocess.CompletedProcess[str]) -> None:
    assert job.returncode == 0, job.stderr


def test_mpi_without_threads_is_refused(mpirun: Mpirun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_RC_THREAD_LEVEL", "serialized")
    expect_ok(run_on_nodes(mpirun, monkeypatch, 2, "store_threads.py"), range(RANKS))


@pytest.mark.open_mpi
@pytest.mark.parametrize("killed", [2, 3])
def test_those_that_are_left_go_on_without_a_killed_rank(
    mpirun: Mpirun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, killed: int
) -> None:
    monkeypatch.setenv(FAKE_NODES, "2")
    program = PROGRAMS / "store_nodes_survivor.py"
    job = mpirun(program, RANKS, str(killed), str(tmp_path), ft=True)
    expect_ok(job, sorted(set(range(RANKS)) - {killed}))


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_rank_that_fails_ends_its_job(
    mpirun: Mpirun, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    before = shared_memory()
    job = run_on_nodes(mpirun, monkeypatch, 2, "store_end.py", how)
    assert job.returncode != 0
    assert "ok" not in job.stdout
    assert shared_memory() <= before


def test_factory_that_nobody_closed_does_not_keep_its_job(
    mpirun: Mpirun, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_ok(run_on_nodes(mpirun, monkeypatch, 2, "store_end.py", "leave open"), range(RANKS))


def test_job_goes_on_when_another_dies_that_shares_its_directory(
    mpirun: Mpirun, tmp_path: Path
) -> None:
    program, place = PROGRAMS / "store_jobs.py", str(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        survivors = pool.submit(mpirun, program, 2, "go on", place)
        other = mpirun(program, 2, "write until killed", place)
        (tmp_path / "ended").touch()
        expect_ok(survivors.result(), range(2))
    assert other.returncode != 0


def run_on_nodes(
    mpirun: Mpirun, monkeypatch: pytest.MonkeyPatch, nodes: int, program: str, *args: str
) -> subprocess.CompletedProcess[str]:
    """Run a program on the ranks of some nodes."""
    monkeypatch.setenv(FAKE_NODES, str(nodes))
    return mpirun(PROGRAMS / program, RANKS, *args, timeout_s=120)


def expect_ok(job: subprocess.CompletedProcess[str], ranks: Iterable[int]) -> None:
    """Check that these ranks came to their end, and that the job did."""
    said = sorted(line for line in job.stdout.splitlines() if line.startswith("ok "))
    assert said == [f"ok {rank}" for rank in ranks], f"{job.stdout}\n{job.stderr}"
    assert job.returncode == 0, job.stderr


def shared_memory() -> set[str]:
    """What MPI libraries left in shared memory, wherever it is."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names if name.startswith(("osc_sm", "sm_segment", "mpich"))}
