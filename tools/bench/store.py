"""What the file store costs, beside the memcpy of the same processes in the same minute.

    python tools/bench/store.py [--quick] [--processes 1,2,4] [--rounds 40] [--json FILE]

Each row is a run of its own: so many processes put pages of one size into one store, each reads
those of its neighbour, and each copies as many bytes by bare memcpy: from private memory to private
memory, and from there into and out of a file of its own beside the store's, mapped and touched
before, as the pages of a store are. A put is compared with the first and the second, a read with the
first and the third.
All wait for each other before each part, and a part has ended when the last one has; a row is the
median over rounds of the same work with new pages. What is moved was not touched for
much more than the caches hold, everything was touched once, and pages are written over older ones.

Only figures of one row may be compared: on a shared machine the speed of memory changes by the
minute, and that is why memcpy is measured beside. Under load the store loses more than memcpy does:
what a call of Python needs is no longer in the caches after each page.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import attrs
import numpy as np

from radixlink_contracts import CacheIdentity, PageKeys, PoolLayout, PoolName, StoreConfig
from radixlink_store import FileStoreFactory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier

    import numpy.typing as npt

    from radixlink_store.segments import SegmentPageStore

    Bytes = npt.NDArray[np.uint8]

KIB: Final = 1 << 10
MIB: Final = 1 << 20
PAGES: Final = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
#: What one call may carry, and how many pages at most.
BATCH_BYTES: Final = 8 * MIB
BATCH_PAGES: Final = 8
#: Short rounds: other users of the machine then disturb a few of them and not their median.
SLICES: Final = 4
WARM_ROUNDS: Final = 6
KEYS_OF_A_LOOKUP: Final = 1024
TIMEOUT_S: Final = 300.0
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 -- where a store is by default


@attrs.frozen(kw_only=True)
class Run:
    """One row.

    Attributes:
        processes: How many at once.
        page_bytes: Bytes of a page.
        ranges: Layer ranges of a page; each is read by a call of its own.
        checksums: Whether they are on.
        bytes_each: What each process has to move, much more than a cache; each round moves the
            next of `SLICES` parts of it.
        rounds: How often.
    """

    processes: int
    page_bytes: int
    ranges: int
    checksums: bool
    bytes_each: int
    rounds: int

    @property
    def layout(self) -> PoolLayout:
        """What the store holds."""
        identity = CacheIdentity(
            model="bench",
            revision="1",
            dtype="uint8",
            page_size=1,
            num_layers=self.ranges,
            layout="bytes",
        )
        size = self.page_bytes // self.ranges
        return PoolLayout(identity=identity, pool=PoolName.KV, range_bytes=(size,) * self.ranges)

    @property
    def batch(self) -> int:
        """Pages of a call."""
        return min(BATCH_PAGES, BATCH_BYTES // self.page_bytes)

    @property
    def batches(self) -> int:
        """Calls of a round."""
        return self.bytes_each // SLICES // self.page_bytes // self.batch

    @property
    def capacity_bytes(self) -> int:
        """As cold as the source, and a quarter more, so that new pages do not evict each other."""
        return self.bytes_each * self.processes * 5 // 4


@attrs.frozen(kw_only=True)
class Part:
    """What one process did in one part of a round."""

    seconds: float
    num_bytes: int


Round: TypeAlias = tuple[Part, Part, Part, Part, Part]
"""What one process did in a round: memcpy, memcpy in, memcpy out, put, read."""


@attrs.frozen(kw_only=True)
class Row:
    """The figures of a run: GB/s of all processes together, and parts of memcpy.

    Attributes:
        memcpy: GB/s, from private memory to private memory.
        memcpy_in: GB/s, from private into shared memory.
        memcpy_out: GB/s, from shared into private memory.
        put: GB/s.
        read: GB/s of what was read right; `open` is counted in.
        put_part: Median over the rounds of the ratio to that round's `memcpy`.
        read_part: The same for reads.
        put_part_shared: Median over the rounds of the ratio to that round's `memcpy_in`.
        read_part_shared: The same for reads and `memcpy_out`.
    """

    memcpy: float
    memcpy_in: float
    memcpy_out: float
    put: float
    read: float
    put_part: float
    read_part: float
    put_part_shared: float
    read_part_shared: float


def memory(num_bytes: int) -> Bytes:
    """Private memory that starts at a page, touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    made = np.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), np.uint8)
    made[:] = 1
    return made


