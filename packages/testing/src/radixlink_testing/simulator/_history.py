"""`run`: one history from beginning to end, held against the rules after each tick.

A tick is one iteration of a scheduler's loop: events, a step of all ranks, requests looked at, a
batch launched, the oldest one processed; backends work in between. Behind the last tick everything
that waits must be told although what hangs goes on hanging, and then nothing may be left.
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never

import attrs

from radixlink_contracts import EvictParams, InsertParams, MatchPrefixParams, RadixKey
from radixlink_contracts.errors import AgreementError
from radixlink_testing.simulator._engine import Engine
from radixlink_testing.simulator._faults import NEVER_LETS_GO, Divergence, Fault
from radixlink_testing.simulator._pages import marks_of
from radixlink_testing.simulator._plan import (
    Abort,
    Arrive,
    Attach,
    Detach,
    Diverge,
    Evict,
    Kill,
    Pass,
    Point,
    Poke,
    Recover,
    Reset,
    Strike,
    Tick,
)
from radixlink_testing.simulator._rank import request_id
from radixlink_testing.simulator._replica import Replica
from radixlink_testing.simulator._rules import Referee, Rule, RuleBrokenError

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_testing.simulator._plan import Event, Plan
    from radixlink_testing.simulator._rank import SimulatedRank

#: Ticks behind the plan within which everything ends.
_DRAIN_TICKS: Final = 400
_TICK_S: Final = 0.1
_DRAIN_TICK_S: Final = 0.5
_DRAIN_QUANTA: Final = 12
#: How many pages go at once where many do.
_PAGES_LOST: Final = 8
#: The most steps for which a divergence may go unnoticed: heartbeats are no rarer in plans.
_UNNOTICED_STEPS: Final = 70


@attrs.frozen(kw_only=True)
class Tally:
    """What happened in a history.

    Attributes:
        steps: Scheduler steps, those behind the plan included.
        requests: Requests that were computed to their end.
        hits: Matches that said HIT.
        loads: Loads that were queued.
        frames: Collectives of steps.
        faults: Faults that struck or could have.
        divergences: Ranks that did what the others did not; each was raised on all ranks at once.
        slots_written_off: Tokens that a rank never let go of, on all ranks.
    """

    steps: int = 0
    requests: int = 0
    hits: int = 0
    loads: int = 0
    frames: int = 0
    faults: int = 0
    divergences: int = 0
    slots_written_off: int = 0

    def __add__(self, other: Tally) -> Tally:
        """Both together."""
        ours, theirs = attrs.asdict(self), attrs.asdict(other)
        return Tally(**{name: ours[name] + theirs[name] for name in ours})


@attrs.frozen(kw_only=True)
class Result:
    """How a history went.

    Attributes:
        plan: The history.
        broken: The first rule that did not hold; None where all did.
        tally: What happened.
        story: Who did what, if it was asked for.
    """

    plan: Plan
    broken: RuleBrokenError | None
    tally: Tally
    story: tuple[str, ...] = ()


def run(plan: Plan, *, tell: bool = False) -> Result:
    """Run one history.

    Args:
        plan: What happens.
        tell: Write the story.

    Returns:
        How it went: the same for the same plan, in any process.
    """
    referee = Referee(tell=tell)
    replica = Replica(plan.shape, referee)
    history = History(replica)
    broken: RuleBrokenError | None = None
    try:
        history.play(plan)
    except RuleBrokenError as error:
        broken = error
    finally:
        replica.close()
    return Result(plan=plan, broken=broken, tally=history.tally(), story=referee.story)


class History:
    """A replica, its engine, and the plan that drives both.

    Thread: one.
    """

    def __init__(self, replica: Replica) -> None:
        """Attach the linker."""
        self.replica = replica
        self.engine = Engine(replica)
        self._referee = replica.referee
        self._num_steps = 0
        self._num_faults = 0
        self._num_divergences = 0
        self._num_ghosts = 0
        #: Slots that linkers which are gone wrote off.
        self._written_off = 0

    def play(self, plan: Plan) -> None:
        """Everything, from attach to close.

        Raises:
            RuleBrokenError: A rule does not hold.
        """
        self.replica.attach()
        for number, tick in enumerate(plan.ticks):
            self._referee.tick = number
            self.tick(tick)
            if self.replica.dead:
                self._end_without_the_dead()
                return
        self.drain()

    def tally(self) -> Tally:
        """What happened so far."""
        return Tally(
            steps=self._num_steps,
            requests=self.engine.num_finished,
            hits=self.engine.num_hits,
            loads=self.engine.num_loads,
            frames=self.replica.num_frames,
            faults=self._num_faults,
            divergences=self._num_divergences,
            slots_written_off=self._written_off + self._written_off_now(),
        )

    def _written_off_now(self) -> int:
        """Slots that the linkers of now wrote off."""
        counters = [rank.cache.counters for rank in self.replica.ranks]
        return sum(one.slots_written_off for one in counters if one is not None)

    # -- a tick ------------------------------------------------------------------------------------

    def tick(self, tick: Tick) -> None:
        """One iteration of the scheduler's loop."""
        self.replica.time.seconds += _TICK_S
        for event in tick.events:
            self.happen(event)
            self._referee.check()
            if self.replica.dead:
                return
        report = self.replica.step(
            tick.first % self.replica.shape.num_ranks,
            lambda rank: self._work(tick, Point.BEFORE_STEP, rank),
            lambda rank: self._work(tick, Point.AFTER_STEP, rank),
        )
        self._num_steps += 1
        self.engine.hear(report)
        found = self.engine.look(tick.admit)
        if tick.late:
            self._retire(tick.overlap)
        self.engine.admit(found)
        for rank in self.replica.ranks:
            self._work(tick, Point.AFTER_SCHEDULING, rank)
        self.engine.launch()
        for rank in self.replica.ranks:
            self._work(tick, Point.AFTER_LAUNCH, rank)
        self._retire(tick.overlap)
        self.replica.check(self.engine.num_pages)
        self.engine.check_patience()
        self._referee.check()

    def _retire(self, overlap: int) -> None:
        """Process batches until so many run."""
        while self.engine.num_batches > overlap:
            self.engine.retire()

    def _work(self, tick: Tick, point: Point, rank: SimulatedRank) -> None:
        """What a rank's backend does at a point of a tick."""
        for when, where, which in tick.work:
            if when is point and where == rank.rank:
                rank.work(which)

    # -- events ------------------------------------------------------------------------------------

    def happen(self, event: Event) -> None:
        """One event."""
        match event:
            case Arrive():
                self.engine.arrive(event)
            case Abort(name=name):
                self.engine.abort(name)
            case Poke(name=name):
                self.engine.poke(name)
            case Evict(num_pages=num_pages):
                tokens = num_pages * self.replica.shape.page_size
                self.replica.alike(
                    "evict",
                    lambda rank: rank.cache.evict(EvictParams(num_tokens=tokens)),
                    lambda result: result.num_tokens_evicted,
                )
            case Pass(seconds=seconds):
                self.replica.time.seconds += seconds
            case Strike():
                self._strike(event)
            case Recover(rank=number):
                rank = self.replica.ranks[number % len(self.replica.ranks)]
                rank.backend.recover()
                rank.executor.release()
            case Diverge(rank=number, how=how):
                if self.replica.attached and len(self.replica.ranks) > 1:
                    self._diverge(self.replica.ranks[number % len(self.replica.ranks)], how)
            case Reset():
                self.reset()
            case Detach():
                if self.replica.attached:
                    self._referee.note("engine", "detaches")
                    self._written_off += self._written_off_now()
                    self.replica.detach()
                    self.engine.detached()
            case Attach():
                if not self.replica.attached:
                    self._referee.note("engine", "attaches")
                    self.replica.attach()
            case Kill(rank=number):
                self._kill(self.replica.ranks[number % len(self.replica.ranks)])
            case _:
                assert_never(event)

    def _strike(self, event: Strike) -> None:
        """Something goes wrong."""
        rank = self.replica.ranks[event.rank % len(self.replica.ranks)]
        self._num_faults += 1
        self.replica.may_hold_on |= event.fault in NEVER_LETS_GO
        match event.fault:
            case Fault.PAGE_LOST:
                happened = rank.watch.shelf.lose(event.which)
            case Fault.PAGES_LOST:
                lost = [rank.watch.shelf.lose(event.which + n) for n in range(_PAGES_LOST)]
                happened = any(lost)
            case Fault.PAGE_FLIPPED:
                happened = rank.watch.shelf.flip(event.which)
            case Fault.NO_ROOM:
                rank.watch.shelf.full = 1 + event.which % 4
                happened = True
            case Fault.LOADER_DEAD:
                rank.backend.dead = happened = True
            case Fault.OLD_COMPLETION:
                happened = rank.backend.complete_again()
            case _:
                rank.watch.arm(event.fault, event.which)
                happened = False
        if happened:
            rank.watch.note(f"fault: {event.fault.value}")

    def reset(self) -> None:
        """All ranks reset, with whatever is on its way."""
        self._referee.note("engine", "resets")
        self.engine.stop()
        self.replica.reset()
        self.engine.start_again()

    # -- ranks that do not do the same -------------------------------------------------------------

    def _diverge(self, odd: SimulatedRank, how: Divergence) -> None:
        """A rank does what the others do not: all of them hear of it in one frame, and recover."""
        odd.watch.note(f"alone: {how.value}")
        self._num_divergences += 1
        if how is Divergence.SETTINGS:
            self._attach_differently(odd)
            return
        self.engine.stop()
        match how:
            case Divergence.INSERT:
                self._insert_alone(odd)
            case Divergence.EVICT:
                if not self._evict_alone(odd):
                    self._match_ghost([odd])
            case Divergence.MATCH:
                self._match_ghost([odd])
            case Divergence.ABORT:
                ghost = self._match_ghost(self.replica.ranks)
                odd.watch.begin("release_aborted_request")
                odd.cache.release_aborted_request(request_id(ghost, odd.rank))
            case Divergence.EXTRA_STEP:
                self._step_alone(odd)
            case Divergence.NO_STEP:
                self._match_ghost(self.replica.ranks)
                self._step_without(odd)
            case _:
                assert_never(how)
        self._expect_disagreement()
        self._expect_refusals()
        self.replica.reset()
        self.engine.start_again()

    def _insert_alone(self, odd: SimulatedRank) -> None:
        """One rank computes a page that the others do not."""
        size = self.replica.shape.page_size
        odd.watch.begin("evict")
        odd.cache.evict(EvictParams(num_tokens=size))
        slots = odd.allocator.alloc(size)
        if slots is None:
            self._match_ghost([odd])
            return
        odd.watch.pages.taken(odd.watch.pages_in(slots))
        key = self._ghost_key()
        for page, mark in zip(odd.watch.pages_in(slots), marks_of(key, size), strict=True):
            odd.watch.pages.compute(page, mark)
        odd.watch.begin("insert")
        odd.cache.insert(InsertParams(key=key, value=slots))

    def _evict_alone(self, odd: SimulatedRank) -> bool:
        """One rank evicts. False where it had nothing to evict."""
        odd.watch.begin("evict")
        return odd.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted > 0

    def _match_ghost(self, ranks: list[SimulatedRank]) -> str:
        """Some ranks ask for a request that is never run."""
        key = self._ghost_key()
        name = f"ghost{self._num_ghosts}"
        for rank in ranks:
            rank.watch.begin("match_prefix")
            rank.cache.match_prefix(
                MatchPrefixParams(key=key, request_id=request_id(name, rank.rank))
            )
        return name

    def _ghost_key(self) -> RadixKey:
        """A sequence of one page that nobody else has."""
        self._num_ghosts += 1
        size = self.replica.shape.page_size
        return RadixKey(array("q", [1_000_000 + self._num_ghosts] * size))

    def _step_alone(self, odd: SimulatedRank) -> None:
        """One rank steps once more: alone where a frame is due, else unnoticed until the next."""
        due = (odd.watch.step + 1) % self.replica.shape.settings.heartbeat_steps == 0
        if not due and not odd.cache.num_outstanding:
            odd.watch.begin("step")
            odd.cache.step()
            self._match_ghost(self.replica.ranks)
            return
        self._match_ghost(self.replica.ranks)
        outcomes = self.replica.together(
            "step", lambda rank: rank.cache.step() if rank is odd else None
        )
        if not isinstance(outcomes[odd.rank].error, AgreementError):
            self._referee.breach(
                Rule.DEADLINES, f"rank {odd.rank} stepped alone and got {outcomes[odd.rank]}"
            )

    def _step_without(self, odd: SimulatedRank) -> None:
        """One rank does not step: the others name it by the deadline."""
        outcomes = self.replica.together(
            "step", lambda rank: None if rank is odd else rank.cache.step()
        )
        for number, outcome in outcomes.items():
            if number != odd.rank:
                self._expect_naming(odd, number, outcome.error)

    def _expect_naming(self, missing: SimulatedRank, number: int, error: Exception | None) -> None:
        """A rank that waited says who was missing."""
        if not isinstance(error, AgreementError) or error.by_rank[missing.rank] != "no answer":
            self._referee.breach(
                Rule.DEADLINES,
                f"rank {missing.rank} did not come to a frame, and rank {number} got {error!r}",
            )

    def _expect_disagreement(self) -> None:
        """All ranks raise in the same step, the first in which a frame is due; none goes on."""
        heard: dict[int, Exception | None] = {}

        def go_on(rank: SimulatedRank) -> None:
            heard[rank.rank] = _error_of_frame(rank)

        for _ in range(_UNNOTICED_STEPS):
            heard.clear()
            outcomes = self.replica.together(
                "step", lambda rank: rank.cache.step(), again=go_on, apart=True
            )
            for number, outcome in outcomes.items():
                heard.setdefault(number, outcome.error)
            if any(heard.values()):
                break
        told = {number: type(error).__name__ for number, error in heard.items()}
        if not all(isinstance(error, AgreementError) for error in heard.values()):
            self._referee.breach(
                Rule.FRAMES, f"ranks differ, and not all of them hear it in one frame: {told}"
            )
        self._referee.check()

    def _expect_refusals(self) -> None:
        """After a disagreement every call that would change something fails at once."""
        for rank in self.replica.ranks:
            calls: dict[str, Callable[[], object]] = {
                "step": rank.cache.step,
                "match_prefix": partial(
                    rank.cache.match_prefix,
                    MatchPrefixParams(
                        key=self._ghost_key(), request_id=request_id("late", rank.rank)
                    ),
                ),
                "ready_to_load_host_cache": rank.cache.ready_to_load_host_cache,
            }
            for name, call in calls.items():
                entered = len(rank.watch.collectives)
                rank.watch.begin(name)
                try:
                    call()
                except AgreementError:
                    pass
                else:
                    self._referee.breach(
                        Rule.DEADLINES, f"rank {rank.rank}: {name} went on after a disagreement"
                    )
                if len(rank.watch.collectives) > entered:
                    self._referee.breach(
                        Rule.DEADLINES,
                        f"rank {rank.rank}: {name} entered a collective after a disagreement",
                    )
        self._referee.check()

    def _attach_differently(self, odd: SimulatedRank) -> None:
        """One rank attaches with other pools: refused on all, and nothing is attached."""
        self._written_off += self._written_off_now()
        self.replica.detach()
        self.engine.detached()
        odd.backend.more_pools = True
        for rank in self.replica.ranks:
            rank.watch.attached = True
        outcomes = self.replica.together(
            "init_cache_linker",
            lambda rank: rank.cache.init_cache_linker(rank.backend),
            apart=True,
        )
        odd.backend.more_pools = False
        for number, outcome in outcomes.items():
            if not isinstance(outcome.error, AgreementError):
                self._referee.breach(
                    Rule.ATTACH,
                    f"rank {number} attached although ranks attach differently: {outcome}",
                )
        self._referee.check()
        self.replica.attach()

    def _kill(self, victim: SimulatedRank) -> None:
        """A rank ends: the others hear who it was by the deadline."""
        victim.watch.note("ends")
        self.engine.stop()
        self._match_ghost(self.replica.ranks)
        self.replica.dead.add(victim.rank)
        outcomes = self.replica.together("step", lambda rank: rank.cache.step())
        for number, outcome in outcomes.items():
            self._expect_naming(victim, number, outcome.error)
        self._referee.check()

    def _end_without_the_dead(self) -> None:
        """Those that live close their linkers, and leave nothing behind."""
        victims = [rank for rank in self.replica.ranks if rank.rank in self.replica.dead]
        for rank in self.replica.alive:
            rank.watch.disarm()
            rank.watch.begin("detach")
            rank.cache.release_host_resources()
        outcomes = self.replica.together("reset", lambda rank: rank.cache.reset())
        for number, outcome in outcomes.items():
            self._expect_naming(victims[0], number, outcome.error)
        self.replica.check_empty("the end")

    # -- the end -----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Everything that waits is told, whatever hangs; then nothing is left."""
        replica, engine = self.replica, self.engine
        if not replica.attached:
            replica.attach()
        last = self._referee.tick
        for number in range(_DRAIN_TICKS):
            self._referee.tick = last + 1 + number
            replica.time.seconds += _DRAIN_TICK_S
            self.tick(self._drain_tick(number))
            if not engine.requests and not engine.num_batches and not self._outstanding():
                break
        else:
            self._referee.breach(
                Rule.DEADLINES,
                f"{self._outstanding()} operations and lookups and requests "
                f"{ {one.name: one.life.value for one in engine.requests.values()} } never end",
            )
            self._referee.check()
        self._settle()
        self._end()

    def _outstanding(self) -> int:
        return self.replica.ranks[0].cache.num_outstanding

    def _drain_tick(self, number: int) -> Tick:
        """A tick in which every backend that lives has time."""
        return Tick(
            work=tuple(
                (Point.BEFORE_STEP, rank.rank, which)
                for rank in self.replica.ranks
                for which in range(_DRAIN_QUANTA)
            ),
            first=number,
            admit=8,
            overlap=number % 2,
        )

    def _settle(self) -> None:
        """Locks end by themselves; what hung comes back, and is of no interest any more."""
        settings = self.replica.shape.settings
        for rank in self.replica.ranks:
            rank.watch.disarm()
            rank.backend.recover()
            rank.executor.release()
        for number in range(settings.publish_lock_steps + settings.miss_steps + 2):
            self.tick(self._drain_tick(number))

    def _end(self) -> None:
        """Evict everything, reset, close: twice is once."""
        replica = self.replica
        while self.engine.num_batches:
            self.engine.retire()
        tally = self.tally()
        if tally.slots_written_off and not replica.may_hold_on:
            self._referee.breach(
                Rule.FRAMES, f"{tally.slots_written_off} slots were written off without a fault"
            )
        self.happen(Evict(1 << 20))
        replica.check(self.engine.num_pages)
        for rank in replica.ranks:
            if rank.tree.evictable_size:
                self._referee.breach(
                    Rule.RECEIPTS, f"rank {rank.rank}: an eviction left what nobody locks"
                )
        for _ in range(2):
            self.reset()
        self._written_off += self._written_off_now()
        for _ in range(2):
            replica.alike("detach", lambda rank: rank.cache.release_host_resources())
        replica.check_empty("the end")


def _error_of_frame(rank: SimulatedRank) -> Exception | None:
    """A rank goes on while others wait for it: by its next heartbeat it comes to a frame."""
    entered = len(rank.watch.collectives)
    try:
        while len(rank.watch.collectives) == entered:
            rank.cache.step()
    except AgreementError as error:
        return error
    return None
