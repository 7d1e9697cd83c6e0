"""Rank programs in processes of their own, each with a deadline.

Every test in this directory gets the marker `mpi`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

from radixlink_testing.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parents[2]

#: For a quiet run on any machine: more ranks than cores, unbound, as root, no RDMA device. What is
#: set already stays.
QUIET_ENVIRONMENT = {
    "OMPI_MCA_osc": "^ucx",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMP_NUM_THREADS": "1",
}

#: What MPICH leaves in shared memory when a rank is killed; it has no setting for another place.
LEFT_BY_MPICH = "mpich_shm_*"

#: Where Open MPI puts the memory that ranks of a node share; None is the usual temporary directory.
SHARED_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


class Mpirun(Protocol):
    """The type of the fixture `mpirun`."""

    def __call__(
        self, script: Path, ranks: int, *args: str, timeout_s: float = 60, ft: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a script on some ranks and return when all have ended.

        Args:
            script: Run as `python -m mpi4py script args...`, so that an exception in one rank ends
                all.
            ranks: How many.
            *args: The script's arguments.
            timeout_s: Seconds until every process of the job is killed and the test fails.
            ft: Open MPI's fault tolerance: the death of one rank does not end the others.

        Returns:
            Exit status and output of the whole job; no status fails the test by itself.
        """
        ...


class Spawn(Protocol):
    """The type of the fixture `spawn`."""

    def __call__(
        self, script: Path, ranks: int, *args: str, timeout_s: float = 60
    ) -> tuple[subprocess.CompletedProcess[str], ...]:
        """Run a script in some plain processes and return all results.

        They have what torch.distributed's `env://` wants: RANK, WORLD_SIZE, MASTER_ADDR and
        MASTER_PORT.
        """
        ...


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark every test below this directory, before `-m` selects."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.mpi)


@pytest.fixture(scope="session")
def mpirun() -> Mpirun:
    """Runs a script under mpirun; skips where there is none."""
    launcher = _find_launcher()
    if launcher is None:
        pytest.skip("no mpirun beside the interpreter or on PATH")
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")

    def run(
        script: Path, ranks: int, *args: str, timeout_s: float = 60, ft: bool = False
    ) -> subprocess.CompletedProcess[str]:
        tolerance = ["--with-ft", "ulfm"] if ft else []
        program = [sys.executable, "-m", "mpi4py", str(script), *args]
        command = [launcher, *tolerance, "-n", str(ranks), *program]
        # A rank that is killed leaves its shared memory behind: 16 MiB in /dev/shm, unless elsewhere.
        # A launcher that is killed leaves its session, and the next one that gets its process id
        # does not start ("listener thread failed to start"), unless each has a place of its own.
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as place:
            placed = {
                "OMPI_MCA_btl_sm_backing_directory": place,
                "PRTE_MCA_prte_tmpdir_base": place,
            }
            environment = QUIET_ENVIRONMENT | os.environ | placed | _path()
            before = set(Path("/dev/shm").glob(LEFT_BY_MPICH))
            try:
                return _run_all([command], [environment], timeout_s)[0]
            finally:
                # A job that goes on beside this one needs the names of its own no more.
                for left in set(Path("/dev/shm").glob(LEFT_BY_MPICH)) - before:
                    left.unlink(missing_ok=True)

    return run


@pytest.fixture(scope="session")
def spawn() -> Spawn:
    """Runs a script in plain processes with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set."""

    def run(
        script: Path, ranks: int, *args: str, timeout_s: float = 60
    ) -> tuple[subprocess.CompletedProcess[str], ...]:
        command = [sys.executable, str(script), *args]
        shared = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        environments = [
            QUIET_ENVIRONMENT | os.environ | shared | _path() | {"RANK": str(rank)}
            for rank in range(ranks)
        ]
        return _run_all([command] * ranks, environments, timeout_s)

    return run


def _find_launcher() -> str | None:
    """What MPIEXEC names, else the launcher of this interpreter's environment, else that of PATH."""
    beside = Path(sys.executable).parent
    return (
        shutil.which(os.environ.get("MPIEXEC", ""))
        or shutil.which("mpirun", path=beside)
        or shutil.which("mpirun")
    )


def _path() -> dict[str, str]:
    """A program may import what a test has, as tests do: see `pythonpath` in tox.ini."""
    return {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def _run_all(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], timeout_s: float
) -> tuple[subprocess.CompletedProcess[str], ...]:
    """Run commands side by side, each in a session of its own; none outlives this call."""
    deadline = time.monotonic() + timeout_s
    jobs: list[subprocess.Popen[str]] = []
    results: list[subprocess.CompletedProcess[str]] = []
    late = False
    try:
        for command, environment in zip(commands, environments, strict=True):
            job = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            jobs.append(job)
        for job, command in zip(jobs, commands, strict=True):
            try:
                out, err = job.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late = True
                _kill_session(job.pid)
                out, err = job.communicate()
            results.append(subprocess.CompletedProcess(command, job.returncode, out, err))
    finally:
        for job in jobs:
            _kill_session(job.pid)
            job.communicate()
    if late:
        pytest.fail(f"still running after {timeout_s} s\n" + "\n".join(map(_report, results)))
    return tuple(results)


def _kill_session(session: int) -> None:
    """Kill a leader and all it started.

    By session, not by process group: mpirun gives each rank a process group of its own.
    """
    pids = [session] if _session_of(session) == session else []
    pids += [
        int(entry.name)
        for entry in Path("/proc").glob("[0-9]*")
        if int(entry.name) != session and _session_of(int(entry.name)) == session
    ]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _report(result: subprocess.CompletedProcess[str]) -> str:
    return f"{result.args}: {result.returncode}\n{result.stdout}\n{result.stderr}"
