"""One rank of an engine among several, one of which is lost in the middle of its work.

    linker_faults.py KIND RANK FAULT...

KIND is `mpi` or `gloo`, as in `rank_groups.py`. That rank stops and is continued later ("stops"), its
loop raises and its process goes on without it ("raises"), it raises and its process ends
("exits"), or it is killed ("dies"): one after the other, but after the last two it is over. All
others print what they were told, and how long after; then that they gave everything back; then,
where the lost one is there again, that all work again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

import attrs
import torch
from tests.integration.linker.cases.job import SETTINGS, Engine, Job
from tests.integration.linker.models import FULL_SWA_MAMBA
from tests.mpi.programs.rank_groups import failure, gloo_groups, mpi_groups, state_of, tell

from radixlink_contracts.errors import AgreementError
from radixlink_testing.rank_groups import PATIENCE_S

STEP_TIMEOUT_S = 1.0
TOKENS = range(1, 9)


class LoopError(Exception):
    """Something in an engine that is not ours."""


def be_busy(job: Job) -> Engine:
    """A load that was started and does not end, one that was not, an offload, a lookup."""
    settings = attrs.evolve(SETTINGS, step_timeout_s=STEP_TIMEOUT_S)
    engine = job.engine(FULL_SWA_MAMBA, by_hand=False, settings=settings)
    engine.store_all(TOKENS, range(101, 109))
    engine.ask("not started", range(101, 109))
    engine.queue("started", TOKENS)
    engine.store.hanging.add("read")
    engine.start()
    engine.load_back("not started", range(101, 109))
    engine.compute(range(201, 209))
    engine.match("asks", range(301, 309))
    assert engine.begin(range(401, 409)) is not None
    engine.check()
    return engine


def give_everything_back(fault: str, engine: Engine) -> None:
    """What `reset` does on this rank alone, where others do not take part in it."""
    while engine.computing:
        engine.end(engine.computing[0], insert=False)
    told = failure(engine.cache.reset)
    engine.check_idle()
    assert engine.in_use == (0,) * len(engine.slots.sizes)
    holders = engine.cache.holders()
    assert not holders.operations
    assert not holders.locks
    assert not holders.lookups
    tell(rank=engine.rank, **{f"{fault}: reset": told})


def work_again(fault: str, job: Job, engine: Engine) -> None:
    """All ranks reset, as often as it takes until all are there, and go on."""
    engine.store.hanging.clear()
    engine.store.gate.set()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            engine.reset()
        except AgreementError:
            assert time.monotonic() < deadline
        else:
            break
    job.meet()
    engine.store_all(TOKENS)
    assert engine.restore("anew", TOKENS).landed == ("anew",)
    engine.check()
    tell(rank=engine.rank, **{f"{fault}: works again": True})


def lose(fault: str) -> None:
    """What happens to the rank that the others lose."""
    match fault:
        case "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case _:
            raise LoopError(fault)


def lose_and_tell(job: Job, lost: int, fault: str, pids: list[int]) -> None:
    """Work, lose a rank, and go on."""
    engine = be_busy(job)
    if job.rank == lost:
        try:
            lose(fault)
        except LoopError:
            if fault == "exits":
                raise
        else:
            # It was continued, and hears of it: at the latest in its second step.
            with contextlib.suppress(AgreementError):
                engine.cache.step()
            tell(rank=job.rank, **{f"{fault}: late": failure(engine.cache.step)})
    else:
        tell(rank=job.rank, **{f"{fault}: step": failure(engine.cache.step)})
        give_everything_back(fault, engine)
    if fault in {"exits", "dies"}:
        # Open MPI's MPI_Finalize sometimes waits for the dead process without an end.
        os._exit(0)
    if fault == "stops" and job.rank == (lost + 1) % job.size:
        while state_of(pids[lost]) != "T":
            time.sleep(0.01)
        os.kill(pids[lost], signal.SIGCONT)
    job.meet()
    work_again(fault, job, engine)


def main(kind: str, lost: str, *faults: str) -> None:
    """Do it with one fault after the other."""
    torch.set_num_threads(1)
    groups = {"mpi": mpi_groups, "gloo": gloo_groups}[kind]()
    world = groups()
    for fault in faults:
        job = Job(world, groups)
        pids = [int(pid) for pid in job.gather(str(os.getpid()))]
        lose_and_tell(job, int(lost), fault, pids)
        job.close()
    world.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
