"""Which process may use Mooncake: not the forked child of one that has connected.

A child has none of its parent's threads, and Mooncake does nothing without its own. Tried: in such a
child a call does not return; nor does `setup` for a connection of the child's own, which holds
Python's lock meanwhile, so that no deadline helps; and to close a connection, even to drop it, ends
the child by a signal. That stays so after the parent has disconnected. Hence the processes that have
connected are remembered: it is the one thing here that belongs to the process.
"""

from __future__ import annotations

import os
from typing import Final

from radixlink_contracts.errors import BackendUnavailableError

_CONNECTED: Final[set[int]] = set()


def note_connecting() -> None:
    """This process connects: its forked children may not from now on."""
    _CONNECTED.add(os.getpid())


def require_no_fork() -> None:
    """This process is not the forked child of one that has connected.

    Raises:
        BackendUnavailableError: It is.
    """
    process = os.getpid()
    ancestors = _CONNECTED - {process}
    if ancestors:
        raise BackendUnavailableError(
            f"Mooncake store: expected a process that was spawned, or forked before its parent "
            f"connected to Mooncake, got {process}, forked from {min(ancestors)} after that; "
            f"Mooncake does not work there"
        )
