"""The file store beside Mooncake over TCP: pages from one process to another, in interleaved turns.

    python -m tools.bench.file_beside_mooncake [--page-kib 512] [--turns 100]

From the repository's root, with Mooncake installed. One process puts and another one reads, by the
batch calls of Mooncake itself on memory that was registered, and by the file store with checksums
on. In each turn both stores move the same number of bytes, who is first changes by turns, and the
bytes read are compared once at the start. What is put was written just before; what it is written
over, and what it is read into, was touched before.

In the same turns the same processes copy as many bytes into and out of memory that both have mapped,
by bare memcpy and nothing else: what any store that copies must take at least. And once more with an
XXH3 of each copy: what one that verifies must.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import mmap
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from tools.bench.store_mooncake import running
from xxhash import xxh3_64_intdigest

from radixlink_contracts import CacheIdentity, PageKeys, PoolLayout, PoolName, StoreConfig
from radixlink_store import FileStoreFactory
from radixlink_store_mooncake import MooncakeSettings
from radixlink_store_mooncake._engine import make_client, make_replicate_config
from radixlink_store_mooncake.commands import master_command, owner_command
from radixlink_testing.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

_SEGMENT_BYTES: Final = 2 << 30
_BATCHES: Final = (1, 8)
_WARM_UP_TURNS: Final = 10
_STORES: Final = ("mooncake", "file", "memcpy", "hashed")
_SHARED_PAGES: Final = 1024
"""Of the memory that both have mapped: as cold, when it is written and read, as a store's."""


