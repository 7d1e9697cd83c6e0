"""All cases, each with every kind of tree that it is about."""

from __future__ import annotations

from tests.integration.linker.cases import (
    agreement,
    attaching_and_asking,
    ends,
    loads,
    offloads,
    whole_way,
)
from tests.integration.linker.cases.registry import Run, cases_of

CASES = cases_of(attaching_and_asking, loads, offloads, ends, whole_way, agreement)
RUNS = {run.name: run for run in (Run(case, kind) for case in CASES for kind in case.kinds)}
"""By name."""


def runs_for(num_ranks: int) -> tuple[Run, ...]:
    """What says something with so many ranks."""
    return tuple(run for run in RUNS.values() if run.case.least_ranks <= num_ranks)
