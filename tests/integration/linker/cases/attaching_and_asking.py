"""Attach, look up, and agree on what can be restored."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import attrs
import pytest
from tests.integration.linker.cases.job import SETTINGS
from tests.integration.linker.cases.registry import STATES, case

from radixlink_contracts import ExternalMatch, PoolName
from radixlink_contracts.errors import AgreementError, ContractError

if TYPE_CHECKING:
    from tests.integration.linker.cases.job import Engine, Job
    from tests.integration.linker.models import Model

TOKENS = range(1, 9)
"""Four pages."""
LONGER = range(1, 11)


def is_not_attached(engine: Engine) -> None:
    """Nothing is half attached."""
    assert engine.cache.counters is None
    assert engine.tree._offloads.threshold is None
    assert engine.cache.num_outstanding == 0


@case("A1")
def attaching_takes_effect_at_once_and_changes_nothing_else(job: Job, model: Model) -> None:
    engine = job.engine(model, attach=False)
    engine.compute(TOKENS)
    before = engine.standing()
    assert engine.match("a", LONGER).external is ExternalMatch.NOT_ASKED
    assert engine.cache.num_outstanding == 0
    is_not_attached(engine)
    assert engine.calls == engine.by_hand.calls == []
    engine.attach()
    assert engine.calls == ["all_gather"] * (2 * job.frame)
    assert engine.by_hand.calls == []
    assert attrs.evolve(engine.standing(), staged=before.staged) == before
    # From now on the first use counts, whatever the engine's own thresholds are.
    engine.compute(TOKENS)
    assert engine.match("a", LONGER).external is ExternalMatch.UNKNOWN
    # The store is asked for all matches of an iteration together, at its end.
    assert set(engine.by_hand.calls) == {"offload"}
    assert engine.cache.ready_to_load_host_cache() is None
    assert set(engine.by_hand.calls) == {"offload", "lookup"}
    assert engine.calls == ["all_gather"] * (2 * job.frame)


@case("A2", "B6", "B7")
def a_linker_without_the_pool_of_a_component_is_refused_on_all_ranks(
    job: Job, model: Model
) -> None:
    for lacking in ({job.last}, set(range(job.size))):
        for pool in model.pools:
            engine = job.engine(model, attach=False)
            pools = engine.by_hand._pools
            taken = pools[pool]
            if job.rank in lacking:
                del pools[pool]
            everywhere = len(lacking) == job.size
            with pytest.raises(ContractError if everywhere else AgreementError) as caught:
                engine.attach()
            error = caught.value
            if isinstance(error, AgreementError):
                # Behind the settings, which name pools as well.
                has = [str(pool) in text.partition(" pools=")[2] for text in error.by_rank.values()]
                assert has == [rank != job.last for rank in error.by_rank]
            else:
                assert all(kind.name in str(error) for kind in engine.tree.components)
                assert str(pool) not in str(error)
            is_not_attached(engine)
            pools[pool] = taken
            # Nothing stands in the way of one that has it.
            engine.attach()
            engine.store_all(TOKENS)
            assert engine.ask("a", TOKENS).external is ExternalMatch.HIT


@case("A3", kinds=STATES)
def the_longest_length_that_all_can_restore_is_the_hit(job: Job, model: Model) -> None:
    """The first rank has states behind two and four pages, the others behind two."""
    engine = job.engine(model)
    every_page(engine)
    engine.lose(TOKENS, *((0, 2) if job.rank == 0 else (0, 2, 3)), pool=PoolName.MAMBA)
    assert engine.restorable(TOKENS) == ({2, 4} if job.rank == 0 else {2})
    hit = engine.ask("a", TOKENS)
    assert (hit.external, hit.host_hit_length) == (ExternalMatch.HIT, 8 if job.size == 1 else 4)
    assert set(engine.calls) <= {"all_and"}


@case("A4", kinds=STATES, least_ranks=2)
def lengths_that_no_two_ranks_share_are_a_miss(job: Job, model: Model) -> None:
    engine = job.engine(model)
    every_page(engine)
    engine.lose(TOKENS, *((0, 1, 3) if job.rank == 0 else (0, 2)), pool=PoolName.MAMBA)
    assert engine.restorable(TOKENS) == ({3} if job.rank == 0 else {2, 4})
    assert engine.ask("a", TOKENS).external is ExternalMatch.MISS


@case("A4", least_ranks=2)
def a_rank_with_nothing_takes_part_all_the_same(job: Job, model: Model) -> None:
    engine = job.engine(model)
    engine.store_all(TOKENS[:2], TOKENS)
    if job.rank == 0:
        engine.lose(TOKENS, 0, 1, 2, 3)
    before = engine.num_frames
    assert engine.match("a", TOKENS).external is ExternalMatch.UNKNOWN
    # One frame agrees that all have answered, one carries the answers; nobody stays away.
    for frames in (1, 2):
        engine.step()
        assert engine.num_frames == before + frames
    assert engine.match("a", TOKENS).external is ExternalMatch.MISS


def every_page(engine: Engine) -> None:
    """Store four pages with a state behind each."""
    engine.store_all(*(TOKENS[:end] for end in (2, 4, 6, 8)))


@case("A6")
def a_match_that_comes_again_asks_no_more(job: Job, model: Model) -> None:
    for restorable in (2, 0):
        engine = job.engine(model)
        engine.store_all(TOKENS[:4], TOKENS)
        engine.lose(TOKENS, restorable)
        for _ in range(2):
            assert engine.ask("a", TOKENS).host_hit_length == 2 * restorable
            assert engine.by_hand.calls.count("lookup") == 1
        engine.release("a")
        assert engine.ask("a", TOKENS).host_hit_length == 2 * restorable
        assert engine.by_hand.calls.count("lookup") == 2
        # A key that grew is another question.
        engine.ask("a", LONGER)
        assert engine.by_hand.calls.count("lookup") == 3


@case("A8")
def less_than_a_page_behind_the_device_prefix_is_not_asked(job: Job, model: Model) -> None:
    engine = job.engine(model)
    engine.compute(TOKENS)
    engine.settle()
    frames = engine.num_frames
    for name, tokens in (("a", [*TOKENS, 9]), ("b", TOKENS), ("c", [77]), ("d", [])):
        match = engine.match(name, tokens)
        assert match.external is ExternalMatch.NOT_ASKED
        assert match.device_prefix_len == (8 if len(tokens) >= 8 else 0)
    assert engine.cache.num_outstanding == 0
    engine.step()
    assert "lookup" not in engine.by_hand.calls
    assert engine.num_frames == frames


@case("A9")
def a_component_that_takes_no_part_is_a_miss_on_all_ranks(job: Job, model: Model) -> None:
    engine = job.engine(model)
    engine.store_all(TOKENS)
    for place, component in enumerate(engine.components):
        asked = engine.by_hand.calls.count("lookup")
        builder = component.build_external_linker_transfer
        no_part = (lambda *_: None) if job.is_last else builder
        with patch.object(component, "build_external_linker_transfer", no_part):
            assert engine.ask(f"{place}", TOKENS).external is ExternalMatch.MISS
        assert engine.by_hand.calls.count("lookup") == asked + (not job.is_last)
    assert engine.ask("another", TOKENS).external is ExternalMatch.HIT


@case("A10")
def a_slow_lookup_keeps_no_step_waiting_and_is_asked_once(job: Job, model: Model) -> None:
    engine = job.engine(model)
    engine.store_all(TOKENS[:4], TOKENS)
    engine.lose(TOKENS, 2)
    engine.executor.held = job.is_last
    for _ in range(3):
        assert engine.match("a", TOKENS).external is ExternalMatch.UNKNOWN
        assert engine.step().ready == ()
    assert engine.by_hand.calls.count("lookup") == (not job.is_last)
    engine.executor.held = False
    engine.executor.release()
    assert engine.ask("a", TOKENS).host_hit_length == 4
    assert engine.ask("a", TOKENS).host_hit_length == 4
    assert engine.by_hand.calls.count("lookup") == 1
    engine.ask("b", TOKENS)
    assert engine.by_hand.calls.count("lookup") == 2


@case("A10", "rule 6")
def what_one_rank_cannot_answer_is_a_miss_on_all(job: Job, model: Model) -> None:
    engine = job.engine(model, settings=attrs.evolve(SETTINGS, lookup_timeout_s=5.0))
    engine.store_all(TOKENS)
    if job.is_last:
        engine.store.raising.add("contains")
    assert engine.ask("raises", TOKENS).external is ExternalMatch.MISS
    engine.store.raising.clear()
    engine.executor.held = job.is_last
    engine.match("late", TOKENS)
    engine.step()
    engine.clock.advance(5.0)
    assert engine.ask("late", TOKENS).external is ExternalMatch.MISS
    engine.executor.held = False
    engine.executor.release()
    # What comes late is nobody's, and the next request is answered.
    assert engine.match("late", TOKENS).external is ExternalMatch.MISS
    assert engine.ask("next", TOKENS).external is ExternalMatch.HIT
    assert engine.cache.counters is not None
    assert engine.cache.counters.lookup_errors == (2 if job.is_last else 0)


@case("K2")
def a_page_that_one_rank_lost_shortens_the_hit_of_all(job: Job, model: Model) -> None:
    engine = job.engine(model, by_hand=False)
    engine.store_all(TOKENS[:4], TOKENS)
    if job.is_last:
        engine.lose(TOKENS, 2)
    assert engine.ask("a", TOKENS).host_hit_length == 4
    assert engine.restore("a", TOKENS).landed == ("a",)
    assert engine.match("a", TOKENS).device_prefix_len == 4
    # The rest is computed, and stored again where it was lost.
    engine.compute(TOKENS)
    assert engine.settle().num_offloads_failed == 0
    assert engine.stored_pages(TOKENS) == 4
