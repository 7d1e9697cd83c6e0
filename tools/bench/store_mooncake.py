"""What the Mooncake store adds to Mooncake's own batch calls: medians of interleaved turns.

    python tools/bench/store_mooncake.py [--pages 8] [--page-kib 512] [--turns 200]

A master and one owner are processes of their own on loopback, over TCP. Each turn moves the same
number of bytes four times, in an order that changes by turns:

    bare     one batch call of Mooncake's
    checked  the same call, and by hand what a checksum takes: one XXH3 and one copy of each page
    copied   by the store from and to memory of the caller's own: `put`; or `open` and `read`
    lent     by the store in memory that it lends: `put_lent`; or `lend`, `open_lent` and `verify`

What is put was just written, as an engine's copy from its device writes it: for `lent`, into the
lent memory. The owner's memory was written before.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import subprocess
import time
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np
from xxhash import xxh3_64_intdigest

from radixlink_contracts import CacheIdentity, PageKeys, PoolLayout, PoolName
from radixlink_store_mooncake import MooncakeSettings, MooncakeStoreFactory
from radixlink_store_mooncake._engine import make_client, make_replicate_config
from radixlink_store_mooncake.commands import ending_with_parent, master_command, owner_command
from radixlink_testing.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    import numpy.typing as npt

    from radixlink_contracts import LentFrames
    from radixlink_store_mooncake import MooncakePageStore
    from radixlink_store_mooncake._engine import MooncakeClient, ReplicateConfig

    Bytes: TypeAlias = npt.NDArray[np.uint8]

_SEGMENT_BYTES: Final = 4 << 30
_START_TIMEOUT_S: Final = 20.0
_WARM_UP_TURNS: Final = 20


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[None]:
    """A process that listens at a port."""
    with subprocess.Popen(
        ending_with_parent(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            deadline = time.monotonic() + _START_TIMEOUT_S
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1.0).close()
                    break
                except OSError:
                    if time.monotonic() > deadline or process.poll() is not None:
                        raise
                    time.sleep(0.02)
            yield
        finally:
            process.kill()


@attrs.define(kw_only=True, eq=False)
class Sides:
    """The sides of each turn. The last field is what `write_lent` has filled for `lent_put`."""

    client: MooncakeClient
    config: ReplicateConfig
    store: MooncakePageStore
    memory: Bytes
    staging: Bytes
    source: Bytes
    out: bytearray
    pages: int
    page_bytes: int
    _filled: LentFrames | None = attrs.field(default=None, init=False)

    def _addresses(self, memory: Bytes) -> list[int]:
        start = memory.ctypes.data
        return [start + page * self.page_bytes for page in range(self.pages)]

    def write(self) -> None:
        """The bytes to put are written by this process."""
        np.copyto(self.memory, self.source)

    def write_lent(self) -> None:
        """The same, written into lent memory."""
        lent = self._filled = self.store.lend(self.pages)
        assert lent is not None
        np.copyto(self._rows(lent), self.source.reshape(self.pages, self.page_bytes))

    def _rows(self, lent: LentFrames) -> Bytes:
        """The pages in lent memory. Shape: (pages, page_bytes)."""
        frames = np.frombuffer(lent.buffer, np.uint8).reshape(self.pages, -1)
        (start,) = self.store.frames.range_offsets
        return frames[:, start : start + self.page_bytes]

    def bare_put(self, turn: int) -> None:
        """One batch put."""
        names, sizes = self._names(turn), [self.page_bytes] * self.pages
        codes = self.client.batch_put_from(names, self._addresses(self.memory), sizes, self.config)
        assert codes == [0] * self.pages, codes

    def checked_put(self, turn: int) -> None:
        """Sums, a copy, and one batch put of it."""
        for page in range(self.pages):
            row = slice(page * self.page_bytes, (page + 1) * self.page_bytes)
            xxh3_64_intdigest(self.memory[row].data)
            np.copyto(self.staging[row], self.memory[row])
        names, sizes = self._names(turn, "checked"), [self.page_bytes] * self.pages
        addresses = self._addresses(self.staging)
        codes = self.client.batch_put_from(names, addresses, sizes, self.config)
        assert codes == [0] * self.pages, codes

    def copied_put(self, turn: int) -> None:
        """The same bytes into the store."""
        keys = self._keys(turn, "copied")
        assert self.store.put(keys, [self.memory.data]).complete, self.store.counters

    def lent_put(self, turn: int) -> None:
        """The same bytes, which lie in the store's memory, into the store."""
        lent = self._filled
        assert lent is not None
        assert self.store.put_lent(self._keys(turn, "lent"), lent).complete, self.store.counters
        lent.release()

    def bare_load(self, turn: int) -> None:
        """One batch get."""
        names, sizes = self._names(turn), [self.page_bytes] * self.pages
        codes = self.client.batch_get_into(names, self._addresses(self.memory), sizes)
        assert codes == sizes, codes

    def checked_load(self, turn: int) -> None:
        """One batch get, a copy, and sums of it."""
        names, sizes = self._names(turn), [self.page_bytes] * self.pages
        codes = self.client.batch_get_into(names, self._addresses(self.staging), sizes)
        assert codes == sizes, codes
        out = np.frombuffer(self.out, np.uint8)
        for page in range(self.pages):
            row = slice(page * self.page_bytes, (page + 1) * self.page_bytes)
            np.copyto(out[row], self.staging[row])
            xxh3_64_intdigest(out[row].data)

    def copied_load(self, turn: int) -> None:
        """The same from the store, verified."""
        handles = self.store.open(self._keys(turn, "copied"), 10.0)
        assert self.store.read(handles, 0, self.out).complete, self.store.counters

    def lent_load(self, turn: int) -> None:
        """The same into the store's memory, verified there."""
        lent = self.store.lend(self.pages)
        assert lent is not None
        handles = self.store.open_lent(self._keys(turn, "lent"), 10.0, lent)
        assert self.store.verify(handles, 0, lent).complete, self.store.counters
        lent.release()

    def _names(self, turn: int, who: str = "bare") -> list[str]:
        return [f"{who}/{turn}/{page}" for page in range(self.pages)]

    def _keys(self, turn: int, who: str) -> PageKeys:
        return PageKeys.join(
            turn.to_bytes(8, "little") + who.ljust(8).encode() + page.to_bytes(16, "little")
            for page in range(self.pages)
        )


