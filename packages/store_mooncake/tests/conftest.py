"""A real Mooncake on loopback: a master and owners, each a process that is ended by its id."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Final, Protocol, Self, cast

import attrs
import numpy as np
import pytest

from radixlink_contracts.errors import BackendUnavailableError
from radixlink_store_mooncake import (
    SMALLEST_SEGMENT_BYTES,
    MooncakeSettings,
    MooncakeStoreFactory,
)
from radixlink_store_mooncake._engine import (
    MooncakeClient,
    connect,
    make_client,
    make_replicate_config,
)
from radixlink_store_mooncake.commands import ending_with_parent, master_command, owner_command
from radixlink_testing import SUITE_CAPACITY_BYTES
from radixlink_testing.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from radixlink_contracts import PoolLayout

_START_TIMEOUT_S: Final = 20.0
_LEASE_MS: Final = 50
_BALLAST_BYTES: Final = 64 << 10

ROOM_BYTES: Final = 16 * SUITE_CAPACITY_BYTES
"""What the shared Mooncake has for pages: its segment cannot be smaller than 16 MiB."""

BUFFER_BYTES: Final = 64 << 10
"""A staging buffer of the shared connections: 157 pages of the suite."""


class Mooncake:
    """A master and its owners. A context manager: leaving it kills them."""

    def __init__(self, logs: Path, *master_flags: str) -> None:
        self._logs = logs
        self._started: list[subprocess.Popen[bytes]] = []
        port, metrics_port = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        self.master = self._start(master_command(port, metrics_port, *master_flags))
        self._wait_for_listener(self.master, port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.wait()

    def start_owner(self, segment_bytes: int = SMALLEST_SEGMENT_BYTES) -> subprocess.Popen[bytes]:
        """An owner that takes pages."""
        port = free_port()
        owner = self._start(owner_command(self.address, port, segment_bytes))
        # It listens there once its memory is given.
        self._wait_for_listener(owner, port)
        return owner

    def settings(self, **fields: object) -> MooncakeSettings:
        """Settings for this master, with time for a machine that does much else."""
        given = {"master_server_address": self.address, "call_timeout_s": 10.0, **fields}
        return MooncakeSettings.from_fields(given, where="a test")

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self._logs / f"{len(self._started)}.log").open("wb") as log:
            process = subprocess.Popen(
                ending_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    def _wait_for_listener(self, process: subprocess.Popen[bytes], port: int) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                return
            time.sleep(0.02)
        log = self._logs / f"{self._started.index(process)}.log"
        pytest.fail(f"nobody listens at port {port}\n{log.read_text(errors='replace')[-2000:]}")


class _AnyClient(MooncakeClient, Protocol):
    """What only tests call."""

    def remove_by_regex(self, pattern: str, *, force: bool) -> int: ...


class Vandal:
    """A client that knows the objects and keeps no rules."""

    def __init__(self, mooncake: Mooncake) -> None:
        self._client = cast("_AnyClient", make_client())
        self._settings = mooncake.settings()
        connect(self._client, self._settings, _START_TIMEOUT_S)
        self._memory = np.zeros(1 << 20, np.uint8)
        self._address = self._memory.ctypes.data
        assert self._client.register_buffer(self._address, self._memory.nbytes) == 0

    def fill(self, num_bytes: int) -> None:
        """Put so many bytes that are never evicted."""
        config = make_replicate_config(attrs.evolve(self._settings, with_hard_pin=True))
        count = num_bytes // _BALLAST_BYTES
        names = [f"ballast/{number}" for number in range(count)]
        sizes = [_BALLAST_BYTES] * count
        codes = self._client.batch_put_from(names, [self._address] * count, sizes, config)
        assert set(codes) == {0}, codes

    def put(self, name: str, size: int) -> None:
        """Put an object that is no page."""
        self._memory[:size] = 0
        self._put(name, size)

    def _put(self, name: str, size: int) -> None:
        config = make_replicate_config(self._settings)
        assert self._client.batch_put_from([name], [self._address], [size], config) == [0]

    def flip(self, name: str, size: int, offset: int) -> None:
        """Replace an object by one of the same bytes, but for a bit."""
        got = self._client.get_into_ranges([self._address], [[name]], [[[0]]], [[[0]]], [[[size]]])
        assert got == [[[size]]]
        self._memory[offset] ^= 1
        self.remove(name)
        self._put(name, size)

    def remove(self, name: str) -> None:
        """Remove an object, as eviction does."""
        assert self._client.batch_remove([name], force=True) == [0]

    def remove_all(self, pattern: str) -> None:
        """Remove all objects whose name fits."""
        assert self._client.remove_by_regex(pattern, force=True) >= 0

    def size(self, name: str) -> int:
        """Bytes of an object, or a negative code."""
        return self._client.get_size(name)

    def close(self) -> None:
        self._client.close()


@contextlib.contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A process is stopped, not ended: it answers nobody until it goes on."""
    os.kill(process.pid, signal.SIGSTOP)
    # The last of its threads may answer for a moment longer.
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


