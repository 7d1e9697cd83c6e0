"""Every case, over one process and over ranks that are threads; tests/mpi has it over processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.integration.linker.cases.all_runs import CASES, runs_for

from radixlink_comm import SingleRank, ThreadGroup
from radixlink_testing.rank_groups import PATIENCE_S, run_in_threads

if TYPE_CHECKING:
    from tests.integration.linker.cases.registry import Run

GROUPS = {"process": 1, "threads-2": 2, "threads-4": 4}
EVERY = [
    pytest.param(num_ranks, run, id=f"{group}-{run.name}")
    for group, num_ranks in GROUPS.items()
    for run in runs_for(num_ranks)
]


@pytest.mark.parametrize(("num_ranks", "run"), EVERY)
def test_all_ranks_pass(num_ranks: int, run: Run) -> None:
    if num_ranks == 1:
        run(SingleRank(), SingleRank)
        return
    run_in_threads(
        ThreadGroup.create(num_ranks),
        lambda world: run(world, partial(world.split, 0, PATIENCE_S)),
    )


def test_the_table_names_every_case() -> None:
    table = (Path(__file__).parent / "README.md").read_text()
    lacking = [
        case.name
        for case in CASES
        if not any(
            f"`{case.name}`" in line and all(rule in line for rule in case.rules)
            for line in table.splitlines()
        )
    ]
    assert not lacking
