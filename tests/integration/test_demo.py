"""The command as a user runs it, on the tiny model: what it reports, what it refuses, what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_TIMEOUT_S = 240.0
_SHORT = ("--model", "tiny", "--turns", "2", "--tokens", "4", "--no-ranks")


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Whatever a test did: no process of the command, and nothing of it in shared memory or the temp dir."""
    before = _leftovers()
    yield
    assert _leftovers() <= before


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def demo(
    *arguments: str, cache_dir: Path, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `radixlink demo`, with a deadline."""
    command = [sys.executable, "-c", "import radixlink, sys; sys.exit(radixlink.main())", "demo"]
    return subprocess.run(
        [*command, *arguments],
        cwd=cwd,
        env={**os.environ, "XDG_CACHE_HOME": str(cache_dir), **environment},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


def _leftovers() -> set[str]:
    """Directories and processes that the command makes."""
    places = {
        str(path) for place in ("/dev/shm", "/tmp") for path in Path(place).glob("radixlink-*")
    }
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(word.startswith("radixlink.demo._") for word in words):
            places.add(f"pid {process.name}: {' '.join(words)}")
    return places


def test_turns_are_restored_from_the_other_replica(cache_dir: Path, tmp_path: Path) -> None:
    result = demo(*_SHORT, cache_dir=cache_dir, cwd=tmp_path)
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
    cache_dir: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    first = demo(*_SHORT, "--store-dir", str(store), cache_dir=cache_dir, cwd=tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    model = next(
        path for path in (cache_dir / "radixlink").iterdir() if path.name.startswith("tiny-")
    )
    other = tmp_path / "other-model"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    result = demo(
        *("--model", str(other), "--turns", "2", "--tokens", "4", "--no-ranks"),
        *("--store-dir", str(store)),
        cache_dir=cache_dir,
        cwd=tmp_path,
    )
    assert result.returncode == 7, result.stdout + result.stderr
    assert str(store) in result.stderr
    assert "revision" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_store_directory_that_cannot_be_made_is_refused(cache_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    result = demo(
        *_SHORT, "--store-dir", str(tmp_path / "file" / "store"), cache_dir=cache_dir, cwd=tmp_path
    )
    assert result.returncode == 7, result.stdout + result.stderr
    assert str(tmp_path / "file") in result.stderr
    assert "Traceback" not in result.stderr


def test_a_report_that_cannot_be_written_is_told(cache_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    result = demo(
        *_SHORT, "--report", str(tmp_path / "file" / "report"), cache_dir=cache_dir, cwd=tmp_path
    )
    assert result.returncode == 1
    assert "--report" in result.stderr
    assert "Traceback" not in result.stderr


def test_being_told_to_end_leaves_nothing_behind(cache_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import radixlink, sys; sys.exit(radixlink.main())", "demo"]
    with subprocess.Popen(
        [*command, *_SHORT],
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(cache_dir)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert "replica A is pid" in running.stdout.readline()
        running.terminate()
        assert running.wait(60.0) == 130
