"""`radixlink store`: what a file store holds, whether it is sound, and giving its pages up."""

from __future__ import annotations

import enum
import stat
from typing import TYPE_CHECKING, Final, assert_never

import attrs

from radixlink.errors import StoreError
from radixlink_contracts.errors import LinkError
from radixlink_store import maintenance
from radixlink_store.maintenance import ClearedLog, LogStatus, LogVerdict, Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from radixlink_contracts import PoolLayout
    from radixlink_store.maintenance import Cleared, SegmentStatus, Verdict

_SOUND: Final = 0
_DAMAGED: Final = 1
_SHOWN_DAMAGES: Final = 10


class StoreAction(enum.Enum):
    """What may be done; the values are what is typed."""

    INSPECT = "inspect"
    VERIFY = "verify"
    CLEAR = "clear"


def run_store(action: StoreAction, path: Path) -> int:
    """Do it, and print what came of it.

    Returns:
        The exit code: 1 if `verify` found damage or any file could not be read, else 0.

    Raises:
        StoreError: There is no store at the path, or it cannot be used.
    """
    _require_directory(action, path)
    try:
        match action:
            case StoreAction.INSPECT:
                told = [_status(found) for found in maintenance.inspect(path)]
            case StoreAction.VERIFY:
                told = [_verdict(found) for found in maintenance.verify(path)]
            case StoreAction.CLEAR:
                told = [_cleared(found) for found in maintenance.clear(path)]
            case _:
                assert_never(action)
    except LinkError as error:
        raise StoreError(str(error)) from error
    for text, _ in told:
        print(text)
    return _SOUND if all(sound for _, sound in told) else _DAMAGED


def _require_directory(action: StoreAction, path: Path) -> None:
    """The path is one of a directory.

    Raises:
        StoreError: It does not exist, is of something else, or cannot be looked at.
    """
    what = f"store {action.value} {path}: expected a directory, got"
    try:
        is_directory = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError as error:
        raise StoreError(f"{what} a path that does not exist") from error
    except OSError as error:
        raise StoreError(f"{what}: {error}") from error
    if not is_directory:
        raise StoreError(f"{what} a path that is a file")


def _status(found: SegmentStatus | LogStatus | Unreadable) -> tuple[str, bool]:
    """One segment, or the files of one layout, in words, and whether it could be read."""
    if isinstance(found, Unreadable):
        return _unreadable(found)
    if isinstance(found, LogStatus):
        return "\n".join([_files(found), *(f"  {line}" for line in _log_lines(found))]), True
    return "\n".join([str(found.file), *(f"  {line}" for line in _lines(found))]), True


def _whose(layout: PoolLayout) -> Iterator[str]:
    """Whose pages they are."""
    identity = layout.identity
    yield f"identity   {identity.model}, revision {identity.revision}, {identity.dtype}"
    yield f"           {identity.page_size} tokens a page, {identity.num_layers} layers"
    yield f"           {identity.layout}"


def _what(layout: PoolLayout) -> str:
    """Which pages, and how large."""
    return (
        f"pool {layout.pool.value}, shard {layout.shard.index} of {layout.shard.count}, "
        f"{layout.page_bytes:,} bytes in {len(layout.range_bytes)} layer ranges"
    )


def _files(found: LogStatus | LogVerdict | ClearedLog) -> str:
    """The files of one layout in a directory, and whose they are, in one line."""
    layout = found.layout
    return (
        f"{found.directory}: {found.num_files:,} files of pages of {layout.identity.model}, pool "
        f"{layout.pool.value}, shard {layout.shard.index} of {layout.shard.count}"
    )


def _log_lines(status: LogStatus) -> Iterator[str]:
    """What `inspect` says of the files of a layout."""
    yield from _whose(status.layout)
    yield f"pages      {_what(status.layout)}"
    yield (
        f"fill       {status.num_records:,} records of {status.num_pages:,} pages, "
        f"{status.num_torn:,} torn; {status.total_bytes:,} bytes"
    )
    yield f"files      {status.num_files:,}, of which {status.num_unsealed:,} not sealed"


def _lines(status: SegmentStatus) -> Iterator[str]:
    """What `inspect` says of a segment."""
    yield from _whose(status.layout)
    yield (f"pages      {_what(status.layout)}, checksums {'on' if status.checksums else 'off'}")
    yield (
        f"fill       {status.num_pages:,} of {status.num_slots:,} pages "
        f"({status.num_pages / status.num_slots:.0%}), {status.num_leased:,} leased, "
        f"{status.num_unfinished:,} unfinished; {status.total_bytes:,} bytes"
    )
    used = "unknown" if status.idle_s is None else f"{status.idle_s:,} s ago"
    yield f"in use     {status.num_openers} openers; last use of a page: {used}"
    counters = attrs.asdict(status.counters)
    asked = status.counters.read_ok + status.counters.read_missing + status.counters.read_stale
    hits = f"{status.counters.read_ok / asked:.0%}" if asked else "none asked for"
    yield f"hits       {hits} of the layer ranges asked for"
    yield "counters   " + ", ".join(f"{name} {count:,}" for name, count in counters.items())
    yield "namespaces not known: they are part of a page's key, which is a digest"


def _verdict(found: Verdict | LogVerdict | Unreadable) -> tuple[str, bool]:
    """What a scrub found, and whether that is nothing."""
    if isinstance(found, Unreadable):
        return _unreadable(found)
    if isinstance(found, LogVerdict):
        return _log_verdict(found)
    read = "" if found.checksums else ", headers alone: it has no checksums"
    lines = [f"{found.file}: {found.num_pages:,} pages, {len(found.damages):,} damaged{read}"]
    lines += [
        f"  slot {damage.slot}: {damage.what}; emptied" for damage in found.damages[:_SHOWN_DAMAGES]
    ]
    lines += _more(len(found.damages))
    return "\n".join(lines), not found.damages


def _log_verdict(found: LogVerdict) -> tuple[str, bool]:
    """What a scrub of files found, and whether that is nothing; a torn tail is."""
    counts = (
        f"{found.num_records:,} records, {len(found.damages):,} damaged, {found.num_torn:,} torn"
    )
    lines = [f"{_files(found)}: {counts}"]
    for damage in found.damages[:_SHOWN_DAMAGES]:
        record = "" if damage.record is None else f", record {damage.record}"
        lines.append(f"  {damage.file.name}{record}: {damage.what}")
    lines += _more(len(found.damages))
    return "\n".join(lines), not found.damages


def _more(num_damages: int) -> list[str]:
    """How many damages are not shown, if any."""
    more = num_damages - _SHOWN_DAMAGES
    return [f"  and {more:,} more"] if more > 0 else []


def _cleared(found: Cleared | ClearedLog | Unreadable) -> tuple[str, bool]:
    """What became of a segment, or of the files of a layout."""
    if isinstance(found, Unreadable):
        return _unreadable(found)
    if isinstance(found, ClearedLog):
        return f"{_files(found)}: {found.num_records:,} records, removed", True
    what = "removed" if found.removed else "emptied; the file stays, somebody has it open"
    return f"{found.file}: {found.num_pages:,} pages, {what}", True


def _unreadable(found: Unreadable) -> tuple[str, bool]:
    return f"{found.file}: left alone: {found.why}", False
