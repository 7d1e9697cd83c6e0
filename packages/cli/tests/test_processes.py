from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from radixlink.demo._processes import (
    Processes,
    free_ports,
    mpi_environment,
    replica_environment,
)
from radixlink.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Says where its child is, waits for it, and ignores the polite request to end.
_STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
child.wait()
"""


def is_running(pid: int) -> bool:
    """True while a process runs; one that has ended and was not collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pid: int) -> None:
    """A killed process is gone as soon as the kernel gets to it, if its parent was waited for and it was not."""
    deadline = time.monotonic() + 10.0
    while is_running(pid):
        assert time.monotonic() < deadline
        os.sched_yield()


def test_leaving_ends_every_process_and_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixlink.demo._processes._END_TIMEOUT_S", 0.2)
    told = tmp_path / "pid"
    with Processes(tmp_path) as processes:
        place = processes.start(
            "stubborn", [sys.executable, "-c", _STUBBORN, str(told)], os.environ
        )
        while not (told.exists() and told.read_text()):
            assert processes.ended(place) is None
        child = int(told.read_text())
        assert is_running(child)
    wait_until_gone(child)
    assert processes.ended(place) is not None


#: Says where its child is, and ends without it.
_CARELESS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
"""


def test_children_are_ended_with_a_process_that_ended_by_itself(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    with Processes(tmp_path) as processes:
        place = processes.start(
            "careless", [sys.executable, "-c", _CARELESS, str(told)], os.environ
        )
        assert processes.wait(place, 30.0) is None
        wait_until_gone(int(told.read_text()))


def test_no_group_is_killed_whose_number_may_be_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    with Processes(tmp_path) as processes:
        happy = processes.start("happy", [sys.executable, "-c", "pass"], os.environ)
        slow = processes.start(
            "slow", [sys.executable, "-c", "import signal; signal.pause()"], os.environ
        )
        assert processes.wait(happy, 30.0) is None
        assert processes.wait(slow, 0.1) is not None
        monkeypatch.setattr(os, "killpg", lambda group, _: killed.append(group))
    assert killed == []


def test_a_process_is_taken_note_of_in_one_step_with_its_start(tmp_path: Path) -> None:
    held: list[str] = []

    @contextmanager
    def held_back() -> Iterator[None]:
        yield
        held.append("held back")
        raise KeyboardInterrupt

    processes = Processes(tmp_path, held_back)
    with pytest.raises(KeyboardInterrupt):
        processes.start("slow", [sys.executable, "-c", "import signal; signal.pause()"], os.environ)
    assert held == ["held back"]
    assert processes.ended(0) is None
    processes.end()
    assert processes.ended(0) is not None


def test_what_a_process_printed_is_told_with_its_exit_code(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        place = processes.start(
            "unhappy", [sys.executable, "-c", "print('no slots'); exit(4)"], os.environ
        )
        told = processes.wait(place, 30.0)
    assert told is not None
    assert "unhappy ended with exit code 4" in told
    assert "no slots" in told


def test_a_process_that_ends_well_has_nothing_to_tell(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        place = processes.start("happy", [sys.executable, "-c", "pass"], os.environ)
        assert processes.wait(place, 30.0) is None


def test_a_process_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        place = processes.start(
            "slow", [sys.executable, "-c", "import time; time.sleep(600)"], os.environ
        )
        told = processes.wait(place, 0.1)
        assert told is not None
        assert "did not end within 0.1 s" in told
        assert processes.ended(place) is not None


def test_a_program_that_is_not_there_is_a_launch_error(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes, pytest.raises(LaunchError, match="nobody: cannot start"):
        processes.start("nobody", [str(tmp_path / "missing")], os.environ)


def test_the_users_own_mpi_settings_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", "slot")
    monkeypatch.delenv("OMPI_MCA_osc", raising=False)
    environment = mpi_environment(num_threads=1, backing=tmp_path)
    assert environment["PRTE_MCA_rmaps_default_mapping_policy"] == "slot"
    assert environment["OMPI_MCA_osc"] == "^ucx"


def test_a_job_leaves_its_session_in_its_own_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever runs this may have set one, which stays as it is.
    monkeypatch.delenv("PRTE_MCA_prte_tmpdir_base", raising=False)
    environment = mpi_environment(num_threads=1, backing=tmp_path)
    assert environment["PRTE_MCA_prte_tmpdir_base"] == str(tmp_path)


def test_replicas_are_offline() -> None:
    assert replica_environment(num_threads=2)["HF_HUB_OFFLINE"] == "1"


def test_a_port_is_below_those_of_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "ip_local_port_range"
    said.write_text("9000\t60999\n")
    monkeypatch.setattr("radixlink.demo._processes._OF_CONNECTIONS", said)
    assert all(1 << 13 <= port < 9000 for port in free_ports(20))


@pytest.mark.parametrize("said", ["1024\t60999\n", None])
def test_without_such_a_port_it_is_one_that_can_be_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str | None
) -> None:
    file = tmp_path / "ip_local_port_range"
    if said is not None:
        file.write_text(said)
    monkeypatch.setattr("radixlink.demo._processes._OF_CONNECTIONS", file)
    with socket.socket() as program:
        program.bind(("127.0.0.1", free_ports(1)[0]))


def test_ports_that_are_drawn_together_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "ip_local_port_range"
    said.write_text(f"{(1 << 13) + 3}\t60999\n")
    monkeypatch.setattr("radixlink.demo._processes._OF_CONNECTIONS", said)
    assert all(len(set(free_ports(3))) == 3 for _ in range(10))


def test_no_port_is_a_launch_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(socket.socket):
        @override
        def bind(self, address: object, /) -> None:
            raise OSError(f"{address} is taken")

    monkeypatch.setattr(socket, "socket", Refusing)
    with pytest.raises(LaunchError, match=r"no port of 127\.0\.0\.1 is free: 100 were tried"):
        free_ports(1)
