"""Pages that memory had no room for a moment ago.

To find that out costs a read of each page from its file. So a page that was refused is not tried
again for a while, which doubles as long as it is refused each time, and is forgotten when the page
was not refused for as long again.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

FIRST_S: Final = 0.1
"""For how long a page is not tried again after the first time."""

LONGEST_S: Final = 3.2
"""After any number of times: a load that keeps others out ends in some seconds."""

MOST_PAGES: Final = 1 << 14
"""Pages that are remembered, the last ones: some 4 MB."""


class Refusals:
    """Which pages are not to be tried now.

    Thread: any.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know of none.

        Args:
            clock: Seconds.
        """
        self._clock: Final = clock
        self._mutex: Final = threading.Lock()
        #: Until when, and for how long that was; the last refused one is the last.
        self._until: Final[dict[bytes, tuple[float, float]]] = {}

    def __contains__(self, key: bytes) -> bool:
        """Whether a page is not to be tried now."""
        until = self._until.get(key)
        return until is not None and self._clock() < until[0]

    def __len__(self) -> int:
        """How many pages are remembered."""
        return len(self._until)

    def add(self, keys: Iterable[bytes]) -> None:
        """Remember pages that were refused just now."""
        now = self._clock()
        with self._mutex:
            for key in keys:
                until, lasted_s = self._until.pop(key, (now, 0.0))
                again = now < until + lasted_s
                pause_s = min(2 * lasted_s, LONGEST_S) if again else FIRST_S
                self._until[key] = now + pause_s, pause_s
            while len(self._until) > MOST_PAGES:
                del self._until[next(iter(self._until))]

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget pages that were taken."""
        if self._until:
            with self._mutex:
                for key in keys:
                    self._until.pop(key, None)
