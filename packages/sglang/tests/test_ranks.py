"""Two tensor-parallel ranks of SGLang in two processes, each with its own shard in the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from packages.sglang.tests import hooked_store
from packages.sglang.tests.sglang_engine import STATE_GRID, Kind
from packages.sglang.tests.sglang_import import ROOT, directory

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 50.0
COMPUTED: dict[str, object] = {"on_device": 0, "restored": 0, "wrong_rows": 0, "aborted": False}


def run_ranks(tmp_path: Path, kind: Kind, what: str) -> list[dict[str, dict[str, object]]]:
    """What both ranks say."""
    place = directory()
    arguments = [
        str(tmp_path / "meeting"),
        kind.value,
        what,
        hooked_store.NAME,
        str(tmp_path / "store"),
    ]
    program = [sys.executable, "-m", "packages.sglang.tests.programs.rank"]
    ranks = [
        subprocess.Popen(
            [*program, str(rank), *arguments],
            cwd=ROOT,
            env={**os.environ, "RADIXLINK_SGLANG": str(place), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ends = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], [end[1][-2000:] for end in ends]
    return [json.loads(end[0].splitlines()[-1]) for end in ends]


def restored(tokens: int) -> dict[str, object]:
    return COMPUTED | {"restored": tokens}


@pytest.mark.parametrize("kind", Kind)
def test_each_rank_restores_its_own_shard(tmp_path: Path, kind: Kind) -> None:
    expected = restored(STATE_GRID if kind is Kind.STATES else 100)
    for said in run_ranks(tmp_path, kind, "nothing"):
        assert said == {"first": expected, "second": expected}


@pytest.mark.parametrize("kind", Kind)
def test_a_page_lost_on_one_rank_leaves_both_the_common_prefix(tmp_path: Path, kind: Kind) -> None:
    # A window is whole at the end of what was stored only, and so is a state.
    expected = restored(20 if kind in {Kind.FULL, Kind.LATENT} else 0)
    for said in run_ranks(tmp_path, kind, "lost"):
        assert said["first"] == expected


@pytest.mark.parametrize("kind", Kind)
def test_a_load_that_fails_on_one_rank_fails_on_both(tmp_path: Path, kind: Kind) -> None:
    for said in run_ranks(tmp_path, kind, "failed"):
        assert said["first"]["aborted"]
        # The rank that saw it counts the pages as missing; the other one follows.
        assert said["second"] == COMPUTED
