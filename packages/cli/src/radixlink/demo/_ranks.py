"""The part with two tensor-parallel ranks, on the tiny model: launched and collected."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from radixlink.demo._processes import free_ports, mpi_environment, mpirun
from radixlink.demo._report import RanksFailed, RanksLeftOut, ranks_report
from radixlink.demo._terminal import say
from radixlink.errors import CommandError, LaunchError
from radixlink.models import default_cache_dir, prepare_model

if TYPE_CHECKING:
    from radixlink.demo._places import Places
    from radixlink.demo._processes import Processes
    from radixlink.demo._report import Ranks, RanksReport

_TIMEOUT_S: Final = 180.0


def hold_ranks(processes: Processes, places: Places) -> Ranks:
    """Hold that part where it can be; what goes wrong in it costs nothing but its own figures."""
    try:
        launcher = mpirun()
    except LaunchError as error:
        return RanksLeftOut(why_left_out=str(error))
    if find_spec("mpi4py") is None:
        return RanksLeftOut(
            why_left_out="mpi4py is not installed: install the extra `mpi` of the package radixlink"
        )
    try:
        return _hold(launcher, processes, places)
    except (CommandError, OSError, ValueError) as error:
        return RanksFailed(failure=str(error))


def _hold(launcher: str, processes: Processes, places: Places) -> RanksReport:
    """Launch it, and collect what the ranks tell.

    Raises:
        LaunchError: The ranks could not be started, or failed.
        CommandError: The model cannot be prepared.
        OSError: The ranks told nothing, or the system refused a directory.
        ValueError: What they told is not whole.
    """
    prepared = prepare_model("tiny", default_cache_dir(os.environ), say)
    say("two tensor-parallel ranks: a tiny model, one shard of the heads each")
    report, store = places.directory / "ranks.json", places.directory / "ranks-store"
    store.mkdir(mode=0o700)
    command = [launcher, "-n", "2", sys.executable, "-m", "mpi4py", "-m", "radixlink.demo._rank"]
    command += [str(prepared.directory), prepared.digest, str(store), str(report)]
    environment = mpi_environment(num_threads=1, backing=places.new_backing())
    (port,) = free_ports(1)
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    failure = processes.wait(processes.start("mpirun", command, environment), _TIMEOUT_S)
    if failure is not None:
        raise LaunchError(failure)
    return ranks_report(json.loads(report.read_text()))
