"""`Engine`: requests and batches, as an engine's scheduler has them; the same on all ranks.

A request waits until its match says what to do, then runs in one batch for each chunk of it, and
comes again for each turn of its conversation. A batch reads its prefix from launch to its end, and
writes its own pages then; both are checked.
"""

from __future__ import annotations

import enum
from array import array
from collections import deque
from typing import TYPE_CHECKING

import attrs
import torch

from radixlink_contracts import (
    EvictParams,
    ExternalMatch,
    IncLockRefParams,
    InsertParams,
    LoadWaiting,
    MatchPrefixParams,
    Namespace,
    RadixKey,
)
from radixlink_testing.simulator._pages import marks_of
from radixlink_testing.simulator._rank import HandedIn, request_id
from radixlink_testing.simulator._rules import Rule
from radixlink_testing.simulator._watch import Wanted, pages_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import (
        IncLockRefResult,
        LoadBack,
        MatchResult,
        NodeId,
        RequestId,
        StepReport,
    )
    from radixlink_testing.simulator._plan import Arrive
    from radixlink_testing.simulator._rank import SimulatedRank
    from radixlink_testing.simulator._replica import Replica

#: Ticks and seconds after which a request that was told nothing waits for ever.
_PATIENCE_TICKS = 80
_PATIENCE_S = 30.0
#: How often a request that finds no room tries again.
_MAX_REFUSALS = 100


class Life(enum.Enum):
    """Where a request is in its life."""

    #: It is to be matched.
    WAITING = "waiting"
    #: It was told to wait until a step names it.
    TOLD_TO_WAIT = "told to wait"
    #: It runs.
    RUNNING = "running"


@attrs.define(kw_only=True, eq=False)
class Part:
    """What one rank has of a request that runs.

    Attributes:
        receipt: The lock on its prefix.
        prefix: The prefix's slots. Shape: (tokens,) int64.
        own: Its own slots. Shape: (tokens of whole pages,) int64.
        pages: The pages of both, first page first.
    """

    receipt: IncLockRefResult
    prefix: torch.Tensor
    own: torch.Tensor
    pages: list[int]


@attrs.define(kw_only=True, eq=False)
class Request:
    """A request of the engine.

    Attributes:
        name: What it is called.
        ids: Its id, by rank.
        tokens: Its sequence.
        namespace: Its tenant's.
        turns: What is still to come.
        chunk: Pages that one forward computes; 0 for all.
        page_size: Tokens.
        life: Where it is.
        since_tick: Since when it is there.
        since_s: The same, in seconds.
        loading: The load that is its own.
        landed_pages: Pages that must be on the device when it matches, until `landed_until`.
        landed_until: Step.
        parts: By rank, while it runs.
        start: Page where its own pages begin.
        end: Page behind the last that this forward computes, one more with a tail.
        aborted: It is over when its batch is.
        refused: How often there was no room.
    """

    name: str
    ids: list[RequestId]
    tokens: array[int]
    namespace: Namespace
    turns: list[array[int]]
    chunk: int
    page_size: int
    life: Life = Life.WAITING
    since_tick: int = 0
    since_s: float = 0.0
    loading: bool = False
    landed_pages: int = 0
    landed_until: int = 0
    parts: list[Part] = attrs.field(factory=list)
    start: int = 0
    end: int = 0
    aborted: bool = False
    refused: int = 0
    _marks: list[bytes] | None = None

    @property
    def key(self) -> RadixKey:
        """Its sequence."""
        return RadixKey(self.tokens, self.namespace)

    @property
    def marks(self) -> list[bytes]:
        """Its whole pages."""
        if self._marks is None:
            self._marks = marks_of(self.key, self.page_size)
        return self._marks

    def grow(self) -> bool:
        """Go on with the next turn. False where there is none."""
        if not self.turns:
            return False
        self.tokens = self.tokens + self.turns.pop(0)
        self._marks = None
        return True


