"""Mooncake's client, as far as it is used, and how a process gets one."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

from radixlink_contracts.errors import BackendUnavailableError
from radixlink_store_mooncake._codes import Code
from radixlink_store_mooncake._process import about_to_connect, require_no_fork

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_store_mooncake._settings import MooncakeSettings

_TAIL_CHARACTERS: Final = 1000


class ReplicateConfig(Protocol):
    """How objects are put."""

    replica_num: int
    with_hard_pin: bool
    preferred_segment: str


class MooncakeClient(Protocol):
    """`mooncake.store.MooncakeDistributedStore`. Results are `Code`s, or numbers of bytes."""

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
        /,
    ) -> int:
        """Connect."""
        ...

    def register_buffer(self, address: int, size: int, /) -> int:
        """Let calls use memory."""
        ...

    def unregister_buffer(self, address: int, /) -> int:
        """The reverse."""
        ...

    def batch_is_exist(self, keys: list[str], /) -> list[int]:
        """1 for each object that is whole. Leases it."""
        ...

    def batch_get_into(
        self, keys: list[str], addresses: list[int], sizes: list[int], /
    ) -> list[int]:
        """Objects into memory; the size of each, which may be less than its memory. Leases them."""
        ...

    def get_into_ranges(
        self,
        addresses: list[int],
        keys: list[list[str]],
        to_offsets: list[list[list[int]]],
        from_offsets: list[list[list[int]]],
        sizes: list[list[list[int]]],
        /,
    ) -> list[list[list[int]]]:
        """Ranges of objects into memory: by memory, object and range."""
        ...

    def batch_put_from(
        self,
        keys: list[str],
        addresses: list[int],
        sizes: list[int],
        config: ReplicateConfig,
        /,
    ) -> list[int]:
        """Memory into objects; one that there is stays as it is, and counts as put."""
        ...

    def batch_remove(self, keys: list[str], *, force: bool) -> list[int]:
        """Remove objects; forced, leased ones too."""
        ...

    def get_size(self, key: str, /) -> int:
        """Bytes of an object."""
        ...

    def close(self) -> int:
        """Disconnect; the memory that this process gave goes."""
        ...


def make_client() -> MooncakeClient:
    """A client that is not connected.

    Raises:
        BackendUnavailableError: Mooncake is not installed, or a library that it needs is not.
    """
    module = _load()
    return cast("Callable[[], MooncakeClient]", module["MooncakeDistributedStore"])()


def make_replicate_config(settings: MooncakeSettings) -> ReplicateConfig:
    """How pages are put.

    Raises:
        BackendUnavailableError: See `make_client`.
    """
    config = cast("Callable[[], ReplicateConfig]", _load()["ReplicateConfig"])()
    config.replica_num = settings.replica_num
    config.with_hard_pin = settings.with_hard_pin
    config.preferred_segment = settings.preferred_segment
    return config


def _load() -> dict[str, object]:
    """What the module `mooncake.store` has.

    Imported when a store is opened and not before: it is large, and where it or a library of its is
    missing, that is told as the store's error.
    """
    try:
        return vars(importlib.import_module("mooncake.store"))
    except ImportError as error:
        raise BackendUnavailableError(
            f"Mooncake store: expected Mooncake to be installed, got: {error}; pip install "
            f"mooncake-transfer-engine (or mooncake-transfer-engine-non-cuda), and "
            f"apt-get install libibverbs1"
        ) from error


def connect(client: MooncakeClient, settings: MooncakeSettings, timeout_s: float) -> None:
    """The client is connected to its master.

    Raises:
        BackendUnavailableError: Nobody listens there, or nobody who answers as a master in time; or
            this process was forked from one that has connected.

    Cost: about a second, most of it for a process that tries it first; see `_probe`.
    """
    require_no_fork()
    with about_to_connect():
        # Mooncake tries for minutes where nobody listens; this tells at once.
        local_hostname = settings.local_hostname or _reach(settings, timeout_s)
        _try(settings, local_hostname, timeout_s)
    code = client.setup(
        local_hostname,
        settings.metadata_server,
        settings.global_segment_size,
        settings.local_buffer_size,
        settings.protocol,
        settings.device_name,
        settings.master_server_address,
    )
    if code != Code.OK:
        raise BackendUnavailableError(
            f"Mooncake store: expected to connect to the mooncake_master at "
            f"{settings.master_server_address}, giving {settings.global_segment_size} bytes, got "
            f"code {code}; Mooncake says more in its log on stderr"
        )


def _reach(settings: MooncakeSettings, timeout_s: float) -> str:
    """The address of this host on its way to the master.

    Raises:
        BackendUnavailableError: Nobody listens there.
    """
    try:
        with socket.create_connection(settings.master, timeout_s) as probe:
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise BackendUnavailableError(
            f"Mooncake store: expected a mooncake_master at {settings.master_server_address}, got: "
            f"{error}; start one, or correct the address",
            transient=True,
        ) from error


def _try(settings: MooncakeSettings, local_hostname: str, timeout_s: float) -> None:
    """Another process can connect.

    Raises:
        BackendUnavailableError: It cannot.
    """
    program = str(Path(__file__).with_name("_probe.py"))
    arguments = (
        local_hostname,
        settings.metadata_server,
        settings.protocol,
        settings.device_name,
        settings.master_server_address,
    )
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            # -P: the program's directory, which is this package, is no place to import from.
            [sys.executable, "-P", program, *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BackendUnavailableError(
            f"Mooncake store: expected a mooncake_master at {settings.master_server_address}, got a "
            f"listener that did not answer as one within {timeout_s:g} s",
            transient=True,
        ) from error
    if done.returncode:
        raise BackendUnavailableError(
            f"Mooncake store: expected to connect to the mooncake_master at "
            f"{settings.master_server_address} over {settings.protocol}, got:\n"
            f"{done.stderr.strip()[-_TAIL_CHARACTERS:]}"
        )
