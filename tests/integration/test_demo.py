"""The command as a user runs it, on the tiny model: what it reports, what it refuses, what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    RunDemo: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]

_SHORT = ("--model", "tiny", "--turns", "2", "--tokens", "4", "--no-ranks")


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind(model_cache: Path) -> Iterator[None]:
    """Whatever a test did: no process of it, and no directory in shared memory or the temp dir."""
    before = _directories()
    yield
    assert _processes_of(model_cache) == []
    assert _directories() <= before


def _directories() -> set[str]:
    """What the command makes for itself."""
    places = ("/dev/shm", tempfile.gettempdir())
    return {str(path) for place in places for path in Path(place).glob("radixlink-*")}


def _processes_of(model_cache: Path) -> list[str]:
    """The processes that run with these tests' cache, this one's children all."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
            if f"XDG_CACHE_HOME={model_cache}\0".encode() in environment:
                found.append((process / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return found


def test_turns_are_restored_from_the_other_replica(run_demo: RunDemo, tmp_path: Path) -> None:
    result = run_demo(*_SHORT)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "build" / "demo-report.json").read_text())
    assert report["identical"] is True
    assert report["max_dlogit"] <= 1e-3 < report["control_dlogit"]
    turns = report["turns"]
    assert [turn["number"] for turn in turns] == [1, 1, 2, 2]
    for before, after in zip(turns[:2], turns[2:], strict=True):
        assert before["pid"] != after["pid"]
        assert after["figures"]["restored_tokens"] > 0
        assert set(after["figures"]["pages_by_writer"]) == {str(before["pid"])}
    assert report["ended_pid"] == turns[0]["pid"]


def test_a_store_of_another_model_is_refused_with_both_named(
    run_demo: RunDemo, model_cache: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    first = run_demo(*_SHORT, "--store-dir", str(store))
    assert first.returncode == 0, first.stdout + first.stderr
    model = next(
        path for path in (model_cache / "radixlink").iterdir() if path.name.startswith("tiny-")
    )
    other = tmp_path / "other-model"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    result = run_demo(
        *("--model", str(other), "--turns", "2", "--tokens", "4", "--no-ranks"),
        *("--store-dir", str(store)),
    )
    assert result.returncode == 7, result.stdout + result.stderr
    assert str(store) in result.stderr
    assert "revision" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_store_directory_that_cannot_be_made_is_refused(
    run_demo: RunDemo, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no directory")
    result = run_demo(
        *_SHORT,
        "--store-dir",
        str(tmp_path / "file" / "store"),
    )
    assert result.returncode == 7, result.stdout + result.stderr
    assert str(tmp_path / "file") in result.stderr
    assert "Traceback" not in result.stderr


def test_a_report_that_cannot_be_written_is_told(run_demo: RunDemo, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    result = run_demo(
        *_SHORT,
        "--report",
        str(tmp_path / "file" / "report"),
    )
    assert result.returncode == 11
    assert "--report" in result.stderr
    assert "Traceback" not in result.stderr


@contextmanager
def _running(
    model_cache: Path, tmp_path: Path, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command while it runs, and the process of its first replica; both replicas are starting or ready."""
    command = [sys.executable, "-c", "import radixlink, sys; sys.exit(radixlink.main())", "demo"]
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen(
            [*command, *_SHORT],
            cwd=tmp_path,
            env={**os.environ, "XDG_CACHE_HOME": str(model_cache), **environment},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as running,
    ):
        assert running.stdout is not None
        first = running.stdout.readline()
        assert "replica A is pid" in first, (tmp_path / "stderr").read_text()
        yield running, int(first.split()[-1])


def test_being_told_to_end_more_than_once_leaves_nothing_behind(
    model_cache: Path, tmp_path: Path
) -> None:
    before = _directories()
    with _running(model_cache, tmp_path) as (running, _):
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            running.send_signal(number)
        assert running.wait(60.0) == 130
    assert (tmp_path / "stderr").read_text().endswith("radixlink: interrupted\n")
    assert _directories() <= before


def test_a_run_after_one_that_was_killed_removes_what_that_left(
    run_demo: RunDemo, model_cache: Path, tmp_path: Path
) -> None:
    before = _directories()
    with _running(model_cache, tmp_path) as (running, _):
        assert running.stdout is not None
        assert "replica B is pid" in running.stdout.readline()
        running.kill()
        running.wait(60.0)
        assert len(_directories() - before) == 2
    assert run_demo("--model", str(tmp_path / "missing")).returncode == 3
    assert _directories() <= before


def test_a_replica_that_is_killed_between_turns_is_named(model_cache: Path, tmp_path: Path) -> None:
    with _running(model_cache, tmp_path) as (running, pid):
        assert running.stdout is not None
        assert "replica B is pid" in running.stdout.readline()
        # It is not asked before the second turn.
        os.kill(pid, signal.SIGKILL)
        running.stdout.read()
        assert running.wait(60.0) == 9
    told = (tmp_path / "stderr").read_text()
    assert f"replica A, pid {pid}, is gone: replica A ended with exit code -9" in told
    assert "Traceback" not in told


def test_a_closed_output_and_a_long_temp_dir_are_no_traceback(
    model_cache: Path, tmp_path: Path
) -> None:
    # An address of a socket has 108 bytes.
    temp = tmp_path / ("long" * 30)
    temp.mkdir()
    with _running(model_cache, tmp_path, TMPDIR=str(temp)) as (running, _):
        assert running.stdout is not None
        running.stdout.close()
        assert running.wait(60.0) == 10
    told = (tmp_path / "stderr").read_text()
    assert told.endswith("radixlink: the output was closed before the end\n")
    assert "Traceback" not in told
    assert list(temp.glob("radixlink-*")) == []
