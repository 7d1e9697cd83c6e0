"""`Stage`: runs one call on each rank, one rank at a time, so that every run is the same.

Theory of operation. Real code waits for the other ranks inside a collective, on its stack. There
are two ways to have the others run meanwhile, and in both nothing runs beside anything else, and the
operating system decides nothing:

*nested* (the usual one): whoever waits makes the next rank's call on top of its own stack. The last
to come ends the meeting, and the calls return in reverse order. It costs a function call. A rank
that waits a second time within one call waits for ranks that lie below it, which cannot go on: for
them that meeting is over by its deadline.

*apart*: each rank's call has a thread, and only the one that holds the baton runs. It is passed on
where a rank waits and where its call has ended, so a call may meet as often as it likes. It costs two
hand-overs between threads for each rank, up to a millisecond where the cores are busy.

A stall, where every rank has ended or waits for one that has, is what a deadline is for: whoever
drives the stage says what happens then.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_T = TypeVar("_T")


class _State(enum.Enum):
    """How a rank's call stands."""

    NEW = enum.auto()
    RUNNING = enum.auto()
    WAITING = enum.auto()
    READY = enum.auto()
    DONE = enum.auto()


_DONE: Final = _State.DONE


@attrs.frozen(kw_only=True)
class Outcome(Generic[_T]):
    """How a rank's call ended.

    Attributes:
        value: What it returned.
        error: What it raised instead.
    """

    value: _T | None = None
    error: Exception | None = None


class _Lane:
    """Where the calls of one place in the order run: the caller's thread, or one of its own."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.turn.acquire()
        self.state = _State.DONE
        self.rank = 0
        self.work: Callable[[], None] | None = None
        self.thread: threading.Thread | None = None


class Stage:
    """The baton, and the threads that it passes between.

    Thread: one; in a meeting, whichever holds the baton.
    """

    def __init__(self, num_ranks: int) -> None:
        """Make room for so many ranks; threads start with the first call that needs them."""
        self._lanes = [_Lane() for _ in range(num_ranks)]
        self._closed = False
        #: The lanes of the calls that run now, in their order.
        self._cast: list[_Lane] = []
        self._nested = True
        self._on_stall: Callable[[frozenset[int]], None] = _never

    def together(
        self,
        calls: Mapping[int, Callable[[], _T]],
        on_stall: Callable[[frozenset[int]], None],
        *,
        apart: bool = False,
    ) -> dict[int, Outcome[_T]]:
        """Call on several ranks at once, in the order of the mapping.

        Args:
            calls: By rank.
            on_stall: Called with the ranks that wait when nobody can go on; it must `wake` some of
                them, or `rerun` some that have ended.
            apart: Each on a thread of its own.

        Returns:
            How each call ended, by rank.
        """
        outcomes: dict[int, Outcome[_T]] = {}
        self._on_stall = on_stall
        self._nested = not apart
        self._cast = self._lanes[: len(calls)]
        for lane, (rank, call) in zip(self._cast, calls.items(), strict=True):
            lane.rank = rank
            lane.state = _State.NEW
            lane.work = _work(outcomes, rank, call)
        first = self._cast[0]
        self._perform(first)
        while self._unfinished():
            if apart:
                self._pass_on(first)
            following = first if apart else self._next()
            if following.state is _State.NEW:
                self._perform(following)
        self._cast = []
        return {rank: outcomes[rank] for rank in calls}

    def _unfinished(self) -> bool:
        """True while some call has not ended."""
        return [lane.state for lane in self._cast].count(_DONE) < len(self._cast)

    @property
    def running(self) -> bool:
        """True while calls are made together: only then can a rank wait for another."""
        return bool(self._cast)

    def wait(self, rank: int, ended: Callable[[], bool]) -> None:
        """Let others run until a meeting has ended. Thread: the one that holds the baton."""
        lane = next(lane for lane in self._cast if lane.rank == rank)
        while not ended():
            lane.state = _State.WAITING
            if self._nested:
                self._run_another()
            else:
                self._pass_on(lane)
        lane.state = _State.RUNNING

    def wake(self, rank: int) -> None:
        """What a rank waited for has ended."""
        for lane in self._cast:
            if lane.rank == rank and lane.state is _State.WAITING:
                lane.state = _State.READY

    def rerun(self, rank: int, call: Callable[[], object]) -> None:
        """Have a rank whose call has ended do one thing more; its outcome stays as it was."""
        for lane in self._cast:
            if lane.rank == rank:
                lane.state = _State.NEW
                lane.work = _extra(call)

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._closed = True
        for lane in self._lanes:
            if lane.thread is not None:
                lane.turn.release()
                lane.thread.join()
                lane.thread = None

    # -- the baton ---------------------------------------------------------------------------------

    def _perform(self, lane: _Lane) -> None:
        """Run a lane's call on this thread."""
        lane.state = _State.RUNNING
        assert lane.work is not None
        lane.work()
        lane.state = _State.DONE

    def _run_another(self) -> None:
        """Make the next call on top of this stack, or stall."""
        for lane in self._cast:
            if lane.state is _State.NEW:
                self._perform(lane)
                return
        self._on_stall(self._waiting())

    def _waiting(self) -> frozenset[int]:
        """The ranks that wait."""
        return frozenset(lane.rank for lane in self._cast if lane.state is _State.WAITING)

    def _pass_on(self, lane: _Lane) -> None:
        """Give the baton to the next that can run, and return when it comes back."""
        following = self._next()
        if following is lane:
            return
        if following.thread is None and following is not self._lanes[0]:
            following.thread = threading.Thread(
                target=self._live, args=(following,), name="simulated-rank", daemon=True
            )
            following.thread.start()
        following.turn.release()
        lane.turn.acquire()

    def _next(self) -> _Lane:
        """The next that can run: who has not begun, then who need not wait any more."""
        while True:
            for state in (_State.NEW, _State.READY):
                for lane in self._cast:
                    if lane.state is state:
                        return lane
            waiting = self._waiting()
            if not waiting:
                return self._cast[0]
            self._on_stall(waiting)

    def _live(self, lane: _Lane) -> None:
        """A lane's thread: run its calls, whenever the baton comes."""
        lane.turn.acquire()
        while not self._closed:
            if lane.state is _State.NEW:
                self._perform(lane)
            self._pass_on(lane)


def _work(
    outcomes: dict[int, Outcome[_T]], rank: int, call: Callable[[], _T]
) -> Callable[[], None]:
    """A call that keeps how it ended."""

    def work() -> None:
        try:
            outcomes[rank] = Outcome(value=call())
        except Exception as error:  # noqa: BLE001 -- it is the outcome
            outcomes[rank] = Outcome(error=error)

    return work


def _extra(call: Callable[[], object]) -> Callable[[], None]:
    """A call whose outcome is of no interest: what it meets is told to whoever waits."""

    def work() -> None:
        with contextlib.suppress(Exception):
            call()

    return work


def _never(waiting: frozenset[int]) -> None:
    """Nobody waits while nothing runs."""
    raise AssertionError(waiting)
