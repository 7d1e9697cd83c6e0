"""What the persistent tier costs, beside the system calls that move the same bytes.

    python tools/bench/persist.py [--quick] [--directory DIR] [--json FILE]

Rows are medians over rounds; both halves of a row take turns in one process, on the same file
system, with what they read in the page cache: the disk's own speed is not in question. So seconds
are those of the CPU, which neighbours on the machine disturb less than those of a clock; but for
`put`, where what others take from the caller is in question. Only figures of one row may be
compared.

* append: `PageLog.append` of pages, beside `pwritev` of as many bytes to a file of its own.
* promote: `TieredStore.open` of pages that are in files only, which reads, verifies and puts them
  into memory, beside `preadv` of the same records.
* open: what a new process pays for each 100,000 records before its first look-up.
* put: `put` of one page with files behind the store and without; what the writing thread takes
  from the caller is in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np

from radixlink_contracts import CacheIdentity, PageKeys, PoolLayout, PoolName, StoreConfig
from radixlink_store import FileStoreFactory, PersistentSettings, TieredStoreFactory
from radixlink_store._page_log import PageLog
from radixlink_store._tier_tally import TierTally
from radixlink_store.segments import SegmentPageStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from radixlink_contracts import PageStore

KIB: Final = 1 << 10
MIB: Final = 1 << 20
PAGES: Final = (16 * KIB, 256 * KIB, MIB)
RECORDS: Final = 100_000
TIMEOUT_S: Final = 300.0
SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 -- where a store is by default


def layout_of(page_bytes: int) -> PoolLayout:
    """Pages of this size in two layer ranges."""
    identity = CacheIdentity(
        model="bench", revision="1", dtype="uint8", page_size=1, num_layers=2, layout="bytes"
    )
    return PoolLayout(
        identity=identity, pool=PoolName.KV, range_bytes=(page_bytes // 2, page_bytes // 2)
    )


def settings_of(directory: Path) -> PersistentSettings:
    """Room for everything."""
    return PersistentSettings(path=directory, capacity_bytes=1 << 40, queue_bytes=1 << 40)


def keys_of(rng: np.random.Generator, count: int) -> PageKeys:
    """New keys."""
    return PageKeys(rng.bytes(32 * count))


def seconds_of(work: Callable[[], object]) -> float:
    """How much of the CPU it takes."""
    started = time.process_time()
    work()
    return time.process_time() - started


@attrs.frozen(kw_only=True)
class Row:
    """GB/s of both halves, and the median of their ratios."""

    ours: float
    system: float
    part: float


def row_of(rounds: Iterator[tuple[float, float]], num_bytes: int) -> Row:
    """A row of the seconds of each round: ours, the system's."""
    pairs = list(rounds)
    return Row(
        ours=num_bytes / statistics.median(ours for ours, _ in pairs) / 1e9,
        system=num_bytes / statistics.median(system for _, system in pairs) / 1e9,
        part=statistics.median(system / ours for ours, system in pairs),
    )


def append_rounds(
    directory: Path, page_bytes: int, num_bytes: int, rounds: int
) -> Iterator[tuple[float, float]]:
    """Write so many bytes in pages, and as many by the system call alone."""
    layout, rng = layout_of(page_bytes), np.random.default_rng(0)
    source = memoryview(rng.bytes(num_bytes))
    half, count = page_bytes // 2, num_bytes // page_bytes
    pages = [
        (
            source[page * page_bytes : page * page_bytes + half],
            source[page * page_bytes + half : (page + 1) * page_bytes],
        )
        for page in range(count)
    ]
    for turn in range(rounds):
        with tempfile.TemporaryDirectory(dir=directory) as place:
            log = PageLog(layout, settings_of(Path(place) / "log"), TierTally())
            keys = list(keys_of(rng, count))

            def append(log: PageLog = log, keys: list[bytes] = keys) -> None:
                for key, ranges in zip(keys, pages, strict=True):
                    log.append(key, ranges)

            def write(path: Path = Path(place) / "plain") -> None:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
                for page, ranges in enumerate(pages):
                    os.pwritev(descriptor, ranges, page * page_bytes)
                os.close(descriptor)

            halves = [seconds_of(half) for half in ((append, write), (write, append))[turn % 2]]
            log.close()
            yield (halves[0], halves[1]) if turn % 2 == 0 else (halves[1], halves[0])


