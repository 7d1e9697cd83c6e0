"""The signals that end the command: they interrupt what it does, never how it cleans up.

Rules of the file:

1. a signal that comes before the part that may be interrupted is held back until that part begins;
2. in that part the first one raises KeyboardInterrupt, and by that ends the part;
3. whatever comes after it is ignored: somebody presses Ctrl-C twice, or a shell sends SIGHUP and SIGTERM;
4. a signal that was ignored before stays ignored: `nohup` means it;
5. a step of that part that must be done whole holds them back too: what came meanwhile ends the part after it.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndingSignals:
    """SIGINT, SIGTERM and SIGHUP, held back but where `interrupting` lets them through. A context manager.

    Thread: the main one.
    """

    def __init__(self) -> None:
        """Holds nothing back yet."""
        self._came = False
        self._interruptible = False
        #: What handled each before.
        self._before: dict[signal.Signals, Callable[..., object] | int | None] = {}

    def __enter__(self) -> Self:
        """Hold them back."""
        for number in _ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        """They do again what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """The part that may be interrupted; once it has ended, signals are ignored.

        Raises:
            KeyboardInterrupt: One of them came, or had come before.
        """
        self._interruptible = True
        try:
            if self._came:
                raise KeyboardInterrupt
            yield
        finally:
            self._interruptible = False

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """A step that is not interrupted, such as starting what must be ended: a signal waits until it is done.

        Raises:
            KeyboardInterrupt: One came meanwhile, and may interrupt what follows.
        """
        interruptible, self._interruptible = self._interruptible, False
        try:
            yield
        finally:
            self._interruptible = interruptible
            if interruptible and self._came:
                self._interruptible = False
                raise KeyboardInterrupt

    def _receive(self, *_: object) -> None:
        """Take note of a signal, and raise where that is allowed."""
        self._came = True
        if self._interruptible:
            self._interruptible = False
            raise KeyboardInterrupt