def nothing() -> None:
    """What a side needs that needs nothing."""


def turns(
    sides: list[tuple[Callable[[], None], Callable[[int], None]]], count: int
) -> list[list[float]]:
    """The seconds of all sides, turn by turn; who is first changes.

    Args:
        sides: What each needs before its time starts, and the side.
        count: How many turns.
    """
    seconds = []
    for turn in range(_WARM_UP_TURNS + count):
        took = [0.0] * len(sides)
        for place in range(len(sides)):
            number = (turn + place) % len(sides)
            prepare, side = sides[number]
            prepare()
            started = time.perf_counter()
            side(turn)
            took[number] = time.perf_counter() - started
        seconds.append(took)
    return seconds[_WARM_UP_TURNS:]


def row(name: str, seconds: list[list[float]], num_bytes: int) -> str:
    """One line of the table."""
    bare, *others = (statistics.median(side) for side in zip(*seconds, strict=True))
    columns = "".join(f"{side * 1e3:9.3f} {(side / bare - 1) * 100:+5.1f} %" for side in others)
    return f"{name:6}{bare * 1e3:9.3f}{columns}{num_bytes / others[-1] / 1e9:9.2f}"


def measure(address: str, pages: int, page_bytes: int, count: int) -> None:
    """Print a line for put and one for load."""
    settings = MooncakeSettings(
        master_server_address=address, buffer_bytes=pages * (page_bytes + 4096)
    )
    factory = MooncakeStoreFactory(settings=settings)
    identity = CacheIdentity(
        model="bench", revision="1", dtype="uint8", page_size=16, num_layers=1, layout="bytes"
    )
    layout = PoolLayout(identity=identity, pool=PoolName.KV, range_bytes=(page_bytes,))
    client = make_client()
    code = client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", address)
    assert code == 0, code
    memory = np.random.default_rng(1).integers(0, 256, pages * page_bytes, np.uint8)
    staging = memory.copy()
    for registered in (memory, staging):
        assert client.register_buffer(registered.ctypes.data, registered.nbytes) == 0
    sides = Sides(
        client=client,
        config=make_replicate_config(settings),
        store=factory.open(layout),
        memory=memory,
        staging=staging,
        source=memory.copy(),
        out=bytearray(memory.nbytes),
        pages=pages,
        page_bytes=page_bytes,
    )
    # The owner's memory is slow at its first touch.
    warm = _SEGMENT_BYTES * 85 // 100 // (pages * page_bytes)
    for turn in range(warm):
        sides.bare_put(-1 - turn)
    client.batch_remove(
        [f"bare/{-1 - t}/{p}" for t in range(warm) for p in range(pages)], force=True
    )
    written, lent = sides.write, sides.write_lent
    puts = turns(
        [
            (written, sides.bare_put),
            (written, sides.checked_put),
            (written, sides.copied_put),
            (lent, sides.lent_put),
        ],
        count,
    )
    loads = turns(
        [
            (nothing, side)
            for side in (sides.bare_load, sides.checked_load, sides.copied_load, sides.lent_load)
        ],
        count,
    )
    print(
        f"{pages} x {page_bytes >> 10} KiB, medians of {count} turns in ms, to bare; GB/s of lent"
    )
    print("           bare          checked           copied             lent     GB/s")
    print(row("put", puts, memory.nbytes))
    print(row("load", loads, memory.nbytes))
    print(sides.store.counters)
    client.close()
    factory.close()


def main() -> None:
    """Start a Mooncake, measure, end it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=8)
    parser.add_argument("--page-kib", type=int, default=512)
    parser.add_argument("--turns", type=int, default=200)
    given = parser.parse_args()
    port, owner_port = free_port(), free_port()
    address = f"127.0.0.1:{port}"
    with (
        running(master_command(port, free_port()), port),
        running(owner_command(address, owner_port, _SEGMENT_BYTES), owner_port),
    ):
        measure(address, given.pages, given.page_kib << 10, given.turns)


if __name__ == "__main__":
    main()
