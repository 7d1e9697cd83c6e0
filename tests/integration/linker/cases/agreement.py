"""How often ranks meet, and what becomes of it when they do not do the same."""

from __future__ import annotations

import contextlib
import random
import time
from functools import partial
from typing import TYPE_CHECKING

import attrs
import pytest
from tests.integration.linker.cases.job import SETTINGS
from tests.integration.linker.cases.registry import LAYERS, case
from tests.integration.linker.counting_group import CountingGroup
from tests.integration.linker.rank import Rank
from typing_extensions import override

from radixlink_contracts import ExternalMatch, LoadWaiting, RequestId, StepReport
from radixlink_contracts.errors import AgreementError, InvalidTransitionError
from radixlink_testing.rank_groups import SLACK_S, check_names_the_missing

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.integration.linker.cases.job import Engine, Job
    from tests.integration.linker.models import Model

    from radixlink_contracts import RankGroup

TOKENS = range(1, 9)
"""Four pages."""

NUM_DIVERGENCES = 50
"""Of each run of their case: there are four kinds of tree, and five groups of more than one rank."""

HASTY = attrs.evolve(SETTINGS, step_timeout_s=1.0)


# -- how often -------------------------------------------------------------------------------------


@case("rule 4")
def an_idle_step_meets_at_every_64th_only(job: Job, model: Model) -> None:
    engine = job.engine(model)
    for step in range(1, 64 * 3 + 1):
        assert engine.cache.step() == StepReport()
        assert engine.calls == ["all_and"] * (step // 64 * job.frame)


@case("rule 4")
def a_step_meets_once_with_64_requests_that_probe_and_64_operations(job: Job, model: Model) -> None:
    sized = attrs.evolve(model, num_swa_pages=256, num_states=256)
    engine = job.engine(sized, num_pages=256)
    engine.executor.held = job.is_last
    for n in range(64):
        engine.compute(range(1000 + 10 * n, 1004 + 10 * n))
    for n in range(64):
        assert engine.match(f"{n}", range(5000 + 100 * n, 5050 + 100 * n)).external is (
            ExternalMatch.UNKNOWN
        )
    assert engine.alike(len(engine.cache.holders().operations)) == 64
    assert len(engine.cache.holders().lookups) == 64
    # Between two steps nothing meets.
    assert engine.calls == []
    for steps in range(1, 5):
        assert engine.cache.step() == StepReport()
        assert engine.calls == ["all_and"] * (steps * job.frame)
    engine.executor.held = False
    engine.executor.release()
    steps = 4
    while engine.cache.num_outstanding:
        engine.transfer()
        engine.cache.step()
        steps += 1
        assert engine.calls == ["all_and"] * (steps * job.frame)
    engine.check()


@case("rule 4", kinds=LAYERS)
def an_iteration_meets_twice_with_64_layer_wise_loads_in_its_batch(job: Job, model: Model) -> None:
    sized = attrs.evolve(model, num_swa_pages=256)
    engine = job.engine(sized, num_pages=256, by_hand=False)
    sequences = [range(1000 + 10 * n, 1004 + 10 * n) for n in range(64)]
    engine.store_all(*sequences)
    for n, tokens in enumerate(sequences):
        engine.match(f"{n}", tokens)
    while engine.cache.num_outstanding:
        engine.cache.step()
    engine.executor.held = True
    for n in range(64):
        engine.match(f"probe {n}", range(5000 + 100 * n, 5050 + 100 * n))
    engine.calls.clear()
    for n, tokens in enumerate(sequences):
        engine.admit(f"{n}", tokens)
    assert engine.alike(len(engine.cache.holders().operations)) == 64
    assert engine.calls == []
    engine.cache.step()
    batch = engine.launch()
    assert engine.calls == ["all_and"] * job.frame
    assert len(engine.finish_loads(batch).landed) == 64
    assert engine.calls == ["all_and"] * (2 * job.frame)
    # The next iteration has none in its batch.
    engine.retire()
    engine.cache.step()
    assert engine.finish_loads(engine.launch()) == StepReport()
    assert engine.calls == ["all_and"] * (3 * job.frame)
    engine.retire()
    engine.executor.held = False
    engine.executor.release()


@case("rule 4", kinds=LAYERS)
def the_frame_of_a_launch_speaks_of_its_loads_alone(job: Job, model: Model) -> None:
    engine = job.engine(model, by_hand=False)
    engine.store_all(TOKENS)
    engine.ask("a", TOKENS)
    engine.compute(range(101, 109))
    offloads = engine.alike(len(engine.cache.holders().operations))
    engine.admit("a", TOKENS)
    batch = engine.launch()
    engine.match("asks", range(201, 209))
    engine.transfer()
    # The offloads have ended and the lookup has its answer, on every rank; they wait for a step.
    assert engine.finish_loads(batch) == StepReport(landed=(RequestId("a"),))
    assert engine.step() == StepReport(num_offloads_stored=offloads)
    assert engine.step().ready == ("asks",)
    engine.retire()


# -- ranks that do not do the same -----------------------------------------------------------------


def insert_another(engine: Engine) -> None:
    Rank.compute(engine, range(701, 705))


def begin_a_forward(engine: Engine) -> None:
    assert engine.begin(range(701, 705)) is not None


def evict_a_page(engine: Engine) -> None:
    assert engine.evict(2).num_tokens_evicted


def ask_for_another(engine: Engine) -> None:
    Rank.match(engine, "another", range(801, 809))


def ask_for_more(engine: Engine) -> None:
    Rank.match(engine, "asks", range(601, 621))


def give_up_a_request(engine: Engine) -> None:
    engine.release("asks")


def begin_a_load(engine: Engine) -> None:
    assert isinstance(Rank.load_back(engine, "hits", TOKENS), LoadWaiting)


def step_once_more(engine: Engine) -> None:
    assert engine.cache.step() == StepReport()


def compute_other_tokens(engine: Engine) -> None:
    """Instead of what all others compute: see the case."""


DIVERGENCES = (
    insert_another,
    begin_a_forward,
    evict_a_page,
    ask_for_another,
    ask_for_more,
    give_up_a_request,
    begin_a_load,
    step_once_more,
    compute_other_tokens,
)
KEPT = range(301, 305)
"""On the device, stored, and locked by nobody."""


@case("rule 4", least_ranks=2)
def every_divergence_is_raised_on_all_ranks_in_the_same_frame(job: Job, model: Model) -> None:
    """One rank does something that the others do not; which and what is drawn, alike on all."""
    engine = job.engine(model)
    engine.store_all(TOKENS)
    draw = random.Random(f"{job.size} {model}")
    for turn in range(NUM_DIVERGENCES):
        odd, diverge = draw.randrange(job.size), draw.choice(DIVERGENCES)
        is_odd = job.rank == odd
        engine.compute(KEPT)
        assert engine.ask("hits", TOKENS).external is ExternalMatch.HIT
        engine.settle()
        if is_odd and diverge is step_once_more:
            diverge(engine)
        # Something is outstanding, so that the next step meets.
        engine.match("asks", range(601, 609))
        first = 1000 + 10 * turn
        other = is_odd and diverge is compute_other_tokens
        Rank.compute(engine, [first, first + 1, first + 2, first + 3 + other])
        if is_odd and diverge is not step_once_more:
            diverge(engine)
        frames = engine.num_frames
        with pytest.raises(AgreementError) as caught:
            engine.cache.step()
        assert engine.num_frames == frames + 1, diverge
        engine.alike(caught.value.message)
        names_the_odd_one(caught.value, odd, job.size)
        with pytest.raises(AgreementError):
            engine.cache.step()
        assert engine.num_frames == frames + 1
        engine.reset()
        assert engine.in_use == (0,) * len(engine.slots.sizes)
    assert engine.restore("at last", TOKENS).landed == ("at last",)


def names_the_odd_one(error: AgreementError, odd: int, size: int) -> None:
    """Something is said of every rank, the same of all but one."""
    assert set(error.by_rank) == set(range(size))
    others = {error.by_rank[rank] for rank in range(size) if rank != odd}
    assert len(others) == 1
    assert error.by_rank[odd] not in others


@case("rule 4", "rule 6", kinds=("full",), least_ranks=2)
def a_step_more_than_the_others_made_is_an_error_on_all(job: Job, model: Model) -> None:
    engine = job.engine(model, settings=HASTY)
    engine.compute(TOKENS)
    engine.step()
    if not job.is_last:
        # The others go on to their next iteration, in which the last rank takes part too early.
        Rank.compute(engine, range(11, 19))
    with pytest.raises(AgreementError) as caught:
        engine.cache.step()
    engine.alike(caught.value.message)
    names_the_odd_one(caught.value, job.last, job.size)
    recovers(engine)


@case("rule 6", kinds=("full",), least_ranks=2)
def a_rank_that_does_not_step_is_named_by_all_others_in_time(job: Job, model: Model) -> None:
    engine = job.engine(model, settings=HASTY)
    engine.compute(TOKENS)
    begin = time.monotonic()
    if not job.is_last:
        with pytest.raises(AgreementError) as caught:
            engine.cache.step()
        assert time.monotonic() - begin < HASTY.step_timeout_s + SLACK_S
        check_names_the_missing(caught.value, job.last, job.size)
        # Every call that would change something fails at once, and says why.
        begin = time.monotonic()
        for call in (
            engine.cache.step,
            engine.cache.ready_to_load_host_cache,
            partial(Rank.match, engine, "a", TOKENS),
            partial(Rank.load_back, engine, "a", TOKENS),
            partial(Rank.compute, engine, range(11, 19)),
        ):
            with pytest.raises(AgreementError, match=f"rank {job.last}"):
                call()
        assert time.monotonic() - begin < SLACK_S
    job.meet()
    if job.is_last:
        # It may complete what the others gave up, but nothing after it.
        with contextlib.suppress(AgreementError):
            engine.cache.step()
        with pytest.raises(AgreementError):
            engine.cache.step()
    job.meet()
    recovers(engine)


@case("A2", "rule 4", kinds=("full",), least_ranks=2)
def unlike_settings_are_named_by_rank_and_nothing_is_attached(job: Job, model: Model) -> None:
    engine = job.engine(model, attach=False)
    if job.is_last:
        engine.cache._settings = attrs.evolve(SETTINGS, max_loads=3)
    with pytest.raises(AgreementError) as caught:
        engine.attach()
    names_the_odd_one(caught.value, job.last, job.size)
    assert "max_loads=3" in caught.value.by_rank[job.last]
    assert engine.cache.counters is None
    engine.cache._settings = SETTINGS
    engine.attach()
    recovers(engine)


@case("A2", "rule 6", kinds=("full",), least_ranks=2)
def what_one_rank_alone_cannot_attach_is_attached_on_none(job: Job, model: Model) -> None:
    engine = job.engine(model, attach=False)
    if job.is_last:
        engine.tree.attach_linker(backup_threshold=1)
        with pytest.raises(InvalidTransitionError):
            engine.attach()
        engine.tree.detach_linker()
    else:
        with pytest.raises(AgreementError, match="expected all ranks to attach") as caught:
            engine.attach()
        assert list(caught.value.by_rank) == [job.last]
        assert "InvalidTransitionError" in caught.value.by_rank[job.last]
    assert not is_attached(engine)
    # Nobody was missing, so that there is nothing to recover from.
    engine.attach()
    engine.store_all(TOKENS)
    assert engine.restore("a", TOKENS).landed == ("a",)


@case("A2", "rule 6", kinds=("full",), least_ranks=2)
def a_rank_that_gives_up_while_the_others_attach_is_named_by_them(job: Job, model: Model) -> None:
    """It heard nothing of a gather that the others completed: the first, and then the last one."""
    for gathers in (1, 2):
        engine = job.engine(model, settings=HASTY, attach=False)
        frames = engine.cache._frames
        if job.is_last:
            frames.group = GivesUpGroup(frames.group, engine.calls, gathers)
            with pytest.raises(AgreementError, match="gave up"):
                engine.attach()
        else:
            hears: Callable[[], object] = engine.attach
            if gathers == 2:
                # All are attached but the last one: the first frame tells.
                engine.attach()
                Rank.match(engine, "a", TOKENS)
                hears = engine.cache.step
            begin = time.monotonic()
            with pytest.raises(AgreementError) as caught:
                hears()
            assert time.monotonic() - begin < HASTY.step_timeout_s + SLACK_S
            check_names_the_missing(caught.value, job.last, job.size)
            alone = "a rank that does not come may have failed alone to attach"
            assert (alone in caught.value.message) == (gathers == 2)
        assert is_attached(engine) == (gathers == 2 and not job.is_last)
        job.meet()
        # The way on, for all of them.
        engine.cache.detach()
        assert not is_attached(engine)
        engine.reset()
        engine.attach()
        recovers(engine)


class GivesUpGroup(CountingGroup):
    """A group of which this rank gives up in a gather that the others complete."""

    def __init__(self, inner: RankGroup, calls: list[str], gathers: int) -> None:
        super().__init__(inner, calls)
        #: In which gather from here.
        self._gathers = gathers

    @override
    def all_gather(self, value: bytes, timeout_s: float) -> tuple[bytes, ...]:
        told = super().all_gather(value, timeout_s)
        self._gathers -= 1
        if not self._gathers:
            raise AgreementError("gave up", by_rank={self.rank: "here"}, rank=self.rank)
        return told


def is_attached(engine: Engine) -> bool:
    """A linker is attached, to the cache and to its tree."""
    attached = engine.cache.counters is not None
    assert attached == (engine.tree._offloads.threshold is not None)
    return attached


def recovers(engine: Engine) -> None:
    """After `reset` by all ranks everything works again."""
    engine.reset()
    assert engine.in_use == (0,) * len(engine.slots.sizes)
    engine.store_all(TOKENS)
    assert engine.restore("anew", TOKENS).landed == ("anew",)
