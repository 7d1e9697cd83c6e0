"""How much a segment may take: of its file system and, if that is memory, of the control group.

A container may be allowed less memory than its /dev/shm is large. Who takes more is killed, and not
at the call that took too much; so it is asked before anything is allocated.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOUNTS: Final = Path("/proc/self/mountinfo")
_GROUPS: Final = Path("/proc/self/cgroup")
_GROUP_ROOT: Final = Path("/sys/fs/cgroup")
_NO_LIMIT: Final = 1 << 62
_IN_MEMORY: Final = {"tmpfs", "ramfs"}


@attrs.frozen(kw_only=True)
class Room:
    """What may still be taken.

    Attributes:
        num_bytes: How much.
        limit: What sets the limit, for a message.
    """

    num_bytes: int
    limit: str


@attrs.frozen(kw_only=True)
class _Names:
    """What the files of a memory control group are called in a version of the interface.

    Attributes:
        limit: Bytes that the group may use.
        usage: Bytes that it uses.
        caches: Entries of `memory.stat` that the kernel takes back before it kills anybody.
    """

    limit: str
    usage: str
    caches: tuple[str, str]


_V1: Final = _Names(
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    caches=("total_active_file", "total_inactive_file"),
)
_V2: Final = _Names(
    limit="memory.max", usage="memory.current", caches=("active_file", "inactive_file")
)


def room_at(path: Path) -> Room:
    """What this process may still write to the file system of a path.

    Raises:
        OSError: The path does not exist.
    """
    status = os.statvfs(path)
    rooms = [Room(num_bytes=status.f_bavail * status.f_frsize, limit=f"the file system of {path}")]
    if is_in_memory(path):
        rooms += memory_rooms()
    return min(rooms, key=lambda room: room.num_bytes)


def lines_of(table: Path) -> list[str]:
    """The lines of a table of the kernel's; names in it may be any bytes but a space and a newline.

    Raises:
        OSError: It cannot be read.
    """
    return [line for line in os.fsdecode(table.read_bytes()).split("\n") if line]


def is_in_memory(path: Path, mounts: Path = _MOUNTS) -> bool:
    """True when the file system of a path is known to be one in memory.

    Raises:
        OSError: The path does not exist.
    """
    device = os.stat(path).st_dev  # noqa: PTH116 -- also takes a descriptor's path
    ours = f"{os.major(device)}:{os.minor(device)}"
    if not mounts.exists():
        return False
    for line in lines_of(mounts):
        # ID, parent's ID, device, root, where, options, any number of tags, "-", kind, ...
        mount, _, kind = line.partition(" - ")
        if mount.split(" ")[2] == ours:
            return kind.split(" ")[0] in _IN_MEMORY
    return False


def memory_rooms(groups: Path = _GROUPS, root: Path = _GROUP_ROOT) -> Iterator[Room]:
    """What each control group that this process is in may still take of memory.

    Args:
        groups: The kernel's list of this process' groups.
        root: Where control groups are mounted.
    """
    if not groups.exists():
        return
    for line in lines_of(groups):
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            yield from _rooms_up_to(root, group, _V2)
        elif "memory" in controllers.split(","):
            yield from _rooms_up_to(root / "memory", group, _V1)


def _rooms_up_to(root: Path, group: str, names: _Names) -> Iterator[Room]:
    """What a group and those above it may still take, as far as they can be seen from here."""
    for place in (Path(group), *Path(group).parents):
        directory = root / place.relative_to("/")
        try:
            limit = (directory / names.limit).read_text("ascii").strip()
            usage = int((directory / names.usage).read_text("ascii"))
            entries = dict(
                entry.split() for entry in (directory / "memory.stat").read_text().splitlines()
            )
        except OSError:
            # A root group has no limit, and in a container a group may not be where it is said.
            continue
        if limit != "max" and int(limit) < _NO_LIMIT:
            caches = sum(int(entries.get(name, "0")) for name in names.caches)
            yield Room(
                num_bytes=max(0, int(limit) - usage + caches),
                limit=f"the memory limit of control group {place}",
            )
