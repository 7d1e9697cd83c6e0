"""`Mutant`: one thing that is wrong, and how the simulator must find it.

Every mutant is the real code with one thing changed, or a backend's, the same on all ranks. It must
be found within 2,000 histories, and what is found must be the rule that was broken. Seeds are tried
in their order, so a mutant that is found once is found again as fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import attrs
import pytest

from radixlink_testing.simulator import Plan, Rule, plan_of, run, scenarios

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_HISTORIES: Final = 2000
Patch: TypeAlias = pytest.MonkeyPatch


def ranks_apart(seed: int) -> Plan:
    """The history of a seed in which each rank stores its own."""
    return plan_of(seed, alike=False)


@attrs.frozen(kw_only=True)
class Mutant:
    """One thing that is wrong.

    Attributes:
        name: What.
        rule: Which rule must be found broken.
        breaks: Changes the real parts.
        interleavings: The scenarios that must find it too.
        plan: Makes the history of a seed.
    """

    name: str
    rule: Rule
    breaks: Callable[[Patch], None]
    interleavings: tuple[str, ...] = ()
    plan: Callable[[int], Plan] = ranks_apart


def check_found(mutant: Mutant, patch: Patch) -> None:
    """The first history that a mutant breaks names its rule."""
    mutant.breaks(patch)
    for seed in range(MAX_HISTORIES):
        broken = run(mutant.plan(seed)).broken
        if broken is not None:
            break
    else:
        pytest.fail(f"not found in {MAX_HISTORIES} histories")
    assert broken.rule is mutant.rule, f"seed {seed}: {broken}"
    assert str(broken).startswith(f"rule {mutant.rule.value} ")


def check_found_by(name: str, mutant: Mutant, patch: Patch) -> None:
    """A scenario finds a mutant."""
    (scenario,) = [one for one in scenarios() if one.plan.name == name]
    mutant.breaks(patch)
    assert run(scenario.plan).broken is not None
