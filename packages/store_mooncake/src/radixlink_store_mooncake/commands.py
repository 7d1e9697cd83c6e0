"""The programs that make a Mooncake on one machine, with the flags that this store was tried with.

A command is a list of arguments; whoever starts it ends it. Mooncake's own listeners for transfers
are on all interfaces, whatever is said here.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from radixlink_contracts.errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

_END_WITH_PARENT: Final = """\
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def master_command(port: int, metrics_port: int, *flags: str, host: str = "127.0.0.1") -> list[str]:
    """The command of a master.

    Args:
        port: Where clients find it.
        metrics_port: Where it tells figures.
        *flags: More of its flags.
        host: Where both listen.

    Raises:
        BackendUnavailableError: Mooncake is not installed.
    """
    return [
        str(_program("mooncake_master")),
        f"--rpc_address={host}",
        f"--rpc_port={port}",
        f"--metrics_host={host}",
        f"--metrics_port={metrics_port}",
        "--enable_metric_reporting=false",
        "--logtostderr",
        *flags,
    ]


def owner_command(
    master_server_address: str, port: int, segment_bytes: int, *flags: str, host: str = "127.0.0.1"
) -> list[str]:
    """The command of an owner: a process that gives memory to all, and nothing else.

    Args:
        master_server_address: "HOST:PORT" of the master.
        port: Where it takes requests.
        segment_bytes: How much memory, at least `SMALLEST_SEGMENT_BYTES`.
        *flags: More of its flags.
        host: How other hosts reach it.

    Raises:
        BackendUnavailableError: Mooncake is not installed.
    """
    return [
        str(_program("mooncake_client")),
        f"--host={host}",
        f"--port={port}",
        f"--global_segment_size={segment_bytes}",
        f"--master_server_address={master_server_address}",
        "--metadata_server=P2PHANDSHAKE",
        "--protocol=tcp",
        "--logtostderr",
        *flags,
    ]


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """The command of the same program, killed when the thread that starts it ends, however it does.

    Its process id is the program's.
    """
    return [sys.executable, "-c", _END_WITH_PARENT, *command]


def _program(name: str) -> Path:
    """A program in Mooncake's package, which is not imported for it."""
    found = importlib.util.find_spec("mooncake")
    for directory in (found and found.submodule_search_locations) or ():
        program = Path(directory) / name
        if program.is_file():
            return program
    raise BackendUnavailableError(
        f"Mooncake store: expected the program {name} in an installed Mooncake, got none; pip "
        f"install mooncake-transfer-engine (or mooncake-transfer-engine-non-cuda)"
    )
