from __future__ import annotations

import os
import sys
from multiprocessing.connection import Pipe
from typing import TYPE_CHECKING

import pytest

from radixlink.demo._messages import Ask, Channel
from radixlink.demo._processes import Processes
from radixlink.demo._replicas import Replica
from radixlink.errors import ReplicaError

if TYPE_CHECKING:
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
    monkeypatch.setattr("radixlink.demo._replicas._EXIT_CODE_TIMEOUT_S", 0.0)
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
