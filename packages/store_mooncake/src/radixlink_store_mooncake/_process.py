"""Which process may use Mooncake: not the forked child of one that has connected.

A child has none of its parent's threads, and Mooncake does nothing without its own. Tried: in such a
child a call does not return; nor does `setup` for a connection of the child's own, which holds
Python's lock meanwhile, so that no deadline helps; and to close a connection, even to drop it, ends
the child by a signal. That stays so after the parent has disconnected. Hence the processes that have
connected are remembered: it is the one thing here that belongs to the process. One that is about to
counts as well, for its child cannot know how far another thread had come at the fork.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Final

from radixlink_contracts.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

_CONNECTED: Final[set[tuple[int, int]]] = set()
"""Processes, each with the thread that connects or has: a failure takes back none but its own."""


@contextlib.contextmanager
def about_to_connect() -> Iterator[None]:
    """Around what precedes `setup`: this process's children may not connect from its start on.

    If it raises, no `setup` follows, and children that are forked later may.
    """
    this = os.getpid(), threading.get_ident()
    is_first = this not in _CONNECTED
    _CONNECTED.add(this)
    try:
        yield
    except BaseException:
        if is_first:
            _CONNECTED.discard(this)
        raise


def require_no_fork() -> None:
    """This process is not the forked child of one that had begun to connect.

    Raises:
        BackendUnavailableError: It is.
    """
    process = os.getpid()
    ancestors = {each for each, _ in tuple(_CONNECTED)} - {process}
    if ancestors:
        raise BackendUnavailableError(
            f"Mooncake store: expected a process that was spawned, or forked before its parent "
            f"connected to Mooncake, got {process}, forked from {min(ancestors)} after that; "
            f"Mooncake does not work there"
        )
