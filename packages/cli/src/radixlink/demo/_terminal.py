"""What the command prints: results on standard output, progress on standard error."""

from __future__ import annotations

import sys


def print_result(line: str) -> None:
    """One line of the result is out, in place of the progress."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    print(line, flush=True)


def say(text: str) -> None:
    """Progress: one line that replaces the last on a terminal, a line each elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)
    else:
        print(f"  {text}", file=sys.stderr, flush=True)
