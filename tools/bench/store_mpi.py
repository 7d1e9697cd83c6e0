"""What a page of another node costs, beside a plain send of the same bytes in the same minute.

    RADIXLINK_MPI_FAKE_NODES=2 mpirun -n 2 python -m mpi4py tools/bench/store_mpi.py [--turns 60]

Rank 0 has the pages. Each turn rank 1 gets new ones in three ways:

    plain   one small message to rank 0, which waits for it in MPI_Recv, and one large one back
    copy    what is done to them here in any case: a put into the segment of this node
    fetch   `open` of the store: looked for here, asked of the other node, verified, put, opened

and once asks for pages that nobody has (`miss`). Medians of interleaved turns. Rank 0 sleeps while its
server answers, so a fetch also waits for that thread's nap, at most a millisecond.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np

from radixlink_contracts import CacheIdentity, PageKeys, PoolLayout, PoolName, StoreConfig
from radixlink_store_mpi import MpiStoreFactory, NodeSettings, NodesPageStore
from radixlink_store_mpi._mpi import MPI

if TYPE_CHECKING:
    from collections.abc import Callable

WORLD: Final = MPI.COMM_WORLD
KIB: Final = 1 << 10
PAGES: Final = (16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
BATCHES: Final = (1, 8)
RANGES: Final = 4
WARM_UP_TURNS: Final = 5
NAP_S: Final = 0.0005
#: Longer than a busy machine keeps a thread waiting.
TIMEOUT_S: Final = 30.0
ASK: Final = np.zeros(1, np.uint8)


def layout_of(page_bytes: int) -> PoolLayout:
    """Pages of some layer ranges."""
    identity = CacheIdentity(
        model="bench",
        revision="1",
        dtype="uint8",
        page_size=16,
        num_layers=RANGES,
        layout="bytes",
    )
    return PoolLayout(
        identity=identity, pool=PoolName.KV, range_bytes=(page_bytes // RANGES,) * RANGES
    )


def keys_of(turn: int, batch: int, who: str) -> PageKeys:
    """The pages of a turn."""
    return PageKeys.join(
        hashlib.sha256(f"{who}/{turn}/{page}".encode()).digest() for page in range(batch)
    )


def meet() -> None:
    """Wait for the other rank, and leave it the cores."""
    request = WORLD.Ibarrier()
    while not request.Test():
        time.sleep(NAP_S)


def timed_us(step: Callable[[], object]) -> float:
    """Microseconds of one step."""
    started = time.perf_counter_ns()
    step()
    return (time.perf_counter_ns() - started) / 1000


def measure(page_bytes: int, batch: int, turns: int) -> dict[str, float]:
    """The medians of each way, in microseconds; on rank 1."""
    # Windows stay until MPI ends; a few turns' pages are enough.
    capacity_bytes = 16 * batch * page_bytes
    nodes = attrs.evolve(NodeSettings.from_environment(), answer_timeout_s=TIMEOUT_S)
    factory = MpiStoreFactory(StoreConfig(capacity_bytes=capacity_bytes), nodes=nodes)
    store = factory.open(layout_of(page_bytes))
    assert isinstance(store, NodesPageStore), "RADIXLINK_MPI_FAKE_NODES=2 is not set"
    local = store._local  # noqa: SLF001 - the part of a fetch that is no exchange
    parts = [
        np.random.default_rng(layer).integers(0, 256, batch * page_bytes // RANGES, np.uint8)
        for layer in range(RANGES)
    ]
    bytes_ = np.zeros(batch * page_bytes, np.uint8)
    figures: dict[str, list[float]] = {"plain": [], "copy": [], "fetch": [], "miss": []}

    def plain() -> None:
        WORLD.Send(ASK, 0)
        WORLD.Recv(bytes_, 0)

    for turn in range(WARM_UP_TURNS + turns):
        wanted = keys_of(turn, batch, "theirs")
        if WORLD.rank == 0:
            store.put(wanted, [part.data for part in parts])
            meet()
            WORLD.Recv(ASK, 1)
            WORLD.Send(bytes_, 1)
            meet()
            continue
        meet()
        took = {"plain": timed_us(plain)}
        mine = keys_of(turn, batch, "mine")
        took["copy"] = timed_us(partial(local.put, mine, [part.data for part in parts]))
        fetched = store.node_counters.fetched
        took["fetch"] = timed_us(partial(store.open, wanted, 0.0))
        assert store.node_counters.fetched == fetched + batch, store.node_counters
        nowhere = keys_of(turn, batch, "nobody's")
        took["miss"] = timed_us(partial(store.contains, nowhere))
        if turn >= WARM_UP_TURNS:
            for way, microseconds in took.items():
                figures[way].append(microseconds)
        meet()
    factory.close()
    return {way: statistics.median(all_) if all_ else 0.0 for way, all_ in figures.items()}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=60)
    options = parser.parse_args()
    says = WORLD.rank == 1
    if says:
        library = MPI.Get_library_version().partition(",")[0].splitlines()[0]
        print(f"{library}; load {os.getloadavg()[0]:.1f}\n")
        print("| page | pages | plain us | copy us | fetch us | to plain | GB/s | miss us |")
        print("|---" * 8 + "|")
    for page_bytes in PAGES:
        for batch in BATCHES:
            us = measure(page_bytes, batch, options.turns)
            if says:
                print(
                    f"| {page_bytes // KIB} KiB | {batch} | {us['plain']:.0f} | {us['copy']:.0f} "
                    f"| {us['fetch']:.0f} | {us['fetch'] / us['plain']:.1f} "
                    f"| {batch * page_bytes / us['fetch'] / 1000:.2f} | {us['miss']:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
