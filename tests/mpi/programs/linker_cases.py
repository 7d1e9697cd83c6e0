"""One rank that runs the linker's cases over MPI or gloo; prints a JSON line for each that passed.

    linker_cases.py KIND [NAME...]

KIND is `mpi` or `gloo`, as in `rank_groups.py`; without names all cases are run.
"""

from __future__ import annotations

import faulthandler
import sys
import time

import torch
from tests.integration.linker.cases.all_runs import RUNS, runs_for
from tests.mpi.programs.rank_groups import gloo_groups, mpi_groups, tell

#: All stacks are printed then: a deadlock says where it is before the job is killed.
STUCK_S = 100.0


def main(kind: str, *names: str) -> None:
    """Run cases, each with new groups for its frames, until one fails."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(STUCK_S)
    groups = {"mpi": mpi_groups, "gloo": gloo_groups}[kind]()
    world = groups()
    for run in [RUNS[name] for name in names] or runs_for(world.size):
        begin = time.monotonic()
        run(world, groups)
        tell(case=run.name, rank=world.rank, took_s=round(time.monotonic() - begin, 3))
    world.close()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
