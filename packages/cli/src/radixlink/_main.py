"""The command line: arguments in, an exit code out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from radixlink.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Without the program's name; None takes them from the command line.

    Returns:
        The exit code: 0 done, 1 a check failed, 2 wrong arguments, others as `radixlink.errors` says.
    """
    parsed = _parser().parse_args(arguments)
    # Imported late, so that `radixlink --help` does not wait for them.
    from radixlink.demo import DemoOptions, run_demo

    options = DemoOptions(
        model=parsed.model,
        store=parsed.store,
        store_dir=parsed.store_dir,
        report=parsed.report,
        max_turns=parsed.turns,
        tokens_per_turn=parsed.tokens,
        ranks=not parsed.no_ranks,
    )
    try:
        return run_demo(options)
    except CommandError as error:
        print(f"radixlink: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("radixlink: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    """What may be typed."""
    parser = argparse.ArgumentParser(
        prog="radixlink", description="Prefix caching outside the engine, shared by processes."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="two replicas hold a conversation, each turn on the other one",
        description="Two replicas of a model hold two conversations over long documents; each turn "
        "finds what the other replica computed in a shared store. Every answer is checked against "
        "a run without a cache.",
    )
    demo.add_argument(
        "--model",
        default="smollm2",
        help="smollm2 (a download of 93 MB, once), tiny (random, no download), or a directory",
    )
    demo.add_argument(
        "--store", default="file", help="file (plain processes) or mpi (one mpirun); default: file"
    )
    demo.add_argument(
        "--store-dir",
        type=Path,
        help="where the file store is, kept afterwards; default: a new place that is removed",
    )
    demo.add_argument(
        "--report",
        type=Path,
        default=Path("build/demo-report.json"),
        help="where the figures go; default: %(default)s",
    )
    demo.add_argument(
        "--turns", type=_at_least_two, default=6, help="turns of each conversation; default: 6"
    )
    demo.add_argument(
        "--tokens", type=_at_least_two, default=16, help="tokens of each answer; default: 16"
    )
    demo.add_argument(
        "--no-ranks", action="store_true", help="leave out the part with two tensor-parallel ranks"
    )
    return parser


def _at_least_two(text: str) -> int:
    """A number of 2 or more."""
    number = int(text)
    if number < 2:  # noqa: PLR2004 -- a turn to store and one to restore
        msg = f"expected 2 or more, got {number}"
        raise argparse.ArgumentTypeError(msg)
    return number