def promote_rounds(
    directory: Path, page_bytes: int, num_bytes: int, rounds: int
) -> Iterator[tuple[float, float]]:
    """Bring so many bytes of pages to memory, and read as many by the system call alone."""
    layout, rng = layout_of(page_bytes), np.random.default_rng(0)
    count, batch = num_bytes // page_bytes, max(1, 8 * MIB // page_bytes)
    keys = keys_of(rng, count)
    with (
        tempfile.TemporaryDirectory(dir=directory) as place,
        tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as memory,
    ):
        settings = settings_of(Path(place) / "log")
        log = PageLog(layout, settings, TierTally())
        half = page_bytes // 2
        for key in keys:
            page = memoryview(rng.bytes(page_bytes))
            log.append(key, [page[:half], page[half:]])
        log.close()
        config = StoreConfig(location=memory, capacity_bytes=num_bytes * 2)
        factory = TieredStoreFactory(FileStoreFactory(config), settings)
        store = factory.open(layout)
        segment = store.memory
        assert isinstance(segment, SegmentPageStore)
        segment.wait_prefault(TIMEOUT_S)
        (path, *_) = sorted(settings.path.iterdir())
        # As large as what is read at a time, so that it is no more in the caches than that.
        out = memoryview(bytearray(batch * page_bytes))

        def promote() -> None:
            for first in range(0, count, batch):
                store.open(keys.span(first, first + batch), 0.0)

        def read() -> None:
            descriptor = os.open(path, os.O_RDONLY)
            whole = path.stat().st_size // page_bytes
            for page in range(count):
                start = page % batch * page_bytes
                rows = [out[start : start + half], out[start + half : start + page_bytes]]
                os.preadv(descriptor, rows, page % whole * page_bytes)
            os.close(descriptor)

        others = keys_of(rng, 4 * count)
        blank = [bytes(half), bytes(half)]
        for _ in range(rounds):
            # Evict what the last round brought.
            for key in others:
                segment.put(PageKeys(key), blank)
            others = keys_of(rng, 4 * count)
            before = store.counters.promoted
            ours = seconds_of(promote)
            brought = store.counters.promoted - before
            if brought < count:
                raise SystemExit(f"expected {count} pages to be read from files, got {brought}")
            yield ours, seconds_of(read)
        factory.close()


def open_seconds(directory: Path, rounds: int) -> dict[str, float]:
    """What it takes to know 100,000 records, sealed and not."""
    layout, rng = layout_of(4 * KIB), np.random.default_rng(0)
    figures = {}
    half = [memoryview(bytes(2 * KIB))] * 2
    for name, sealed in (("with lists of keys", True), ("from headers", False)):
        with tempfile.TemporaryDirectory(dir=directory) as place:
            settings = settings_of(Path(place) / "log")
            log = PageLog(layout, settings, TierTally())
            for key in keys_of(rng, RECORDS):
                log.append(key, half)
            log.close()
            if not sealed:
                for path in settings.path.iterdir():
                    path.chmod(0o600)
            times = []
            for _ in range(rounds):
                started = time.process_time()
                opened = PageLog(layout, settings, TierTally())
                times.append(time.process_time() - started)
                if len(opened) != RECORDS:
                    raise SystemExit(f"expected {RECORDS} records, got {len(opened)}")
                opened.close()
            figures[f"open of {RECORDS:,} records, {name}"] = statistics.median(times)
    return figures


def put_microseconds(directory: Path, count: int) -> dict[str, float]:
    """A put of 16 KiB with files behind the store and without, by turns."""
    page_bytes, rng = 16 * KIB, np.random.default_rng(0)
    layout = layout_of(page_bytes)
    parts = [rng.bytes(page_bytes // 2) for _ in range(2)]
    with (
        tempfile.TemporaryDirectory(dir=directory) as place,
        tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as memory,
    ):
        plain = FileStoreFactory(StoreConfig(location=f"{memory}/a", capacity_bytes=64 * MIB))
        behind = FileStoreFactory(StoreConfig(location=f"{memory}/b", capacity_bytes=64 * MIB))
        tiered = TieredStoreFactory(behind, settings_of(Path(place) / "log"))
        stores: dict[str, PageStore] = {
            "without files": plain.open(layout),
            "with files behind": tiered.open(layout),
        }
        times: dict[str, list[int]] = {name: [] for name in stores}
        for key, (name, store) in itertools.product(keys_of(rng, count), stores.items()):
            started = time.perf_counter_ns()
            store.put(PageKeys(key), parts)
            times[name].append(time.perf_counter_ns() - started)
        plain.close()
        tiered.close()
    return {
        f"put of 16 KiB, {name}": statistics.median(each) / 1000 for name, each in times.items()
    }


def main() -> None:
    """Measure, print the tables, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke: few rounds, few bytes")
    parser.add_argument("--directory", type=Path, help="where files are; default: temporary files")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.gettempdir())
    num_bytes, rounds = (16 * MIB, 2) if options.quick else (128 * MIB, 9)
    load = os.getloadavg()[0]
    print(f"load average at the start: {load:.1f}\n")
    print(
        "| page | append | pwritev | part | promote | preadv | part |\n|---|---|---|---|---|---|---|"
    )
    rows: dict[str, dict[str, Row]] = {}
    for page_bytes in PAGES:
        append = row_of(append_rounds(directory, page_bytes, num_bytes, rounds), num_bytes)
        promote = row_of(promote_rounds(directory, page_bytes, num_bytes, rounds), num_bytes)
        cells = [f"{row.ours:.2f} | {row.system:.2f} | {row.part:.2f}" for row in (append, promote)]
        print(f"| {page_bytes // KIB} KiB, GB/s | {' | '.join(cells)} |", flush=True)
        rows[f"{page_bytes // KIB} KiB"] = {"append": append, "promote": promote}
    seconds = open_seconds(directory, rounds)
    microseconds = put_microseconds(directory, 500 if options.quick else 4000)
    print("\n| one process | |\n|---|---|")
    for name, figure in seconds.items():
        print(f"| {name} | {figure:.3f} s |")
    for name, figure in microseconds.items():
        print(f"| {name} | {figure:.1f} us |")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        kept = {
            "load average at the start": load,
            "GB/s": {
                page: {which: attrs.asdict(row) for which, row in both.items()}
                for page, both in rows.items()
            },
            "seconds": seconds,
            "microseconds": microseconds,
        }
        options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
