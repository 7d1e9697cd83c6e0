"""A model that transformers spreads over two ranks, which agree over MPI or over gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.integration.test_restore_across_engines import save_tiny

from radixlink_testing.ports import free_port
from radixlink_transformers import generate_without_cache, load_model

if TYPE_CHECKING:
    import subprocess

    from tests.mpi.conftest import Mpirun, Spawn

PROGRAM = Path(__file__).parent / "programs" / "spread_model.py"
DOCUMENT = tuple((37 * index) % 251 for index in range(128))
JOB_S = 240.0


@pytest.mark.parametrize(
    ("kind", "family", "part"),
    [
        ("mpi", "llama", "sharded"),
        ("mpi", "gemma3_text", "sharded"),
        ("mpi", "qwen3_next", "sharded"),
        ("gloo", "llama", "sharded"),
        ("gloo", "gemma3_text", "sharded"),
        ("gloo", "qwen3_next", "sharded"),
        ("gloo", "falcon_h1", "whole"),
    ],
)
def test_each_rank_restores_what_it_has_of_the_model_for_requests_in_flight(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    family: str,
    part: str,
) -> None:
    saved = save_tiny(family, tmp_path / "model")
    arguments = (kind, part, str(saved), str(tmp_path / "store"), *map(str, DOCUMENT))
    if kind == "mpi":
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        mpirun: Mpirun = request.getfixturevalue("mpirun")
        results: tuple[subprocess.CompletedProcess[str], ...] = (
            mpirun(PROGRAM, 2, *arguments, timeout_s=JOB_S),
        )
    else:
        monkeypatch.setenv("GROUP_PORT", str(free_port()))
        spawn: Spawn = request.getfixturevalue("spawn")
        results = spawn(PROGRAM, 2, *arguments, timeout_s=JOB_S)
    assert [result.returncode for result in results] == [0] * len(results), results
    lines = [line for result in results for line in result.stdout.splitlines()]
    told = [json.loads(line) for line in lines if line.startswith("{")]
    first, second = sorted(told, key=lambda one: int(one["rank"]))
    for rank in (first, second):
        assert rank["equal"] == [True, True, True]
        # The document is 8 pages; each prompt has a page of its own behind it, but the last.
        for restored in rank["restored"]:
            assert restored == [144, 144, 96]
    alone = load_model(saved)
    prompts = [(*DOCUMENT, *range(start, start + 20)) for start in (10, 40)] + [DOCUMENT[:100]]
    expected = [list(generate_without_cache(alone, prompt, 8).tokens) for prompt in prompts]
    assert first["reference"] == second["reference"] == expected
    if part == "whole":
        # Both have the same, and one stores it.
        assert set(first["puts"]) == {"kv", "mamba"}
        assert not second["puts"]
        return
    # Keys and values are each rank's own; states are the same on both, and stored by one.
    assert first["puts"]["kv"] == second["puts"]["kv"] > 0
    if family == "gemma3_text":
        assert first["puts"]["swa"] == second["puts"]["swa"] > 0
    if family == "qwen3_next":
        assert first["puts"]["mamba"] > 0
        assert "mamba" not in second["puts"]
