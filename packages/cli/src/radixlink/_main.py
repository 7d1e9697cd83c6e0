"""The command line: arguments in, an exit code out."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from radixlink.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Sequence

_INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Without the program's name; None takes them from the command line.

    Returns:
        The exit code, as `radixlink.errors` lists them.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # The name of a file or a model may have what the terminal cannot show.
            stream.reconfigure(errors="backslashreplace")
    parsed = _parser().parse_args(arguments)
    try:
        return _store(parsed) if parsed.command == "store" else _demo(parsed)
    except CommandError as error:
        return _failed(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _failed("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        return _failed("the output was closed before the end", CommandError.exit_code)
    except OSError as error:
        return _failed(str(error), CommandError.exit_code)


def _demo(parsed: argparse.Namespace) -> int:
    """Run `radixlink demo`."""
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
    return run_demo(options)


def _store(parsed: argparse.Namespace) -> int:
    """Run `radixlink store`."""
    from radixlink._store_command import StoreAction, run_store

    return run_store(StoreAction(parsed.action), parsed.path)


def _failed(message: str, exit_code: int) -> int:
    """Say why the command ends, as far as somebody still reads.

    Returns:
        The exit code.
    """
    with contextlib.suppress(OSError):
        print(f"radixlink: {message}", file=sys.stderr, flush=True)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            # Python flushes again when it ends, and would complain.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
    return exit_code


def _parser() -> argparse.ArgumentParser:
    """What may be typed."""
    parser = argparse.ArgumentParser(
        prog="radixlink", description="Prefix caching outside the engine, shared by processes."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    _add_demo(commands)
    _add_store(commands)
    return parser


def _add_store(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """What may be typed after `radixlink store`."""
    store = commands.add_parser(
        "store",
        help="what a file store holds, whether it is sound, and giving its pages up",
        description="Look after a file store or the files of a persistent tier, in use or not. "
        "inspect: sizes, fill, counters and identity. verify: read every page; those that are "
        "damaged are named, and emptied in a segment. clear: give up all pages; files that are none "
        "of this version are left alone.",
    )
    store.add_argument("action", choices=["inspect", "verify", "clear"])
    store.add_argument(
        "path",
        type=_path,
        help="the directory of the store or the tier, or the one that has stores for each model",
    )


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """What may be typed after `radixlink demo`."""
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
        "--store",
        default="file",
        help="file (plain processes), mpi (one mpirun) or mooncake; default: file",
    )
    demo.add_argument(
        "--store-dir",
        type=_location,
        help="where the store is, in its own terms, kept afterwards (the mpi store is in memory and takes none); "
        "for mooncake HOST:PORT of a master, or a JSON file of settings; default: a new place that is removed",
    )
    demo.add_argument(
        "--report",
        type=_path,
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


def _path(text: str) -> Path:
    """A path that was typed; for `Path` nothing at all would be the current directory."""
    if not text:
        msg = "expected a path, got an empty one; the current directory is ."
        raise argparse.ArgumentTypeError(msg)
    return Path(text)


def _location(text: str) -> str:
    """A store's location that was typed, as it was: it need not be a path. Nothing at all would be the default."""
    if not text:
        msg = "expected a location, got an empty one; leave the option out for the default"
        raise argparse.ArgumentTypeError(msg)
    return text


def _at_least_two(text: str) -> int:
    """A number of 2 or more."""
    try:
        number = int(text)
    except ValueError as error:
        msg = f"expected a whole number of 2 or more, got {text!r}"
        raise argparse.ArgumentTypeError(msg) from error
    if number < 2:  # noqa: PLR2004 -- a turn to store and one to restore
        msg = f"expected a whole number of 2 or more, got {number}"
        raise argparse.ArgumentTypeError(msg)
    return number
