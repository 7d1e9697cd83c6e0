"""`python -m radixlink_testing.simulator`: the scenarios and many histories, or one with its story."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from radixlink_testing.simulator._campaign import campaign, explain, story_of
from radixlink_testing.simulator._draw import AT_EDGES, plan_of
from radixlink_testing.simulator._history import run
from radixlink_testing.simulator._scenarios import scenarios

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_testing.simulator._campaign import Report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says; the exit status is 1 where a rule broke."""
    parser = argparse.ArgumentParser(
        prog="python -m radixlink_testing.simulator",
        description="Run seeded histories of a replica and hold each against the rules.",
    )
    parser.add_argument(
        "--histories", type=int, default=2000, help="how many (default: %(default)s)"
    )
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        metavar="SEED",
        help="the first one's seed, so that a long campaign can be run in pieces "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="default: one a core"
    )
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one, and tell its story")
    parser.add_argument(
        "--edges",
        action="store_true",
        help="of the same histories with the linker's settings at the ends of what it takes",
    )
    chosen = parser.parse_args(arguments)
    if chosen.replay is not None:
        result = run(plan_of(chosen.replay, edges=chosen.edges), tell=True)
        sys.stdout.write(f"{story_of(result)}\n{result.tally}\n")
        return int(result.broken is not None)
    played = scenarios()
    for scenario in played:
        result = run(scenario.plan, tell=True)
        if result.broken is not None:
            sys.stdout.write(f"{story_of(result)}\n")
            return 1
    report = campaign(
        chosen.first, chosen.histories, processes=chosen.processes, edges=chosen.edges
    )
    sys.stdout.write(f"{summary(report, num_scenarios=len(played))}\n")
    if report.broken:
        seed, _ = report.broken[0]
        sys.stdout.write(f"\n{explain(plan_of(seed, edges=chosen.edges))}\n")
    return int(bool(report.broken))


def summary(report: Report, *, num_scenarios: int) -> str:
    """A campaign in one line that tells all of a piece of one, and a few on what happened in it.

    Args:
        report: How it went.
        num_scenarios: Scenarios that were played before, each of which held.
    """
    tally = report.tally
    ran = (
        f"seeds {report.first_seed} to {report.first_seed + report.histories - 1}"
        f"{AT_EDGES * report.edges}: "
        f"{len(report.broken)} of {report.histories} histories broke a rule, "
        f"{report.faulty} had faults, {num_scenarios} scenarios held, {tally.steps} steps, "
        f"{report.seconds:.1f} s"
    )
    happened = (
        f"{tally.frames} frames, {tally.requests} requests, {tally.hits} hits, "
        f"{tally.loads} loads ({tally.layer_wise} layer-wise), {tally.touches} touches, "
        f"{tally.faults} faults, {tally.divergences} divergences"
    )
    return "\n".join(
        [
            ran,
            happened,
            f"{tally.slots_written_off} slots written off, {tally.given_up} stores given up",
            *(f"seed {seed}: {error}" for seed, error in report.broken),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
