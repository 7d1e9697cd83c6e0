"""Any calls in any order, with faults on any rank: what must hold holds, and nobody waits forever.

Ranks step in lockstep, each with a linker that completes by hand, so that every run can be repeated.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, ClassVar

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.integration.linker import ownership
from tests.integration.linker.models import KINDS
from tests.integration.linker.replica import Replica
from typing_extensions import override

from radixlink_contracts import ExternalMatch, LoadWaiting, Outcome, PoolName
from radixlink_linker import LinkerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.integration.linker.models import Model
    from tests.integration.linker.rank import Computation, Rank

RANKS = st.integers(0, 2)
REQUESTS = st.sampled_from("abcd")
#: Few pages in few places, so that sequences share prefixes and differ anywhere.
PAGES = st.lists(st.sampled_from([(1, 2), (1, 3), (4, 5)]), max_size=5)
TAILS = st.sampled_from([(), (9,)])

POOLS = [PoolName.KV, PoolName.SWA, PoolName.MAMBA]

FAULTS = st.sampled_from(
    [
        ("raising", "lookup"),
        ("raising", "load"),
        ("raising", "start_layer_wise_loading"),
        ("raising", "cancel_queued_load"),
        ("raising", "offload"),
        ("raising", "touch"),
        ("raising", "pop_completed_load"),
        ("raising", "pop_completed_offload"),
        ("refusing", "load"),
        ("refusing", "offload"),
        ("refusing", "touch"),
        ("store", "contains"),
        ("store", "open"),
        ("store", "read"),
        ("store", "put"),
        ("executor", "held"),
    ]
)

SETTINGS = LinkerSettings(
    step_timeout_s=20.0,
    max_operations=5,
    max_lookups=2,
    frame_words=7,
    staged_percent=30,
    max_loads=3,
    publish_lock_steps=4,
    miss_steps=3,
    heartbeat_steps=5,
    write_off_steps=8,
    written_off_percent=100,
    backup_threshold=1,
    touch_after_uses=4,
    max_touches=2,
)


class LinkerMachine(RuleBasedStateMachine):
    """What an engine may do, and what may go wrong on any rank."""

    #: Which components; the sizes are drawn.
    kind: ClassVar[Model]

    @initialize(
        num_ranks=st.integers(1, 3),
        num_pages=st.sampled_from([6, 12, 24]),
        page_size=st.sampled_from([1, 2, 16]),
        num_swa_pages=st.sampled_from([5, 9, 24]),
        num_states=st.sampled_from([3, 5, 12]),
    )
    def begin(
        self, num_ranks: int, num_pages: int, page_size: int, num_swa_pages: int, num_states: int
    ) -> None:
        model = attrs.evolve(
            self.kind,
            page_size=page_size,
            # Two pages, one of them in part.
            window=page_size + 1 if self.kind.window else 0,
            num_swa_pages=num_swa_pages,
            num_states=num_states,
        )
        self.page_size = page_size
        self.replica = Replica(
            num_ranks, model=model, settings=SETTINGS, num_pages=num_pages, by_hand=True
        )
        #: What each request that is known asks for.
        self.tokens: dict[str, list[int]] = {}
        #: Requests that were told to wait, and not yet to match again.
        self.waiting: set[str] = set()
        #: Tokens that must be on the device when a request that landed matches.
        self.landed: dict[str, int] = {}
        #: Computations, as each rank knows them.
        self.computing: list[list[Computation]] = []
        self.launched = 0
        #: What was stored at some time, so that a request can ask for it.
        self.known: list[list[int]] = []
        self.store_and_evict([(1, 2), (1, 3), (4, 5)])
        self.store_and_evict([(1, 2), (4, 5), (4, 5), (1, 3)])
        self.store_and_evict([(4, 5), (4, 5), (1, 2)])
        self.store_and_evict([(1, 3), (1, 2)])

    def flat(self, pages: Sequence[tuple[int, int]], tail: Sequence[int] = ()) -> list[int]:
        """The tokens of pages: those of a page differ in its last token, if in any."""
        body = self.page_size - 1
        return [token for first, last in pages for token in [first] * body + [last]] + list(tail)

    @property
    def in_use(self) -> list[tuple[set[int], ...]]:
        """What is not free on each rank, in each pool."""
        return [ownership.in_use(rank) for rank in self.replica.ranks]

    def rank(self, number: int) -> Rank:
        return self.replica.ranks[number % len(self.replica.ranks)]

    # -- the engine --------------------------------------------------------------------------------

    @rule(pages=PAGES, tail=TAILS, state=st.booleans(), slide=st.booleans())
    def compute(
        self, pages: list[tuple[int, int]], tail: Sequence[int], *, state: bool, slide: bool
    ) -> None:
        self.replica.compute(self.flat(pages, tail), state=state, slide=slide)

    @precondition(lambda self: self.tokens)
    @rule(name=REQUESTS, state=st.booleans(), slide=st.booleans())
    def compute_asked(self, name: str, *, state: bool, slide: bool) -> None:
        """A request goes on from what it has."""
        if name in self.tokens and name not in self.waiting:
            self.replica.compute(self.tokens[name], state=state, slide=slide)

    @rule(pages=PAGES, tail=TAILS, state=st.booleans(), slide=st.booleans())
    def begin_forward(
        self, pages: list[tuple[int, int]], tail: Sequence[int], *, state: bool, slide: bool
    ) -> None:
        tokens = self.flat(pages, tail)
        begun = [rank.begin(tokens, state=state, slide=slide) for rank in self.replica.ranks]
        computations = [one for one in begun if one is not None]
        assert len(computations) in {0, len(begun)}
        if computations:
            self.computing.append(computations)

    @precondition(lambda self: self.computing)
    @rule(which=st.integers(0, 9), insert=st.booleans())
    def end_forward(self, which: int, *, insert: bool) -> None:
        computations = self.computing.pop(which % len(self.computing))
        for rank, computation in zip(self.replica.ranks, computations, strict=True):
            rank.end(computation, insert=insert)

    @rule(pages=PAGES)
    def store_and_evict(self, pages: list[tuple[int, int]]) -> None:
        """What a request would like to restore."""
        tokens = self.flat(pages)
        self.known.append(tokens)
        self.replica.compute(tokens)
        self.replica.transfer()
        self.step()
        self.replica.evict()

    @rule(name=REQUESTS, which=st.integers(0, 9), tail=TAILS)
    def ask(self, name: str, which: int, tail: Sequence[int]) -> None:
        """A request comes, or matches again."""
        self.tokens.setdefault(name, [*self.known[which % len(self.known)], *tail])
        self.match(name)

    def match(self, name: str) -> None:
        found = self.replica.match(name, self.tokens[name])
        assert self.replica.match(name, self.tokens[name]) == found
        if found.external is ExternalMatch.UNKNOWN:
            self.waiting.add(name)
        if name in self.landed:
            assert found.device_prefix_len >= self.landed.pop(name)
        if found.external is ExternalMatch.HIT:
            before = self.in_use
            answer = self.replica.load_back(name, self.tokens[name])
            if isinstance(answer, LoadWaiting):
                self.waiting.add(name)
            else:
                # A miss may have evicted, and took nothing.
                for now, then in zip(self.in_use, before, strict=True):
                    assert all(few <= more for few, more in zip(now, then, strict=True))

    @rule(busy=st.sets(RANKS), which=st.integers(0, 9), tail=TAILS)
    def iterate(self, busy: set[int], which: int, tail: Sequence[int]) -> None:
        """One turn of a scheduler's loop, with a request more, while some ranks' I/O is slow."""
        names = [name for name in "abcd" if name not in self.waiting]
        for offset, name in enumerate(names[:2] if which % 2 else names[-2:]):
            self.ask(name, which + offset, tail)
        self.launch()
        for number, rank in enumerate(self.replica.ranks):
            if number not in busy:
                rank.transfer()
        self.step()
        if self.launched > 2:
            self.retire()

    @rule(busy=st.sets(RANKS), which=st.integers(0, 9))
    def iterate_again(self, busy: set[int], which: int) -> None:
        """The same, so that it is more likely."""
        self.iterate(busy, which, ())

    @rule(
        name=REQUESTS,
        which=st.integers(0, 9),
        num_pages=st.integers(1, 5),
        meanwhile=st.sampled_from(["compute", "slide", "no state", "begin", ""]),
    )
    def restore(self, name: str, which: int, num_pages: int, meanwhile: str) -> None:
        """A request comes and its load is started; meanwhile another has some of its pages."""
        self.release(name)
        self.ask(name, which, ())
        self.step()
        if name not in self.waiting:
            self.match(name)
        self.launch()
        tokens = self.tokens[name][: num_pages * self.page_size]
        state, slide = meanwhile != "no state", meanwhile == "slide"
        if meanwhile == "begin":
            begun = [rank.begin(tokens) for rank in self.replica.ranks]
            if all(begun):
                self.computing.append([one for one in begun if one is not None])
        elif meanwhile:
            self.replica.compute(tokens, state=state, slide=slide)

    @precondition(lambda self: self.tokens)
    @rule(name=REQUESTS, page=st.sampled_from([(1, 2), (7, 8)]))
    def grow(self, name: str, page: tuple[int, int]) -> None:
        """A request goes on with a longer key."""
        if (
            name in self.tokens
            and name not in self.waiting
            and len(self.tokens[name]) < 6 * self.page_size
        ):
            self.tokens[name] = [*self.tokens[name], *self.flat([page])]

    @rule(name=REQUESTS)
    def load_back_uncalled_for(self, name: str) -> None:
        """An engine asks for a load that no match promised."""
        if isinstance(
            self.replica.load_back(name, self.tokens.get(name, self.flat([(1, 2)]))), LoadWaiting
        ):
            self.waiting.add(name)

    @rule()
    def launch(self) -> None:
        self.replica.launch()
        self.launched += 1

    @precondition(lambda self: self.launched)
    @rule()
    def retire(self) -> None:
        self.replica.retire()
        self.launched -= 1

    @rule()
    def step(self) -> None:
        self.landed.clear()
        report = self.replica.step()
        told = [*report.landed, *report.failed, *report.ready]
        assert len(told) == len(set(told))
        for name in told:
            assert name in self.tokens, "a request that is gone was told something"
            self.waiting.discard(name)
        for name in report.landed:
            self.landed[name] = self.page_size

    @rule(name=REQUESTS)
    def release(self, name: str) -> None:
        """A request ends, or is aborted."""
        self.replica.release(name)
        self.tokens.pop(name, None)
        self.waiting.discard(name)
        self.landed.pop(name, None)

    @rule(num_tokens=st.sampled_from([1, 4, 1000]))
    def evict(self, num_tokens: int) -> None:
        self.replica.evict(num_tokens)

    @rule(num_tokens=st.sampled_from([1, 4, 1000]))
    def evict_windows(self, num_tokens: int) -> None:
        if self.kind.window:
            self.replica.evict_windows(num_tokens)

    @rule(num_states=st.sampled_from([1, 2, 1000]))
    def evict_states(self, num_states: int) -> None:
        if self.kind.states:
            self.replica.evict_states(num_states)

    # -- the linkers -------------------------------------------------------------------------------

    @rule(rank=RANKS, which=st.integers(0, 3))
    def run(self, rank: int, which: int) -> None:
        linker = self.rank(rank).by_hand
        if linker.started:
            linker.run(linker.started[which % len(linker.started)])

    @rule()
    def run_everything(self) -> None:
        self.replica.transfer()

    @rule(rank=RANKS, which=st.integers(0, 3), quiesced=st.booleans())
    def fail(self, rank: int, which: int, *, quiesced: bool) -> None:
        linker = self.rank(rank).by_hand
        if linker.started:
            op = linker.started[which % len(linker.started)]
            linker.complete(op, Outcome.FAILED, quiesced=quiesced)

    # -- what goes wrong ---------------------------------------------------------------------------

    @rule(rank=RANKS, pages=PAGES, lost=st.sets(st.integers(0, 4)), pool=st.sampled_from(POOLS))
    def lose(self, rank: int, pages: list[tuple[int, int]], lost: set[int], pool: PoolName) -> None:
        one = self.rank(rank)
        if pool in one.stores:
            one.lose(self.flat(pages), *(page for page in lost if page < len(pages)), pool=pool)

    @rule(rank=RANKS, fault=FAULTS)
    def go_wrong(self, rank: int, fault: tuple[str, str]) -> None:
        """One kind of fault at a time; `heal` ends all."""
        self.heal()
        one = self.rank(rank)
        match fault:
            case ("raising", call):
                one.by_hand.raising.add(call)
            case ("refusing", call):
                one.by_hand.refusing.add(call)
            case ("store", call):
                for store in one.stores.values():
                    store.raising.add(call)
            case _:
                one.executor.held = True

    @rule(seconds=st.sampled_from([4.0, 29.0]))
    def wait(self, seconds: float) -> None:
        self.replica.clock.advance(seconds)

    @rule()
    def heal(self) -> None:
        for rank in self.replica.ranks:
            rank.by_hand.raising.clear()
            rank.by_hand.refusing.clear()
            for store in rank.stores.values():
                store.raising.clear()
            rank.executor.held = False
            rank.executor.release()

    # -- the end of everything ---------------------------------------------------------------------

    @rule(how=st.sampled_from(["", "", "", "", "", "detach", "reset"]))
    def end(self, how: str) -> None:
        """Mostly not, so that something can grow before."""
        if how == "detach":
            self.replica.alike(lambda rank: rank.cache.detach())
            self.replica.attach()
            self.forget()
        elif how == "reset":
            self.reset()

    def reset(self) -> None:
        self.replica.reset()
        self.computing.clear()
        self.launched = 0
        self.forget()

    def forget(self) -> None:
        self.tokens.clear()
        self.waiting.clear()
        self.landed.clear()

    # -- what must hold ----------------------------------------------------------------------------

    @invariant()
    def everything_holds(self) -> None:
        self.replica.check()

    @override
    def teardown(self) -> None:
        if not hasattr(self, "replica"):
            return
        with contextlib.closing(self.replica):
            self.heal()
            while self.computing:
                self.end_forward(0, insert=True)
            self.launch()
            # Everything that waits is told, whatever went wrong before.
            for _ in range(60):
                for rank in self.replica.ranks:
                    for op in (*rank.by_hand.queued, *rank.by_hand.started):
                        rank.by_hand.run(op)
                self.step()
            assert self.replica.ranks[0].cache.num_outstanding == 0
            assert not self.waiting, f"{self.waiting} were never told"
            for name in list(self.tokens):
                self.release(name)
            while self.launched:
                self.retire()
            if any(
                rank.cache._wrapper and rank.cache._wrapper._written_off
                for rank in self.replica.ranks
            ):
                self.reset()
            self.replica.finish()


@pytest.mark.parametrize("kind", KINDS, ids=KINDS)
def test_anything_in_any_order(kind: str) -> None:
    class Machine(LinkerMachine):
        """Of one component set."""

    Machine.kind = KINDS[kind]
    # The more there is of a component set, the longer an example takes.
    share = 1 if kind == "full" else 3
    examples = settings().max_examples // share
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=examples, stateful_step_count=40)
    )
