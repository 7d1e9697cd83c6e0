"""`Inquiry`: what an engine asks the cache about a request, and what the answers must be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixlink_contracts import ExternalMatch, LoadAdmitted, LoadMode, MatchPrefixParams
from radixlink_testing.simulator._rank import HandedIn
from radixlink_testing.simulator._rules import Rule
from radixlink_testing.simulator._watch import Wanted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import LoadBack, MatchResult, NodeId
    from radixlink_testing.simulator._rank import SimulatedRank
    from radixlink_testing.simulator._replica import Replica
    from radixlink_testing.simulator._requests import Request


class Inquiry:
    """Matches and loads, asked of all ranks.

    Thread: one.
    """

    def __init__(self, replica: Replica) -> None:
        """Ask these ranks."""
        self._replica = replica
        self._referee = replica.referee

    def match(self, request: Request) -> MatchResult:
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

    def load_back(self, request: Request, found: MatchResult) -> LoadBack:
        """Queue the load of a hit."""
        end = (found.device_prefix_len + found.host_hit_length) // request.page_size
        wanted = Wanted(name=request.name, marks=request.marks, promised=end)
        layer_wise = request.layer_wise and self._replica.shape.layer_wise
        mode = LoadMode.LAYER_WISE if layer_wise else LoadMode.STAGED
        request.handed_in = [HandedIn(request_id=one, key=request.key) for one in request.ids]

        def ask(rank: SimulatedRank) -> LoadBack:
            rank.watch.wanted = wanted
            answer = rank.cache.init_load_back(request.handed_in[rank.rank], mode)
            rank.watch.wanted = None
            return answer

        answer = self._replica.alike("init_load_back", ask)
        self._referee.note("engine", f"{request.name}: {answer}")
        if not isinstance(answer, LoadAdmitted):
            request.handed_in = []
        return answer

    def device_match(self, request: Request) -> tuple[int, dict[int, NodeId]]:
        """How many pages of a request the device has, and the node where they end, by rank."""
        nodes: dict[int, NodeId] = {}

        def match(rank: SimulatedRank) -> int:
            found = rank.cache.match_prefix(MatchPrefixParams(key=request.key))
            nodes[rank.rank] = found.last_device_node
            return found.device_prefix_len

        return self._replica.alike("match_prefix", match) // request.page_size, nodes

    def check_told(self, request: Request, on_device: int, loading: int) -> None:
        """Who is admitted was told where each of its tokens will be."""
        size = request.page_size
        for rank, handed_in in enumerate(request.handed_in):
            told = [(start, len(slots)) for start, slots in handed_in.told]
            if told != [(on_device * size, loading * size)]:
                self._referee.breach(
                    Rule.LOAD_BACK,
                    f"rank {rank}: {request.name} has {on_device} pages and was admitted with "
                    f"{loading} more, and it was told (start, slots) {told}",
                )
        self._referee.check()
