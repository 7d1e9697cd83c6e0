"""`Engine`: requests and batches, as an engine's scheduler has them; the same on all ranks.

A request waits until its match says what to do, then runs in one batch for each chunk of it, and
comes again for each turn of its conversation. One with a layer-wise load runs at once, and its
results count when the load has landed; where that fails it is run again. A batch reads its prefix
from launch to its end, and writes its own pages then; both are checked.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING

import torch

from radixlink_contracts import (
    DEFAULT_NAMESPACE,
    ExternalMatch,
    LoadAdmitted,
    LoadWaiting,
    Namespace,
    PoolName,
)
from radixlink_testing.simulator._batch import Batch
from radixlink_testing.simulator._holdings import Holdings
from radixlink_testing.simulator._inquiry import Inquiry
from radixlink_testing.simulator._rank import request_id
from radixlink_testing.simulator._requests import Life, Request, Verdict
from radixlink_testing.simulator._rules import Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import (
        BatchIndex,
        MatchResult,
        StepReport,
    )
    from radixlink_testing.simulator._plan import Arrive
    from radixlink_testing.simulator._rank import SimulatedRank
    from radixlink_testing.simulator._replica import Replica

#: Ticks and seconds after which a request that was told nothing waits for ever.
_PATIENCE_TICKS = 80
_PATIENCE_S = 30.0
#: How often a request that finds no room tries again: what was written off may never come back.
_MAX_REFUSALS = 40
#: For how many of those one counts that comes between two chunks: all of the first is in vain.
_CHUNK_REFUSALS = 8


class Engine:
    """The scheduler.

    Thread: one.
    """

    def __init__(self, replica: Replica) -> None:
        """Start with no request."""
        self._replica = replica
        self._referee = replica.referee
        self._inquiry = Inquiry(replica)
        self._holdings = Holdings(replica)
        #: All that are not over, in the order in which they came.
        self.requests: dict[str, Request] = {}
        #: Batches that run, oldest first.
        self._batches: deque[Batch] = deque()
        #: The last one, while the frame after its launch has not come.
        self._unfinished: Batch | None = None
        #: Requests whose next forward comes with the next batch.
        self._admitted: list[Request] = []
        #: Requests that are done, in the whole history.
        self.num_finished = 0
        self.num_hits = 0
        self.num_loads = 0
        self.num_layer_wise = 0

    @property
    def num_batches(self) -> int:
        """Batches that run."""
        return len(self._batches)

    @property
    def num_pages(self) -> dict[PoolName, int]:
        """Pages, and states, that requests have on each rank."""
        full = states = 0
        for request in self.requests.values():
            states += len(request.states) > 0
            if request.parts:
                part = request.parts[0]
                full += len(part.own_pages)
                states += part.state is not None
        return {PoolName.KV: full, PoolName.SWA: full, PoolName.MAMBA: states}

    # -- requests come and go ----------------------------------------------------------------------

    def arrive(self, arrival: Arrive) -> None:
        """A request comes."""
        if arrival.name in self.requests:
            return
        size = self._replica.shape.page_size
        salt = arrival.tenant
        tokens = _tokens(arrival.pages, size)
        tokens.extend([9] * min(arrival.tail, size - 1))
        self.requests[arrival.name] = Request(
            name=arrival.name,
            ids=[request_id(arrival.name, rank.rank) for rank in self._replica.ranks],
            tokens=tokens,
            namespace=Namespace(cache_salt=salt) if salt else DEFAULT_NAMESPACE,
            turns=[_tokens(turn, size) for turn in arrival.turns],
            chunk=arrival.chunk,
            slide=arrival.slide,
            keep=arrival.keep,
            layer_wise=arrival.layer_wise,
            page_size=size,
            since_tick=self._referee.tick,
            since_s=self._replica.time.seconds,
        )
        self._referee.note("engine", f"{arrival.name} comes: {arrival.pages} and {arrival.turns}")

    def abort(self, name: str) -> None:
        """A request is ended, in whatever state it is."""
        request = self.requests.get(name)
        if request is None or request.aborted:
            return
        self._referee.note("engine", f"{name} is aborted while it is {request.life.value}")
        self._release(request)
        if request in self._admitted:
            self._admitted.remove(request)
            self._drop(request)
        elif request.life is Life.RUNNING:
            request.aborted = True
            for part in request.parts:
                part.ignore_load()
        else:
            del self.requests[name]

    def _release(self, request: Request) -> None:
        """The cache forgets a request; twice is once."""
        for _ in range(2):
            self._replica.alike(
                "release_aborted_request",
                lambda rank: rank.cache.release_aborted_request(request.ids[rank.rank]),
            )
        for rank in self._replica.ranks:
            rank.watch.released(request.name)
        request.landed_pages = 0

    def _move(self, request: Request, life: Life) -> None:
        """A request is somewhere else in its life now."""
        request.life = life
        request.since_tick = self._referee.tick
        request.since_s = self._replica.time.seconds

    # -- what a step said --------------------------------------------------------------------------

    def hear(self, report: StepReport) -> None:
        """Wake whoever a step names."""
        told = [str(name) for name in (*report.landed, *report.failed, *report.ready)]
        if len(set(told)) < len(told):
            self._referee.breach(Rule.FRAMES, f"a step named a request twice: {told}")
        if self._referee.telling and told:
            self._referee.note(
                "step",
                f"landed {[*map(str, report.landed)]}, failed {[*map(str, report.failed)]}, "
                f"ready {[*map(str, report.ready)]}",
            )
        for name in told:
            request = self.requests.get(name)
            if request is None or request.aborted:
                self._referee.breach(
                    Rule.DEADLINES, f"{name}, which the engine released, was told something"
                )
            elif request.life is Life.TOLD_TO_WAIT:
                self._move(request, Life.WAITING)
        self._referee.check()
        for name in map(str, report.landed):
            self._land(self.requests[name])
        for name in map(str, report.failed):
            request = self.requests[name]
            if request.verdict is Verdict.OPEN:
                self._fail(request)
        self._referee.check()

    def _land(self, request: Request) -> None:
        """A request's pages are in the tree, for as long as its lock is promised."""
        replica = self._replica
        loads = [one for one in replica.operations.live.values() if one.request == request.name]
        if loads:
            request.landed_pages = loads[-1].end
            request.landed_until = replica.step_number + replica.shape.settings.publish_lock_steps
        if request.verdict is Verdict.OPEN:
            self._take_over(request)

    def _take_over(self, request: Request) -> None:
        """What a request that runs was admitted with is the tree's: lock it, and go on with that."""
        request.verdict = Verdict.NONE
        pages, nodes = self._inquiry.device_match(request)
        if pages < request.start:
            self._referee.breach(
                Rule.LANDED, f"{request.name} has landed, but the device has {pages} of its pages"
            )
            return
        receipts = self._holdings.lock(nodes)
        self._holdings.unlock([part.receipt for part in request.parts])
        end = request.start * request.page_size
        for rank, part in zip(self._replica.ranks, request.parts, strict=True):
            handed_in, receipt = request.handed_in[rank.rank], receipts[rank.rank]
            path = rank.tree.path_indices(receipt.node_id)[:end]
            told = part.prefix.clone()
            for start, slots in handed_in.told[1:]:
                told[start : start + len(slots)] = slots
            if not torch.equal(told, path):
                self._referee.breach(
                    Rule.LANDED,
                    f"rank {rank.rank}: {request.name} was told of slots {told.tolist()}, and the "
                    f"tree has {path.tolist()}",
                )
            part.receipt, part.prefix = receipt, path
        request.handed_in = []
        request.landed_pages = 0

    def _fail(self, request: Request) -> None:
        """What a request that runs was admitted with will never come: it is run again."""
        request.handed_in = []
        request.verdict = Verdict.FAILED
        if request in self._admitted:
            self._admitted.remove(request)
            self._begin_again(request)

    # -- one iteration -----------------------------------------------------------------------------

    def look(self, admit: int) -> list[tuple[Request, MatchResult]]:
        """Match those that wait; what becomes of them is decided in `admit`, and much may lie between."""
        waiting = [one for one in self.requests.values() if one.life is Life.WAITING]
        found = [(request, self._inquiry.match(request)) for request in waiting[:admit]]
        for request, result in found:
            if result.external is ExternalMatch.UNKNOWN:
                self._move(request, Life.TOLD_TO_WAIT)
        return found

    def admit(self, found: Sequence[tuple[Request, MatchResult]]) -> None:
        """Queue the loads of hits, and take slots for what is to be computed."""
        for request, result in found:
            if request.life is not Life.WAITING:
                continue
            if result.external is ExternalMatch.HIT:
                self.num_hits += 1
                answer = self._inquiry.load_back(request, result)
                self.num_loads += isinstance(answer, LoadWaiting | LoadAdmitted)
                if isinstance(answer, LoadWaiting):
                    self._move(request, Life.TOLD_TO_WAIT)
                    continue
                if isinstance(answer, LoadAdmitted):
                    self._admit(request, answer.num_tokens // request.page_size)
                    continue
            self._admit(request)

    def poke(self, name: str) -> None:
        """Match a request that waits once more, without having been told to."""
        request = self.requests.get(name)
        if request is None or request.life is Life.RUNNING:
            return
        if self._inquiry.match(request).external is ExternalMatch.UNKNOWN:
            if request.life is Life.WAITING:
                self._move(request, Life.TOLD_TO_WAIT)
        else:
            self._move(request, Life.WAITING)

    def _admit(self, request: Request, loading: int = 0) -> None:
        """Lock the prefix and take slots for what is to be computed.

        Args:
            request: Whom.
            loading: Pages behind the device prefix that a layer-wise load brings.
        """
        on_device, nodes = self._inquiry.device_match(request)
        receipts = self._holdings.lock(nodes)
        if loading:
            self.num_layer_wise += 1
            self._inquiry.check_told(request, on_device, loading)
        if not self._holdings.take(request, on_device, on_device + loading, receipts):
            self._holdings.unlock(receipts)
            if loading:
                # It cannot run now, so its load is of no use.
                request.handed_in = []
                self._release(request)
            self._refuse(request)
            return
        self._admitted.append(request)
        request.verdict = Verdict.OPEN if loading else Verdict.NONE
        self._move(request, Life.RUNNING)

    def _refuse(self, request: Request, weight: int = 1) -> None:
        """There was no room for it: it tries again, but not for ever."""
        request.refused += weight
        if request.refused > _MAX_REFUSALS:
            self.abort(request.name)

    def launch(self) -> None:
        """Start the queued loads and a batch of what was admitted."""
        self.finish()
        indices: dict[int, BatchIndex | None] = {}

        def start(rank: SimulatedRank) -> None:
            indices[rank.rank] = rank.cache.ready_to_load_host_cache()

        self._replica.alike("ready_to_load_host_cache", start)
        self._replica.operations.start()
        batch = Batch(self._admitted, self._replica.ranks, indices)
        self._admitted = []
        self._batches.append(batch)
        self._unfinished = batch
        if self._referee.telling and batch.requests:
            self._referee.note("engine", f"launches {[request.name for request in batch.requests]}")
        self._referee.check()

    def go_on(self, rank: SimulatedRank) -> None:
        """The forwards that run read on, on one rank."""
        for batch in self._batches:
            batch.go_on(rank)

    def finish(self) -> None:
        """The frame after a launch, if it has not come."""
        batch, self._unfinished = self._unfinished, None
        if batch is not None:
            self.hear(self._replica.finish_loads(batch.indices))

    def retire(self) -> None:
        """Process the results of the oldest batch."""
        batch = self._batches.popleft()
        if batch is self._unfinished:
            self.finish()
        batch.end()
        self._referee.check()
        for request in batch.requests:
            if request.aborted:
                self._drop(request)
            elif request.verdict is Verdict.FAILED:
                self._begin_again(request)
            else:
                self._process(request)
        self._replica.alike("batch_retired", lambda rank: rank.cache.batch_retired(1))

    def _drop(self, request: Request) -> None:
        """Give an aborted request's slots and lock back."""
        self._holdings.free(request)
        self._holdings.unlock([part.receipt for part in request.parts])
        del self.requests[request.name]

    def _begin_again(self, request: Request) -> None:
        """Drop what was computed of a load that failed."""
        self._referee.note("engine", f"{request.name} is run again")
        receipts = [part.receipt for part in request.parts]
        self._holdings.free(request)
        self._holdings.unlock(receipts)
        request.parts = []
        request.verdict = Verdict.NONE
        self._move(request, Life.WAITING)

    def _process(self, request: Request) -> None:
        """Insert what was computed, move the lock on, and see what comes next."""
        parts = request.parts
        for part in parts:
            if part.misread:
                self._referee.breach(Rule.LANDED, part.misread)
        if request.verdict is Verdict.OPEN:
            self._referee.breach(Rule.DEADLINES, f"{request.name}'s load was never decided")
        self._referee.check()
        more = request.end < len(request.marks)
        nodes = self._holdings.insert(request, last=not more)
        request.parts = []
        receipts = self._holdings.lock(nodes) if more else []
        self._holdings.unlock([part.receipt for part in parts])
        if more:
            request.states = [part.state for part in parts if part.state is not None]
            if self._holdings.take(request, request.end, request.end, receipts):
                self._admitted.append(request)
                return
            self._holdings.unlock(receipts)
            self._move(request, Life.WAITING)
            self._refuse(request, _CHUNK_REFUSALS)
            return
        if request.grow():
            self._move(request, Life.WAITING)
        else:
            self._release(request)
            self.num_finished += 1
            del self.requests[request.name]

    # -- the end of things -------------------------------------------------------------------------

    def stop(self) -> None:
        """No forward runs any more, and no request has a slot: what must be so before a reset."""
        for batch in self._batches:
            batch.drop()
        for request in self.requests.values():
            self._holdings.free(request)
            self._holdings.free_states(request)
        self._batches.clear()
        self._admitted.clear()
        self._unfinished = None

    def start_again(self) -> None:
        """After a reset every request begins anew; its locks are void."""
        for name, request in list(self.requests.items()):
            request.parts = []
            request.handed_in = []
            request.verdict = Verdict.NONE
            request.landed_pages = 0
            self._move(request, Life.WAITING)
            if request.aborted:
                del self.requests[name]
        for rank in self._replica.ranks:
            rank.watch.forget_requests()

    def detached(self) -> None:
        """Nobody answers any more: whoever waits matches again, whose load was open has none."""
        for request in list(self.requests.values()):
            if request.life is Life.TOLD_TO_WAIT:
                self._move(request, Life.WAITING)
            if request.verdict is Verdict.OPEN:
                self._fail(request)
            request.landed_pages = 0
        for rank in self._replica.ranks:
            rank.watch.forget_requests()

    def check_patience(self) -> None:
        """Nobody waits for ever."""
        now = self._replica.time.seconds
        for request in self.requests.values():
            if (
                request.life is Life.TOLD_TO_WAIT
                and self._referee.tick - request.since_tick > _PATIENCE_TICKS
                and now - request.since_s > _PATIENCE_S
            ):
                self._referee.breach(
                    Rule.DEADLINES,
                    f"{request.name} waits since tick {request.since_tick}, and is told nothing",
                )


def _tokens(pages: str, page_size: int) -> array[int]:
    """The tokens of pages that are named by letters."""
    return array("q", [ord(letter) * 8 + place for letter in pages for place in range(page_size)])