@pytest.fixture(scope="session")
def _mooncake_is_there() -> None:
    """Skips where Mooncake, or a library that it needs, is not installed."""
    try:
        make_client()
    except BackendUnavailableError as error:
        pytest.skip(str(error))


class StartMooncake(Protocol):
    """The type of the fixture `start_mooncake`."""

    def __call__(self, *master_flags: str) -> Mooncake:
        """A master without owners."""
        ...


@pytest.fixture(scope="session")
def start_mooncake(
    _mooncake_is_there: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartMooncake]:
    """Starts Mooncakes that end with the session: for a test that stops or kills parts of one."""
    with contextlib.ExitStack() as stack:

        def start(*master_flags: str) -> Mooncake:
            return stack.enter_context(Mooncake(tmp_path_factory.mktemp("mooncake"), *master_flags))

        yield start


class Connect(Protocol):
    """The type of the fixture `connect_to`."""

    def __call__(self, mooncake: Mooncake, **fields: object) -> MooncakeStoreFactory:
        """A factory for this Mooncake, with these settings."""
        ...


@pytest.fixture(scope="session")
def connect_to(start_mooncake: StartMooncake) -> Iterator[Connect]:
    """Makes factories that are closed with the session: each takes a second, most of it to close."""
    del start_mooncake  # Its Mooncakes end after the factories.
    with contextlib.ExitStack() as stack:

        def connect_to(mooncake: Mooncake, **fields: object) -> MooncakeStoreFactory:
            factory = MooncakeStoreFactory(settings=mooncake.settings(**fields))
            stack.callback(factory.close)
            return factory

        yield connect_to


@pytest.fixture(scope="session")
def mooncake(start_mooncake: StartMooncake) -> Mooncake:
    """The one of all tests that do it no harm: a master, and an owner that `vandal` fills.

    Its leases are short: while all else is leased, what was just put is evicted first.
    """
    mooncake = start_mooncake(
        "--eviction_high_watermark_ratio=0.995", f"--default_kv_lease_ttl={_LEASE_MS}"
    )
    mooncake.start_owner(SMALLEST_SEGMENT_BYTES)
    return mooncake


@pytest.fixture(scope="session")
def vandal(mooncake: Mooncake) -> Iterator[Vandal]:
    """A vandal in `mooncake`, who has left room for some hundred pages of the suite."""
    vandal = Vandal(mooncake)
    vandal.fill(SMALLEST_SEGMENT_BYTES - ROOM_BYTES)
    yield vandal
    vandal.close()


@attrs.frozen(kw_only=True)
class Namespace:
    """One in `mooncake`, with the one connection of all tests that use it.

    Attributes:
        settings: Of the connection.
        factory: The connection.
        vandal: Who reaches behind its back.
    """

    settings: MooncakeSettings
    factory: MooncakeStoreFactory
    vandal: Vandal

    def name_of(self, layout: PoolLayout, key: bytes) -> str:
        """What the object of a page is called."""
        return f"{self.settings.namespace}/2/{layout.fingerprint.hex()}/{key.hex()}"

    def clear(self) -> None:
        """All pages go."""
        self.vandal.remove_all(f"^{self.settings.namespace}/")


class MakeNamespace(Protocol):
    """The type of the fixture `make_namespace`."""

    def __call__(self, namespace: str, *, whole_pages: bool = True) -> Namespace:
        """A namespace with a connection; made once for each name."""
        ...


@pytest.fixture(scope="session")
def make_namespace(mooncake: Mooncake, vandal: Vandal, connect_to: Connect) -> MakeNamespace:
    """Makes namespaces for tests that share them."""

    @functools.cache
    def make(namespace: str, *, whole_pages: bool = True) -> Namespace:
        fields = {
            "namespace": namespace,
            "whole_pages": whole_pages,
            "buffer_bytes": BUFFER_BYTES,
        }
        return Namespace(
            settings=mooncake.settings(**fields),
            factory=connect_to(mooncake, **fields),
            vandal=vandal,
        )

    return make


@pytest.fixture
def whole(make_namespace: MakeNamespace) -> Iterator[Namespace]:
    """Pages that `open` fetches whole, as is the default; empty."""
    namespace = make_namespace("whole")
    yield namespace
    namespace.clear()


@pytest.fixture
def ranges(make_namespace: MakeNamespace) -> Iterator[Namespace]:
    """Pages that are read range by range; empty."""
    namespace = make_namespace("ranges", whole_pages=False)
    yield namespace
    namespace.clear()
