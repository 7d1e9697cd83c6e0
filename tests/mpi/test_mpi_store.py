"""Stores that ranks share: by a window, and by a directory from one job to the next."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from subprocess import CompletedProcess

    from tests.mpi.conftest import Mpirun

PROGRAMS = Path(__file__).parent / "programs"
RANKS = 2


@pytest.mark.parametrize(
    "case",
    [
        "pages_of_one_rank_are_read_by_all",
        "ranks_that_write_the_same_slots_never_mix_bytes",
        "nothing_has_a_name_once_it_is_open",
        "layouts_that_differ_are_refused_on_all_ranks",
        "shards_have_communicators_of_their_own",
        "window_that_does_not_fit_is_refused_on_all_ranks",
        "rank_without_descriptors_is_refused_on_all_ranks",
        "window_that_cannot_be_used_is_given_back",
        "rank_that_cannot_read_the_boot_id_keeps_nobody_waiting",
        "step_that_cannot_be_undone_is_raised_as_it_failed_elsewhere",
        "error_that_nobody_foresaw_on_one_rank_is_raised_on_all",
        "rank_that_does_not_open_is_not_waited_for_longer_than_agreed",
    ],
)
def test_window(mpirun: Mpirun, case: str) -> None:
    expect_ok(mpirun(PROGRAMS / "store_window.py", RANKS, case), [0, 1])


@pytest.mark.open_mpi
def test_survivor_of_a_killed_rank_reads_on_and_ends(mpirun: Mpirun) -> None:
    expect_ok(mpirun(PROGRAMS / "store_survivor.py", RANKS, ft=True), [0])


def test_later_job_reads_what_an_earlier_one_wrote_to_files(mpirun: Mpirun, tmp_path: Path) -> None:
    for action in ("write", "read"):
        expect_ok(mpirun(PROGRAMS / "store_file.py", RANKS, action, str(tmp_path)), [0, 1])


def expect_ok(job: CompletedProcess[str], ranks: list[int]) -> None:
    """Check that these ranks came to their end, and that the job did."""
    said = sorted(line for line in job.stdout.splitlines() if line.startswith("ok "))
    assert said == [f"ok {rank}" for rank in ranks], f"{job.stdout}\n{job.stderr}"
    assert job.returncode == 0, job.stderr
