"""The part with two ranks as the command sees it: left out, or failed, and never in the way of the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from radixlink.demo._places import Places
from radixlink.demo._processes import Processes
from radixlink.demo._ranks import hold_ranks
from radixlink.demo._report import RanksFailed, RanksLeftOut
from radixlink.errors import LaunchError
from radixlink.models import ModelCacheError, PreparedModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from radixlink.demo._report import Ranks


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is taken for `mpirun`: no program yet."""
    path = tmp_path / "mpirun"
    prepared = PreparedModel(directory=tmp_path, digest="d", name="tiny")
    monkeypatch.setattr("radixlink.demo._ranks.mpirun", lambda: str(path))
    monkeypatch.setattr("radixlink.demo._ranks.find_spec", lambda _: "there")
    monkeypatch.setattr("radixlink.demo._ranks.prepare_model", lambda *_: prepared)
    return path


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Places(tmp_path / "no memory") as places:
        yield places


def hold(places: Places) -> Ranks:
    with Processes(places.directory) as processes:
        return hold_ranks(processes, places)


def test_without_mpirun_they_are_left_out(
    launcher: Path, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mpirun() -> str:
        raise LaunchError("mpirun was not found")

    monkeypatch.setattr("radixlink.demo._ranks.mpirun", mpirun)
    assert hold(places) == RanksLeftOut(why_left_out="mpirun was not found")


def test_without_mpi4py_they_are_left_out(
    launcher: Path, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixlink.demo._ranks.find_spec", lambda _: None)
    left_out = hold(places)
    assert isinstance(left_out, RanksLeftOut)
    assert "mpi4py is not installed" in left_out.why_left_out


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo no slots; exit 4", "mpirun ended with exit code 4:\nno slots"),
        ("exit 0", "ranks.json"),
        ("for last; do :; done; echo '[{' > $last", "Expecting property name"),
    ],
    ids=["it fails", "it tells nothing", "it tells half"],
)
def test_ranks_that_fail_cost_nothing_but_their_own_figures(
    launcher: Path, places: Places, script: str, told: str
) -> None:
    launcher.write_text(f"#!/bin/sh\n{script}\n")
    launcher.chmod(0o755)
    failed = hold(places)
    assert isinstance(failed, RanksFailed)
    assert told in failed.failure


def test_a_launcher_that_cannot_be_started_is_a_failure(launcher: Path, places: Places) -> None:
    launcher.write_text("no program")
    failed = hold(places)
    assert isinstance(failed, RanksFailed)
    assert f"cannot start {launcher}" in failed.failure


def test_a_model_that_cannot_be_prepared_is_a_failure(
    launcher: Path, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare_model(*_: object) -> PreparedModel:
        raise ModelCacheError("the disk is full")

    monkeypatch.setattr("radixlink.demo._ranks.prepare_model", prepare_model)
    assert hold(places) == RanksFailed(failure="the disk is full")
