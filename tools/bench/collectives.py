"""Median time of one `all_and` of a step's words, for each kind of rank group that can run here.

    python tools/bench/collectives.py                                  # one process, and threads
    mpirun -n 2 python -m mpi4py tools/bench/collectives.py mpi
    torchrun --nproc-per-node 2 tools/bench/collectives.py gloo

Medians: on a machine whose cores are shared, means say more about the neighbours.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from radixlink_comm import SingleRank, ThreadGroup

if TYPE_CHECKING:
    from radixlink_contracts import RankGroup

NUM_WORDS = 480
NUM_CALLS = 5_000
NUM_WARM_UP = 200
TIMEOUT_S = 60.0


def median_us(group: RankGroup) -> float:
    """Median microseconds of `all_and` on this rank. Ranks: all."""
    words = bytearray(b"\xff" * 8 * NUM_WORDS)
    for _ in range(NUM_WARM_UP):
        group.all_and(words, TIMEOUT_S)
    samples: list[float] = []
    for _ in range(NUM_CALLS):
        begin = time.perf_counter()
        group.all_and(words, TIMEOUT_S)
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples) * 1e6


def threads_median_us(size: int) -> float:
    """The same for ranks that are threads, as the first of them sees it."""
    first, *others = ThreadGroup.create(size)
    threads = [threading.Thread(target=median_us, args=(group,)) for group in others]
    for thread in threads:
        thread.start()
    median = median_us(first)
    for thread in threads:
        thread.join()
    return median


def mpi_group() -> RankGroup:
    """All ranks of the job."""
    from mpi4py import MPI  # noqa: PLC0415  only where asked for

    from radixlink_comm.mpi import MpiGroup  # noqa: PLC0415

    return MpiGroup.create(MPI.COMM_WORLD, TIMEOUT_S)


def gloo_group() -> RankGroup:
    """All ranks that torchrun started: they meet in its store."""
    # TCPStore is documented there, but not among the module's explicit exports.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415

    from radixlink_comm.torch import TorchGroup  # noqa: PLC0415

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hosts_store = rank == 0 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    store = TCPStore(address, port, None, hosts_store, timedelta(seconds=TIMEOUT_S))
    return TorchGroup.create(store, rank=rank, size=size, timeout_s=TIMEOUT_S)


def main(kinds: list[str]) -> None:
    """Print a row for each group."""
    rows: list[tuple[str, int, float]] = []
    rank = 0
    if not kinds:
        rows = [
            ("SingleRank", 1, median_us(SingleRank())),
            ("ThreadGroup", 2, threads_median_us(2)),
        ]
    for kind in kinds:
        group = {"mpi": mpi_group, "gloo": gloo_group}[kind]()
        rank = group.rank
        rows.append((type(group).__name__, group.size, median_us(group)))
        group.close()
    if rank == 0:
        print(f"| group | ranks | all_and of {NUM_WORDS} words, median us |\n|---|---|---|")
        for name, size, median in rows:
            print(f"| {name} | {size} | {median:.1f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
