"""The simulator itself: histories hold, are the same in any process, and get short when they fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import Final

import attrs
import pytest

from radixlink_contracts.errors import ContractError
from radixlink_linker import LinkerSettings
from radixlink_linker._operation import Operation
from radixlink_testing.simulator import (
    Plan,
    Rule,
    campaign,
    explain,
    plan_of,
    run,
    scenarios,
    shrink,
)
from radixlink_testing.simulator.events import Diverge, Divergence

#: Of one test; there are four of them.
HISTORIES: Final = 100
_TIMEOUT_S: Final = 120.0
_TELL: Final = """
from radixlink_testing.simulator import plan_of, run
for seed in (1, 3, 4):
    result = run(plan_of(seed), tell=True)
    print(result.tally, result.broken)
    print(*result.story, sep="\\n")
"""


@pytest.mark.parametrize("first_seed", range(0, 4 * HISTORIES, HISTORIES))
def test_every_rule_holds_in_the_histories_of_the_normal_run(first_seed: int) -> None:
    report = campaign(first_seed, HISTORIES, processes=2)
    assert report.broken == ()
    assert report.histories == HISTORIES
    # Half of them have faults, and what they are for has happened.
    assert report.faulty == HISTORIES // 2
    assert report.tally.steps >= 150 * HISTORIES
    assert report.tally.requests >= 15 * HISTORIES
    assert min(report.tally.hits, report.tally.loads) > HISTORIES
    assert report.tally.divergences > HISTORIES // 10
    assert report.tally.layer_wise > HISTORIES // 2
    assert report.tally.touches > HISTORIES
    assert report.tally.given_up > 0


def test_every_rule_holds_with_settings_at_their_edges() -> None:
    report = campaign(0, HISTORIES, processes=2, edges=True)
    assert report.broken == ()
    assert report.tally.loads > HISTORIES
    assert report.tally.given_up > 0


def test_edges_change_nothing_but_settings() -> None:
    for seed in range(50):
        plain, edges = plan_of(seed), plan_of(seed, edges=True)
        assert edges.ticks == plain.ticks
        settings = plain.shape.settings
        assert attrs.evolve(edges.shape, settings=settings) == plain.shape
        assert edges.shape.settings.storing_ranks == settings.storing_ranks


def test_edges_are_what_the_linker_takes_and_no_more() -> None:
    drawn = [plan_of(seed, edges=True).shape.settings for seed in range(200)]
    for name, least, most in (
        ("max_operations", 1, 64),
        ("max_lookups", 1, 64 * 64),
        ("staged_percent", 1, 100),
        ("written_off_percent", 0, 100),
        ("max_touches", 0, 64),
    ):
        of_all = [getattr(settings, name) for settings in drawn]
        assert (min(of_all), max(of_all)) == (least, most), name
        for value in (least - 1, most + 1):
            numbers = {**attrs.asdict(drawn[0], recurse=False), name: value}
            with pytest.raises(ContractError, match=name):
                LinkerSettings(**numbers)


def test_it_does_not_matter_how_many_processes_share_the_seeds() -> None:
    # Two chunks, of which the second is short.
    alone, shared = (campaign(0, 30, processes=processes) for processes in (1, 2))
    assert attrs.evolve(alone, seconds=0) == attrs.evolve(shared, seconds=0)


def test_nothing_is_written_off_where_nothing_goes_wrong() -> None:
    for seed in range(0, 40, 2):
        result = run(plan_of(seed))
        assert (result.broken, result.tally.slots_written_off) == (None, 0)


# Of 100,000 the one in which nine offloads were queued before a load that another rank refused; and of
# as many the one in which a prompt backend ended no copy for ten steps, which another rank had failed.
@pytest.mark.parametrize(("seed", "prompt"), [(68931, False), (253059, True)])
def test_a_backend_that_is_only_behind_may_be_written_off_by_the_hasty(
    seed: int,
    prompt: bool,  # noqa: FBT001 -- a parameter
) -> None:
    plan = plan_of(seed)
    assert plan.shape.hasty
    assert plan.shape.prompt == prompt
    result = run(plan)
    assert result.broken is None
    assert result.tally.slots_written_off > 0


def test_a_campaign_in_pieces_is_the_whole() -> None:
    whole, head, tail = campaign(0, 12), campaign(0, 5), campaign(5, 7)
    assert head.tally + tail.tally == whole.tally
    assert head.faulty + tail.faulty == whole.faulty
    assert (head.first_seed + head.histories, whole.histories) == (tail.first_seed, 12)


def test_a_history_is_as_long_as_it_must_be() -> None:
    for seed in range(200):
        plan = plan_of(seed)
        assert plan.num_steps >= 150
        assert plan.num_requests >= 20
        assert 2 <= plan.shape.num_ranks <= 4
        assert plan.faulty == (seed % 2 == 1)


def test_the_seed_draws_the_kind() -> None:
    kinds = Counter(plan_of(seed).shape.kind for seed in range(200))
    assert sorted(kinds) == ["full", "full+mamba", "full+swa", "full+swa+mamba"]
    assert min(kinds.values()) > 30


def test_the_seed_draws_which_ranks_have_the_same_bytes() -> None:
    settings = [plan_of(seed).shape.settings for seed in range(200)]
    shared = [one.shared_pools for one in settings if one.storing_ranks]
    assert 30 < len(shared) < 70
    # All of a node is stored by one, or a part of it.
    assert {len(pools) for pools in shared} == {1, 2, 3}
    assert {one.storing_ranks[0] for one in settings if one.storing_ranks} == {0, 1, 2, 3}


def test_one_rank_alone_exchanges_nothing() -> None:
    for seed in range(8):
        result = run(plan_of(seed, num_ranks=1))
        assert result.broken is None
        assert result.tally.frames == 0


def with_divergences(seed: int, how: Divergence, every: int) -> Plan:
    """A history in which a rank does something alone again and again."""
    plan = plan_of(seed, faults=False)
    ticks = [
        attrs.evolve(tick, events=(*tick.events, Diverge(number, how)))
        if number % every == every - 1
        else tick
        for number, tick in enumerate(plan.ticks)
    ]
    return attrs.evolve(plan, ticks=tuple(ticks))


@pytest.mark.parametrize("how", Divergence, ids=lambda how: how.name)
def test_a_rank_that_does_otherwise_is_heard_by_all_in_one_frame(how: Divergence) -> None:
    divergences = 0
    for seed in range(3):
        result = run(with_divergences(seed, how, every=3))
        assert result.broken is None
        divergences += result.tally.divergences
    # Seven kinds: more than 1,000 in all.
    assert divergences >= 145


def test_a_history_is_the_same_under_any_hash_seed() -> None:
    stories = {tell(hash_seed) for hash_seed in ("0", "1", "4711")}
    assert len(stories) == 1
    assert len(stories.pop().splitlines()) > 500


def tell(hash_seed: str) -> str:
    """The stories of some histories, from a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _TELL],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=True,
    )
    return done.stdout


