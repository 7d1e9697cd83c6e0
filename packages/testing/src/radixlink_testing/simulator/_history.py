"""`run`: one history from beginning to end, held against the rules after each tick.

A tick is one iteration of a scheduler's loop: events, a step of all ranks, requests looked at, a
batch launched, the oldest one processed; backends work in between. Behind the last tick everything
that waits must be told although what hangs goes on hanging, and then nothing may be left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never

from radixlink_contracts import EvictParams
from radixlink_testing.simulator._divergences import Divergences
from radixlink_testing.simulator._engine import Engine
from radixlink_testing.simulator._faults import NEVER_LETS_GO, Fault
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
from radixlink_testing.simulator._replica import Replica
from radixlink_testing.simulator._result import Result, Tally
from radixlink_testing.simulator._rules import Referee, Rule, RuleBrokenError

if TYPE_CHECKING:
    from radixlink_testing.simulator._plan import Event, Plan
    from radixlink_testing.simulator._rank import SimulatedRank

#: Ticks behind the plan within which everything ends.
_DRAIN_TICKS: Final = 400
_TICK_S: Final = 0.1
_DRAIN_TICK_S: Final = 0.5
_DRAIN_QUANTA: Final = 12
#: How many pages go at once where many do.
_PAGES_LOST: Final = 8


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
        self._num_given_up = 0
        self.divergences = Divergences(replica, self.engine, self.take_off)
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
                self.divergences.end_without_the_dead()
                return
        self.drain()

    def tally(self) -> Tally:
        """What happened so far."""
        return Tally(
            steps=self._num_steps,
            requests=self.engine.num_finished,
            hits=self.engine.num_hits,
            loads=self.engine.num_loads,
            layer_wise=self.engine.num_layer_wise,
            touches=self.replica.operations.num_touches,
            frames=self.replica.num_frames,
            faults=self._num_faults,
            divergences=self.divergences.num_divergences,
            slots_written_off=self._written_off + self._written_off_now(),
            given_up=self._num_given_up,
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
        self._num_given_up += report.detached
        self.engine.hear(report)
        self.engine.finish()
        found = self.engine.look(tick.admit)
        if tick.late:
            self._retire(tick.overlap)
        self.engine.admit(found)
        for rank in self.replica.ranks:
            self._work(tick, Point.AFTER_SCHEDULING, rank)
        if not tick.held:
            self.engine.launch()
        for rank in self.replica.ranks:
            self._work(tick, Point.AFTER_LAUNCH, rank)
        if not tick.finish_later:
            self.engine.finish()
        self._retire(tick.overlap)
        self.replica.check(self.engine.num_pages)
        self.engine.check_patience()
        self._referee.check()

    def _retire(self, overlap: int) -> None:
        """Process batches until so many run."""
        while self.engine.num_batches > overlap:
            self.engine.retire()

    def _work(self, tick: Tick, point: Point, rank: SimulatedRank) -> None:
        """What a rank's backend does at a point of a tick; its forwards read on behind it."""
        for which in tick.quanta.get((point, rank.rank), ()):
            rank.work(which)
            self.engine.go_on(rank)

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
            case Evict():
                self._evict(event)
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
                    rank = self.replica.ranks[number % len(self.replica.ranks)]
                    self.divergences.diverge(rank, how)
            case Reset():
                self.reset()
            case Detach():
                if self.replica.attached:
                    self._referee.note("engine", "detaches")
                    self.take_off()
            case Attach():
                if not self.replica.attached:
                    self._referee.note("engine", "attaches")
                    self.replica.attach()
            case Kill(rank=number):
                self.divergences.kill(self.replica.ranks[number % len(self.replica.ranks)])
            case _:
                assert_never(event)

    def take_off(self) -> None:
        """All ranks take the linker off."""
        self._written_off += self._written_off_now()
        self.replica.detach()
        self.engine.detached()

    def _evict(self, event: Evict) -> None:
        """The engine makes room."""
        shape = self.replica.shape
        params = EvictParams(
            num_tokens=event.num_pages * shape.page_size,
            swa_num_tokens=event.num_windows * shape.page_size if shape.window else 0,
            mamba_num=event.num_states if shape.num_states else 0,
        )
        self.replica.alike(
            "evict",
            lambda rank: rank.cache.evict(params),
            lambda result: (
                result.num_tokens_evicted,
                result.swa_num_tokens_evicted,
                result.mamba_num_evicted,
            ),
        )

    def _strike(self, event: Strike) -> None:
        """Something goes wrong."""
        rank = self.replica.ranks[event.rank % len(self.replica.ranks)]
        self._num_faults += 1
        self.replica.may_hold_on |= event.fault in NEVER_LETS_GO or self.replica.shape.hasty
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
        self.happen(Evict(1 << 20, 1 << 20, 1 << 20))
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
