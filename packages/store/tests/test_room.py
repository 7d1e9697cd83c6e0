from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from radixlink_store._room import Room, is_in_memory, memory_rooms, room_at

if TYPE_CHECKING:
    from pathlib import Path

UNLIMITED_V1 = 9223372036854771712

#: Names that the kernel tells as they are: no UTF-8, and what Python takes for the end of a line or a space.
NAMES = ["a\udcff", "a\u2028b", "a\x0cb", "a\u3000b"]


def group(directory: Path, **files: object) -> None:
    """Make a control group with these files; dots in their names are written as two underscores."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(f"{content}\n", "ascii")


def rooms(tmp_path: Path, groups: str) -> list[Room]:
    listed = tmp_path / "groups"
    listed.write_bytes(os.fsencode(groups))
    return list(memory_rooms(listed, tmp_path / "root"))


def test_group_may_take_what_its_limit_leaves_and_what_is_only_cached(tmp_path: Path) -> None:
    group(
        tmp_path / "root" / "a",
        memory__max=1000,
        memory__current=700,
        memory__stat="anon 400\nactive_file 30\ninactive_file 20\nshmem 250",
    )
    assert rooms(tmp_path, "0::/a\n") == [
        Room(num_bytes=350, limit="the memory limit of control group /a")
    ]


def test_every_group_above_counts(tmp_path: Path) -> None:
    root = tmp_path / "root"
    group(root / "a" / "b", memory__max="max", memory__current=10, memory__stat="anon 10")
    group(root / "a", memory__max=50, memory__current=60, memory__stat="anon 60")
    group(root, memory__max=500, memory__current=60, memory__stat="anon 60")
    found = [(room.num_bytes, room.limit[-2:]) for room in rooms(tmp_path, "0::/a/b\n")]
    assert found == [(0, "/a"), (440, " /")]


def test_older_interface_is_asked_as_well(tmp_path: Path) -> None:
    memory = tmp_path / "root" / "memory"
    stat = "total_active_file 5\ntotal_inactive_file 6"
    names = {"memory__usage_in_bytes": 100, "memory__stat": stat}
    group(memory / "job", memory__limit_in_bytes=300, **names)
    group(memory, memory__limit_in_bytes=UNLIMITED_V1, **names)
    listed = "7:cpu,cpuacct:/elsewhere\n4:memory:/job\n0::/\n"
    assert [room.num_bytes for room in rooms(tmp_path, listed)] == [211]


def test_group_that_cannot_be_seen_sets_no_limit(tmp_path: Path) -> None:
    # In a container, the path is often one of the host.
    assert rooms(tmp_path, "0::/host/container\n4:memory:/x\n") == []
    assert list(memory_rooms(tmp_path / "missing", tmp_path)) == []


@pytest.mark.parametrize("name", NAMES)
def test_group_may_have_any_name(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    group(root / name, memory__max=50, memory__current=10, memory__stat="anon 10")
    assert [room.num_bytes for room in rooms(tmp_path, f"0::/{name}\n")] == [40]


def test_kind_of_a_file_system_is_that_of_its_device(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    other = "\n".join(
        f"{20 + place} 1 0:999 / /mnt/{name} rw,relatime - tmpfs none rw"
        for place, name in enumerate(NAMES)
    )
    ours = f"30 20 {number} /some/where /mnt rw shared:1 master:2 - {{}} none rw"
    for kind, expected in (("tmpfs", True), ("ext4", False)):
        mounts.write_bytes(os.fsencode(f"{other}\n{ours.format(kind)}\n"))
        assert is_in_memory(tmp_path, mounts) is expected
    mounts.write_bytes(os.fsencode(f"{other}\n"))
    assert not is_in_memory(tmp_path, mounts)
    assert not is_in_memory(tmp_path, tmp_path / "missing")


def test_memory_limit_counts_only_where_files_are_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = Room(num_bytes=3, limit="a group")
    monkeypatch.setattr("radixlink_store._room.memory_rooms", lambda: iter([limit]))
    monkeypatch.setattr("radixlink_store._room.is_in_memory", lambda _: True)
    assert room_at(tmp_path) == limit
    monkeypatch.setattr("radixlink_store._room.is_in_memory", lambda _: False)
    room = room_at(tmp_path)
    assert room.num_bytes > 3
    assert str(tmp_path) in room.limit


def test_room_of_a_place_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        room_at(tmp_path / "missing")


def test_tables_may_be_empty(tmp_path: Path) -> None:
    (tmp_path / "table").write_bytes(b"")
    assert not is_in_memory(tmp_path, tmp_path / "table")
    assert list(memory_rooms(tmp_path / "table", tmp_path)) == []
