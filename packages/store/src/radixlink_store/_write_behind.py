"""What waits to be written, and the thread that writes it.

A call that stores pages must not wait for a disk, so it leaves their keys here; the pages wait
where they are. The queue is bounded by the bytes of these pages: what is too much is refused, and
the caller counts it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import PageKeys


_LONGEST_S: Final = threading.TIMEOUT_MAX / 2
"""Python waits no longer, and fails if it is asked to."""


class WriteBehind:
    """A queue of pages, and one thread.

    Thread: any.
    """

    def __init__(
        self,
        write: Callable[[PageKeys], PageKeys],
        pause_s: Callable[[], float],
        end: Callable[[], None],
        max_pages: int,
    ) -> None:
        """Start nothing yet; the thread starts with the first pages.

        Args:
            write: Writes pages, in the thread. Returns those that have to wait.
            pause_s: For how many seconds it makes no sense to write.
            end: Called once when nothing will be written any more; by the thread, if there was one.
            max_pages: How many may wait.
        """
        self._write: Final = write
        self._pause_s: Final = pause_s
        self._end: Final = end
        self._max_pages: Final = max_pages
        # `with` enters a lock in C, a condition in Python, where a signal's exception would keep it.
        self._lock: Final = threading.RLock()
        self._changed: Final = threading.Condition(self._lock)
        self._waiting: Final[deque[PageKeys]] = deque()
        #: Pages that wait or are being written.
        self._num_pages = 0
        self._thread: threading.Thread | None = None
        self._ended = False
        #: When closing gives up, by `time.monotonic`; None while open.
        self._deadline: float | None = None

    def offer(self, keys: PageKeys) -> int:
        """Leave pages to be written.

        Returns:
            How many are refused: they are too many, or this was closed, or there is no thread to
            write them. The first ones are taken.
        """
        with self._lock:
            is_open = self._deadline is None and not self._ended
            room = self._max_pages - self._num_pages if is_open else 0
            taken = keys if len(keys) <= room else keys.span(0, max(0, room))
            if len(taken) and not self._start():
                return len(keys)
            if len(taken):
                self._waiting.append(taken)
                self._num_pages += len(taken)
                self._changed.notify_all()
            return len(keys) - len(taken)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was left here before is written, or cannot be.

        Returns:
            Whether that is so; False after the time is up.
        """
        with self._lock:
            self._changed.wait_for(
                lambda: not self._num_pages or self._ended, min(timeout_s, _LONGEST_S)
            )
            return not self._num_pages

    def close(self, timeout_s: float) -> int:
        """Take no more, write what waits as far as time allows, and end the thread.

        A thread that waits for a disk beyond that is left to end by itself. Idempotent.

        Returns:
            How many pages were not written.
        """
        with self._lock:
            if self._deadline is not None:
                return 0
            self._deadline = time.monotonic() + timeout_s
            self._changed.notify_all()
        if self._thread is None or self._thread.ident is None:
            self._end()
            return 0
        self._thread.join(min(timeout_s + 1.0, _LONGEST_S))
        with self._lock:
            return self._num_pages

    def _start(self) -> bool:
        """Have a thread; the lock is held. Not, where the system allows no more of them now."""
        if self._thread is None:
            # Known before it runs: a signal's exception may leave `start` once it does.
            self._thread = threading.Thread(
                target=self._run, name="radixlink-write-behind", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError:
                self._thread = None
                return False
        return True

    def _run(self) -> None:
        """Write until closed."""
        try:
            while (keys := self._next()) is not None:
                rest = self._write(keys)
                with self._lock:
                    self._num_pages -= len(keys) - len(rest)
                    if len(rest):
                        self._waiting.appendleft(rest)
                    self._changed.notify_all()
        finally:
            with self._lock:
                self._ended = True
                self._changed.notify_all()
            self._end()

    def _next(self) -> PageKeys | None:
        """The pages to write next, once there are some and it makes sense; None for the end."""
        with self._lock:
            while True:
                pause_s = self._pause_s()
                if self._deadline is not None and (
                    not self._waiting or pause_s or time.monotonic() >= self._deadline
                ):
                    return None
                if self._waiting and not pause_s:
                    return self._waiting.popleft()
                self._changed.wait(min(pause_s, _LONGEST_S) or None)
