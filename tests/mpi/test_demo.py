"""The demonstration under `mpirun`, on the tiny model: its report, what it refuses, what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def demo(
    *arguments: str, cache_dir: Path, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `radixlink demo` on the tiny model, with a deadline."""
    command = [sys.executable, "-c", "import radixlink, sys; sys.exit(radixlink.main())", "demo"]
    return subprocess.run(
        [*command, "--model", "tiny", "--turns", "2", "--tokens", "4", *arguments],
        cwd=cwd,
        env={**os.environ, "XDG_CACHE_HOME": str(cache_dir), **environment},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def test_a_rank_that_is_killed_leaves_its_pages_to_the_other(
    cache_dir: Path, tmp_path: Path
) -> None:
    before = shared_memory()
    result = demo("--store", "mpi", cache_dir=cache_dir, cwd=tmp_path)
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


def test_too_few_slots_are_told_with_what_mpirun_said(cache_dir: Path, tmp_path: Path) -> None:
    before = shared_memory()
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=1\n")
    result = demo(
        *("--store", "mpi", "--no-ranks"),
        cache_dir=cache_dir,
        cwd=tmp_path,
        PRTE_MCA_rmaps_default_mapping_policy="slot",
        PRTE_MCA_prte_default_hostfile=str(hosts),
    )
    assert result.returncode == 8, result.stdout + result.stderr
    assert "mpirun could not start 2 replicas" in result.stderr
    assert "not enough slots" in result.stderr
    assert "Traceback" not in result.stderr
    assert shared_memory() <= before