class Engine:
    """The scheduler.

    Thread: one.
    """

    def __init__(self, replica: Replica) -> None:
        """Start with no request."""
        self._replica = replica
        self._referee = replica.referee
        #: All that are not over, in the order in which they came.
        self.requests: dict[str, Request] = {}
        #: Batches that run, oldest first.
        self._batches: deque[list[Request]] = deque()
        #: Requests whose next forward comes with the next batch.
        self._admitted: list[Request] = []
        #: Requests that are done, in the whole history.
        self.num_finished = 0
        self.num_hits = 0
        self.num_loads = 0

    @property
    def num_batches(self) -> int:
        """Batches that run."""
        return len(self._batches)

    @property
    def num_pages(self) -> int:
        """Pages that requests have on each rank."""
        return sum(
            -(-len(request.parts[0].own) // request.page_size)
            for request in self.requests.values()
            if request.parts
        )

    # -- requests come and go ----------------------------------------------------------------------

    def arrive(self, arrival: Arrive) -> None:
        """A request comes."""
        if arrival.name in self.requests:
            return
        size = self._replica.shape.page_size
        salt = arrival.tenant or None
        tokens = _tokens(arrival.pages, size)
        tokens.extend([9] * min(arrival.tail, size - 1))
        self.requests[arrival.name] = Request(
            name=arrival.name,
            ids=[request_id(arrival.name, rank.rank) for rank in self._replica.ranks],
            tokens=tokens,
            namespace=Namespace(cache_salt=salt),
            turns=[_tokens(turn, size) for turn in arrival.turns],
            chunk=arrival.chunk,
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
        if request.life is Life.RUNNING:
            request.aborted = True
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
        for name in told:
            request = self.requests.get(name)
            if request is None or request.aborted:
                self._referee.breach(
                    Rule.DEADLINES, f"{name}, which the engine released, was told something"
                )
            elif request.life is Life.TOLD_TO_WAIT:
                self._move(request, Life.WAITING)
        for name in map(str, report.landed):
            self._land(name)
        for name in map(str, (*report.landed, *report.failed)):
            if name in self.requests:
                self.requests[name].loading = False
        if self._referee.telling and told:
            self._referee.note(
                "step",
                f"landed {[*map(str, report.landed)]}, failed {[*map(str, report.failed)]}, "
                f"ready {[*map(str, report.ready)]}",
            )
        self._referee.check()

    def _land(self, name: str) -> None:
        """A request's pages are in the tree, for as long as its lock is promised."""
        replica = self._replica
        loads = [one for one in replica.operations.live.values() if one.request == name]
        request = self.requests.get(name)
        if request is None or not loads:
            return
        request.landed_pages = loads[-1].end
        request.landed_until = replica.step_number + replica.shape.settings.publish_lock_steps

    # -- one iteration -----------------------------------------------------------------------------

    def look(self, admit: int) -> list[tuple[Request, MatchResult]]:
        """Match those that wait; what becomes of them is decided in `admit`, and much may lie between."""
        waiting = [one for one in self.requests.values() if one.life is Life.WAITING]
        found = [(request, self._match(request)) for request in waiting[:admit]]
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
                if isinstance(self._load_back(request, result), LoadWaiting):
                    self._move(request, Life.TOLD_TO_WAIT)
                    continue
            self._admit(request)

    def poke(self, name: str) -> None:
        """Match a request that waits once more, without having been told to."""
        request = self.requests.get(name)
        if request is None or request.life is Life.RUNNING:
            return
        if self._match(request).external is ExternalMatch.UNKNOWN:
            if request.life is Life.WAITING:
                self._move(request, Life.TOLD_TO_WAIT)
        else:
            self._move(request, Life.WAITING)

    def _match(self, request: Request) -> MatchResult:
        """What is cached of a request; asked twice, it is the same."""
        ask = [MatchPrefixParams(key=request.key, request_id=one) for one in request.ids]
        found = self._matched(ask)
        if self._referee.tick % 2 == 0:
            again = self._matched(ask)
            if again != found:
                self._referee.breach(
                    Rule.MATCH, f"{request.name}: two matches without a step: {found}, {again}"
                )
        if self._referee.telling:
            self._referee.note(
                "engine",
                f"{request.name} matches {found.device_prefix_len} tokens, {found.external.name} "
                f"{found.host_hit_length}, waits for {found.waiting_on}",
            )
        pages = found.device_prefix_len // request.page_size
        landed = self._replica.step_number < request.landed_until
        if landed and pages < request.landed_pages:
            self._referee.breach(
                Rule.LANDED,
                f"{request.name}: {request.landed_pages} pages landed, {pages} are left of them "
                "while their lock is promised",
            )
        request.landed_pages = 0
        if found.external is ExternalMatch.HIT:
            self._check_hit(request, found)
        self._referee.check()
        return found

    def _matched(self, ask: Sequence[MatchPrefixParams]) -> MatchResult:
        """One match on all ranks."""
        return self._replica.alike(
            "match_prefix",
            lambda rank: rank.cache.match_prefix(ask[rank.rank]),
            lambda result: (
                result.device_prefix_len,
                result.external,
                result.host_hit_length,
                result.waiting_on,
            ),
        )

    def _check_hit(self, request: Request, found: MatchResult) -> None:
        """A hit is the longest prefix that every rank can restore."""
        end = (found.device_prefix_len + found.host_hit_length) // request.page_size
        for rank in self._replica.ranks:
            answers = rank.watch.answers.get(request.name, [])
            if not any(end - len(request.marks) + bits.count - 1 in bits for bits in answers):
                self._referee.breach(
                    Rule.FRAMES,
                    f"{request.name} hits up to page {end}, which rank {rank.rank} does not have",
                )

    def _load_back(self, request: Request, found: MatchResult) -> LoadBack:
        """Queue the load of a hit."""
        end = (found.device_prefix_len + found.host_hit_length) // request.page_size
        wanted = Wanted(name=request.name, marks=request.marks, promised=end)

        def ask(rank: SimulatedRank) -> LoadBack:
            rank.watch.wanted = wanted
            handed_in = HandedIn(request_id=request.ids[rank.rank], key=request.key)
            answer = rank.cache.init_load_back(handed_in)
            rank.watch.wanted = None
            return answer

        answer = self._replica.alike("init_load_back", ask)
        self._referee.note("engine", f"{request.name}: {answer}")
        if isinstance(answer, LoadWaiting):
            self.num_loads += 1
            request.loading = True
        return answer

    def _admit(self, request: Request) -> None:
        """Lock the prefix and take slots for what is to be computed."""
        nodes: dict[int, NodeId] = {}

        def match(rank: SimulatedRank) -> int:
            found = rank.cache.match_prefix(MatchPrefixParams(key=request.key))
            nodes[rank.rank] = found.last_device_node
            return found.device_prefix_len

        start = self._replica.alike("match_prefix", match) // request.page_size
        receipts = self._lock(nodes)
        if not self._take(request, start, receipts):
            self._unlock(receipts)
            request.refused += 1
            if request.refused > _MAX_REFUSALS:
                self.abort(request.name)
            return
        self._move(request, Life.RUNNING)

    def _lock(self, nodes: dict[int, NodeId]) -> list[IncLockRefResult]:
        """Lock a path on every rank."""
        receipts: list[IncLockRefResult] = []

        def lock(rank: SimulatedRank) -> None:
            receipts.append(rank.cache.inc_lock_ref(IncLockRefParams(node_id=nodes[rank.rank])))

        self._replica.alike("inc_lock_ref", lock)
        return receipts

    def _unlock(self, receipts: Sequence[IncLockRefResult]) -> None:
        """Release a path on every rank."""
        self._replica.alike(
            "dec_lock_ref",
            lambda rank: rank.cache.dec_lock_ref(receipts[rank.rank].to_dec_params()),
        )

    def _take(self, request: Request, start: int, receipts: list[IncLockRefResult]) -> bool:
        """Slots for the next forward of a request, behind a locked prefix. False for no room."""
        size, replica = request.page_size, self._replica
        whole = len(request.marks)
        tail = len(request.tokens) > whole * size
        end = min(whole, start + request.chunk) if request.chunk else whole
        needed = (end - start + (tail and end == whole)) * size

        def take(rank: SimulatedRank) -> torch.Tensor | None:
            short = needed - rank.allocator.available_size
            if short > 0:
                rank.cache.evict(EvictParams(num_tokens=short))
            own = rank.allocator.alloc(needed)
            if own is not None:
                rank.watch.pages.taken(pages_of(own, size))
                prefix = rank.tree.path_indices(receipts[rank.rank].node_id)
                request.parts.append(
                    Part(
                        receipt=receipts[rank.rank],
                        prefix=prefix,
                        own=own,
                        pages=pages_of(prefix, size) + pages_of(own, size),
                    )
                )
            return own

        request.parts = []
        own = replica.alike("alloc", take, lambda slots: slots is None)
        if own is None:
            return False
        request.start, request.end = start, end
        self._admitted.append(request)
        return True

    def launch(self) -> None:
        """Start the queued loads and a batch of what was admitted."""
        self._replica.alike(
            "ready_to_load_host_cache", lambda rank: rank.cache.ready_to_load_host_cache()
        )
        batch, self._admitted = self._admitted, []
        for request in batch:
            for rank, part in zip(self._replica.ranks, request.parts, strict=True):
                rank.watch.pages.launched(part.pages)
                self._read(rank, request, part)
        self._batches.append(batch)
        if self._referee.telling and batch:
            self._referee.note("engine", f"launches {[request.name for request in batch]}")
        self._referee.check()

    def _read(self, rank: SimulatedRank, request: Request, part: Part) -> None:
        """A forward reads its prefix."""
        for page, mark in zip(part.pages[: request.start], request.marks, strict=False):
            rank.watch.pages.look(page, mark, Rule.LANDED, f"is read by {request.name}'s forward")

    def retire(self) -> None:
        """Process the results of the oldest batch."""
        batch = self._batches.popleft()
        for request in batch:
            for rank, part in zip(self._replica.ranks, request.parts, strict=True):
                self._read(rank, request, part)
                for page, mark in zip(
                    part.pages[request.start : request.end],
                    request.marks[request.start : request.end],
                    strict=True,
                ):
                    rank.watch.pages.compute(page, mark)
                rank.watch.pages.retired(part.pages)
        for request in batch:
            if request.aborted:
                self._drop(request)
            else:
                self._process(request)
        self._replica.alike("batch_retired", lambda rank: rank.cache.batch_retired(1))

    def _drop(self, request: Request) -> None:
        """Give an aborted request's slots and lock back."""
        self._free(request)
        self._unlock([part.receipt for part in request.parts])
        del self.requests[request.name]

    def _free(self, request: Request) -> None:
        """The engine frees slots of its own."""
        if len(request.parts[0].own):
            self._replica.alike(
                "free", lambda rank: rank.allocator.free(request.parts[rank.rank].own)
            )

    def _process(self, request: Request) -> None:
        """Insert what was computed, move the lock on, and see what comes next."""
        size = request.page_size
        whole = (request.end - request.start) * size
        parts = request.parts
        key = RadixKey(request.tokens[: request.end * size], request.namespace)
        nodes: dict[int, NodeId] = {}

        def insert(rank: SimulatedRank) -> int:
            part = parts[rank.rank]
            result = rank.cache.insert(
                InsertParams(
                    key=key,
                    value=torch.cat([part.prefix, part.own[:whole]]),
                    prev_prefix_len=request.start * size,
                )
            )
            nodes[rank.rank] = result.last_device_node
            return result.prefix_len

        self._replica.alike("insert", insert)
        if len(parts[0].own) > whole:
            self._replica.alike(
                "free", lambda rank: rank.allocator.free(parts[rank.rank].own[whole:])
            )
        request.parts = []
        more = request.end < len(request.marks)
        receipts = self._lock(nodes) if more else []
        self._unlock([part.receipt for part in parts])
        if more:
            if not self._take(request, request.end, receipts):
                self._unlock(receipts)
                request.refused += 1
                self._move(request, Life.WAITING)
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
        for request in self.requests.values():
            if request.parts:
                for rank, part in zip(self._replica.ranks, request.parts, strict=True):
                    if request not in self._admitted:
                        rank.watch.pages.retired(part.pages)
                self._free(request)
        self._batches.clear()
        self._admitted.clear()

    def start_again(self) -> None:
        """After a reset every request begins anew; its locks are void."""
        for name, request in list(self.requests.items()):
            request.parts = []
            request.loading = False
            request.landed_pages = 0
            self._move(request, Life.WAITING)
            if request.aborted:
                del self.requests[name]
        for rank in self._replica.ranks:
            rank.watch.forget_requests()

    def detached(self) -> None:
        """Nobody answers any more: whoever waits matches again."""
        for request in self.requests.values():
            if request.life is Life.TOLD_TO_WAIT:
                self._move(request, Life.WAITING)
            request.loading = False
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
