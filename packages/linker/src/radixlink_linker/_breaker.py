"""`Breaker`: whether a store that does not answer is worth another call.

A call that has run for longer than the patience hangs. While one does, whoever is about to begin
something is told so, and need not find it out by waiting itself. Once in a while, each time twice
as long after the last, one is let through. The store is back when what hung has returned, or when a
call of the same kind that began later has: then what hangs is lost, and says nothing of the store
any more.
"""

from __future__ import annotations

import threading
from itertools import count
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from radixlink_contracts import Clock

_LONGEST_BACK_OFF: Final = 16
"""Times the patience."""


@attrs.frozen
class _Call:
    """A call that has not returned.

    Attributes:
        what: Its kind.
        since: When it began, on the clock.
        thread: On which thread, or for which one it waits.
    """

    what: str
    since: float
    thread: int


class Breaker:
    """The calls of one store that are on their way.

    Local: what it says makes this rank's verdict fail sooner, and decides nothing else.
    Thread: any.
    """

    def __init__(self, clock: Clock, *, patience_s: float, max_hanging: int) -> None:
        """Start with no call.

        Args:
            clock: For how long calls take.
            patience_s: Seconds after which a call hangs.
            max_hanging: With so many that hang or are lost, none is let through any more: each has
                a thread.
        """
        self._clock = clock
        self._patience_s = patience_s
        self._max_hanging = max_hanging
        #: Guards all below.
        self._lock = threading.Lock()
        self._numbers = count()
        #: By number, so in the order in which they began.
        self._calls: dict[int, _Call] = {}
        #: Calls that hung when a later one returned.
        self._lost: set[int] = set()
        self._back_off_s = patience_s
        #: When the next is let through; None while nothing hangs, as far as is known.
        self._retry_at: float | None = None

    def begin(self, what: str) -> int:
        """A call of some kind begins on this thread, or is handed to one. Returns its number."""
        call = _Call(what, self._clock.now(), threading.get_ident())
        with self._lock:
            number = next(self._numbers)
            self._calls[number] = call
            return number

    def end(self, number: int) -> None:
        """A call has returned, whatever it said."""
        now = self._clock.now()
        with self._lock:
            self._lost.discard(number)
            ended = self._calls.pop(number, None)
            if ended is None:
                return
            for earlier, call in list(self._calls.items()):
                if earlier > number:
                    return
                if call.what == ended.what and self._hangs(call, now):
                    del self._calls[earlier]
                    self._lost.add(earlier)

    def hanging(self) -> str | None:
        """What hangs, for people; None for nothing."""
        now = self._clock.now()
        with self._lock:
            return self._story(now)

    def refusal(self) -> str | None:
        """Why nothing is to be begun now; None to go ahead, which once in a while is to find out."""
        now = self._clock.now()
        with self._lock:
            story = self._story(now)
            if story is None:
                self._retry_at, self._back_off_s = None, self._patience_s
                return None
            if self._retry_at is None:
                self._retry_at = now + self._back_off_s
            num_hanging = len(self._lost) + len(self._calls)
            if now < self._retry_at or num_hanging >= self._max_hanging:
                return story
            self._back_off_s = min(2 * self._back_off_s, _LONGEST_BACK_OFF * self._patience_s)
            self._retry_at = now + self._back_off_s
            return None

    def hangs_on(self, thread: int | None) -> bool:
        """True when a call that hangs was begun by this thread."""
        now = self._clock.now()
        with self._lock:
            return any(
                call.thread == thread and self._hangs(call, now) for call in self._calls.values()
            )

    def _hangs(self, call: _Call, now: float) -> bool:
        return now - call.since >= self._patience_s

    def _story(self, now: float) -> str | None:
        """What has hung for longest."""
        for call in self._calls.values():
            if self._hangs(call, now):
                return f"the store hangs: {call.what} has not returned for {now - call.since:.1f} s"
        return None
