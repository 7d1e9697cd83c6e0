from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from radixlink_contracts.errors import BackendUnavailableError
from radixlink_store import default_directory
from radixlink_store._directory import names_in, open_directory
from radixlink_store._room import Room


@pytest.fixture
def shared_memory(tmp_path: Path) -> Path:
    """A directory that plays /dev/shm."""
    path = tmp_path / "shm"
    path.mkdir()
    return path


def choose(shared_memory: Path, kind: str | None, free: int, needed: int = 1000) -> Path:
    """Let the chooser look at a table of mounts in which the directory is of some kind."""
    mounts = shared_memory.parent / "mounts"
    # The kernel takes any bytes for a name, and tells them as they are.
    lines = ["/dev/vda / ext4 rw 0 0", "y /mnt/\udcff ext4 rw 0 0", "y /mnt/\u2028 ext4 rw 0 0"]
    if kind:
        lines.append(f"x {shared_memory} {kind} rw 0 0")
    mounts.write_bytes(os.fsencode("\n".join(lines)))
    return default_directory(
        7,
        needed,
        temp=Path("/temp"),
        shared_memory=shared_memory,
        mounts=mounts,
        room=lambda path: Room(num_bytes=free if path == shared_memory else 0, limit="it"),
    )


def test_shared_memory_with_room_is_chosen(shared_memory: Path) -> None:
    assert choose(shared_memory, "tmpfs", free=1000) == shared_memory / "radixlink-7"


@pytest.mark.parametrize(
    ("kind", "free"),
    [("tmpfs", 999), ("ext4", 1000), (None, 1000)],
    ids=["no room", "a disk", "not mounted"],
)
def test_temporary_directory_is_chosen_where_shared_memory_will_not_do(
    shared_memory: Path, kind: str | None, free: int
) -> None:
    assert choose(shared_memory, kind, free) == Path("/temp/radixlink-7")


def test_last_mount_on_a_directory_counts(shared_memory: Path) -> None:
    mounts = shared_memory.parent / "mounts"
    lines = [f"x {shared_memory} tmpfs rw 0 0", f"y {shared_memory} ext4 rw 0 0"]
    mounts.write_text("\n".join(lines), "utf-8")
    chosen = default_directory(
        7,
        1,
        temp=Path("/temp"),
        shared_memory=shared_memory,
        mounts=mounts,
        room=lambda _: Room(num_bytes=1, limit="it"),
    )
    assert chosen == Path("/temp/radixlink-7")


def test_directory_in_shared_memory_stays_the_answer_once_made(shared_memory: Path) -> None:
    (shared_memory / "radixlink-7").mkdir()
    assert choose(shared_memory, "tmpfs", free=0) == shared_memory / "radixlink-7"


def test_missing_shared_memory_is_no_error(tmp_path: Path) -> None:
    assert choose(tmp_path / "none", "tmpfs", free=1000) == Path("/temp/radixlink-7")


def test_directory_is_made_for_the_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "store"
    os.close(open_directory(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(BackendUnavailableError, match="symbolic link"):
        open_directory(tmp_path / "link")


def test_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.mkdir()
    path.chmod(0o770)
    with pytest.raises(BackendUnavailableError, match="mode 770"):
        open_directory(path)


def test_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only root can give a directory away, so we are another user instead.
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(BackendUnavailableError, match=f"one of user {owner}"):
        open_directory(tmp_path)


@pytest.mark.parametrize("parent", ["missing", "file"])
def test_directory_that_cannot_be_made_says_what_was_tried(tmp_path: Path, parent: str) -> None:
    (tmp_path / "file").write_text("not a directory", "utf-8")
    path = tmp_path / parent / "store"
    with pytest.raises(BackendUnavailableError) as caught:
        open_directory(path)
    cause = caught.value.__cause__
    assert isinstance(cause, OSError)
    assert cause.strerror is not None
    for part in (str(path), "make or open", cause.strerror, "location"):
        assert part in str(caught.value)


def test_names_are_all_told_while_another_lists_by_the_same_descriptor(tmp_path: Path) -> None:
    names = [str(number) for number in range(3)]
    for name in names:
        (tmp_path / name).touch()
    descriptor = open_directory(tmp_path)
    try:
        with os.scandir(descriptor) as other:
            next(other)
            assert sorted(names_in(descriptor)) == names
    finally:
        os.close(descriptor)
