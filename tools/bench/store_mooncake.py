"""What the Mooncake store adds to Mooncake's own batch calls: medians of interleaved turns.

    python tools/bench/store_mooncake.py [--pages 8] [--page-kib 512] [--turns 200]

A master and one owner are processes of their own on loopback, over TCP. Each turn moves the same
number of bytes three times, in an order that changes by turns:

    bare     one batch call of Mooncake's
    checked  the same call, and by hand what a checksum takes: one XXH3 and one copy of each page
    store    by the store: `put`; or `open` and `read`

What is put was just written, as an engine's copy from its device writes it. The owner's memory was
written before.
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    import numpy.typing as npt

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


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@attrs.frozen(kw_only=True, eq=False)
class Sides:
    """The sides of each turn."""

    client: MooncakeClient
    config: ReplicateConfig
    store: MooncakePageStore
    memory: Bytes
    staging: Bytes
    source: Bytes
    out: bytearray
    pages: int
    page_bytes: int

    def _addresses(self, memory: Bytes) -> list[int]:
        start = memory.ctypes.data
        return [start + page * self.page_bytes for page in range(self.pages)]

    def write(self) -> None:
        """The bytes to put are written by this process."""
        np.copyto(self.memory, self.source)

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

    def store_put(self, turn: int) -> None:
        """The same bytes into the store."""
        assert self.store.put(self._keys(turn), [self.memory.data]).complete, self.store.counters

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

    def store_load(self, turn: int) -> None:
        """The same from the store, verified."""
        handles = self.store.open(self._keys(turn), 10.0)
        assert self.store.read(handles, 0, self.out).complete, self.store.counters

    def _names(self, turn: int, who: str = "bare") -> list[str]:
        return [f"{who}/{turn}/{page}" for page in range(self.pages)]

    def _keys(self, turn: int) -> PageKeys:
        return PageKeys.join(
            turn.to_bytes(16, "little") + page.to_bytes(16, "little") for page in range(self.pages)
        )


def turns(
    sides: list[Callable[[int], None]], prepare: Callable[[], None], count: int
) -> list[list[float]]:
    """The seconds of all sides, turn by turn; who is first changes."""
    seconds = []
    for turn in range(_WARM_UP_TURNS + count):
        took = [0.0] * len(sides)
        for place in range(len(sides)):
            side = (turn + place) % len(sides)
            prepare()
            started = time.perf_counter()
            sides[side](turn)
            took[side] = time.perf_counter() - started
        seconds.append(took)
    return seconds[_WARM_UP_TURNS:]


def row(name: str, seconds: list[list[float]], num_bytes: int) -> str:
    """One line of the table."""
    bare, checked, ours = (statistics.median(side) for side in zip(*seconds, strict=True))
    return (
        f"{name:6}{bare * 1e3:9.3f}{checked * 1e3:9.3f}{ours * 1e3:9.3f}"
        f"{(ours / bare - 1) * 100:9.1f} %{(ours / checked - 1) * 100:9.1f} %"
        f"{num_bytes / ours / 1e9:9.2f}"
    )


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
    puts = turns([sides.bare_put, sides.checked_put, sides.store_put], sides.write, count)
    loads = turns([sides.bare_load, sides.checked_load, sides.store_load], lambda: None, count)
    print(f"{pages} x {page_bytes >> 10} KiB, medians of {count} turns in ms; overhead; GB/s")
    print("           bare  checked    store  to bare  to checked     GB/s")
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
