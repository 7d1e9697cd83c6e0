"""Two tensor-parallel ranks of SGLang in two processes, each with its own shard in the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, TypeAlias

import pytest
from packages.sglang.tests.sglang_engine import STATE_GRID, Kind
from packages.sglang.tests.sglang_import import ROOT, directory

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT_S = 200.0
COMPUTED: dict[str, object] = {
    "on_device": 0,
    "restored": 0,
    "wrong_rows": 0,
    "aborted": False,
}

Said: TypeAlias = "Mapping[str, Mapping[str, Mapping[str, dict[str, object]]]]"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Said]:
    """What each rank says, by kind, by what happened, and by which time it asked."""
    place, scratch = directory(), tmp_path_factory.mktemp("ranks")
    program = [sys.executable, "-m", "packages.sglang.tests.programs.rank"]
    processes = [
        subprocess.Popen(
            [*program, str(rank), str(scratch / "meeting"), str(scratch)],
            cwd=ROOT,
            env={**os.environ, "RADIXLINK_SGLANG": str(place), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ends = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], [
        errors[-2000:] for _, errors in ends
    ]
    return [json.loads(output.splitlines()[-1]) for output, _ in ends]


def restored(tokens: int) -> dict[str, object]:
    return COMPUTED | {"restored": tokens}


@pytest.mark.parametrize("kind", Kind)
def test_each_rank_restores_its_own_shard(ranks: list[Said], kind: Kind) -> None:
    expected = restored(STATE_GRID if kind.has_states else 100)
    for said in ranks:
        assert said[kind.value]["nothing"] == {"first": expected, "second": expected}


@pytest.mark.parametrize("kind", Kind)
def test_a_page_lost_on_one_rank_leaves_both_the_common_prefix(
    ranks: list[Said], kind: Kind
) -> None:
    # SGLang stores the window behind every page, but a state only where it keeps one.
    expected = restored(0 if kind.has_states else 20)
    for said in ranks:
        assert said[kind.value]["lost"]["first"] == expected


@pytest.mark.parametrize("kind", Kind)
def test_a_load_that_fails_on_one_rank_fails_on_both(ranks: list[Said], kind: Kind) -> None:
    for said in ranks:
        first, second = (said[kind.value]["failed"][time] for time in ("first", "second"))
        assert first["aborted"]
        # The rank that saw it counts the pages as missing; the other one follows.
        assert second == COMPUTED
