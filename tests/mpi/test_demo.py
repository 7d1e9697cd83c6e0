"""The demonstration under `mpirun`, on the tiny model: its report, what it refuses, what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    RunDemo: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]

_SHORT = ("--model", "tiny", "--turns", "2", "--tokens", "4", "--store", "mpi")


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def test_a_rank_that_is_killed_leaves_its_pages_to_the_other(
    run_demo: RunDemo, tmp_path: Path
) -> None:
    before = shared_memory()
    result = run_demo(*_SHORT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert shared_memory() <= before
    report = json.loads((tmp_path / "build" / "demo-report.json").read_text())
    assert report["identical"] is True
    assert report["max_dlogit"] <= 1e-3 < report["control_dlogit"]
    last = [turn for turn in report["turns"] if turn["number"] == 2]
    assert len(last) == 2
    for turn in last:
        assert turn["pid"] != report["ended_pid"]
        assert set(turn["figures"]["pages_by_writer"]) == {str(report["ended_pid"])}
    ranks = report["ranks"]
    assert ranks["restored_tokens"][0] == ranks["restored_tokens"][1] > 0
    assert ranks["restored_tokens_after_loss"] == [0, 0]
    assert ranks["computed_tokens_after_loss"][0] == ranks["computed_tokens_after_loss"][1]


def test_too_few_slots_are_told_with_what_mpirun_said(run_demo: RunDemo, tmp_path: Path) -> None:
    before = shared_memory()
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=1\n")
    result = run_demo(
        *_SHORT,
        "--no-ranks",
        PRTE_MCA_rmaps_default_mapping_policy="slot",
        PRTE_MCA_prte_default_hostfile=str(hosts),
    )
    assert result.returncode == 8, result.stdout + result.stderr
    assert "mpirun could not start 2 replicas" in result.stderr
    assert "not enough slots" in result.stderr
    assert "Traceback" not in result.stderr
    assert shared_memory() <= before


def test_a_place_for_the_mpi_store_is_refused_and_not_ignored(
    run_demo: RunDemo, tmp_path: Path
) -> None:
    before = shared_memory()
    result = run_demo(*_SHORT, "--no-ranks", "--store-dir", str(tmp_path))
    assert result.returncode == 7, result.stdout + result.stderr
    assert f"expected an empty location, got '{tmp_path}'" in result.stderr
    assert "Traceback" not in result.stderr
    assert shared_memory() <= before
