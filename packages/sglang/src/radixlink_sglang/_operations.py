"""One rank's loads and offloads, between SGLang's requests and our operations."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import attrs
from typing_extensions import override

from radixlink_contracts import OperationTicket, Outcome

if TYPE_CHECKING:
    from radixlink_contracts import OperationId, PoolTransfer


class Ticket(OperationTicket):
    """An operation that this rank may give up.

    Thread: `give_up` the scheduler's; the rest any.
    """

    def __init__(self, op: OperationId) -> None:
        """It goes on."""
        self._op: Final = op
        self._decided: Final = threading.Event()

    @property
    @override
    def op(self) -> OperationId:
        """Its id."""
        return self._op

    @property
    @override
    def decided(self) -> bool:
        """True once it was given up: touch no more of its slots."""
        return self._decided.is_set()

    def give_up(self) -> None:
        """No copy of it starts any more."""
        self._decided.set()


@attrs.define(kw_only=True, eq=False)
class Operation:
    """A load or an offload, from its being accepted to its end.

    Attributes:
        ticket: What our linker knows it by.
        transfers: What it moves.
        started_at: On the clock.
        outcome: How it ended; the first that is said counts.
        quiesced: It touches no slot any more.
        why: What went wrong, for people.
    """

    ticket: Ticket
    transfers: tuple[PoolTransfer, ...]
    started_at: float
    outcome: Outcome | None = None
    quiesced: bool = False
    why: str = ""

    @property
    def landed(self) -> bool:
        """All its bytes are where they belong."""
        return self.outcome is Outcome.LANDED

    def end(self, outcome: Outcome, *, quiesced: bool, why: str = "") -> None:
        """Note what was said of it."""
        if self.outcome is None:
            self.outcome, self.why = outcome, why
        self.quiesced = quiesced
