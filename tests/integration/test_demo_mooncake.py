"""The demonstration over Mooncake, on the tiny model: its report, and what it leaves behind."""

from __future__ import annotations

import ctypes
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    RunDemo: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]

_SHORT = ("--model", "tiny", "--turns", "2", "--tokens", "4", "--no-ranks", "--store", "mooncake")


def _mooncakes() -> set[str]:
    """The processes of Mooncake's programs."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            program = (process / "cmdline").read_bytes().split(b"\0")[0]
        except OSError:
            continue
        if Path(program.decode(errors="replace")).name in {"mooncake_master", "mooncake_client"}:
            found.add(process.name)
    return found


@pytest.fixture
def _mooncake_is_there() -> None:
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("Mooncake is not installed")
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        pytest.skip(f"Mooncake needs libibverbs1: {error}")


@pytest.mark.usefixtures("_mooncake_is_there")
def test_turns_are_restored_from_the_replica_that_was_killed(
    run_demo: RunDemo, tmp_path: Path
) -> None:
    before = _mooncakes()
    result = run_demo(*_SHORT)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "build" / "demo-report.json").read_text())
    assert report["identical"] is True
    assert report["max_dlogit"] <= 1e-3 < report["control_dlogit"]
    last = [turn for turn in report["turns"] if turn["number"] == 2]
    assert len(last) == 2
    for turn in last:
        assert turn["figures"]["restored_tokens"] > 0
        assert set(turn["figures"]["pages_by_writer"]) == {str(report["ended_pid"])}
    assert _mooncakes() <= before
