"""`Buffers`: memory for large messages, used again, since its first touch costs as much as a copy."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_SMALL: Final = 1 << 16
"""Bytes up to which the system's allocator has touched memory at hand."""


class Buffers:
    """Lends memory, and takes it back when the last view of it is gone: nobody returns it.

    So what MPI still uses, and therefore holds, is never lent twice.

    Thread: any.
    """

    def __init__(self, max_idle: int = 2) -> None:
        """Hold nothing yet.

        Args:
            max_idle: How many buffers are kept that nobody uses.
        """
        self._idle: Final[deque[npt.NDArray[np.uint8]]] = deque(maxlen=max_idle)

    def take(self, num_bytes: int) -> memoryview:
        """Memory with anything in it. Shape: (num_bytes,)."""
        if num_bytes <= _SMALL:
            return np.empty(num_bytes, np.uint8).data
        try:
            memory = self._idle.popleft()
        except IndexError:
            memory = np.empty(0, np.uint8)
        if memory.nbytes < num_bytes:
            # More than is asked for costs nothing as long as it is not touched.
            memory = np.empty(1 << (num_bytes - 1).bit_length(), np.uint8)
        lent = memory[:num_bytes]
        # Views hold `lent` and not `memory`, which the call that gives it back holds.
        weakref.finalize(lent, self._idle.append, memory).atexit = False
        return lent.data
