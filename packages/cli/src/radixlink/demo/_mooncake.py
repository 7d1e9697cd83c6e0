"""A Mooncake for one run: a master and one owner, on the loopback device."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING, Final

from radixlink.demo._processes import free_ports
from radixlink.demo._terminal import say
from radixlink.errors import LaunchError, StoreError
from radixlink_contracts.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink.demo._processes import Processes

_START_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.05


def start_mooncake(processes: Processes, store_bytes: int) -> str:
    """Start it.

    Returns:
        The location of its stores.

    Raises:
        StoreError: Mooncake is not installed.
        LaunchError: It does not start.
    """
    from radixlink_store_mooncake import SMALLEST_SEGMENT_BYTES
    from radixlink_store_mooncake.commands import (
        ending_with_parent,
        master_command,
        owner_command,
    )

    port, metrics_port, owner_port = free_ports(3)
    address = f"127.0.0.1:{port}"
    say("starting a mooncake_master and one owner of memory")
    try:
        master = master_command(port, metrics_port)
        owner = owner_command(address, owner_port, max(SMALLEST_SEGMENT_BYTES, store_bytes))
    except BackendUnavailableError as error:
        raise StoreError(f"--store mooncake: {error}") from error
    # Replicas end when the command is gone, however it went; these must be told to.
    _start(processes, "mooncake_master", ending_with_parent(master), port)
    _start(processes, "mooncake_client", ending_with_parent(owner), owner_port)
    return address


def _start(processes: Processes, name: str, command: Sequence[str], port: int) -> None:
    """Start a program and wait until it listens.

    Raises:
        LaunchError: It ended, or does not.
    """
    place = processes.start(name, command, os.environ)
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), _POLL_S):
            return
        ended = processes.ended(place, within_s=_POLL_S)
        if ended is not None:
            raise LaunchError(ended)
    raise LaunchError(f"{name} does not listen at port {port} after {_START_TIMEOUT_S:g} s")