class Side:
    """One process's way into both stores."""

    def __init__(self, address: str, directory: Path, page_bytes: int, *, seed: int) -> None:
        """Open both."""
        most = max(_BATCHES)
        settings = MooncakeSettings(master_server_address=address)
        self._config = make_replicate_config(settings)
        self._page_bytes = page_bytes
        #: What is put, or was read. Shape: (most, page_bytes).
        self.memory = np.random.default_rng(seed).integers(0, 256, (most, page_bytes), np.uint8)
        self._fresh = self.memory.copy()
        self._client = make_client()
        code = self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", address)
        assert code == 0, code
        code = self._client.register_buffer(self.memory.ctypes.data, self.memory.nbytes)
        assert code == 0, code
        identity = CacheIdentity(
            model="bench", revision="1", dtype="uint8", page_size=16, num_layers=1, layout="bytes"
        )
        config = StoreConfig(location=str(directory), capacity_bytes=_SEGMENT_BYTES)
        layout = PoolLayout(identity=identity, pool=PoolName.KV, range_bytes=(page_bytes,))
        self._file = FileStoreFactory(config).open(layout)
        assert self._file.wait_prefault(60.0)
        size = _SHARED_PAGES * page_bytes
        with directory.with_name("shared").open("a+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            mapped = mmap.mmap(file.fileno(), size)
        #: Shape: (_SHARED_PAGES, page_bytes); touched.
        self._shared = np.frombuffer(mapped, np.uint8).reshape(-1, page_bytes)
        for row in self._shared:
            row[:: mmap.PAGESIZE] = 1

    def move(self, what: str, turn: int, batch: int) -> float:
        """Put or read the pages of a turn; the seconds it took."""
        keys = PageKeys.join(
            turn.to_bytes(24, "little") + page.to_bytes(8, "little") for page in range(batch)
        )
        names = [key.hex() for key in keys]
        start = self.memory.ctypes.data
        addresses = [start + page * self._page_bytes for page in range(batch)]
        sizes = [self._page_bytes] * batch
        pages = self.memory[:batch]
        data = pages.reshape(-1).data
        # memcpy and hashed share no rows: what one of them touched is in the caches for the other.
        half = _SHARED_PAGES // 2 if what.endswith("hashed") else 0
        rows = [
            (turn * max(_BATCHES) + page) % (_SHARED_PAGES // 2) + half for page in range(batch)
        ]
        if what.startswith("put"):
            np.copyto(self.memory, self._fresh)
        began = time.perf_counter()
        match what:
            case "put mooncake":
                codes = self._client.batch_put_from(names, addresses, sizes, self._config)
                assert codes == [0] * batch, codes
            case "put file":
                assert self._file.put(keys, [data]).complete
            case "read mooncake":
                assert self._client.batch_get_into(names, addresses, sizes) == sizes
            case "put memcpy":
                for row, page in zip(rows, pages, strict=True):
                    np.copyto(self._shared[row], page)
            case "read memcpy":
                for row, page in zip(rows, pages, strict=True):
                    np.copyto(page, self._shared[row])
            case "put hashed":
                for row, page in zip(rows, pages, strict=True):
                    np.copyto(self._shared[row], page)
                    xxh3_64_intdigest(self._shared[row])
            case "read hashed":
                for row, page in zip(rows, pages, strict=True):
                    np.copyto(page, self._shared[row])
                    xxh3_64_intdigest(page)
            case _:
                assert self._file.read(self._file.open(keys, 0.0), 0, data).complete
        return time.perf_counter() - began

    def close(self) -> None:
        """Close both."""
        self._client.close()
        self._file.close()


def serve(link: Connection, address: str, directory: Path, page_bytes: int) -> None:
    """Be the process that reads, until the link closes."""
    side = Side(address, directory, page_bytes, seed=2)
    link.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            what, turn, batch = link.recv()
            seconds = side.move(what, turn, batch)
            link.send((seconds, side.memory[:batch].tobytes() if turn == 0 else b""))
    side.close()


@contextlib.contextmanager
def reader(address: str, directory: Path, page_bytes: int) -> Iterator[Connection]:
    """The process that reads."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, address, directory, page_bytes))
    process.start()
    theirs.close()
    try:
        assert ours.recv() == "ready"
        yield ours
    finally:
        ours.close()
        process.join(20.0)
        process.kill()


def measure(address: str, directory: Path, page_bytes: int, count: int) -> None:
    """Print a line for each batch, put and read."""
    turns = itertools.count()
    side = Side(address, directory, page_bytes, seed=1)
    with reader(address, directory, page_bytes) as link:

        def ask(what: str, turn: int, batch: int) -> float:
            link.send((what, turn, batch))
            seconds, data = link.recv()
            assert not data or data == side.memory[:batch].tobytes(), "other bytes were read"
            return float(seconds)

        ways: dict[str, Callable[[str, int, int], float]] = {"put": side.move, "read": ask}
        print(f"pages of {page_bytes >> 10} KiB, us, medians of {count} interleaved turns")
        print("batch  way   mooncake      file    memcpy    hashed   times   most  hashed")
        for batch in _BATCHES:
            took: dict[str, list[float]] = {}
            for turn in itertools.islice(turns, _WARM_UP_TURNS + count):
                first = turn % len(_STORES)
                order = _STORES[first:] + _STORES[:first]
                for way, store in itertools.product(ways, order):
                    seconds = ways[way](f"{way} {store}", turn, batch)
                    took.setdefault(f"{way} {store}", []).append(seconds)
            for way in ways:
                theirs, ours, bare, hashed = (
                    statistics.median(took[f"{way} {store}"][_WARM_UP_TURNS:]) * 1e6
                    for store in _STORES
                )
                took_us = f"{theirs:9.0f}{ours:10.0f}{bare:10.0f}{hashed:10.0f}"
                times = f"{theirs / ours:8.1f}{theirs / bare:7.1f}{theirs / hashed:8.1f}"
                print(f"{batch:5}  {way:5}{took_us}{times}")
    side.close()


def main() -> None:
    """Start a Mooncake and a store, measure, end both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page-kib", type=int, default=512)
    parser.add_argument("--turns", type=int, default=100)
    given = parser.parse_args()
    port, owner_port = free_port(), free_port()
    address = f"127.0.0.1:{port}"
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        running(master_command(port, free_port()), port),
        running(owner_command(address, owner_port, _SEGMENT_BYTES), owner_port),
    ):
        measure(address, Path(directory) / "store", given.page_kib << 10, given.turns)


if __name__ == "__main__":
    main()
