"""`Health`: whether a group may still be used, and the words in which it says no.

Rules of this file:

1. A group is OPEN, then perhaps BROKEN, then CLOSED; there is no way back.
2. A collective that fails breaks its group, whatever failed: another rank may have completed it.
3. Every `AgreementError` of this package is worded here.

| state  | a collective          | `renew`, `roll_call`    | `close` |
|--------|-----------------------|-------------------------|---------|
| OPEN   | goes on               | goes on                 | CLOSED  |
| BROKEN | AgreementError        | goes on                 | CLOSED  |
| CLOSED | InvalidTransitionError | InvalidTransitionError | nothing |

A `renew` that succeeds closes the group that it renews; one that fails breaks it, and may be tried
again.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

from radixlink_contracts.errors import AgreementError, InvalidTransitionError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: How long a failed collective waits for the other ranks' marks: by so much an error may come after
#: its deadline.
ROLL_CALL_S: Final = 0.5

#: What is said of a rank that left no mark.
NO_ANSWER: Final = "no answer"

#: Why most collectives fail.
LATE: Final = "not all ranks took part in time"

#: Why else, where it can be seen.
MIXED: Final = "the ranks called different collectives"


class CollectiveError(Exception):
    """What a transport saw go wrong. The group makes an `AgreementError` of it.

    Attributes:
        reason: What happened.
        known: What the transport knows of single ranks, by rank; the roll call asks for the others.
    """

    def __init__(self, reason: str, known: Mapping[int, str] | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.known = dict(known or {})


class State(enum.Enum):
    """Whether a group may be used."""

    #: All is well.
    OPEN = enum.auto()
    #: A collective failed: only `renew`, `roll_call` and `close` are left.
    BROKEN = enum.auto()
    #: Closed, or renewed.
    CLOSED = enum.auto()


class Health:
    """The state of one group on one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._state = State.OPEN
        #: What happened to the group, oldest first. The first failure is what later errors repeat.
        self._story: list[str] = []
        #: Of the first failure; empty before.
        self._by_rank: dict[int, str] = {}

    @property
    def state(self) -> State:
        """Where the group stands."""
        return self._state

    def admit(self, call: str) -> None:
        """Return if a collective may be entered.

        Raises:
            AgreementError: An earlier one failed.
            InvalidTransitionError: The group was closed or renewed.
        """
        if self._state is State.OPEN:
            return
        self.admit_recovery(call)
        raise AgreementError(
            f"{call}: the group is unusable until all ranks renew it, since {self._story[0]}",
            by_rank=self._by_rank,
            rank=self._rank,
        )

    def admit_recovery(self, call: str) -> None:
        """Return if `call`, which a broken group allows, may be entered.

        Raises:
            InvalidTransitionError: The group was closed or renewed.
        """
        if self._state is State.CLOSED:
            raise InvalidTransitionError(
                f"{call}: the group is closed: {self._story[-1]}",
                state=self._state.name,
                event=call,
                story=tuple(self._story),
            )

    def broke(self, message: str, by_rank: Mapping[int, str]) -> AgreementError:
        """Break the group and return the error to raise."""
        self._story.append(message)
        self._state = State.BROKEN
        self._by_rank = self._by_rank or dict(by_rank)
        return AgreementError(message, by_rank=by_rank, rank=self._rank)

    def close(self, why: str) -> None:
        """End the group."""
        self._story.append(why)
        self._state = State.CLOSED


def wording(where: str, timeout_s: float, reason: str, by_rank: Mapping[int, str]) -> str:
    """The message of a failed collective: which, why, its deadline, what is known of each rank."""
    ranks = "; ".join(f"rank {rank}: {said}" for rank, said in sorted(by_rank.items()))
    return f"{where}: {reason}, deadline {timeout_s:g} s; {ranks}"


def not_created(
    kind: str, timeout_s: float, error: CollectiveError, rank: int, size: int
) -> AgreementError:
    """The error of a group that never came to be."""
    by_rank = {other: error.known.get(other, NO_ANSWER) for other in range(size)}
    by_rank[rank] = "in create"
    message = wording(f"{kind}.create", timeout_s, error.reason, by_rank)
    return AgreementError(message, by_rank=by_rank, rank=rank)
