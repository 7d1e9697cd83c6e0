"""`Result`: how a history went, and how much happened in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from radixlink_testing.simulator._plan import Plan
    from radixlink_testing.simulator._rules import RuleBrokenError


@attrs.frozen(kw_only=True)
class Tally:
    """What happened in a history.

    Attributes:
        steps: Scheduler steps, those behind the plan included.
        requests: Requests that were computed to their end.
        hits: Matches that said HIT.
        loads: Loads that were queued.
        layer_wise: Those of them whose request ran at once.
        touches: Nodes that were touched in the store.
        frames: Collectives of steps.
        faults: Faults that struck or could have.
        divergences: Ranks that did what the others did not; each was raised on all ranks at once.
        slots_written_off: Slots that a rank never let go of, on all ranks.
        given_up: Times that the cache went on without its store because of those.
    """

    steps: int = 0
    requests: int = 0
    hits: int = 0
    loads: int = 0
    layer_wise: int = 0
    touches: int = 0
    frames: int = 0
    faults: int = 0
    divergences: int = 0
    slots_written_off: int = 0
    given_up: int = 0

    def __add__(self, other: Tally) -> Tally:
        """Both together."""
        ours, theirs = attrs.asdict(self), attrs.asdict(other)
        return Tally(**{name: ours[name] + theirs[name] for name in ours})


@attrs.frozen(kw_only=True)
class Result:
    """How a history went.

    Attributes:
        plan: The history.
        broken: The first rule that did not hold; None where all did.
        tally: What happened.
        story: Who did what, if it was asked for.
    """

    plan: Plan
    broken: RuleBrokenError | None
    tally: Tally
    story: tuple[str, ...] = ()
