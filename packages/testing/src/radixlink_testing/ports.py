"""Ports of loopback for programs that a test starts."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOWEST: Final = 1 << 13
_TRIES: Final = 100
_OF_CONNECTIONS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A TCP port of loopback that nobody listens on, for a program that binds it some seconds later.

    It is none of those that the kernel gives to connections, and to who asks for any port: such a one
    may be the near end of somebody's connection by the time it is bound, or be given to the next who
    asks. Where they leave no room, or the system does not say which they are, it is one of them. A
    process gets each of the others once, so that two asked for in turn differ.

    Raises:
        OSError: All that were tried are taken.
    """
    for port in itertools.chain(itertools.islice(_ports(), _TRIES), (0,)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found: int = probe.getsockname()[1]
            return found
    raise OSError(f"expected a free port of 127.0.0.1, got none in {_TRIES} tries")


@functools.cache
def _ports() -> Iterator[int]:
    """What is below the ports of connections, in an order of this process."""
    try:
        lowest = int(_OF_CONNECTIONS.read_text("ascii").split()[0])
    except OSError:
        return iter(())
    ports = range(_LOWEST, lowest)
    return iter(random.sample(ports, len(ports)))
