from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from multiprocessing.connection import Pipe
from typing import TYPE_CHECKING

import pytest

from radixlink.demo._messages import Ask, Channel, Failed, Stop, Stopped
from radixlink.demo._processes import Processes
from radixlink.demo._replicas import Replica
from radixlink.errors import ReplicaError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path


def test_a_replica_that_was_killed_between_turns_is_named_with_its_end(tmp_path: Path) -> None:
    ours, theirs = Pipe()
    with Processes(tmp_path) as processes:
        place = processes.start(
            "replica B", [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], os.environ
        )
        replica = Replica(name="B", pid=42, channel=Channel(ours), place=place, processes=processes)
        theirs.close()
        with pytest.raises(ReplicaError, match=r"replica B, pid 42, .* exit code -9") as raised:
            replica.answer(Ask(request_id="x", prompt=(1,), num_tokens=1), "turn 2")
        assert raised.value.exit_code == 9
        replica.channel.close()


def test_a_replica_whose_process_goes_on_has_a_broken_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixlink.demo._replicas.EXIT_CODE_TIMEOUT_S", 0.0)
    ours, theirs = Pipe()
    with Processes(tmp_path) as processes:
        # What `mpirun` does when one of its ranks was killed.
        place = processes.start(
            "mpirun", [sys.executable, "-c", "import signal; signal.pause()"], os.environ
        )
        replica = Replica(name="A", pid=42, channel=Channel(ours), place=place, processes=processes)
        theirs.close()
        with pytest.raises(ReplicaError, match="replica A, pid 42, is gone: its connection broke"):
            replica.tell(Ask(request_id="x", prompt=(1,), num_tokens=1))
        replica.channel.close()


@contextmanager
def running(directory: Path, program: str) -> Iterator[tuple[Replica, Connection]]:
    """A replica whose process runs a program that says nothing, and the other end of its socket."""
    ours, theirs = Pipe()
    with Processes(directory) as processes, ours, theirs:
        place = processes.start("replica A", [sys.executable, "-c", program], os.environ)
        yield (
            Replica(name="A", pid=42, channel=Channel(ours), place=place, processes=processes),
            theirs,
        )


def test_a_replica_that_dies_while_it_is_waited_for_is_told_with_what_it_printed(
    tmp_path: Path,
) -> None:
    with running(tmp_path, "raise AttributeError('no layers')") as (replica, theirs):
        theirs.close()
        with pytest.raises(ReplicaError, match=r"exit code 1:\n(?s:.*)AttributeError: no layers"):
            replica.wait_until_ready()


def test_a_replica_that_ends_well_has_nothing_to_tell(tmp_path: Path) -> None:
    with running(tmp_path, "pass") as (replica, theirs):
        theirs.send(Stopped())
        assert replica.stop(alone=True) is None
        assert theirs.recv() == Stop()


def test_a_replica_that_fails_when_it_is_to_end_is_told(tmp_path: Path) -> None:
    with running(tmp_path, "import signal; signal.pause()") as (replica, theirs):
        theirs.send(Failed(message="the store cannot be closed", exit_code=7))
        assert replica.stop(alone=True) == "the store cannot be closed"


def test_a_replica_that_crashes_after_its_last_word_is_told_but_not_for_another_ranks_end(
    tmp_path: Path,
) -> None:
    with running(tmp_path, "exit(3)") as (replica, theirs):
        theirs.send(Stopped())
        theirs.send(Stopped())
        assert replica.stop(alone=True) == "replica A ended with exit code 3"
        assert replica.stop(alone=False) is None


@pytest.mark.parametrize("last_words", [[], [Stopped()]])
def test_a_replica_that_hangs_when_it_is_to_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_words: list[Stopped]
) -> None:
    monkeypatch.setattr("radixlink.demo._replicas._END_TIMEOUT_S", 0.1)
    with running(tmp_path, "import signal; signal.pause()") as (replica, theirs):
        for message in last_words:
            theirs.send(message)
        told = replica.stop(alone=True)
    assert told in {
        "waiting for the end of replica A: no word for 0.1 s",
        "replica A did not end within 0.1 s",
    }
