"""A replica of one or more ranks around the real parts, driven in lockstep."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import pytest
from tests.integration.linker.models import FULL
from tests.integration.linker.rank import Rank

from radixlink_comm import SingleRank, ThreadGroup
from radixlink_contracts import ExternalMatch, LoadWaiting, RequestId, Shard, StepReport
from radixlink_linker import LinkerSettings
from radixlink_testing import InMemoryStoreFactory
from radixlink_testing.linkers import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.integration.linker.models import Model

    from radixlink_contracts import LoadBack, MatchResult, PageStore, PoolName, RankGroup

_T = TypeVar("_T")

#: What failed is offered at its next use: but for how long it waits, which has tests of its own.
SETTINGS = LinkerSettings(step_timeout_s=20.0, retry_after_uses=1)


class Replica:
    """All ranks, in lockstep. What is asked of all must have one answer."""

    def __init__(
        self,
        num_ranks: int = 1,
        *,
        model: Model = FULL,
        settings: LinkerSettings = SETTINGS,
        num_pages: int = 32,
        by_hand: bool = False,
        attach: bool = True,
        one_shard: bool = False,
    ) -> None:
        groups: Sequence[RankGroup] = (
            [SingleRank()] if num_ranks == 1 else ThreadGroup.create(num_ranks)
        )
        self.clock = ManualClock()
        shared: dict[PoolName, PageStore] = {}
        if one_shard:
            shared = {
                pool: InMemoryStoreFactory().open(model.layout(pool, Shard()))
                for pool in model.pools
                if pool in settings.shared_pools
            }
        self.ranks = [
            Rank(
                group,
                model=model,
                settings=settings,
                num_pages=num_pages,
                by_hand=by_hand,
                clock=self.clock,
                shared=shared,
            )
            for group in groups
        ]
        self._threads = ThreadPoolExecutor(max_workers=num_ranks)
        if attach:
            self.attach()

    def attach(self) -> None:
        self.together(lambda rank: rank.cache.init_cache_linker(rank.linker))

    # -- ways to ask -------------------------------------------------------------------------------

    def together(self, call: Callable[[Rank], _T]) -> list[_T]:
        """Call on all ranks at once, as a collective needs it."""
        if len(self.ranks) == 1:
            return [call(self.ranks[0])]
        return [future.result(30) for future in [self._threads.submit(call, r) for r in self.ranks]]

    def outcomes(self, call: Callable[[Rank], object]) -> list[object]:
        """What each rank returned or raised, when all are called at once."""

        def attempt(rank: Rank) -> object:
            try:
                return call(rank)
            except Exception as error:  # noqa: BLE001 -- it is the answer
                return error

        return self.together(attempt)

    def alike(self, call: Callable[[Rank], _T]) -> _T:
        """The answer of all ranks, which is the same, one after the other."""
        first, *others = [call(rank) for rank in self.ranks]
        assert all(other == first for other in others), [first, *others]
        return first

    # -- what the engine does ----------------------------------------------------------------------

    def compute(self, tokens: Sequence[int], *, state: bool = True, slide: bool = False) -> bool:
        return self.alike(lambda rank: rank.compute(tokens, state=state, slide=slide))

    def evict(self, num_tokens: int = 1 << 20) -> int:
        return self.alike(lambda rank: rank.evict(num_tokens).num_tokens_evicted)

    def evict_windows(self, num_tokens: int = 1 << 20) -> int:
        return self.alike(
            lambda rank: rank.evict(0, swa_num_tokens=num_tokens).swa_num_tokens_evicted
        )

    def evict_states(self, num_states: int = 1 << 20) -> int:
        return self.alike(lambda rank: rank.evict(0, mamba_num=num_states).mamba_num_evicted)

    def match(self, request_id: str, tokens: Sequence[int]) -> MatchResult:
        return self.alike(lambda rank: rank.match(request_id, tokens))

    def load_back(self, request_id: str, tokens: Sequence[int]) -> LoadBack:
        return self.alike(lambda rank: rank.load_back(request_id, tokens))

    def start(self) -> None:
        """Start the queued loads, with a batch that ends at once."""
        self.launch()
        self.retire()

    def launch(self) -> None:
        self.alike(lambda rank: rank.cache.ready_to_load_host_cache())

    def retire(self) -> None:
        self.alike(lambda rank: rank.cache.batch_retired(1))

    def release(self, request_id: str) -> None:
        self.alike(lambda rank: rank.cache.release_aborted_request(RequestId(request_id)))

    def step(self) -> StepReport:
        """A scheduler step of all ranks; everything is checked behind it."""
        first, *others = self.together(lambda rank: rank.cache.step())
        assert all(other == first for other in others), [first, *others]
        self.check()
        return first

    def transfer(self) -> None:
        for rank in self.ranks:
            rank.transfer()

    def settle(self) -> StepReport:
        """Let every transfer end and step until nothing is outstanding; all that was reported."""
        reports: list[StepReport] = []
        while self.alike(lambda rank: rank.cache.num_outstanding):
            self.transfer()
            reports.append(self.step())
            assert len(reports) < 50, "something never ends"
        return total(reports)

    def reset(self) -> None:
        for rank in self.ranks:
            while rank.computing:
                rank.end(rank.computing[0], insert=False)
        self.together(lambda rank: rank.cache.reset())
        self.check()

    # -- ways that tests begin with ----------------------------------------------------------------

    def store(self, tokens: Sequence[int]) -> None:
        """Compute a sequence, store it, and drop it from the device."""
        self.compute(tokens)
        report = self.settle()
        assert report.num_offloads_failed == 0
        self.evict()
        assert self.alike(lambda rank: rank.device_pages(tokens)) == 0

    def ask(self, request_id: str, tokens: Sequence[int]) -> MatchResult:
        """Match until the lookup is answered."""
        if self.match(request_id, tokens).external is ExternalMatch.UNKNOWN:
            for _ in range(10):
                if request_id in self.step().ready:
                    break
            else:
                pytest.fail(f"the lookup of {request_id} was never answered")
        return self.match(request_id, tokens)

    def queue(self, request_id: str, tokens: Sequence[int]) -> LoadWaiting:
        """Match, and queue the load of the hit."""
        assert self.ask(request_id, tokens).external is ExternalMatch.HIT
        waiting = self.load_back(request_id, tokens)
        assert isinstance(waiting, LoadWaiting), waiting
        return waiting

    def restore(self, request_id: str, tokens: Sequence[int]) -> StepReport:
        """Bring back what the store has, for a request that goes on to use it."""
        self.queue(request_id, tokens)
        self.start()
        return self.settle()

    # -- what must hold ----------------------------------------------------------------------------

    def check(self) -> None:
        for rank in self.ranks:
            rank.check()

    def finish(self) -> None:
        """End everything, and check that nothing is left."""
        for rank in self.ranks:
            rank.end_requests()
        if self.ranks[0].slots._launched > self.ranks[0].slots._processed:
            self.retire()
        self.settle()
        for rank in self.ranks:
            rank.check_idle()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self._threads.shutdown()


def total(reports: Sequence[StepReport]) -> StepReport:
    """What several steps reported together."""
    return StepReport(
        landed=tuple(itertools.chain.from_iterable(report.landed for report in reports)),
        failed=tuple(itertools.chain.from_iterable(report.failed for report in reports)),
        ready=tuple(itertools.chain.from_iterable(report.ready for report in reports)),
        num_offloads_stored=sum(report.num_offloads_stored for report in reports),
        num_offloads_failed=sum(report.num_offloads_failed for report in reports),
    )
