"""One rank of a job, as a case sees it: all ranks run the same case, each on parts of its own.

A `Job` makes `Engine`s, whose frames go over a new group of all ranks, and has a group of its own for
what a test must say beside them. Neither knows what ranks are: one process, threads, MPI or gloo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import attrs
from tests.integration.linker.layer_wise import RunningRequest
from tests.integration.linker.rank import Rank
from tests.integration.linker.replica import total
from tests.integration.linker.sequences import key_of
from typing_extensions import override

from radixlink_contracts import (
    ComponentType,
    ExternalMatch,
    LoadAdmitted,
    LoadMode,
    LoadWaiting,
    OperationId,
    PoolName,
    RequestId,
)
from radixlink_linker import LinkerSettings
from radixlink_testing.linkers import ManualClock
from radixlink_testing.rank_groups import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.integration.linker.models import Model

    from radixlink_contracts import (
        BatchIndex,
        LinkerComponent,
        LoadBack,
        MatchResult,
        PoolTransfer,
        RankGroup,
        StepReport,
    )

_T = TypeVar("_T")

#: What failed is offered at its next use.
SETTINGS = LinkerSettings(step_timeout_s=PATIENCE_S, staged_percent=100, retry_after_uses=1)


@attrs.frozen(kw_only=True)
class NodeState:
    """A node of a tree, as far as a load or an offload could change it."""

    place: int
    slots: tuple[int, ...]
    has_window: bool
    state: int | None
    unstored: tuple[ComponentType, ...]
    pending: bool


@attrs.frozen(kw_only=True)
class Standing:
    """What a rank has of slots, locks, operations and tree: equal before and after what failed."""

    available: tuple[int, ...]
    protected: tuple[int, ...]
    num_locks: int
    num_operations: int
    num_retired: int
    staged: dict[PoolName, int]
    nodes: tuple[NodeState, ...]


class Engine(Rank):
    """An engine on one rank, whose calls every rank makes alike.

    What it is told must be what all ranks are told; that is compared when the case is over.
    """

    def __init__(
        self,
        group: RankGroup,
        *,
        model: Model,
        settings: LinkerSettings,
        num_pages: int,
        by_hand: bool,
    ) -> None:
        super().__init__(
            group,
            model=model,
            settings=settings,
            num_pages=num_pages,
            by_hand=by_hand,
            clock=ManualClock(),
        )
        self.told: list[str] = []

    def alike(self, value: _T) -> _T:
        """A value that is the same on all ranks."""
        self.told.append(str(value))
        return value

    @property
    def components(self) -> tuple[LinkerComponent, ...]:
        """Full attention first."""
        return self.cache._components

    @property
    def num_frames(self) -> int:
        """Collectives that were entered for frames."""
        return self.calls.count("all_and")

    def attach(self) -> None:
        """Attach the linker. Ranks: all."""
        self.cache.init_cache_linker(self.linker)

    # -- what an engine does -----------------------------------------------------------------------

    @override
    def match(self, request_id: str, tokens: Sequence[int]) -> MatchResult:
        return self.alike(super().match(request_id, tokens))

    @override
    def load_back(self, request_id: str, tokens: Sequence[int]) -> LoadBack:
        return self.alike(super().load_back(request_id, tokens))

    @override
    def compute(self, tokens: Sequence[int], *, state: bool = True, slide: bool = False) -> bool:
        return self.alike(super().compute(tokens, state=state, slide=slide))

    def ask(self, request_id: str, tokens: Sequence[int]) -> MatchResult:
        """Match until the lookup is answered."""
        if self.match(request_id, tokens).external is ExternalMatch.UNKNOWN:
            for _ in range(10):
                if request_id in self.step().ready:
                    break
            else:
                raise AssertionError(f"the lookup of {request_id} was never answered")
        return self.match(request_id, tokens)

    def queue(self, request_id: str, tokens: Sequence[int]) -> OperationId:
        """Match, and queue the staged load of the hit."""
        assert self.ask(request_id, tokens).external is ExternalMatch.HIT
        waiting = self.load_back(request_id, tokens)
        assert isinstance(waiting, LoadWaiting), waiting
        return waiting.operation_id

    def admit(self, request_id: str, tokens: Sequence[int]) -> RunningRequest:
        """Match, and have the request admitted, its load layer by layer."""
        hit = self.ask(request_id, tokens)
        assert hit.external is ExternalMatch.HIT, hit
        running = RunningRequest(request_id=RequestId(request_id), key=key_of(tokens))
        answer = self.alike(self.cache.init_load_back(running, LoadMode.LAYER_WISE))
        assert isinstance(answer, LoadAdmitted), answer
        return running

    def launch(self) -> BatchIndex | None:
        """Start what is queued, and launch a batch."""
        return self.cache.ready_to_load_host_cache()

    def retire(self) -> None:
        """A batch was processed."""
        self.cache.batch_retired(1)

    def start(self) -> None:
        """Start the queued loads, with a batch that ends at once."""
        self.launch()
        self.retire()

    def step(self) -> StepReport:
        """One step; everything is checked behind it."""
        report = self.alike(self.cache.step())
        self.check()
        return report

    def finish_loads(self, batch: BatchIndex | None) -> StepReport:
        """The frame after a launch; everything is checked behind it."""
        report = self.alike(self.cache.finish_loads(batch))
        self.check()
        return report

    def settle(self) -> StepReport:
        """Let every transfer end and step until nothing is outstanding; all that was reported."""
        reports: list[StepReport] = []
        while self.alike(self.cache.num_outstanding):
            self.transfer()
            reports.append(self.step())
            assert len(reports) < 50, "something never ends"
        return total(reports)

    def release(self, request_id: str) -> None:
        """A request goes."""
        self.cache.release_aborted_request(RequestId(request_id))

    def drop(self) -> None:
        """Evict all that can be evicted."""
        self.alike(self.evict().num_tokens_evicted)

    def store_all(self, *sequences: Sequence[int]) -> None:
        """Compute sequences, store them, and drop them from the device."""
        for tokens in sequences:
            assert self.compute(tokens)
        assert self.settle().num_offloads_failed == 0
        self.drop()
        assert self.in_use == (0,) * len(self.slots.sizes)

    def restore(self, request_id: str, tokens: Sequence[int]) -> StepReport:
        """Bring back what the store has, for a request that goes on to use it."""
        self.queue(request_id, tokens)
        self.start()
        return self.settle()

    def reset(self) -> None:
        """End every forward and begin anew. Ranks: all."""
        while self.computing:
            self.end(self.computing[0], insert=False)
        self.cache.reset()
        self.check_idle()

    # -- what can be seen --------------------------------------------------------------------------

    @property
    def in_use(self) -> tuple[int, ...]:
        """Slots of each pool that are not free."""
        return tuple(
            size - available
            for size, available in zip(self.slots.sizes, self.slots.available_sizes, strict=True)
        )

    def transfers_of(self, op: OperationId) -> tuple[PoolTransfer, ...]:
        """What the linker was handed for an operation that it holds."""
        return self.by_hand._held[op].transfers

    def locks_of_operations(self) -> list[OperationId]:
        """Who holds a lock, of operations."""
        return [lock.op for lock in self.cache.holders().locks if lock.op is not None]

    def standing(self) -> Standing:
        """What a failure must leave as it was."""
        holders = self.cache.holders()
        return Standing(
            available=self.slots.available_sizes,
            protected=tuple(self.tree.protected(kind) for kind in self.tree.components),
            num_locks=len(holders.locks),
            num_operations=len(holders.operations) + len(holders.written_off),
            num_retired=holders.num_retired,
            staged=dict(holders.staged),
            nodes=tuple(
                NodeState(
                    place=node.node_id - self.tree.root,
                    slots=tuple(node.device_indices.tolist()),
                    has_window=node.has_swa,
                    state=node.mamba_slot,
                    unstored=node.unstored,
                    pending=node.pending_operation is not None,
                )
                for node in self.nodes()
            ),
        )

    def finish(self) -> None:
        """End everything, and check that nothing is left, and nothing was ever written off."""
        self.end_requests()
        self.slots.release_all()
        self.settle()
        self.check_idle()
        counters = self.cache.counters
        assert counters is None or counters.slots_written_off == 0

    @override
    def close(self) -> None:
        """Close everything that it has, its group too."""
        super().close()
        self.cache._frames.group.close()


class Job:
    """This rank, for the length of one case."""

    def __init__(self, world: RankGroup, new_group: Callable[[], RankGroup]) -> None:
        """Run on the ranks of a group, with new groups of the same ranks for frames.

        Args:
            world: For what tests tell each other. The caller closes it.
            new_group: Makes one. Ranks: all.
        """
        self.rank = world.rank
        self.size = world.size
        #: The last rank is the one that faults are about.
        self.last = world.size - 1
        self._world = world
        self._new_group = new_group
        self._engines: list[Engine] = []

    @property
    def is_last(self) -> bool:
        """This rank is the one that faults are about."""
        return self.rank == self.last

    @property
    def frame(self) -> int:
        """Collectives that a frame costs."""
        return 0 if self.size == 1 else 1

    def engine(
        self,
        model: Model,
        *,
        settings: LinkerSettings = SETTINGS,
        num_pages: int = 64,
        by_hand: bool = True,
        attach: bool = True,
    ) -> Engine:
        """A new engine on this rank; its linker moves nothing before it is told to, if by hand."""
        engine = Engine(
            self._new_group(),
            model=model,
            settings=settings,
            num_pages=num_pages,
            by_hand=by_hand,
        )
        self._engines.append(engine)
        if attach:
            engine.attach()
            engine.calls.clear()
        return engine

    def gather(self, text: str) -> list[str]:
        """What each rank says."""
        return [one.decode() for one in self._world.all_gather(text.encode(), PATIENCE_S)]

    def meet(self) -> None:
        """Return when all ranks are here."""
        self.gather("")

    def finish(self) -> None:
        """Check that nothing is left of any engine, and that all ranks were told the same."""
        for engine in self._engines:
            engine.finish()
            logs = self.gather("\n".join(engine.told))
            for other in logs[1:]:
                assert other.splitlines() == logs[0].splitlines()

    def close(self) -> None:
        """Close the engines."""
        for engine in self._engines:
            engine.close()
