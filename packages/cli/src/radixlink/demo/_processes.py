"""Starting processes and ending them: whatever happens, none is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from radixlink.errors import LaunchError
from radixlink.models import force_offline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_END_TIMEOUT_S: Final = 10.0
_TAIL_CHARACTERS: Final = 2_000
_OF_CONNECTIONS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT: Final = 1 << 13
_PORTS: Final = 100

_QUIET_MPI: Final = {
    # One machine, no RDMA device: no search for one, and no warning that there is none.
    "OMPI_MCA_osc": "^ucx",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # Two ranks on one core are slow, but right.
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


class Processes:
    """Processes in sessions of their own, ended as groups. A context manager: leaving it ends them all."""

    def __init__(self, logs: Path) -> None:
        """Start with none.

        Args:
            logs: The directory for what they print; whoever made it removes it, after `end`.
        """
        self._started: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        self._logs = logs

    def __enter__(self) -> Self:
        """Nothing to begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """End everything that runs."""
        self.end()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start a process.

        Returns:
            Its place, for the other methods.

        Raises:
            LaunchError: The program is not there.
        """
        log = self._logs / f"{len(self._started)}.log"
        try:
            with log.open("wb") as out:
                process = subprocess.Popen(  # noqa: S603 -- our own program
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    start_new_session=True,
                )
        except OSError as error:
            msg = f"{name}: cannot start {command[0]}: {error}"
            raise LaunchError(msg) from error
        self._started.append((name, process, log))
        return len(self._started) - 1

    def ended(self, place: int, within_s: float = 0.0) -> str | None:
        """Why a process has ended, with the end of what it printed; None while it runs.

        Args:
            place: As `start` returned it.
            within_s: Wait so long for its end.
        """
        name, process, log = self._started[place]
        try:
            code = process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
        return f"{name} ended with exit code {code}{_tail(log)}"

    def wait(self, place: int, timeout_s: float) -> str | None:
        """Wait for a process.

        Returns:
            None when it ended well; else why not, with the end of what it printed.
        """
        name, process, log = self._started[place]
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _kill_group(process)
            return f"{name} did not end within {timeout_s:g} s{_tail(log)}"
        return None if code == 0 else f"{name} ended with exit code {code}{_tail(log)}"

    def end(self) -> None:
        """End every process: asked first, then killed, groups and all. Idempotent."""
        for _, process, _ in self._started:
            if process.poll() is None:
                process.terminate()
        for _, process, _ in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_TIMEOUT_S)
            _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process's session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    """The end of what a process printed, or nothing once the log is gone."""
    if not log.is_file():
        return ""
    text = log.read_text(errors="replace").strip()
    return f":\n{text[-_TAIL_CHARACTERS:]}" if text else ""


def replica_environment(num_threads: int) -> dict[str, str]:
    """The environment of a replica: offline, and with threads that do not spin while they wait."""
    environment = dict(os.environ)
    force_offline(environment)
    environment.setdefault("GOMP_SPINCOUNT", "0")
    environment["OMP_NUM_THREADS"] = str(num_threads)
    return environment


def mpi_environment(num_threads: int, backing: Path) -> dict[str, str]:
    """The same under `mpirun`, with quiet defaults that the user's own settings override.

    Args:
        num_threads: Of each rank.
        backing: Where ranks put what they share and the launcher its session. Of this job alone: a
            launcher that was killed leaves its session, and the next one that gets its process id
            would not start beside it.
    """
    places = {
        "OMPI_MCA_btl_sm_backing_directory": str(backing),
        "PRTE_MCA_prte_tmpdir_base": str(backing),
    }
    return {**_QUIET_MPI, **places, **replica_environment(num_threads)}


def mpirun() -> str:
    """The launcher: of this Python's environment, else of the system.

    Raises:
        LaunchError: There is none.
    """
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.is_file() else shutil.which("mpirun")
    if found is None:
        msg = (
            "mpirun was not found: install the extra `mpi` of the package radixlink (packages/cli of "
            "the checkout), or Open MPI"
        )
        raise LaunchError(msg)
    return found


def free_port() -> int:
    """A port of the loopback device that nobody listens on, for a program that binds it seconds later.

    Linux gives it to no connection meanwhile; elsewhere it is one of those that it gives to any.

    Raises:
        LaunchError: All that were tried are taken.
    """
    for port in (*_below_connections(), 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found: int = probe.getsockname()[1]
            return found
    raise LaunchError(f"no port of 127.0.0.1 is free: {_PORTS} were tried")


def _below_connections() -> list[int]:
    """Some ports below those of connections."""
    try:
        lowest = int(_OF_CONNECTIONS.read_text("ascii").split()[0])
    except OSError:
        return []
    ports = range(_LOWEST_PORT, lowest)
    return random.sample(ports, min(_PORTS, len(ports)))
