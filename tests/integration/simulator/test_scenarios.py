"""Every interleaving that is written out happens, and every rule holds in it."""

from __future__ import annotations

import pytest

from radixlink_testing.simulator import Scenario, run, scenarios


@pytest.mark.parametrize("scenario", scenarios(), ids=lambda scenario: scenario.plan.name)
def test_the_interleaving_happens_and_no_rule_breaks(scenario: Scenario) -> None:
    result = run(scenario.plan, tell=True)
    story = "\n".join(result.story)
    assert result.broken is None, story
    at = 0
    for told in scenario.tells:
        at = story.find(told, at)
        assert at >= 0, f"the story does not tell {told!r} where it should:\n{story}"