def test_a_failing_history_is_replayed_and_gets_short(monkeypatch: pytest.MonkeyPatch) -> None:
    # Transfers without a deadline: something waits for ever.
    monkeypatch.setattr(Operation, "give_up", lambda *_: None)
    seed, broken = next(
        (seed, broken) for seed in range(100) if (broken := run(plan_of(seed)).broken) is not None
    )
    plan = plan_of(seed)
    again = run(plan, tell=True)
    assert str(again.broken) == str(broken)
    short = shrink(plan, broken.rule, max_runs=150)
    assert len(short.ticks) < len(plan.ticks) // 2
    assert sum(1 for _ in short.events()) < sum(1 for _ in plan.events()) // 2
    story = explain(short, shorten=False)
    assert f"rule {Rule.DEADLINES.value} " in story.splitlines()[-1]
    assert len(story.splitlines()) < len(again.story)


def test_the_command_says_what_it_did_and_replays_a_seed() -> None:
    command = [sys.executable, "-m", "radixlink_testing.simulator"]
    many = subprocess.run(
        [*command, "--first", "60", "--histories", "30", "--processes", "1"],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=True,
    )
    assert many.stdout.startswith(
        "seeds 60 to 89: 0 of 30 histories broke a rule, 15 had faults, "
        f"{len(scenarios())} scenarios held, {campaign(60, 30).tally.steps} steps, "
    )
    one = subprocess.run(
        [*command, "--replay", "1"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
    )
    assert one.stdout.startswith("seed 1: ")
    assert "matches" in one.stdout


def test_the_command_says_which_histories_were_of_edges() -> None:
    command = [sys.executable, "-m", "radixlink_testing.simulator", "--edges"]
    for chosen, begins in (
        (["--histories", "2"], "seeds 0 to 1, settings at their edges: 0 of 2 histories broke"),
        (["--replay", "1"], "seed 1, settings at their edges: "),
    ):
        done = subprocess.run(
            [*command, *chosen], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        assert done.stdout.startswith(begins)
