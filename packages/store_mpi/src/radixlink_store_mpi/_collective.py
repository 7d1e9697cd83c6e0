"""What ranks do together when they open a store: wait no longer than agreed, and fail alike."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final, TypeVar

from radixlink_contracts.errors import BackendUnavailableError, LinkError
from radixlink_contracts.texts import named
from radixlink_store_mpi._mpi import MPI

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")

_SPINS: Final = 1000
_POLL_S: Final = 0.0005


def wait(request: MPI.Request, timeout_s: float) -> bool:
    """Wait for a collective.

    Returns:
        Whether it ended in time. If not, its communicator must not be used again.

    Raises:
        MPI.Exception: It failed.
    """
    deadline = time.monotonic() + timeout_s
    spins = 0
    while not request.Test():
        spins += 1
        if spins < _SPINS:
            continue
        # Of a deadline that is no number this is true as well.
        if not time.monotonic() < deadline:
            return False
        time.sleep(_POLL_S)
    return True


def all_or_none(
    comm: MPI.Intracomm,
    step: Callable[[], _Result],
    undo: Callable[[_Result], None] | None = None,
) -> _Result:
    """Do one step on every rank; if it fails on any, every rank raises what the first one did.

    Args:
        comm: The ranks.
        step: What to do.
        undo: What to do with the result where the step succeeded here and failed elsewhere: local.
            An OSError of it is dropped: what all ranks raise is the step's.

    Ranks: all of the communicator.
    """
    result, failure = _attempt(step)
    failures: list[LinkError | None] = comm.allgather(failure)
    for rank, first in enumerate(failures):
        if first is not None:
            if failure is None and undo is not None:
                with contextlib.suppress(OSError):
                    undo(result)  # type: ignore[arg-type] # no failure: the step returned
            first.rank = rank
            raise first from failure
    return result  # type: ignore[return-value] # no failure: the step returned


def only_on(comm: MPI.Intracomm, root: int, step: Callable[[], _Result]) -> _Result:
    """Do one step on one rank and give its result to all; if it fails, every rank raises that.

    Ranks: all of the communicator.
    """
    outcome: tuple[_Result | None, LinkError | None] = (None, None)
    if comm.rank == root:
        outcome = _attempt(step)
    result, failure = comm.bcast(outcome, root)
    if failure is not None:
        failure.rank = root
        raise failure
    return result  # type: ignore[no-any-return] # a pickle has no type


def _attempt(step: Callable[[], _Result]) -> tuple[_Result | None, LinkError | None]:
    """What came of a step, or what it failed by, whatever that is: the others wait to be told.

    Raises:
        MPI.Exception: A collective within the step failed; all ranks know.
    """
    try:
        return step(), None
    except LinkError as error:
        return None, error
    except MPI.Exception:
        raise
    except Exception as error:  # noqa: BLE001 -- the others would wait for ever
        failure = BackendUnavailableError(
            f"MPI store: expected every rank to do its part, got {named(error)}"
        )
        failure.__cause__ = error
        return None, failure
