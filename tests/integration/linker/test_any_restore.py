"""Whatever stores and device hold, a request gets back what all pools of all ranks allow, and no more."""

from __future__ import annotations

import contextlib

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.integration.linker.models import KINDS, Model
from tests.integration.linker.replica import Replica

from radixlink_contracts import ExternalMatch, LoadWaiting, PoolName
from radixlink_linker import LinkerSettings

#: For each of 24 worlds, so fewer than the profile says.
EXAMPLES = settings().max_examples // 8

#: Of the sequence that all is about.
NUM_PAGES = 6
PAGES = st.integers(1, NUM_PAGES)


@attrs.frozen(kw_only=True)
class Turn:
    """A request that computes some pages."""

    num_pages: int
    state: bool
    slide: bool


def turns(at_most: int) -> st.SearchStrategy[list[Turn]]:
    """Some turns; hits need states, so most have one."""
    state = st.sampled_from([True, True, False])
    turn = st.builds(Turn, num_pages=PAGES, state=state, slide=st.booleans())
    return st.lists(turn, max_size=at_most)


@attrs.frozen(kw_only=True)
class Scene:
    """What happens before a request comes, and while its load is on its way.

    Attributes:
        stored: Turns whose pages are stored, and evicted as `kept` says.
        lost: (rank, pool, page) that a store loses.
        kept: What of the device is evicted: all, or windows, or states, or some tokens.
        again: Turns that compute anew behind that, and store too.
        asked: Pages that the request asks for.
        meanwhile: Turns between the start of its load and its end.
        running: The last of these still runs at the end.
        fails: The load fails on the last rank.
    """

    stored: list[Turn]
    lost: set[tuple[int, PoolName, int]]
    kept: str
    again: list[Turn]
    asked: int
    meanwhile: list[Turn]
    running: bool
    fails: bool


LOST = st.tuples(
    st.integers(0, 1),
    st.sampled_from([PoolName.KV, PoolName.SWA, PoolName.MAMBA]),
    st.integers(0, NUM_PAGES - 1),
)
SCENES = st.builds(
    Scene,
    stored=turns(3).map(lambda some: [*some, Turn(num_pages=NUM_PAGES, state=True, slide=False)]),
    lost=st.just(set()) | st.sets(LOST, max_size=2),
    kept=st.sampled_from(
        ["nothing", "no windows", "no states", "two pages less", "one state less"]
    ),
    again=turns(1),
    asked=st.just(NUM_PAGES) | PAGES,
    meanwhile=turns(3),
    running=st.booleans(),
    fails=st.sampled_from([False, False, False, True]),
)


class World:
    """A replica with room for all of it."""

    def __init__(self, model: Model, num_ranks: int) -> None:
        self.model = model
        self.replica = Replica(
            num_ranks,
            model=model,
            settings=LinkerSettings(step_timeout_s=20.0, staged_percent=100),
            num_pages=8 * NUM_PAGES,
            by_hand=True,
        )

    def tokens(self, num_pages: int) -> range:
        return range(1, 1 + num_pages * self.model.page_size)

    def turn(self, turn: Turn) -> None:
        done = self.replica.compute(self.tokens(turn.num_pages), state=turn.state, slide=turn.slide)
        assert done, "there is room for all"

    def evict(self, kept: str) -> None:
        match kept:
            case "nothing":
                self.replica.evict()
            case "no windows":
                if self.model.window:
                    self.replica.evict_windows()
            case "no states":
                if self.model.states:
                    self.replica.evict_states()
            case "one state less":
                if self.model.states:
                    self.replica.evict_states(1)
            case _:
                self.replica.evict(2 * self.model.page_size)

    def lose(self, rank: int, pool: PoolName, page: int) -> None:
        ranks = self.replica.ranks
        one = ranks[rank % len(ranks)]
        if pool in one.stores:
            one.lose(self.tokens(NUM_PAGES), page, pool=pool)

    def play(self, scene: Scene) -> None:
        replica, tokens = self.replica, self.tokens(scene.asked)
        for turn in scene.stored:
            self.turn(turn)
        replica.settle()
        self.evict(scene.kept)
        for turn in scene.again:
            self.turn(turn)
        replica.settle()
        for rank, pool, page in sorted(scene.lost):
            self.lose(rank, pool, page)
        start = replica.alike(lambda rank: rank.device_pages(tokens))
        common = set.intersection(*(rank.restorable(tokens, start) for rank in replica.ranks))
        found = replica.ask("a", tokens)
        page_size = self.model.page_size
        assert found.device_prefix_len == start * page_size
        if start == scene.asked:
            assert found.external is ExternalMatch.NOT_ASKED
        elif not common:
            assert found.external is ExternalMatch.MISS
        else:
            assert found.external is ExternalMatch.HIT
            assert found.host_hit_length == (max(common) - start) * page_size
            self.load(scene, max(common))
        self.go_on(tokens)
        replica.finish()

    def load(self, scene: Scene, end: int) -> None:
        """Load up to the end of a page, and find it on the device."""
        replica, tokens = self.replica, self.tokens(scene.asked)
        assert isinstance(replica.load_back("a", tokens), LoadWaiting)
        replica.launch()
        if scene.fails:
            for store in replica.ranks[-1].stores.values():
                store.raising.add("read")
        for turn in scene.meanwhile:
            self.turn(turn)
        if scene.running and scene.meanwhile:
            last = scene.meanwhile[-1]
            for rank in replica.ranks:
                pages = self.tokens(last.num_pages)
                assert rank.begin(pages, state=last.state, slide=last.slide)
        report = replica.settle()
        assert (report.landed, report.failed) == (((), ("a",)) if scene.fails else (("a",), ()))
        replica.retire()
        for store in replica.ranks[-1].stores.values():
            store.raising.clear()
        if not scene.fails:
            assert replica.alike(lambda rank: rank.device_pages(tokens)) >= end
        for rank in replica.ranks:
            for computation in list(rank.computing):
                rank.end(computation)

    def go_on(self, tokens: range) -> None:
        """The request runs: it reads what it hit, and stores what it adds."""
        self.turn(Turn(num_pages=len(tokens) // self.model.page_size, state=True, slide=False))
        assert self.replica.settle().num_offloads_failed == 0
        pages = len(tokens) // self.model.page_size
        assert self.replica.alike(lambda rank: rank.device_pages(tokens)) == pages


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=EXAMPLES)
@given(scene=SCENES)
def test_a_request_gets_what_all_pools_allow(
    kind: str, page_size: int, num_ranks: int, scene: Scene
) -> None:
    model = attrs.evolve(
        KINDS[kind],
        page_size=page_size,
        window=page_size + 1 if KINDS[kind].window else 0,
        num_swa_pages=8 * NUM_PAGES,
        num_states=24,
    )
    world = World(model, num_ranks)
    with contextlib.closing(world.replica):
        world.play(scene)
