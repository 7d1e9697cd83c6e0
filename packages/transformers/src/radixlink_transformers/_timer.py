"""`Timer`: the moments of one request, and the figures that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from radixlink_transformers._values import RequestFigures

if TYPE_CHECKING:
    from radixlink_contracts import Clock


@attrs.define
class Timer:
    """Two moments of a request. Starts when it is made."""

    _clock: Clock
    _started: float = attrs.field(init=False)
    _settled: float = attrs.field(init=False)
    _answered: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Start."""
        self._started = self._settled = self._answered = self._clock.now()

    def settled(self) -> None:
        """It is settled what must be computed."""
        self._settled = self._clock.now()

    def answered(self) -> None:
        """The first token is known."""
        self._answered = self._clock.now()

    def figures(
        self, prompt_tokens: int, *, device_tokens: int, restored_tokens: int
    ) -> RequestFigures:
        """The figures of a request that was answered."""
        return RequestFigures(
            prompt_tokens=prompt_tokens,
            device_tokens=device_tokens,
            restored_tokens=restored_tokens,
            computed_tokens=prompt_tokens - device_tokens - restored_tokens,
            time_to_first_token_s=self._answered - self._started,
            load_s=self._settled - self._started,
            compute_s=self._answered - self._settled,
        )
