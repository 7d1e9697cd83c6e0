"""Messages on their way: the two halves of one, and how often a waiting thread looks.

Rules of the file:

1. nothing here blocks: what is sent and received is nonblocking and looked after by `done`, so that
   a process that was stopped in the middle of a message keeps nobody;
2. MPI may read and write a buffer until its request has ended. A message holds its buffer, and who
   gives up on it keeps it (`keep`).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

from radixlink_store_mpi._mpi import MPI

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from radixlink_store_mpi._buffers import Buffers

_SPIN_S: Final = 500e-6
_SHORT_NAP_S: Final = 20e-6
_LONG_NAP_S: Final = 1e-3
_PATIENCE: Final = 32


def pause(idle_s: float) -> None:
    """Leave the core to others until the next look, when nothing happened for a while.

    At first it only gives way to who else wants to run, for the kernel's shortest sleep is some 75
    us, and who is answered often asks again in less than this takes. Then it sleeps for a 32th of
    that time, so that a nap costs little of what is waited for anyway; a millisecond at most, which
    costs a thread that waits for ever some 3 % of a core.
    """
    if idle_s < _SPIN_S:
        os.sched_yield()
    else:
        time.sleep(min(max(idle_s / _PATIENCE, _SHORT_NAP_S), _LONG_NAP_S))


class Sending:
    """A message that is being sent."""

    def __init__(self, comm: MPI.Intracomm, message: Buffer, to: int, tag: int) -> None:
        """Begin.

        Raises:
            MPI.Exception: The rank's process has ended.
        """
        self._message: Final = message
        self._request: Final = comm.Isend([message, MPI.BYTE], to, tag)

    def done(self) -> bool:
        """Whether MPI needs its bytes no more.

        Raises:
            MPI.Exception: It failed.
        """
        return self._request.Test()


class Receiving:
    """A message that has been announced and is being received.

    Attributes:
        source: Who sent it.
        tag: Under which tag.
        message: Its bytes, right when it is done. Shape: (num_bytes,).
    """

    def __init__(self, message: MPI.Message, status: MPI.Status, buffers: Buffers) -> None:
        """Begin."""
        self.source: Final = status.Get_source()
        self.tag: Final = status.Get_tag()
        self.message: Final = buffers.take(status.Get_count(MPI.BYTE))
        self._request: Final = message.Irecv([self.message, MPI.BYTE])

    @classmethod
    def begin(
        cls, comm: MPI.Intracomm, source: int, tag: int, buffers: Buffers
    ) -> Receiving | None:
        """Take a message that was announced; None if none was.

        Raises:
            MPI.Exception: The rank's process has ended.
        """
        status = MPI.Status()
        # Open MPI looks among what it has received, and receives only then: what came while this
        # thread slept is found at the second look, which must not be a nap later.
        message = comm.Improbe(source, tag, status) or comm.Improbe(source, tag, status)
        return None if message is None else cls(message, status, buffers)

    def done(self) -> bool:
        """Whether all of it is there.

        Raises:
            MPI.Exception: It failed.
        """
        return self._request.Test()


def keep(things: object) -> None:
    """Keep objects until MPI ends, which may still use their memory."""
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(), things)
