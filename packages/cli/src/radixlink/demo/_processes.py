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
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

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


class _Session:
    """One process that was started, the leader of a session of its own.

    Its group is killed once, at its end: the number of a group of which nothing is left may become another's.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        """It runs."""
        self.name: Final = name
        self.log: Final = log
        self._process: Final = process
        self._killed = False

    def exit_code(self, within_s: float = 0.0) -> int | None:
        """The leader's exit code, and nothing of the session runs any more; None while the leader runs."""
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
        self._kill_group()
        return code

    def ask_to_end(self) -> None:
        """Tell the leader to end, if it runs."""
        if self.exit_code() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Nothing of the session runs any more."""
        self._kill_group()
        self._process.wait()

    def _kill_group(self) -> None:
        """Kill all of the group, the first time."""
        if not self._killed:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._killed = True


class Processes:
    """Processes in sessions of their own, ended as groups. A context manager: leaving it ends them all."""

    def __init__(
        self,
        logs: Path,
        held_back: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Start with none.

        Args:
            logs: The directory for what they print; whoever made it removes it, after `end`.
            held_back: What must not be interrupted is done within it: starting a process and taking note of it.
        """
        self._started: list[_Session] = []
        self._logs: Final = logs
        self._held_back: Final = held_back

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
        place = len(self._started)
        log = self._logs / f"{place}.log"
        try:
            with log.open("wb") as out, self._held_back():
                process = subprocess.Popen(  # noqa: S603 -- our own program
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    start_new_session=True,
                )
                self._started.append(_Session(name, process, log))
        except OSError as error:
            msg = f"{name}: cannot start {command[0]}: {error}"
            raise LaunchError(msg) from error
        return place

    def ended(self, place: int, within_s: float = 0.0) -> str | None:
        """Why a process has ended, with the end of what it printed; None while it runs.

        What it left of its session is ended too.

        Args:
            place: As `start` returned it.
            within_s: Wait so long for its end.
        """
        session = self._started[place]
        code = session.exit_code(within_s)
        if code is None:
            return None
        return f"{session.name} ended with exit code {code}{_tail(session.log)}"

    def wait(self, place: int, timeout_s: float) -> str | None:
        """Wait for a process; then nothing of its session runs any more.

        Returns:
            None when it ended well; else why not, with the end of what it printed.
        """
        session = self._started[place]
        code = session.exit_code(timeout_s)
        if code is None:
            session.kill()
            return f"{session.name} did not end within {timeout_s:g} s{_tail(session.log)}"
        if code == 0:
            return None
        return f"{session.name} ended with exit code {code}{_tail(session.log)}"

    def end(self) -> None:
        """End every process: asked first, then killed, groups and all. Idempotent."""
        for session in self._started:
            session.ask_to_end()
        for session in self._started:
            session.exit_code(_END_TIMEOUT_S)
            session.kill()


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


def free_ports(count: int) -> tuple[int, ...]:
    """Different ports of the loopback device that nobody listens on, for programs that bind them seconds later.

    Linux gives them to no connection meanwhile; elsewhere they are among those that it gives to any.

    Raises:
        LaunchError: All that were tried are taken.
    """
    # Each is bound until all are found, so that none is found twice.
    with contextlib.ExitStack() as probes:
        return tuple(_bind(probes.enter_context(socket.socket())) for _ in range(count))


def _bind(probe: socket.socket) -> int:
    """Bind a socket to a port that nobody has, and return it.

    Raises:
        LaunchError: All that were tried are taken.
    """
    for port in (*_below_connections(), 0):
        with contextlib.suppress(OSError):
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
