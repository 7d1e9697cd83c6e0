"""`Scheduler`: requests in flight, whose forwards take turns, one each in an iteration.

Theory of operation. A request is a generator (`_answer`), resumed up to three times an iteration:

1. `step`, and each request is told what the report says of it. Then each is resumed, oldest first:
   it matches, asks for a load or takes room. It says `WAITS`, or that it runs a forward now.
2. `ready_to_load_host_cache`: the loads that were queued start. Those that run are resumed and run
   one forward each; those whose layers are still loading come last, so that the others do not
   stand behind them. Each says `RAN`.
3. `finish_loads`: it is agreed how the layer-wise loads of this batch ended, each by itself. Those
   that ran are resumed and look at their results: tokens, an insert, or, where their load failed,
   a new beginning. They say `WAITS`, or are over.
4. `batch_retired`.

Rules of the file:
1. A request ends by leaving its generator, in whatever state it is: that gives back what it holds
   (`_stay`). An abort closes the generator; a failure of one request is its own.
2. What the order of requests decides, their order of arrival decides. All ranks resume the same
   ones at the same points.
3. An interrupt, and ranks that do not agree, end everything that is in flight: there is no half of
   an iteration to go on from.

Forwards are not fused: each has one sequence, in the cache object of its request.
"""

from __future__ import annotations

import enum
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import attrs

from radixlink_contracts.errors import AgreementError, ContractError, InvalidTransitionError

if TYPE_CHECKING:
    from collections.abc import Generator

    from radixlink_contracts import BatchIndex, LinkedPrefixCache, RequestId, StepReport
    from radixlink_transformers._pending import PendingGeneration
    from radixlink_transformers._request import EngineRequest


class Turn(enum.Enum):
    """What a request says at the end of its part of an iteration."""

    #: Nothing to run before the next step.
    WAITS = "waits"
    #: It has all that it needs to run one forward.
    RUNS = "runs"
    #: The same, but layers of its prefix are still loading.
    RUNS_WHILE_LOADING = "runs while loading"
    #: The forward is over, and its results may be looked at after `finish_loads`.
    RAN = "ran"


@attrs.define(eq=False)
class Traffic:
    """What requests see of each other and of the iteration.

    Attributes:
        batch: What the layers of this iteration's forwards wait for.
        room_is_awaited: A request was refused room in this iteration: those behind it ask for none.
        num_in_flight: Requests.
        num_running: Those that have what they need to run, and will give it back.
    """

    batch: BatchIndex | None = None
    room_is_awaited: bool = False
    num_in_flight: int = 0
    num_running: int = 0


@attrs.frozen(kw_only=True, eq=False)
class _InFlight:
    """A request on its way.

    Attributes:
        request: It.
        way: What it does, up to its end; tells `pending` the answer.
        pending: Its outcome.
    """

    request: EngineRequest
    way: Generator[Turn, None, None]
    pending: PendingGeneration


