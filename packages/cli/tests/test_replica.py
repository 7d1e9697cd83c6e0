"""A replica in this process: what it tells, and how it fails."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from pathlib import Path
from typing import TypeVar

import attrs
import pytest

from radixlink.demo._messages import (
    Ask,
    Ready,
    ReplicaSpec,
    Stop,
    Stopped,
    Switchboard,
    TurnFigures,
)
from radixlink.demo._replica import main
from radixlink.errors import ReplicaError
from radixlink.models import PreparedModel, prepare_model

_M = TypeVar("_M")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    return prepare_model("tiny", tmp_path_factory.mktemp("cache"), lambda _: None)


@pytest.fixture
def spec(tiny: PreparedModel, tmp_path: Path) -> ReplicaSpec:
    return ReplicaSpec(
        model_dir=str(tiny.directory),
        model_name="tiny",
        model_digest=tiny.digest,
        page_size=16,
        num_pages=16,
        num_threads=1,
        store="file",
        store_dir=str(tmp_path / "store"),
        store_bytes=1 << 20,
    )


class RunningReplica:
    """A replica in a thread, and the command's end of its socket."""

    def __init__(self, directory: Path, spec: ReplicaSpec) -> None:
        switchboard = Switchboard(directory / "s")
        self.exit_code: int | None = None
        self.notes: list[str] = []
        self._thread = threading.Thread(target=self._run, args=[switchboard.path])
        self._thread.start()
        _, self.channel = switchboard.accept(30.0, lambda _: None)
        switchboard.close()
        self.channel.send(spec)

    def _run(self, path: Path) -> None:
        self.exit_code = main([str(path), "0"])

    def expect(self, kind: type[_M]) -> _M:
        return self.channel.expect(
            kind,
            timeout_s=30.0,
            ended=lambda _: None,
            on_note=self.notes.append,
            waiting_for="a test",
        )

    def end(self) -> None:
        self._thread.join(30.0)
        self.channel.close()


def failure(directory: Path, spec: ReplicaSpec) -> ReplicaError:
    """What a replica that cannot start says."""
    replica = RunningReplica(directory, spec)
    with pytest.raises(ReplicaError) as raised:
        replica.expect(Ready)
    replica.end()
    assert replica.exit_code == raised.value.exit_code
    return raised.value


def test_no_room_for_the_store_is_the_stores_fault(tmp_path: Path, spec: ReplicaSpec) -> None:
    error = failure(tmp_path, attrs.evolve(spec, store_bytes=1 << 50))
    assert error.exit_code == 7
    assert "--store file" in str(error)


def test_damaged_weights_are_the_models_fault(
    tmp_path: Path, spec: ReplicaSpec, tiny: PreparedModel
) -> None:
    damaged = Path(shutil.copytree(tiny.directory, tmp_path / "damaged"))
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1_000])
    error = failure(tmp_path, attrs.evolve(spec, model_dir=str(damaged)))
    assert error.exit_code == 3
    assert str(damaged) in str(error)


def test_a_kind_of_model_that_is_not_known_is_the_models_fault(
    tmp_path: Path, spec: ReplicaSpec, tiny: PreparedModel
) -> None:
    other = Path(shutil.copytree(tiny.directory, tmp_path / "other"))
    (other / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    assert failure(tmp_path, attrs.evolve(spec, model_dir=str(other))).exit_code == 3


def test_what_nobody_foresaw_is_told_with_where_it_happened(
    tmp_path: Path, spec: ReplicaSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_model(_: str) -> None:
        raise AttributeError("'GPT2Model' object has no attribute 'layers'")

    monkeypatch.setattr("radixlink.demo._replica.load_model", load_model)
    error = failure(tmp_path, spec)
    assert error.exit_code == 9
    assert "replica A failed" in str(error)
    assert "in _load_model" in str(error)
    assert str(error).endswith("AttributeError: 'GPT2Model' object has no attribute 'layers'")


def test_what_is_wrong_at_the_end_is_told(
    tmp_path: Path, spec: ReplicaSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(_: object) -> None:
        raise RuntimeError("the pages are stuck")

    replica = RunningReplica(tmp_path, spec)
    replica.expect(Ready)
    monkeypatch.setattr("radixlink_store.FileStoreFactory.close", close)
    replica.channel.send(Stop())
    with pytest.raises(ReplicaError, match="the pages are stuck"):
        replica.expect(Stopped)
    replica.end()
    assert replica.exit_code == 9


def test_a_replica_gives_signs_of_life_while_it_decodes(
    tmp_path: Path, spec: ReplicaSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 1.0)
    monkeypatch.setattr("radixlink.demo._replica._now", lambda: next(clock))
    replica = RunningReplica(tmp_path, spec)
    replica.expect(Ready)
    replica.channel.send(Ask(request_id="x", prompt=tuple(range(64)), num_tokens=20))
    figures = replica.expect(TurnFigures)
    replica.channel.send(Stop())
    replica.expect(Stopped)
    replica.end()
    assert replica.exit_code == 0
    assert len(figures.tokens) == 20
    for what in ("computing 64 tokens", "checking against a run without a cache"):
        assert len([n for n in replica.notes if n.startswith(f"{what}; tokens so far: ")]) > 2
