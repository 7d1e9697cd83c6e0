"""The part with two tensor-parallel ranks, on the tiny model: launched and collected."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Final

from radixlink.demo._processes import free_port, mpi_environment, mpirun
from radixlink.demo._report import ranks_report
from radixlink.demo._terminal import say
from radixlink.errors import LaunchError
from radixlink.models import default_cache_dir, prepare_model

if TYPE_CHECKING:
    from radixlink.demo._places import Places
    from radixlink.demo._processes import Processes
    from radixlink.demo._report import RanksReport

_TIMEOUT_S: Final = 180.0


def hold_ranks(processes: Processes, places: Places) -> tuple[RanksReport | None, str]:
    """Hold that part.

    Returns:
        Its report, or None and why it was left out.

    Raises:
        LaunchError: It failed.
        CommandError: The model cannot be prepared.
    """
    try:
        launcher = mpirun()
    except LaunchError as error:
        return None, str(error)
    prepared = prepare_model("tiny", default_cache_dir(os.environ), say)
    say("two tensor-parallel ranks: a tiny model, one shard of the heads each")
    report, store = places.directory / "ranks.json", places.directory / "ranks-store"
    store.mkdir(mode=0o700)
    command = [launcher, "-n", "2", sys.executable, "-m", "mpi4py", "-m", "radixlink.demo._rank"]
    command += [str(prepared.directory), prepared.digest, str(store), str(report)]
    environment = mpi_environment(num_threads=1, backing=places.new_backing())
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    failure = processes.wait(processes.start("mpirun", command, environment), _TIMEOUT_S)
    if failure is not None:
        raise LaunchError(f"the part with two ranks failed: {failure}")
    return ranks_report(json.loads(report.read_text())), ""
