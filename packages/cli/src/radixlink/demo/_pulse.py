"""A sign of life from a replica that works long: how many tokens it has, every few seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL_S: Final = 3.0
"""Longer than that only a single forward is silent."""


class Pulse:
    """Tells what begins, and while it lasts how far it is."""

    def __init__(
        self, say: Callable[[str], None], now: Callable[[], float], interval_s: float = INTERVAL_S
    ) -> None:
        """Begin with nothing.

        Args:
            say: Gets each text.
            now: A clock, in seconds.
            interval_s: The least time between two texts about one thing.
        """
        self._say: Final = say
        self._now: Final = now
        self._interval_s: Final = interval_s
        self._text = ""
        self._num_forwards = 0
        self._told_at = now()

    def begin(self, text: str) -> None:
        """Tell what begins, and count anew."""
        self._text = text
        self._num_forwards = 0
        self._told_at = self._now()
        self._say(text)

    def forward(self, *_: object) -> None:
        """The model is about to run; each run after the first means that one more token is known."""
        num_tokens = self._num_forwards
        self._num_forwards += 1
        if num_tokens and self._now() - self._told_at >= self._interval_s:
            self._told_at = self._now()
            self._say(f"{self._text}; tokens so far: {num_tokens}")
