"""Two replicas of SGLang with two tensor-parallel ranks each; the second restores what the first stored.

mpirun -n 4 python sglang_rank.py MEETING
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
from packages.sglang.tests.sglang_engine import (
    STATE_GRID,
    Answer,
    Kind,
    SglangEngine,
    linker_config,
)

from radixlink_store_mpi._mpi import MPI

# `sglang_stores`, which the configuration names.
sys.path.append(str(Path(__file__).parent))

PROMPT = list(range(100, 200))
_TENSOR_PARALLEL = 2


def main(meeting: str) -> None:
    """Run one rank, for each kind of model."""
    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=60),
    )
    groups = [
        torch.distributed.new_group(list(range(first, first + _TENSOR_PARALLEL)))
        for first in range(0, world.size, _TENSOR_PARALLEL)
    ]
    replica = world.rank // _TENSOR_PARALLEL
    for kind in (Kind.FULL, Kind.WINDOWS, Kind.STATES):
        config = linker_config("sglang_stores:factory", "")
        with SglangEngine(config, kind=kind, group=groups[replica]) as engine:
            if replica == 0:
                engine.serve(PROMPT)
                engine.settle()
            world.Barrier()
            if replica == 1:
                expected = STATE_GRID if kind is Kind.STATES else len(PROMPT)
                assert engine.serve([*PROMPT, 7]) == [
                    Answer(on_device=0, restored=expected, wrong_rows=0, aborted=False)
                ]
                engine.forget()
            world.Barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.write("ok\n")


if __name__ == "__main__":
    main(sys.argv[1])
