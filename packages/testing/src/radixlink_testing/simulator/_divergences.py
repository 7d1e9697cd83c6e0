"""`Divergences`: ranks that do not make the same calls, and ranks that end.

All ranks hear of it in one frame, or by its deadline; afterwards nothing goes on until all reset.
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING, assert_never

from radixlink_contracts import EvictParams, InsertParams, MatchPrefixParams, PoolName, RadixKey
from radixlink_contracts.errors import AgreementError
from radixlink_testing.simulator._device import pages_of
from radixlink_testing.simulator._faults import Divergence
from radixlink_testing.simulator._pages import marks_of
from radixlink_testing.simulator._rank import request_id
from radixlink_testing.simulator._rules import Rule

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from radixlink_testing.simulator._engine import Engine
    from radixlink_testing.simulator._rank import SimulatedRank
    from radixlink_testing.simulator._replica import Replica


class Divergences:
    """What one rank alone does, and what must follow.

    Thread: one.
    """

    def __init__(self, replica: Replica, engine: Engine, take_off: Callable[[], None]) -> None:
        """Of this replica.

        Args:
            replica: The ranks.
            engine: What it drives them for.
            take_off: Detaches the linker of all ranks.
        """
        self._replica = replica
        self._engine = engine
        self._take_off = take_off
        self._referee = replica.referee
        #: Ranks that did what the others did not.
        self.num_divergences = 0
        self._num_ghosts = 0

    def _with_a_store(self) -> None:
        """A cache that gave its store up exchanges nothing that could tell; it gets one again."""
        if self._replica.given_up:
            self._take_off()
            self._replica.attach()

    def diverge(self, odd: SimulatedRank, how: Divergence) -> None:
        """A rank does what the others do not: all of them hear of it in one frame, and recover."""
        odd.watch.note(f"alone: {how.value}")
        self.num_divergences += 1
        self._with_a_store()
        if how is Divergence.SETTINGS:
            self._attach_differently(odd)
            return
        self._engine.stop()
        match how:
            case Divergence.INSERT:
                self._insert_alone(odd)
            case Divergence.EVICT:
                if not self._evict_alone(odd):
                    self._match_ghost([odd])
            case Divergence.MATCH:
                self._match_ghost([odd])
            case Divergence.ABORT:
                ghost = self._match_ghost(self._replica.ranks)
                odd.watch.begin("release_aborted_request")
                odd.cache.release_aborted_request(request_id(ghost, odd.rank))
            case Divergence.EXTRA_STEP:
                self._step_alone(odd)
            case Divergence.NO_STEP:
                self._match_ghost(self._replica.ranks)
                self._step_without(odd)
            case _:
                assert_never(how)
        self._expect_disagreement()
        self._expect_refusals()
        self._replica.reset()
        self._engine.start_again()

    def _insert_alone(self, odd: SimulatedRank) -> None:
        """One rank computes a page that the others do not."""
        size = self._replica.shape.page_size
        odd.watch.begin("evict")
        swa = 0 if odd.pair is None else size
        odd.cache.evict(EvictParams(num_tokens=size, swa_num_tokens=swa))
        slots = odd.allocator.alloc(size)
        if slots is None:
            self._match_ghost([odd])
            return
        key = self._ghost_key()
        _computed(odd, slots, key)
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
        size = self._replica.shape.page_size
        return RadixKey(array("q", [1_000_000 + self._num_ghosts] * size))

    def _step_alone(self, odd: SimulatedRank) -> None:
        """One rank steps once more: alone where a frame is due, else unnoticed until the next."""
        due = (odd.watch.step + 1) % self._replica.shape.settings.heartbeat_steps == 0
        if not due and not odd.cache.num_outstanding:
            odd.watch.begin("step")
            odd.cache.step()
            self._match_ghost(self._replica.ranks)
            return
        self._match_ghost(self._replica.ranks)
        outcomes = self._replica.together(
            "step", lambda rank: rank.cache.step() if rank is odd else None
        )
        if not isinstance(outcomes[odd.rank].error, AgreementError):
            self._referee.breach(
                Rule.DEADLINES, f"rank {odd.rank} stepped alone and got {outcomes[odd.rank]}"
            )

    def _step_without(self, odd: SimulatedRank) -> None:
        """One rank does not step: the others name it by the deadline."""
        outcomes = self._replica.together(
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

        # By the next heartbeat, and a rank may be a step ahead.
        for _ in range(self._replica.shape.settings.heartbeat_steps + 1):
            heard.clear()
            outcomes = self._replica.together(
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
        for rank in self._replica.ranks:
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
        self._take_off()
        odd.backend.more_pools = True
        for rank in self._replica.ranks:
            rank.watch.attached = True
        outcomes = self._replica.together(
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
        self._replica.attach()

    def kill(self, victim: SimulatedRank) -> None:
        """A rank ends: the others hear who it was by the deadline."""
        victim.watch.note("ends")
        self._with_a_store()
        self._engine.stop()
        self._match_ghost(self._replica.ranks)
        self._replica.dead.add(victim.rank)
        outcomes = self._replica.together("step", lambda rank: rank.cache.step())
        for number, outcome in outcomes.items():
            self._expect_naming(victim, number, outcome.error)
        self._referee.check()

    def end_without_the_dead(self) -> None:
        """Those that live close their linkers, and leave nothing behind."""
        victims = [rank for rank in self._replica.ranks if rank.rank in self._replica.dead]
        for rank in self._replica.alive:
            rank.watch.disarm()
            rank.watch.begin("detach")
            rank.cache.release_host_resources()
        outcomes = self._replica.together("reset", lambda rank: rank.cache.reset())
        for number, outcome in outcomes.items():
            self._expect_naming(victims[0], number, outcome.error)
        self._replica.check_empty("the end")


def _computed(rank: SimulatedRank, slots: torch.Tensor, key: RadixKey) -> None:
    """A forward wrote the pages of a sequence, and the windows beside them."""
    size, device = rank.tree.page_size, rank.device
    for page, mark in zip(pages_of(slots, size), marks_of(key, size), strict=True):
        windows = device.windows_of((page,))
        for name, pages in ((PoolName.KV, [page]), (PoolName.SWA, windows)):
            for one in pages:
                device.pools[name].taken((one,))
                device.pools[name].compute(one, mark)


def _error_of_frame(rank: SimulatedRank) -> Exception | None:
    """A rank goes on while others wait for it: by its next heartbeat it comes to a frame."""
    entered = len(rank.watch.collectives)
    try:
        while len(rank.watch.collectives) == entered:
            rank.cache.step()
    except AgreementError as error:
        return error
    return None
