"""`PendingGeneration`: an answer that is on its way, or was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from radixlink_contracts.errors import InvalidTransitionError

if TYPE_CHECKING:
    from radixlink_contracts import RequestId
    from radixlink_transformers._values import Generation


class PendingGeneration:
    """How a request stands: on its way, answered, failed or aborted.

    Thread: the scheduler's.
    """

    def __init__(self, request_id: RequestId) -> None:
        """It is on its way."""
        self._request_id: Final = request_id
        self._is_over = False
        self._outcome: Generation | Exception | None = None

    @property
    def request_id(self) -> RequestId:
        """Whose answer it is."""
        return self._request_id

    @property
    def is_over(self) -> bool:
        """Nothing more becomes of it."""
        return self._is_over

    @property
    def error(self) -> Exception | None:
        """Why there is no answer, for a request that failed."""
        return self._outcome if isinstance(self._outcome, Exception) else None

    def result(self) -> Generation:
        """The answer.

        Raises:
            InvalidTransitionError: There is none: it is on its way, or was aborted.
            Exception: What the request failed with.
        """
        if isinstance(self._outcome, Exception):
            raise self._outcome
        if self._outcome is None:
            state = "aborted" if self._is_over else "on its way"
            raise InvalidTransitionError(
                f"result of {self._request_id}: expected an answer, got a request that is {state}",
                state=state,
                event="result",
            )
        return self._outcome

    def end(self, outcome: Generation | Exception | None) -> None:
        """It is over, and this is what became of it; None where it was aborted. The engine's."""
        self._is_over = True
        self._outcome = outcome
