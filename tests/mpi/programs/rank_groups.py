"""One rank of a group over MPI or gloo; prints what it saw, a JSON line for each thing.

    rank_groups.py cases KIND NAME...       run cases of the suite, each on a new group
    rank_groups.py absent KIND SIGNAL RANK  one rank sends itself a signal instead of coming
    rank_groups.py interrupted KIND         one rank leaves what it waits in by a signal's exception

KIND is `mpi` or `gloo`. Gloo ranks need MASTER_ADDR and MASTER_PORT, and get their rank from the
launcher, whichever it was.
"""

# Imports inside functions: an MPI rank needs no torch, and a gloo rank must not initialise MPI.
# ruff: noqa: PLC0415

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from radixlink_contracts.errors import AgreementError
from radixlink_testing.rank_groups import CASES, PATIENCE_S, check_group_works

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from radixlink_contracts import RankGroup

#: How long the others wait for the rank that does not come.
ABSENT_S = 1.0
#: The deadline of a wait that a signal ends: nothing afterwards may take so long.
INTERRUPTED_S = 60.0


def mpi_groups() -> Callable[[], RankGroup]:
    """Makes groups of all ranks of the job."""
    from mpi4py import MPI

    from radixlink_comm.mpi import MpiGroup

    return lambda: MpiGroup.create(MPI.COMM_WORLD, PATIENCE_S)


def gloo_groups() -> Callable[[], RankGroup]:
    """Makes groups of all ranks that share a TCP store."""
    # TCPStore is documented there, but not among the module's explicit exports.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from radixlink_comm.torch import TorchGroup

    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "")))
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("WORLD_SIZE", "")))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, None, rank == 0, timedelta(seconds=PATIENCE_S))
    return lambda: TorchGroup.create(store, rank=rank, size=size, timeout_s=PATIENCE_S)


def tell(**facts: object) -> None:
    """Print one line that the test reads."""
    # In one piece: a launcher may mix the pieces of several ranks.
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def run_cases(groups: Callable[[], RankGroup], names: list[str]) -> None:
    """Run cases, each on a new group, until one fails."""
    for name in names:
        group = groups()
        CASES[name](group)
        group.close()
        tell(case=name, rank=group.rank)


def be_absent(groups: Callable[[], RankGroup], how: signal.Signals, absent: int) -> None:
    """Let one rank not come to a collective, and tell what each of the others gets."""
    group = groups()
    pids = [int(pid) for pid in group.all_gather(str(os.getpid()).encode(), PATIENCE_S)]
    if group.rank == absent:
        os.kill(os.getpid(), how)
        # A stopped rank goes on here when it is continued.
        tell(rank=group.rank, late_rank_failed=_fails(group))
    else:
        tell(rank=group.rank, **failure(lambda: group.all_and(bytearray(8), ABSENT_S)))
    if how is signal.SIGKILL:
        tell(rank=group.rank, renewal=failure(lambda: group.renew(ABSENT_S)))
    elif group.rank == (absent + 1) % group.size:
        while state_of(pids[absent]) != "T":
            time.sleep(0.01)
        os.kill(pids[absent], signal.SIGCONT)
    group.close()
    if how is signal.SIGKILL:
        # Open MPI's MPI_Finalize sometimes waits for the dead process without an end.
        os._exit(0)


def be_interrupted(groups: Callable[[], RankGroup], *, creates: bool) -> None:
    """Let one rank leave a collective and a renewal by a signal's exception, then all go on.

    Args:
        groups: Makes groups.
        creates: Leave the making of a group likewise, at the end.
    """
    group = groups()
    if group.rank == 0:
        for call in (
            lambda: group.all_and(bytearray(8), INTERRUPTED_S),
            lambda: group.renew(INTERRUPTED_S),
        ):
            left = interrupted(call)
            refused = failure(lambda: group.all_and(bytearray(8), PATIENCE_S))
            tell(rank=group.rank, left=left, refused=refused)
    group.roll_call("nobody waits any more", PATIENCE_S)
    begin = time.monotonic()
    renewed = group.renew(PATIENCE_S)
    check_group_works(renewed)
    renewed.close()
    tell(rank=group.rank, renewed_after_s=time.monotonic() - begin)
    if creates and group.rank == 0:
        left = interrupted(groups)
        errands = [one for one in threading.enumerate() if one.name == "radixlink-errand"]
        for errand in errands:
            errand.join(PATIENCE_S)
        tell(rank=group.rank, left_create=left, errands=sum(one.is_alive() for one in errands))


def interrupted(call: Callable[[], object]) -> bool:
    """True when a call that waits for other ranks was left by the exception of a signal."""
    main = threading.get_ident()

    def interrupt() -> None:
        while not waits(sys._current_frames()[main]):
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    # Whoever started this may have had it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        thread.join()
    return False


def waits(frame: FrameType | None) -> bool:
    """True where a stack is inside a wait of a rank group."""
    while frame is not None:
        if frame.f_code.co_name in {"_wait", "_result"}:
            return True
        frame = frame.f_back
    return False


def failure(call: Callable[[], object]) -> dict[str, object]:
    """What a call that must fail says, of whom, and after how long."""
    begin = time.monotonic()
    try:
        call()
    except AgreementError as error:
        after_s = time.monotonic() - begin
        said = {str(rank): what for rank, what in error.by_rank.items()}
        return {"message": str(error), "by_rank": said, "after_s": after_s}
    return {"passed": True}


def _fails(group: RankGroup) -> bool:
    """True if a late rank is told, at the latest in its second collective."""
    try:
        for _ in range(2):
            group.all_and(bytearray(8), PATIENCE_S)
    except AgreementError:
        return True
    return False


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def main(task: str, kind: str, *args: str) -> None:
    """Do one task on this rank."""
    groups = {"mpi": mpi_groups, "gloo": gloo_groups}[kind]()
    if task == "cases":
        run_cases(groups, list(args))
    elif task == "lengths":
        group = groups()
        words = bytearray(8 * (1 + group.rank))
        tell(rank=group.rank, failure=failure(lambda: group.all_and(words, PATIENCE_S)))
    elif task == "interrupted":
        be_interrupted(groups, creates=kind == "gloo")
    else:
        be_absent(groups, signal.Signals[args[0]], int(args[1]))


if __name__ == "__main__":
    main(*sys.argv[1:])
