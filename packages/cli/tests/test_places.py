from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from radixlink.demo._places import Places, remove_leftovers, require_store_directory
from radixlink.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temp dir of the test's own."""
    made = tmp_path / "temp"
    made.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(made))
    return made


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    made = tmp_path / "memory"
    made.mkdir()
    return made


@pytest.fixture
def dead_pid() -> int:
    """The id of a process that has been there."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_leaving_removes_every_directory_with_what_is_in_it(temp: Path, memory: Path) -> None:
    with Places(memory) as places:
        for directory in (places.directory, places.new_backing(), places.new_store(1)):
            (directory / "file").write_text("something")
        assert len(list(memory.iterdir())) == 1
        assert len(list(temp.iterdir())) == 1
    assert list(memory.iterdir()) == []
    assert list(temp.iterdir()) == []


def test_shared_memory_is_not_touched_before_it_is_needed(memory: Path) -> None:
    with Places(memory) as places:
        assert list(memory.iterdir()) == []
        places.new_backing()
        assert [path.name.split("-")[2] for path in memory.iterdir()] == [str(os.getpid())]


def test_without_shared_memory_everything_is_in_the_temp_dir(tmp_path: Path) -> None:
    with Places(tmp_path / "missing") as places:
        assert places.new_backing().parent == places.directory
        assert places.new_store(1).parent == places.directory


def test_a_store_that_does_not_fit_into_shared_memory_is_in_the_temp_dir(memory: Path) -> None:
    with Places(memory) as places:
        assert places.new_store(1 << 60).parent == places.directory
        assert list(memory.iterdir()) == []


def test_the_next_run_removes_what_a_dead_one_left(temp: Path, memory: Path, dead_pid: int) -> None:
    for parent in (temp, memory):
        (parent / f"radixlink-demo-{dead_pid}-abc" / "deep").mkdir(parents=True)
    with Places(memory) as places:
        assert list(temp.iterdir()) == [places.directory]
        assert list(memory.iterdir()) == []


def test_what_may_be_in_use_or_somebody_elses_stays(
    temp: Path, memory: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Places(memory):
        locked = temp / f"radixlink-demo-{dead_pid}-locked"
        locked.mkdir()
        other_name = temp / f"radixlink-demo-{dead_pid}"
        other_name.mkdir()
        link = temp / f"radixlink-demo-{dead_pid}-link"
        link.symlink_to(memory)
        descriptor = os.open(locked, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        before = set(temp.iterdir())
        assert len(before) == 4
        remove_leftovers([temp])
        assert set(temp.iterdir()) == before
        os.close(descriptor)
        monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
        remove_leftovers([temp])
        assert set(temp.iterdir()) == before
        monkeypatch.undo()
        remove_leftovers([temp])
        assert set(temp.iterdir()) == before - {locked}


def test_a_store_directory_that_can_be_made_is_not_made_yet(tmp_path: Path) -> None:
    require_store_directory(tmp_path / "store")
    assert not (tmp_path / "store").exists()
    require_store_directory(tmp_path)
    assert tmp_path.is_dir()


@pytest.mark.parametrize("name", ["file", "file/store", "missing/store"])
def test_a_store_directory_that_cannot_be_used_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StoreError, match=f"--store-dir .*{name}: expected a directory"):
        require_store_directory(tmp_path / name)
