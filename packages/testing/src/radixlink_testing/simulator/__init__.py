"""The simulator: histories of a whole replica in one process, each of which can be run again.

* `plan_of` makes the history of a seed, `run` runs it and says which rule broke, if one did.
* `campaign` runs many, `explain` tells the story of one that broke, as short as `shrink` gets it.
* `scenarios` are interleavings that easily go wrong, written out.
* `Plan`, `Tick` and the events of `radixlink_testing.simulator.events` write a history by hand.

Needs the extra `simulator`.
"""

from radixlink_testing.simulator._campaign import Report, campaign, explain
from radixlink_testing.simulator._draw import plan_of
from radixlink_testing.simulator._history import run
from radixlink_testing.simulator._plan import Plan, Tick
from radixlink_testing.simulator._rank import Shape
from radixlink_testing.simulator._result import Result, Tally
from radixlink_testing.simulator._rules import Rule, RuleBrokenError
from radixlink_testing.simulator._scenarios import Scenario, scenarios
from radixlink_testing.simulator._shrink import shrink

__all__ = [
    "Plan",
    "Report",
    "Result",
    "Rule",
    "RuleBrokenError",
    "Scenario",
    "Shape",
    "Tally",
    "Tick",
    "campaign",
    "explain",
    "plan_of",
    "run",
    "scenarios",
    "shrink",
]
