"""Page tables filled ahead: the first touch of a mapping costs several times a copy.

Each process has page tables of its own, so each opener pays once for every 4 KiB, whoever wrote
there before. A thread pays in the background, a piece at a time, so that it never keeps the memory
map locked for long.
"""

from __future__ import annotations

import threading
from typing import Final

from radixlink_store._address import address_of
from radixlink_store._advice import Advice, advise

_PIECE_BYTES: Final = 1 << 21


class Prefault:
    """Fills the page tables of a mapping, in a thread.

    Thread: any.
    """

    def __init__(self, memory: memoryview, *, write: bool) -> None:
        """Start.

        Args:
            memory: The mapping, or its beginning. It starts at a page.
            write: Fill the tables for writing, which makes pages of a file on a disk dirty; else
                for reading.
        """
        self._memory: memoryview | None = memory
        self._advice: Final = Advice.POPULATE_WRITE if write else Advice.POPULATE_READ
        # No `threading.Event`: its lock may be held at a fork, and the child stops this as well.
        self._stopped = False
        self._thread: Final = threading.Thread(
            target=self._run, name="radixlink-prefault", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is done.

        Returns:
            Whether it is.
        """
        self._thread.join(min(timeout_s, threading.TIMEOUT_MAX))
        return not self._thread.is_alive()

    def stop(self) -> None:
        """End it, done or not, and let go of the memory. Idempotent; waits for a piece at most."""
        self._stopped = True
        self._thread.join()
        self._memory = None

    def _run(self) -> None:
        memory = self._memory
        if memory is None:
            return
        start = address_of(memory)
        for offset in range(0, memory.nbytes, _PIECE_BYTES):
            length = min(_PIECE_BYTES, memory.nbytes - offset)
            # Refused by kernels before 5.14: then the first touches cost what they cost.
            if self._stopped or advise(start + offset, length, self._advice):
                return