def shared_memory(num_bytes: int) -> Bytes:
    """The same, of a file without a name where stores are."""
    with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        made = np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)
    made[:] = 1
    return made


def open_store(run: Run, directory: str) -> tuple[FileStoreFactory, SegmentPageStore]:
    """The store, once no touch of it costs a fault."""
    config = StoreConfig(location=directory, capacity_bytes=run.capacity_bytes)
    factory = FileStoreFactory(config, checksums=run.checksums)
    store = factory.open(run.layout)
    if not store.wait_prefault(TIMEOUT_S):
        raise TimeoutError(f"expected page tables to be full within {TIMEOUT_S} s")
    return factory, store


class Worker:
    """One process: its memory, and its view of the store."""

    def __init__(self, run: Run, rank: int, store: SegmentPageStore) -> None:
        self._run = run
        self._rank = rank
        self._store = store
        rng = np.random.default_rng(rank)
        shape = (SLICES, run.batches, run.ranges, run.batch * run.page_bytes // run.ranges)
        self._source = memory(run.bytes_each).reshape(shape)
        self._source[:] = rng.integers(0, 256, shape, np.uint8)
        self._out = memory(run.bytes_each).reshape(shape)
        self._shared = shared_memory(run.bytes_each).reshape(shape)

    def keys(self, of: int, round_: int) -> list[PageKeys]:
        """The keys of a process' pages in a round, a call's worth each."""
        rng = np.random.default_rng([of, round_])
        return [PageKeys(rng.bytes(32 * self._run.batch)) for _ in range(self._run.batches)]

    def copy(self, source: Bytes, out: Bytes) -> int:
        """Copy a part, page by page; how many bytes that were."""
        pages = (self._run.batches * self._run.batch, self._run.page_bytes)
        for to, page in zip(out.reshape(pages), source.reshape(pages), strict=True):
            np.copyto(to, page)
        return int(source.nbytes)

    def put(self, part: int, keys: list[PageKeys]) -> int:
        """Put every page; how many bytes are there now."""
        stored = 0
        for batch, ranges in zip(keys, self._source[part], strict=True):
            stored += self._store.put(batch, [data.data for data in ranges]).total
        return stored * self._run.page_bytes

    def read(self, part: int, keys: list[PageKeys]) -> int:
        """Read every page that is still there; how many bytes were right."""
        right = 0
        for batch, out in zip(keys, self._out[part], strict=True):
            handles = self._store.open(batch, 0.0)
            for layer_range, data in enumerate(out):
                right += self._store.read(handles, layer_range, data.data).total
        return right * self._run.page_bytes // self._run.ranges

    def round(self, number: int, barrier: Barrier) -> Round:
        """The parts of a round, each together with the other processes."""
        mine = self.keys(self._rank, number)
        neighbours = self.keys((self._rank + 1) % self._run.processes, number)
        part = number % SLICES
        source, out, shared = self._source[part], self._out[part], self._shared[part]
        parts: list[dict[str, Callable[[], int]]] = [
            {"memcpy": partial(self.copy, source, out)},
            {"in": partial(self.copy, source, shared)},
            {"out": partial(self.copy, shared, out)},
            {"put": partial(self.put, part, mine), "read": partial(self.read, part, neighbours)},
        ]
        # Each comes first as often as the others: what was moved before it is partly in the caches.
        first = number % len(parts)
        took = {
            what: timed(part, barrier)
            for group in parts[first:] + parts[:first]
            for what, part in group.items()
        }
        return took["memcpy"], took["in"], took["out"], took["put"], took["read"]


def timed(part: Callable[[], int], barrier: Barrier) -> Part:
    """Do one part when all are ready."""
    barrier.wait(TIMEOUT_S)
    started = time.perf_counter()
    num_bytes = part()
    return Part(seconds=time.perf_counter() - started, num_bytes=num_bytes)


def work(
    run: Run,
    rank: int,
    directory: str,
    barrier: Barrier,
    results: Queue[list[Round]],
) -> None:
    """Be one of the processes of a run."""
    factory, store = open_store(run, directory)
    worker = Worker(run, rank, store)
    rounds = [worker.round(number, barrier) for number in range(WARM_ROUNDS + run.rounds)]
    results.put(rounds[WARM_ROUNDS:])
    factory.close()


def rate(parts: list[Part]) -> float:
    """GB/s of all processes, until the last one had ended."""
    return sum(part.num_bytes for part in parts) / max(part.seconds for part in parts) / 1e9


def measure(run: Run) -> Row:
    """Start the processes of a run, and put together what they say."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(run.processes), context.Queue()
    directory = tempfile.mkdtemp(prefix="radixlink-bench-", dir=SHARED_MEMORY)
    processes = [
        context.Process(target=work, args=(run, rank, directory, barrier, results), daemon=True)
        for rank in range(run.processes)
    ]
    try:
        for process in processes:
            process.start()
        everybody: list[list[Round]] = [results.get(timeout=TIMEOUT_S) for _ in processes]
        for process in processes:
            process.join(TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
        shutil.rmtree(directory)
    rates = [
        [rate(list(parts)) for parts in zip(*ranks, strict=True)]
        for ranks in zip(*everybody, strict=True)
    ]
    memcpy, memcpy_in, memcpy_out, put, read = map(statistics.median, zip(*rates, strict=True))
    return Row(
        memcpy=memcpy,
        memcpy_in=memcpy_in,
        memcpy_out=memcpy_out,
        put=put,
        read=read,
        put_part=statistics.median(put / memcpy for memcpy, _, _, put, _ in rates),
        read_part=statistics.median(read / memcpy for memcpy, _, _, _, read in rates),
        put_part_shared=statistics.median(put / into for _, into, _, put, _ in rates),
        read_part_shared=statistics.median(read / out for _, _, out, _, read in rates),
    )


def calls(directory: str, *, rounds: int) -> dict[str, float]:
    """What single calls on one process cost, in microseconds."""
    run = Run(
        processes=1,
        page_bytes=16 * KIB,
        ranges=1,
        checksums=True,
        bytes_each=64 * MIB,
        rounds=rounds,
    )
    factory, store = open_store(run, directory)
    rng = np.random.default_rng(0)
    count = run.bytes_each // run.page_bytes
    source = memory(run.bytes_each).reshape(count, run.page_bytes)
    source[:] = rng.integers(0, 256, source.shape, np.uint8)
    out = memory(run.page_bytes).data
    rows = [[row.data] for row in source]
    data = rng.bytes(32 * count)
    keys = [PageKeys(data[32 * page : 32 * (page + 1)]) for page in range(count)]
    new = [PageKeys(rng.bytes(32)) for _ in range(count)]
    figures = {
        "put of 16 KiB, into a free slot": median_us(
            [partial(store.put, key, row) for key, row in zip(keys, rows, strict=True)]
        )
    }
    present = [key for key in keys if store.contains(key).complete]
    handles = [store.open(key, 0.0) for key in present]
    figures["open of 1 page"] = median_us([partial(store.open, key, 0.0) for key in present])
    figures["read of 16 KiB"] = median_us(
        [partial(store.read, handle, 0, out) for handle in handles]
    )
    figures["contains, 1 page"] = median_us([partial(store.contains, key) for key in present])
    full = KEYS_OF_A_LOOKUP
    lookups = {
        "there": [
            PageKeys(data[start : start + 32 * full]) for start in range(0, len(data), 32 * full)
        ],
        "not there": [PageKeys(rng.bytes(32 * full)) for _ in range(len(data) // 32 // full)],
    }
    for which, batches in lookups.items():
        looks = [partial(store.contains, batch) for batch in batches * rounds]
        figures[f"contains, a key of {full:,}, {which}"] = median_us(looks) / full
    # Fill what is free, and then some.
    for key, row in zip(new, rows, strict=True):
        store.put(key, row)
    newer = [PageKeys(rng.bytes(32)) for _ in range(count)]
    figures["put of 16 KiB, over an old page"] = median_us(
        [partial(store.put, key, row) for key, row in zip(newer, rows, strict=True)]
    )
    figures["put of 16 KiB that is there"] = median_us(
        [
            partial(store.put, key, row)
            for key, row in zip(newer, rows, strict=True)
            if store.contains(key).complete
        ]
    )
    factory.close()
    return figures


def median_us(timed_calls: Iterable[Callable[[], object]]) -> float:
    """Median time of a call."""
    times: list[int] = []
    for call in timed_calls:
        started = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times) / 1000


def size_of(num_bytes: int) -> str:
    """A size for people."""
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


def table(title: str, rows: dict[str, tuple[Row, Row]]) -> str:
    """Markdown: each page with checksums and without; memcpy is that of the run with them."""
    head = "memcpy | in | out | put | read | put, off | read, off"
    lines = [f"| {title} | {head} |", "|---" * 8 + "|"]
    for name, both in rows.items():
        on = both[0]
        cells = " | ".join(
            f"{row.put:.1f} ({row.put_part:.2f}, {row.put_part_shared:.2f})"
            f" | {row.read:.1f} ({row.read_part:.2f}, {row.read_part_shared:.2f})"
            for row in both
        )
        memcpy = f"{on.memcpy:.1f} | {on.memcpy_in:.1f} | {on.memcpy_out:.1f}"
        lines.append(f"| {name} | {memcpy} | {cells} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, print the tables, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke: few rounds, little memory")
    parser.add_argument("--processes", default="1,2,4", help="how many at once; default: 1,2,4")
    parser.add_argument("--rounds", type=int, default=40, help="of each row; default: 40")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    options = parser.parse_args()
    bytes_each, rounds = (32 * MIB, 4) if options.quick else (256 * MIB, options.rounds)
    kept: dict[str, object] = {"load average at the start": os.getloadavg()[0]}
    print(f"load average at the start: {os.getloadavg()[0]:.1f}\n")

    with tempfile.TemporaryDirectory(prefix="radixlink-bench-", dir=SHARED_MEMORY) as directory:
        figures = calls(directory, rounds=rounds)
    kept["one process, us"] = figures
    lines = [f"| {name} | {microseconds:.2f} |" for name, microseconds in figures.items()]
    print("\n".join(["| one process | us |", "|---|---|", *lines, ""]), flush=True)

    for processes in map(int, options.processes.split(",")):
        rows: dict[str, tuple[Row, Row]] = {}
        for page_bytes, ranges in [*((size, 1) for size in PAGES), (MIB, 16)]:
            on, off = (
                measure(
                    Run(
                        processes=processes,
                        page_bytes=page_bytes,
                        ranges=ranges,
                        checksums=checksums,
                        bytes_each=bytes_each,
                        rounds=rounds,
                    )
                )
                for checksums in (True, False)
            )
            name = size_of(page_bytes) + (f" in {ranges} ranges" if ranges > 1 else "")
            rows[name] = on, off
        title = f"{processes} process{'es' * (processes > 1)}, GB/s"
        print(table(title, rows), flush=True)
        kept[title] = {
            name: {"checksums": attrs.asdict(on), "no checksums": attrs.asdict(off)}
            for name, (on, off) in rows.items()
        }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