class Scheduler:
    """The loop of the engine.

    Ranks: all, the same calls in the same order.
    Thread: one.
    """

    def __init__(self, cache: LinkedPrefixCache, poll_interval_s: float) -> None:
        """Have no request.

        Args:
            cache: The controller.
            poll_interval_s: The pause after an iteration in which nothing ran.
        """
        self._cache: Final = cache
        self._poll_interval_s: Final = poll_interval_s
        self._traffic: Final = Traffic()
        #: Oldest first.
        self._in_flight: dict[RequestId, _InFlight] = {}
        self._launched = False
        self._iterating = False

    @property
    def traffic(self) -> Traffic:
        """What the requests share."""
        return self._traffic

    @property
    def num_in_flight(self) -> int:
        """Requests that are not over."""
        return len(self._in_flight)

    def add(
        self,
        request: EngineRequest,
        way: Generator[Turn, None, None],
        pending: PendingGeneration,
    ) -> None:
        """The request takes part from the next iteration on.

        Args:
            request: Not begun.
            way: What it does.
            pending: Its outcome, told by its way.

        Raises:
            ContractError: One of that name is in flight.
        """
        if request.request_id in self._in_flight:
            raise ContractError(
                f"submit: expected a request that is not in flight, got {request.request_id} again"
            )
        self._in_flight[request.request_id] = _InFlight(request=request, way=way, pending=pending)
        self._traffic.num_in_flight = len(self._in_flight)

    def abort(self, request_id: RequestId) -> None:
        """The request is gone, and gives back what it holds. Nothing to do for one that is over.

        Raises:
            InvalidTransitionError: An iteration runs: it is called by what that calls.
        """
        self.refuse_within_iteration("abort")
        found = self._in_flight.get(request_id)
        if found is not None:
            try:
                found.way.close()
            finally:
                self._end(found, None)

    def iterate(self) -> None:
        """All requests go on by one turn.

        Raises:
            AgreementError: The ranks do not agree; no request is in flight any more.
            InvalidTransitionError: An iteration runs.
        """
        self.refuse_within_iteration("iterate")
        self._iterating = True
        try:
            ran = self._iterate()
        except BaseException as error:
            self.abort_all(error if isinstance(error, Exception) else None)
            raise
        finally:
            self._iterating = False
        if not ran and (self._in_flight or self._cache.num_outstanding):
            self._pause()

    def abort_all(self, outcome: Exception | None = None) -> None:
        """All requests are gone. One that cannot be left does not keep the others from it.

        Args:
            outcome: What all of them failed with; None where they were aborted.
        """
        with ExitStack() as leaving:
            leaving.callback(self.retire)
            for found in self._in_flight.values():
                leaving.callback(found.way.close)
                found.pending.end(outcome)
            self._in_flight.clear()
            self._traffic.num_in_flight = 0

    def retire(self) -> None:
        """No forward of the last launch runs: what was retired since is free."""
        if self._launched:
            self._launched = False
            self._cache.batch_retired(1)

    # -- one iteration --------------------------------------------------------------------------

    def _iterate(self) -> bool:
        """The four points of an iteration; False where nothing ran."""
        self._note(self._cache.step())
        self._traffic.room_is_awaited = False
        turns = [(found, self._resume(found)) for found in list(self._in_flight.values())]
        batch = self._cache.ready_to_load_host_cache()
        self._launched = True
        self._traffic.batch = batch
        running = [found for found, turn in turns if turn is Turn.RUNS]
        running += [found for found, turn in turns if turn is Turn.RUNS_WHILE_LOADING]
        ran = [found for found in running if self._resume(found) is Turn.RAN]
        self._note(self._cache.finish_loads(batch))
        for found in ran:
            self._resume(found)
        self.retire()
        return bool(running)

    def _resume(self, found: _InFlight) -> Turn | None:
        """Let a request go on; None when it is over."""
        outcome: Exception | None = None
        try:
            return next(found.way)
        except StopIteration:
            pass
        except AgreementError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the end of this request alone
            outcome = error
        self._end(found, outcome)
        return None

    def _end(self, found: _InFlight, outcome: Exception | None) -> None:
        if not found.pending.is_over:
            found.pending.end(outcome)
        del self._in_flight[found.request.request_id]
        self._traffic.num_in_flight = len(self._in_flight)

    def _note(self, report: StepReport) -> None:
        for found in self._in_flight.values():
            found.request.note(report)

    def _pause(self) -> None:
        """Let other threads run; an interrupt comes here as likely as anywhere."""
        try:
            time.sleep(self._poll_interval_s)
        except BaseException:
            self.abort_all()
            raise

    def refuse_within_iteration(self, event: str) -> None:
        """Let nothing be called by what an iteration calls.

        Raises:
            InvalidTransitionError: An iteration runs.
        """
        if self._iterating:
            raise InvalidTransitionError(
                f"{event}: expected no iteration to run, got a call from within one",
                state="iterating",
                event=event,
            )
