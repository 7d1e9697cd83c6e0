"""What a page of another node costs, beside a plain send of the same bytes in the same minute.

    RADIXLINK_MPI_FAKE_NODES=2 mpirun -n 2 python -m mpi4py tools/bench/store_mpi.py [--turns 60]

Rank 0 has the pages. Each turn rank 1 gets new ones in three ways:

    plain   one small message to rank 0, which waits for it in MPI_Recv, and one large one back
    copy    what is done to them here in any case: a put into the segment of this node
    fetch   `open` of the store: looked for here, asked of the other node, verified, put, opened

and once asks for pages that nobody has (`miss`). Medians of interleaved turns. Rank 0 sleeps while its
server answers, so a fetch also waits for that thread's nap, at most a millisecond.

With --naps it measures these naps instead: fetches of one small page, one behind the other and after
pauses, what they cost the CPU of rank 0, and what its server costs while nobody asks.
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
LONG_NAP_S: Final = 0.05
#: Longer than a busy machine keeps a thread waiting.
TIMEOUT_S: Final = 30.0
ASK: Final = np.zeros(1, np.uint8)
#: Seconds from the end of one fetch to the start of the next.
PAUSES_S: Final = (0.0, 0.001, 0.01, 0.1)
IDLE_S: Final = 3.0


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


def meet(nap_s: float = NAP_S) -> None:
    """Wait for the other rank, and leave it the cores."""
    request = WORLD.Ibarrier()
    while not request.Test():
        time.sleep(nap_s)


def timed_us(step: Callable[[], object]) -> float:
    """Microseconds of one step."""
    started = time.perf_counter_ns()
    step()
    return (time.perf_counter_ns() - started) / 1000


def opened(page_bytes: int, num_pages: int) -> tuple[MpiStoreFactory, NodesPageStore]:
    """A store between two nodes, whose windows stay until MPI ends."""
    nodes = attrs.evolve(NodeSettings.from_environment(), answer_timeout_s=TIMEOUT_S)
    config = StoreConfig(capacity_bytes=2 * num_pages * page_bytes)
    factory = MpiStoreFactory(config, nodes=nodes)
    store = factory.open(layout_of(page_bytes))
    assert isinstance(store, NodesPageStore), "RADIXLINK_MPI_FAKE_NODES=2 is not set"
    return factory, store


def measure(page_bytes: int, batch: int, turns: int) -> dict[str, float]:
    """The medians of each way, in microseconds; on rank 1."""
    # A few turns' pages are enough.
    factory, store = opened(page_bytes, 8 * batch)
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


def measure_naps(turns: int) -> None:
    """Print what naps cost, in microseconds and in per cent of a core."""
    page_bytes = 16 * KIB
    factory, store = opened(page_bytes, len(PAUSES_S) * turns)
    parts = [np.zeros(page_bytes // RANGES, np.uint8).data for _ in range(RANGES)]
    if WORLD.rank == 0:
        for turn in range(len(PAUSES_S) * turns):
            assert store.put(keys_of(turn, 1, "theirs"), parts).complete
    else:
        print("| pause ms | fetch us, median | 9 of 10 below | CPU of the other node, us |")
        print("|---" * 4 + "|")
    for place, pause_s in enumerate(PAUSES_S):
        meet()
        spent_s = time.process_time()
        took = []
        if WORLD.rank == 1:
            for turn in range(place * turns, (place + 1) * turns):
                time.sleep(pause_s)
                took.append(timed_us(partial(store.open, keys_of(turn, 1, "theirs"), 0.0)))
        meet(LONG_NAP_S)
        shares = WORLD.gather((time.process_time() - spent_s) / turns, 1)
        if shares:
            print(
                f"| {1000 * pause_s:g} | {statistics.median(took):.0f} "
                f"| {statistics.quantiles(took, n=10)[-1]:.0f} | {1e6 * shares[0]:.0f} |",
                flush=True,
            )
    spent_s = time.process_time()
    time.sleep(IDLE_S)
    shares = WORLD.gather((time.process_time() - spent_s) / IDLE_S, 1)
    if shares:
        print(f"\nOf a core, while nobody asks: {shares[0]:.1%} and {shares[1]:.1%}")
    factory.close()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--naps", action="store_true")
    options = parser.parse_args()
    says = WORLD.rank == 1
    if says:
        library = MPI.Get_library_version().partition(",")[0].splitlines()[0]
        print(f"{library}; load {os.getloadavg()[0]:.1f}\n", flush=True)
    if options.naps:
        measure_naps(options.turns)
        return
    if says:
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
