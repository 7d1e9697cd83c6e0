"""`shrink`: the same fault in fewer ticks, events and quanta.

Parts of the plan are left out, halves first and single ones last, for as long as the same rule breaks:
a plan means something whatever is left out of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import attrs

from radixlink_testing.simulator._history import run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from radixlink_testing.simulator._plan import Plan, Tick
    from radixlink_testing.simulator._rules import Rule

_T = TypeVar("_T")


def shrink(plan: Plan, rule: Rule, *, max_runs: int = 400) -> Plan:
    """A shorter plan that breaks the same rule.

    Args:
        plan: A plan that breaks it.
        rule: Which.
        max_runs: Histories to try.

    Cost: `max_runs` histories at most, each shorter than the one before.
    """
    search = _Search(plan, rule, max_runs)
    search.cut_behind()
    search.reduce(lambda one: one.ticks, _with_ticks)
    search.reduce(_events, _with_events)
    search.reduce(_quanta, _with_quanta)
    search.reduce(lambda one: one.ticks, _with_ticks)
    return attrs.evolve(search.best, name=f"{plan.name}, shrunk")


class _Search:
    """The shortest plan so far."""

    def __init__(self, plan: Plan, rule: Rule, max_runs: int) -> None:
        self.best = plan
        self._rule = rule
        self._left = max_runs

    def fails(self, plan: Plan) -> bool:
        """True when the plan breaks the rule too; it is the best then."""
        if self._left <= 0:
            return False
        self._left -= 1
        broken = run(plan).broken
        if broken is None or broken.rule is not self._rule:
            return False
        self.best = plan
        return True

    def cut_behind(self) -> None:
        """Leave out what comes behind the fault."""
        broken = run(self.best).broken
        if broken is not None and broken.tick + 1 < len(self.best.ticks):
            self.fails(attrs.evolve(self.best, ticks=self.best.ticks[: broken.tick + 1]))

    def reduce(
        self,
        parts_of: Callable[[Plan], Sequence[_T]],
        rebuilt: Callable[[Plan, Sequence[_T]], Plan],
    ) -> None:
        """Leave parts out, in runs that get shorter, until each single one is needed."""
        size = max(1, len(parts_of(self.best)) // 2)
        while size and self._left > 0:
            start, removed = 0, False
            while start < len(parts_of(self.best)) and self._left > 0:
                parts = parts_of(self.best)
                rest = [*parts[:start], *parts[start + size :]]
                if self.fails(rebuilt(self.best, rest)):
                    removed = True
                else:
                    start += size
            if not removed or size > 1:
                size //= 2


def _with_ticks(plan: Plan, ticks: Sequence[Tick]) -> Plan:
    return attrs.evolve(plan, ticks=tuple(ticks))


def _events(plan: Plan) -> list[tuple[int, int]]:
    """The places of all events."""
    return [
        (number, place)
        for number, tick in enumerate(plan.ticks)
        for place in range(len(tick.events))
    ]


def _with_events(plan: Plan, kept: Sequence[tuple[int, int]]) -> Plan:
    """Only these events."""
    places = set(kept)
    ticks = [
        attrs.evolve(
            tick,
            events=tuple(
                event for place, event in enumerate(tick.events) if (number, place) in places
            ),
        )
        for number, tick in enumerate(plan.ticks)
    ]
    return _with_ticks(plan, ticks)


def _quanta(plan: Plan) -> list[int]:
    """The ticks in which backends work."""
    return [number for number, tick in enumerate(plan.ticks) if tick.work]


def _with_quanta(plan: Plan, kept: Sequence[int]) -> Plan:
    """Backends work in these ticks only."""
    working = set(kept)
    ticks = [
        tick if number in working else attrs.evolve(tick, work=())
        for number, tick in enumerate(plan.ticks)
    ]
    return _with_ticks(plan, ticks)
