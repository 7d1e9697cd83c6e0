"""`TimedLookups`: lookups that a scheduler waits for, but not for long."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import attrs

from radixlink_contracts.texts import named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import (
        Executor,
        PoolTransfer,
        PoolTransferResult,
        RequestId,
        UnifiedCacheLinker,
    )


@attrs.define(eq=False)
class _Answer:
    """What one lookup came to; guarded by its event.

    Attributes:
        told: Set once it is there.
        result: What the stores said; None where they failed.
        why: How they failed.
    """

    told: threading.Event = attrs.field(factory=threading.Event)
    result: PoolTransferResult | None = None
    why: str = ""


@attrs.frozen
class LookupFailed:
    """There is no answer.

    Attributes:
        why: For people.
        late: The store said nothing in time.
    """

    why: str
    late: bool = False


class TimedLookups:
    """Runs lookups on another thread and waits for them.

    Thread: one.
    """

    def __init__(self, linker: UnifiedCacheLinker, executor: Executor, timeout_s: float) -> None:
        """Ask `linker` on `executor`, for at most `timeout_s` seconds each."""
        self._linker: Final = linker
        self._executor: Final = executor
        self._timeout_s: Final = timeout_s

    def ask(
        self, request_id: RequestId, transfers: Sequence[PoolTransfer]
    ) -> PoolTransferResult | LookupFailed:
        """What the stores say within the time."""
        answer = _Answer()

        def look_up() -> None:
            try:
                answer.result = self._linker.lookup(request_id, transfers)
            except Exception as error:  # noqa: BLE001 -- whatever it is, it is a miss of this rank
                answer.why = named(error)
            except BaseException as error:
                # The executor's to deal with, but nobody is to wait for an answer.
                answer.why = named(error)
                raise
            finally:
                answer.told.set()

        try:
            self._executor.submit(look_up)
        except Exception as error:  # noqa: BLE001 -- no thread can be had: likewise
            return LookupFailed(named(error))
        if not answer.told.wait(self._timeout_s):
            return LookupFailed(f"no answer within {self._timeout_s} s", late=True)
        return LookupFailed(answer.why) if answer.result is None else answer.result
