from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from packages.linker.tests.test_store_linker import Ticket

from radixlink_contracts import LoadMode, OperationId, Outcome
from radixlink_contracts.errors import StorageError
from radixlink_linker import LinkerCounters
from radixlink_linker._guarded_linker import GuardedLinker
from radixlink_testing.faults import Nameless

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import PoolTransfer


class Raising:
    """A linker that raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def load(self, *_: object) -> bool:
        raise self.error


class Noted:
    """An operation that takes a note of its end."""

    def __init__(self) -> None:
        self.ticket = Ticket(OperationId(1))
        self.transfers: Sequence[PoolTransfer] = ()
        self.mode = LoadMode.STAGED
        self.told: list[tuple[Outcome, bool, str]] = []

    def note(self, outcome: Outcome, *, quiesced: bool, why: str) -> None:
        self.told.append((outcome, quiesced, why))


@pytest.mark.parametrize(
    ("error", "text"),
    [(StorageError("full"), "StorageError('full')"), (Nameless(), "Nameless")],
    ids=["with text", "without"],
)
def test_whatever_a_backend_raises_is_a_verdict_with_a_text(error: Exception, text: str) -> None:
    counters, operation = LinkerCounters(), Noted()
    guarded = GuardedLinker(Raising(error), counters)  # type: ignore[arg-type]
    guarded.load(operation)  # type: ignore[arg-type]
    assert operation.told == [(Outcome.FAILED, True, text)]
    assert (counters.backend_errors, counters.last_error) == (1, text)
