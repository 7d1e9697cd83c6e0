"""A mutex that a forked child finds free.

A child has the memory of its parent as it was at the fork, and none of its threads: a lock that
another thread held then is never released there. So every child is given new locks before anything
else of it runs; the set of those that there are is the one thing here that belongs to the process.

What a child never takes needs none: the persistent tier has locks of its parent's alone (`_tiered`).
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Final

_ALL: Final[weakref.WeakSet[ProcessMutex]] = weakref.WeakSet()


class ProcessMutex:
    """What a thread holds while it changes something, in its own process.

    What is changed must stand a fork in the middle, by another thread.

    Attributes:
        lock: The lock of this process. Held with `with`, for a moment, and never kept elsewhere.

    Thread: any.
    """

    __slots__ = ("__weakref__", "lock")

    def __init__(self) -> None:
        """Be free."""
        self.lock = threading.Lock()
        _ALL.add(self)


def _renew() -> None:
    """Free all of them, in a child that has no other thread yet."""
    for mutex in _ALL:
        mutex.lock = threading.Lock()


os.register_at_fork(after_in_child=_renew)
