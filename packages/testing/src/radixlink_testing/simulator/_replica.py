"""`Replica`: all ranks of a history: the same calls on each, and one answer.

What the engine does is called on one rank after the other; what enters a collective is called on a
stage. Every answer is compared, every call counted, and everything is looked at again after each tick.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from radixlink_contracts import POOL_OF, PoolName
from radixlink_contracts.errors import AgreementError, ContractError, LinkError, TransferError
from radixlink_testing.simulator._group import Meetings, Time
from radixlink_testing.simulator._operations import Operations
from radixlink_testing.simulator._pages import Holder
from radixlink_testing.simulator._rank import SimulatedRank
from radixlink_testing.simulator._rules import Rule
from radixlink_testing.simulator._shelf import Shelf
from radixlink_testing.simulator._stage import Stage
from radixlink_tree import check_invariants

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from radixlink_contracts import BatchIndex, OperationId, StepReport
    from radixlink_testing.simulator._pages import DevicePages
    from radixlink_testing.simulator._rank import Shape
    from radixlink_testing.simulator._rules import Referee
    from radixlink_testing.simulator._stage import Outcome

_T = TypeVar("_T")

_KINDS = {pool: kind for kind, pool in POOL_OF.items()}

#: How often a reset that could not end a copy is called again.
_RESETS = 4


class Replica:
    """The ranks.

    Thread: one.
    """

    def __init__(self, shape: Shape, referee: Referee) -> None:
        """Make the ranks; no linker is attached yet."""
        self.shape = shape
        self.referee = referee
        self.time = Time()
        self.operations = Operations(shape.num_ranks, referee)
        self.stage = Stage(shape.num_ranks)
        self.meetings = Meetings(shape.num_ranks, self.stage, self.time)
        shelves = [Shelf() for _ in range(shape.num_ranks)]
        self.ranks = [
            SimulatedRank(
                rank,
                shape,
                meetings=self.meetings,
                time=self.time,
                operations=self.operations,
                shelves=shelves,
                referee=referee,
            )
            for rank in range(shape.num_ranks)
        ]
        #: Ranks that have ended.
        self.dead: set[int] = set()
        #: Steps since attach or reset.
        self.step_number = 0
        #: A fault came after which a backend may never let go.
        self.may_hold_on = False
        #: Frames exchanged in the whole history.
        self.num_frames = 0
        self.attached = False
        #: Written-off operations that each rank has named the holders of.
        self._named: set[tuple[int, OperationId]] = set()
        #: It goes on without its store, until it is detached.
        self.given_up = False

    @property
    def offers_at_once(self) -> bool:
        """True when whatever is used for the first time is due for a store."""
        return self.attached and not self.given_up and self.shape.settings.backup_threshold == 1

    # -- ways to ask -------------------------------------------------------------------------------

    @property
    def alive(self) -> list[SimulatedRank]:
        """The ranks that have not ended."""
        return [rank for rank in self.ranks if rank.rank not in self.dead]

    def alike(
        self,
        call: str,
        ask: Callable[[SimulatedRank], _T],
        same: Callable[[_T], object] | None = None,
    ) -> _T:
        """Call on every rank, one after the other; the first one's answer, which is everybody's.

        Args:
            call: What is called.
            ask: How.
            same: What of an answer must be equal on all ranks; None: all of it.
        """
        return self.alike_all(call, ask, same)[0]

    def alike_all(
        self,
        call: str,
        ask: Callable[[SimulatedRank], _T],
        same: Callable[[_T], object] | None = None,
    ) -> list[_T]:
        """`alike`, with what each rank answered, by rank."""
        answers: list[_T] = []
        for rank in self.ranks:
            watch = rank.watch
            entered = len(watch.collectives)
            watch.begin(call)
            try:
                answers.append(ask(rank))
            except LinkError as error:
                self.referee.breach(_rule_of(error), f"rank {rank.rank}: {call} raised {error!r}")
            watch.acting = ""
            if len(watch.collectives) > entered:
                rule = Rule.MATCH if call == "match_prefix" else Rule.FRAMES
                self.referee.breach(rule, f"rank {rank.rank}: {call} entered a collective")
            self.referee.check()
        told: Sequence[object] = answers if same is None else [same(one) for one in answers]
        if told.count(told[0]) < len(told):
            self.referee.breach(
                Rule.LOAD_BACK if call == "init_load_back" else Rule.FRAMES,
                f"{call}: ranks answer differently: {told}",
            )
            self.referee.check()
        return answers

    def together(
        self,
        call: str,
        ask: Callable[[SimulatedRank], _T],
        *,
        first: int = 0,
        again: Callable[[SimulatedRank], object] | None = None,
        apart: bool = False,
    ) -> dict[int, Outcome[_T]]:
        """Call on every rank that lives, as a collective needs it.

        Args:
            call: What is called.
            ask: How.
            first: Who begins.
            again: What a rank whose call has ended does while another waits for it; None for
                nothing, so that the deadline passes.
            apart: Ranks may meet more than once in the call, as they do to attach and when they differ.
        """
        alive = self.alive
        order = [alive[(first + place) % len(alive)] for place in range(len(alive))]
        left = {rank.rank for rank in order} if again is not None else set()

        def perform(rank: SimulatedRank) -> Callable[[], _T]:
            def run() -> _T:
                rank.watch.begin(call)
                try:
                    return ask(rank)
                finally:
                    rank.watch.acting = ""

            return run

        def repeat(rank: SimulatedRank) -> Callable[[], object]:
            def run() -> object:
                rank.watch.begin(call)
                return again(rank) if again is not None else None

            return run

        def stalled(waiting: frozenset[int]) -> None:
            late = sorted(left - waiting)
            if not late:
                self.meetings.expire()
            for rank in late:
                left.discard(rank)
                self.stage.rerun(rank, repeat(self.ranks[rank]))

        outcomes = self.stage.together(
            {rank.rank: perform(rank) for rank in order}, stalled, apart=apart
        )
        self.referee.check()
        return outcomes

    # -- steps -------------------------------------------------------------------------------------

    def step(
        self,
        first: int,
        work: Callable[[SimulatedRank], None],
        after: Callable[[SimulatedRank], None],
    ) -> StepReport:
        """One step of all ranks, which agree.

        Args:
            first: Who comes to the frame first.
            work: What a rank's backend does before it comes.
            after: What it does when the rank has left.
        """
        self.step_number += 1
        self.operations.before_step()
        outstanding = self.alike("num_outstanding", lambda rank: rank.cache.num_outstanding)
        due = self._frame_is_due(outstanding)
        entered = [len(rank.watch.collectives) for rank in self.ranks]

        def act(rank: SimulatedRank) -> StepReport:
            work(rank)
            rank.watch.step += 1
            report = rank.cache.step()
            self.operations.stepped(rank.rank, rank.clock.now())
            after(rank)
            return report

        outcomes = self.together("step", act, first=first)
        report = self._one_report("step", outcomes)
        for rank, before in zip(self.ranks, entered, strict=True):
            self._check_frames(rank, rank.watch.collectives[before:], due=due)
        self.num_frames += due
        if self.attached:
            if report.detached:
                self._give_up()
            self.operations.after_step(
                self.step_number, self.shape.settings, given_up=self.given_up
            )
            self._check_written_off()
        self.referee.check()
        return report

    def finish_loads(self, indices: Mapping[int, BatchIndex | None]) -> StepReport:
        """The frame after a launch, on all ranks, which agree.

        Args:
            indices: What each rank's forward waits for.
        """
        running = self.operations.running() if self.attached else []
        entered = [len(rank.watch.collectives) for rank in self.ranks]

        def act(rank: SimulatedRank) -> StepReport:
            report = rank.cache.finish_loads(indices[rank.rank])
            if running:
                self.operations.stepped(rank.rank, rank.clock.now())
                self.operations.waited_for(rank.rank, running)
            return report

        report = self._one_report("finish_loads", self.together("finish_loads", act))
        due = len(running) > 0 and len(self.ranks) > 1
        for rank, before in zip(self.ranks, entered, strict=True):
            self._check_frames(rank, rank.watch.collectives[before:], due=due)
        self.num_frames += due
        if running:
            self.operations.after_launch(self.step_number, self.shape.settings)
        self.referee.check()
        return report

    def _one_report(self, call: str, outcomes: Mapping[int, Outcome[StepReport]]) -> StepReport:
        """What all ranks were told, which is the same."""
        reports: list[StepReport] = []
        for number, outcome in outcomes.items():
            if outcome.value is not None:
                reports.append(outcome.value)
            else:
                self.referee.breach(
                    _rule_of(outcome.error), f"rank {number}: {call} raised {outcome.error!r}"
                )
            self.referee.check()
        if reports.count(reports[0]) < len(reports):
            self.referee.breach(Rule.FRAMES, f"{call}: ranks answer differently: {reports}")
            self.referee.check()
        return reports[0]

    # -- slots that some rank never lets go of -----------------------------------------------------

    def _give_up(self) -> None:
        """The cache goes on without its store: too many slots must be written off."""
        self.referee.note("step", "the store is given up")
        if self.given_up:
            self.referee.breach(Rule.FRAMES, "the store was given up twice")
        self.given_up = True
        for rank in self.ranks:
            rank.watch.given_up = True
            if not self._too_many_written_off(rank):
                self.referee.breach(
                    Rule.FRAMES,
                    f"rank {rank.rank} gave the store up, and few slots are written off",
                )

    def _check_written_off(self) -> None:
        """Past the cap the store is given up in that very step; who holds on is named."""
        if not any(one.written_off for one in self.operations.live.values()):
            return
        for rank in self.ranks:
            if self._too_many_written_off(rank) and not self.given_up:
                self.referee.breach(
                    Rule.FRAMES,
                    f"rank {rank.rank}: more slots are written off than may be, and the store is "
                    "not given up",
                )
            for lost in rank.cache.holders().written_off:
                operation = self.operations.get(lost.operation.op)
                if operation is None or (rank.rank, operation.op) in self._named:
                    continue
                self._named.add((rank.rank, operation.op))
                busy = [one for one in sorted(operation.shares) if operation.holds_on(one)]
                if list(lost.ranks) != busy:
                    self.referee.breach(
                        Rule.FRAMES,
                        f"rank {rank.rank}: operation {operation.op} is written off because of "
                        f"ranks {list(lost.ranks)}, and ranks {busy} hold on to it",
                    )

    def _too_many_written_off(self, rank: SimulatedRank) -> bool:
        """True when some pool has lost more than it may."""
        slots: Counter[PoolName] = Counter()
        for lost in rank.cache.holders().written_off:
            slots.update(lost.operation.slots)
        percent = self.shape.settings.written_off_percent
        return any(slots[pool] > self._slots_of(pool) * percent // 100 for pool in self.shape.pools)

    def _slots_of(self, pool: PoolName) -> int:
        """Slots of a pool."""
        size = 1 if pool is PoolName.MAMBA else self.shape.page_size
        return self.shape.pools[pool] * size

    def _frame_is_due(self, outstanding: int) -> bool:
        """True when this step must exchange a frame."""
        beat = self.step_number % self.shape.settings.heartbeat_steps == 0
        heartbeat = beat and not self.given_up
        return self.attached and len(self.ranks) > 1 and (outstanding > 0 or heartbeat)

    def _check_frames(self, rank: SimulatedRank, entered: list[str], *, due: bool) -> None:
        """A step enters one collective where a frame is due, else none."""
        expected = ["all_and"] if due else []
        if entered != expected:
            rule = Rule.GROUP if due and not entered else Rule.FRAMES
            if not self.attached:
                rule = Rule.ATTACH
            self.referee.breach(
                rule, f"rank {rank.rank}: a step entered {entered}, expected {expected}"
            )

    # -- the beginning and the end -----------------------------------------------------------------

    def attach(self) -> None:
        """Attach a linker on all ranks."""
        for rank in self.ranks:
            rank.watch.attached = True
            rank.watch.step = 0
        outcomes = self.together(
            "init_cache_linker", lambda rank: rank.cache.init_cache_linker(rank.backend), apart=True
        )
        for number, outcome in outcomes.items():
            if outcome.error is not None:
                self.referee.breach(
                    Rule.ATTACH, f"rank {number}: attaching raised {outcome.error!r}"
                )
        self.referee.check()
        self.attached = True
        self.given_up = False
        self.step_number = 0

    def detach(self) -> None:
        """Take it off again."""

        def take_off(rank: SimulatedRank) -> None:
            try:
                rank.cache.detach()
            except TransferError:
                rank.cache.detach()

        self.alike("detach", take_off)
        for rank in self.ranks:
            rank.watch.attached = rank.watch.given_up = False
            rank.watch.step = 0
        self.operations.forget_all()
        self.attached = self.given_up = False
        self.step_number = 0

    def reset(self) -> None:
        """All ranks reset, as often as it takes; afterwards nothing is left."""
        for _ in range(_RESETS):
            outcomes = self.together("reset", lambda rank: rank.cache.reset())
            errors = [outcome.error for outcome in outcomes.values() if outcome.error is not None]
            if not errors:
                break
            strange = [e for e in errors if not isinstance(e, TransferError | AgreementError)]
            if strange or not any(isinstance(error, TransferError) for error in errors):
                self.referee.breach(Rule.RECEIPTS, f"reset raised {errors[0]!r}")
                self.referee.check()
        else:
            self.referee.breach(Rule.RECEIPTS, f"reset failed {_RESETS} times")
        self.operations.forget_all()
        self.step_number = 0
        # A store that was given up serves again, on all ranks.
        self.given_up = False
        for rank in self.ranks:
            rank.watch.given_up = False
            rank.watch.step = 0
        self.check_empty("reset")

    def check_empty(self, after: str) -> None:
        """Nothing is locked, pending or leaked."""
        for rank in self.alive:
            for pool in rank.device.pools.values():
                held = pool.of(*(set(Holder) - {Holder.FREE}))
                if held or rank.available[pool.pool] != self._slots_of(pool.pool):
                    names = sorted({pool.holds[page].holder.name for page in held})
                    self.referee.breach(
                        Rule.RECEIPTS,
                        f"rank {rank.rank}: after {after} pages {sorted(held)} of {pool.pool} are "
                        f"in use: {names}",
                    )
            left = (rank.cache.num_outstanding, rank.tree.protected_size, len(rank.watch.locks))
            if left != (0, 0, 0):
                self.referee.breach(
                    Rule.RECEIPTS,
                    f"rank {rank.rank}: after {after} there are {left} "
                    "outstanding, locked tokens and locks",
                )
        self.referee.check()

    # -- what must hold ----------------------------------------------------------------------------

    def check(self, engine_pages: Mapping[PoolName, int]) -> None:
        """Everything that must hold at any time.

        Args:
            engine_pages: Pages of each pool that the engine's requests have.
        """
        idle = self.ranks[0].cache.num_outstanding == 0
        if idle:
            self.operations.forget_quiesced()
        for rank in self.ranks:
            if rank.tree.changed:
                rank.tree.changed = False
                try:
                    check_invariants(rank.tree)
                except ContractError as error:
                    self.referee.breach(Rule.RECEIPTS, f"rank {rank.rank}: {error}")
            available = rank.available
            for pool in rank.device.pools.values():
                self._check_pages(rank, pool, available[pool.pool], engine_pages[pool.pool])
                if idle and not rank.slots.num_retired:
                    self._check_leaks(pool)
            if idle:
                self._check_locks(rank)
        self.referee.check()

    def _check_pages(
        self, rank: SimulatedRank, pool: DevicePages, available: int, engine_pages: int
    ) -> None:
        """Each page has one owner, and nobody's are free."""
        size = 1 if pool.pool is PoolName.MAMBA else self.shape.page_size
        kind = _KINDS[pool.pool]
        count = pool.count
        in_tree = (rank.tree.evictable(kind) + rank.tree.protected(kind)) // size
        seen = (count[Holder.FREE], count[Holder.TREE], count[Holder.ENGINE])
        expected = (available // size, in_tree, engine_pages)
        if seen != expected:
            self.referee.breach(
                Rule.RECEIPTS,
                f"rank {rank.rank}: {expected} pages of {pool.pool} are free, in the tree and with "
                f"requests, the calls make {seen}",
            )
        # A load that found no room for all its parts gives back what it took, behind the batches.
        if count[Holder.ALLOCATED] * size > rank.slots.num_retired:
            self.referee.breach(
                Rule.LOAD_BACK,
                f"rank {rank.rank}: {count[Holder.ALLOCATED]} pages of {pool.pool} were allocated "
                "for nothing",
            )

    def _check_leaks(self, pool: DevicePages) -> None:
        """With nothing outstanding only the tree, requests and what was written off have pages."""
        for page in pool.of(Holder.LOAD, Holder.UNADOPTED, Holder.EVICTED):
            hold = pool.holds[page]
            operation = None if hold.operation is None else self.operations.get(hold.operation)
            if operation is None or not operation.written_off:
                self.referee.breach(
                    Rule.RECEIPTS,
                    f"rank {pool.rank}: {pool.pool} page {page} of operation {hold.operation} "
                    f"leaked: it is {hold.holder.name} with nothing outstanding",
                )

    def _check_locks(self, rank: SimulatedRank) -> None:
        """With nothing outstanding the cache locks only what it published a moment ago."""
        bound = self.shape.settings.publish_lock_steps
        old = [
            lock
            for lock in rank.watch.locks.values()
            if not lock.engine and rank.watch.step - lock.step > bound
        ]
        written_off = sum(one.written_off for one in self.operations.live.values())
        if len(old) > written_off:
            self.referee.breach(
                Rule.RECEIPTS,
                f"rank {rank.rank}: node {old[0].receipt.node_id} is locked since step "
                f"{old[0].step}, for nothing",
            )

    def close(self) -> None:
        """End the stage's threads."""
        self.stage.close()


def _rule_of(error: Exception | None) -> Rule:
    """Which rule an exception breaks that no sound replica raises."""
    if isinstance(error, AgreementError):
        return Rule.FRAMES
    return Rule.LOAD_BACK
