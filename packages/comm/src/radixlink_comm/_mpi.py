"""`MpiGroup`: ranks of an MPI job.

Theory of operation: a group has two communicators that nobody else uses. The *control* communicator
lives as long as the ranks do: marks travel on it by point to point, and `renew` duplicates it. The
*frames* communicator carries the collectives of one epoch and is never used again after one of them
failed.

Rules of this file:

1. Nothing blocks: what is begun is polled, so that it has a deadline: a short spin first (ranks of
   a step come within microseconds of each other), then naps, which leave the core to whoever is
   late.
2. A rank that gives up leaves a mark with all others. They look for one before they enter a
   collective and while they nap in it, so that all give up together, whenever each of them came.
3. MPI may write to the buffers of an abandoned collective at any later time. So all buffers are
   MPI's own memory (`Alloc_mem`), which outlives every Python object, and are given back only after
   their collective ended.
4. A communicator with an abandoned collective is not freed.
5. Words are combined by one message from every rank to every other, not by an allreduce. A tree
   combines on the way, so that a rank that lost its core or Python's lock delays the others once on
   each level; here a rank needs of each other that it came, and nothing afterwards.

Source: MPI-4.1 sections 3.5 (messages of two ranks do not overtake each other), 3.9 (persistent
requests; to prepare one is local, while section 6.13 lets a persistent collective's preparation
wait for other ranks), 7.4.2 (`MPI_Comm_idup`).
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final, Self

import attrs
from mpi4py import MPI
from typing_extensions import override

from radixlink_comm._checked import (
    WORD_BYTES,
    CheckedGroup,
    MarkKind,
    deadline_after,
    time_left,
)
from radixlink_comm._errand import Errands
from radixlink_comm._health import LATE, MIXED, CollectiveError, State, not_created
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Callable

#: How long a wait spins before it naps.
SPIN_S: Final = 100e-6

#: The first nap and the longest; each is twice the one before.
SHORT_NAP_S: Final = 20e-6
LONG_NAP_S: Final = 1e-3

#: Every epoch has a tag for each kind of mark, so that no mark is read in an epoch that it was not
#: left in.
TAGS_PER_EPOCH: Final = len(MarkKind)


@attrs.frozen
class _Duplicate:
    """A communicator that is being duplicated: not to be used before the request ended."""

    comm: MPI.Intracomm
    request: MPI.Request

    @classmethod
    def of(cls, comm: MPI.Intracomm) -> Self:
        """Begin: local."""
        return cls(*comm.Idup())

    def wait(self, deadline: float) -> MPI.Intracomm:
        """The duplicate.

        Raises:
            CollectiveError: Not all ranks duplicate in time. It may be waited for again.
            MPI.Exception: It failed.
        """
        try:
            _wait(self.request.Test, deadline, _see_nothing)
        except BaseException:
            # MPI writes the handle when the last rank comes, whatever this one waits for by then.
            _keep(self)
            raise
        # Errors as exceptions, not the end of the job.
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        return self.comm


class MpiGroup(CheckedGroup):
    """One rank of a group of processes of an MPI job.

    Without fault tolerance (`mpirun --with-ft ulfm`) MPI ends the whole job when a process dies;
    with it, the others get an `AgreementError` that names the dead rank. They should then leave by
    `os._exit`: `MPI_Finalize` of Open MPI 5.0.11 sometimes waits for the dead one without an end.

    Thread: one at a time; MPI must be initialised for as many threads as the engine uses it from.
    Cost: an `all_and` is one probe, and a message to and from each other rank. Ranks that have the
        same words compare them, no more. Words of up to 3.8 KiB go at once; longer ones take as
        long again, since Open MPI asks the receiver first (`btl_sm_eager_limit`).
    """

    def __init__(self, control: MPI.Intracomm, frames: MPI.Intracomm, *, epoch: int = 0) -> None:
        super().__init__(frames.Get_rank(), frames.Get_size(), epoch)
        self._frames = frames
        #: None when a renewed group has taken it over.
        self._control: MPI.Intracomm | None = control
        #: Of words of the last size: all frames have one, so it is prepared once.
        self._word_exchange = _WordExchange(frames, 0)
        #: A renewal that not all ranks came to yet.
        self._renewal: _Duplicate | None = None
        self._failed_tag: Final = self._tag(MarkKind.FAILED)
        #: The newest marks that were heard in this epoch, by kind and rank.
        self._heard: dict[MarkKind, dict[int, str]] = {kind: {} for kind in MarkKind}

    @classmethod
    def create(cls, comm: MPI.Intracomm, timeout_s: float) -> Self:
        """A group of the ranks of `comm`, of which it keeps duplicates only.

        Raises:
            AgreementError: Not all ranks took part in time. `comm` is then to be used for no other
                collective.
            ContractError: `timeout_s` is no time.

        Ranks: all of `comm`, in the same order as its other collectives.
        """
        deadline = deadline_after("create", timeout_s)
        rank, size = comm.Get_rank(), comm.Get_size()
        try:
            with _ERRORS:
                return cls._over(_Duplicate.of(comm).wait(deadline), deadline)
        except CollectiveError as error:
            # Who came is not known: no mark travels on a communicator that is not ours.
            error.known.update(dict.fromkeys(range(size), "not known"))
            raise not_created(cls.__name__, timeout_s, error, rank, size) from error

    @classmethod
    def _over(cls, control: MPI.Intracomm, deadline: float) -> Self:
        """A group that owns `control`."""
        return cls(control, _Duplicate.of(control).wait(deadline))

    @override
    def _and(self, words: bytearray, deadline: float) -> None:
        with _ERRORS:
            if self._word_exchange.size != len(words):
                self._word_exchange.free()
                self._word_exchange = _WordExchange(self._frames, len(words))
            exchange = self._word_exchange
            self._look_out()
            exchange.start(words)
            _wait(exchange.ended, deadline, self._look_out)
        exchange.combine(words)

    @override
    def _subgroup(self, members: tuple[int, ...], deadline: float) -> Self:
        # No split is nonblocking, so a thread blocks in it. All ranks just met: it takes long only
        # if one stops now.
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ContractError("split: expected an MPI initialised with MPI_THREAD_MULTIPLE")
        splitting = Errands().send(lambda: self._frames.Split(members[0], self._rank))
        with _ERRORS:
            control = splitting.result(time_left(deadline))
            assert isinstance(control, MPI.Intracomm), control
            control.Set_errhandler(MPI.ERRORS_RETURN)
            return self._over(control, deadline)

    @override
    def _renewed(self, deadline: float) -> Self:
        control = self._own_control()
        with _ERRORS:
            if self._renewal is None:
                self._leave(MarkKind.RENEWING, self._mark(), {})
                self._renewal = _Duplicate.of(control)
            frames = self._renewal.wait(deadline)
        self._control = None
        return type(self)(control, frames, epoch=self._epoch + 1)

    @override
    def _marks(self, kind: MarkKind, mark: str, deadline: float) -> dict[int, str]:
        heard = self._heard[kind]
        lost: dict[int, str] = {}
        self._leave(kind, mark, lost)
        nap_s = SHORT_NAP_S
        while True:
            for other in range(self._size):
                if other != self._rank and other not in lost:
                    self._hear(kind, other, lost)
            if len(heard | lost) == self._size or time.monotonic() >= deadline:
                return heard | lost
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, LONG_NAP_S)

    @override
    def _release(self) -> None:
        if self._health.state is State.BROKEN:
            return
        self._word_exchange.free()
        self._frames.Free()
        if self._control is not None:
            self._control.Free()

    def _own_control(self) -> MPI.Intracomm:
        assert self._control is not None, "a group that was renewed is closed"
        return self._control

    def _tag(self, kind: MarkKind) -> int:
        return self._epoch * TAGS_PER_EPOCH + kind

    def _look_out(self) -> None:
        """Return if nobody gave up.

        Raises:
            CollectiveError: A rank left a mark that says so.
            MPI.Exception: A rank's process ended.
        """
        if self._own_control().Iprobe(MPI.ANY_SOURCE, self._failed_tag):
            raise CollectiveError("another rank gave up")

    def _leave(self, kind: MarkKind, mark: str, lost: dict[int, str]) -> None:
        """Send a mark to all others, waiting for none; note whom it cannot reach."""
        self._heard[kind][self._rank] = mark
        encoded = mark.encode()
        for other in range(self._size):
            if other == self._rank:
                continue
            memory = _Memory(len(encoded))
            memory.view[:] = encoded
            try:
                sent = self._own_control().Isend(memory.spec, other, self._tag(kind)).Test()
            except MPI.Exception as error:
                lost[other] = f"not reached: {error.Get_error_string()}"
            else:
                # What is not sent yet stays allocated: MPI still reads it.
                if sent:
                    memory.free()

    def _hear(self, kind: MarkKind, source: int, lost: dict[int, str]) -> None:
        """Take all marks of a rank that arrived; the newest counts."""
        status = MPI.Status()
        try:
            while message := self._own_control().Improbe(source, self._tag(kind), status):
                mark = bytearray(status.Get_count(MPI.BYTE))
                message.Recv((mark, MPI.BYTE))
                self._heard[kind][source] = mark.decode()
        except MPI.Exception as error:
            lost[source] = f"not reached: {error.Get_error_string()}"


class _Memory:
    """Memory that MPI allocated. Owns: it is given back by `free`, and only by it."""

    def __init__(self, size: int) -> None:
        self.size = size
        # At least one word, so that there is an address.
        self.buffer = MPI.Alloc_mem(max(size, WORD_BYTES))
        self.view = self.buffer.cast("B")[:size]
        self.spec = (self.buffer, size, MPI.BYTE)

    def free(self) -> None:
        """Give it back. Nothing may use it any more."""
        self.view.release()
        MPI.Free_mem(self.buffer)


class _WordExchange:
    """One message from every rank to every other, prepared for words of one size.

    A message is the size of the words in bytes, a word, and the words.
    Owns: what MPI may write to is given back by `free`, and only by it.
    """

    def __init__(self, comm: MPI.Intracomm, size: int) -> None:
        """Prepare: local."""
        self.size = size
        others = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
        self._mine = _Memory(WORD_BYTES + size)
        self._mine.view[:WORD_BYTES] = size.to_bytes(WORD_BYTES, "little")
        self._theirs = [_Memory(WORD_BYTES + size) for _ in others]
        self._requests = [
            comm.Recv_init(memory.spec, other)
            for other, memory in zip(others, self._theirs, strict=True)
        ]
        self._requests += [comm.Send_init(self._mine.spec, other) for other in others]
        #: Tells whether all others' words came, and this rank's are sent.
        self.ended: Final = partial(MPI.Request.Testall, self._requests)
        #: The message that was sent.
        self._sent = b""

    def start(self, words: bytearray) -> None:
        """Send the words to all others: local."""
        self._mine.view[WORD_BYTES:] = words
        MPI.Prequest.Startall(self._requests)
        # For `combine`, while it travels.
        self._sent = self._mine.view.tobytes()

    def combine(self, words: bytearray) -> None:
        """Replace the words that were sent by the AND of all ranks'.

        Raises:
            CollectiveError: A rank sent fewer.

        Cost: a comparison for each rank, and an AND for each whose words differ.
        """
        mine = self._sent
        # Comparing bytes is a memcmp; comparing views goes item by item.
        differing = [
            message for memory in self._theirs if (message := memory.view.tobytes()) != mine
        ]
        if not differing:
            return
        anded = int.from_bytes(words, "little")
        for message in differing:
            if message[:WORD_BYTES] != mine[:WORD_BYTES]:
                raise CollectiveError(MIXED)
            anded &= int.from_bytes(message[WORD_BYTES:], "little")
        words[:] = anded.to_bytes(self.size, "little")

    def free(self) -> None:
        """Give all back. Nothing may use it any more."""
        for request in self._requests:
            request.Free()
        for memory in (self._mine, *self._theirs):
            memory.free()


class _Errors:
    """The one place where MPI's exceptions, and an errand's late end, become ours."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        match error:
            case None:
                return
            case MPI.Exception():
                raise CollectiveError(f"MPI failed: {error.Get_error_string()}") from error
            case TimeoutError():
                raise CollectiveError(LATE) from error
            case _:
                pass


_ERRORS: Final = _Errors()


def _see_nothing() -> None:
    """Stand in for a look-out where there is none."""


def _wait(ended: Callable[[], bool], deadline: float, look_out: Callable[[], None]) -> None:
    """Return when something has ended.

    Args:
        ended: Tells whether it has, and lets MPI go on with it.
        deadline: Until when.
        look_out: Called between naps; raises if there is nothing to wait for any more.

    Raises:
        CollectiveError: It had not ended at the deadline; or what `look_out` raises.
        MPI.Exception: It failed.
    """
    if ended():
        return
    spin_until = min(time.monotonic() + SPIN_S, deadline)
    while time.monotonic() < spin_until:
        if ended():
            return
    nap_s = SHORT_NAP_S
    while not ended():
        if time.monotonic() >= deadline:
            raise CollectiveError(LATE)
        look_out()
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, LONG_NAP_S)


def _keep(thing: object) -> None:
    """Keep an object until MPI ends, which may still write to it."""
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(), thing)
