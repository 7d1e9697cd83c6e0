"""`TorchGroup`: ranks that meet over torch.distributed's gloo.

Theory of operation: a group has a gloo process group of its own for each epoch, made directly over
a store. It is not made by `torch.distributed.new_group`, which every rank of the default group must
enter, also those of other pipeline stages, and which needs a default group. The store is where
ranks meet for an epoch and where marks are left.

Rules of this file:

1. Gloo's own time-outs count each step of a collective, so the deadline is ours: a wait is cut into
   slices, between which a look-out asks the store whether another rank gave up.
2. A store that does not answer (its host stopped) blocks the caller, so the store is only ever
   asked by `Errands`.
3. Freeing a gloo group waits for its collectives; and where gloo's thread is the last to let go of a
   tensor while the interpreter ends, the process aborts. So an abandoned collective is never freed.
4. Collectives run on tensors of the group, never on the caller's memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol, Self, TypeVar, cast

import attrs
import torch
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    Store,
    Work,
)
from typing_extensions import override

from radixlink_comm._checked import CheckedGroup, MarkKind, deadline_after, time_left
from radixlink_comm._errand import Errands
from radixlink_comm._health import LATE, ROLL_CALL_S, CollectiveError, not_created
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from concurrent.futures import Future

_Answer = TypeVar("_Answer")

#: How long a wait lasts before it looks out; a collective in which all take part ends before the
#: first look.
SLICE_S: Final = 0.05

#: How often an errand asks the store for what is not there yet.
POLL_S: Final = 0.01

#: How long connecting may take once all ranks have come to it.
CONNECT_S: Final = 60.0

#: By how much gloo's time-out is behind ours.
GLOO_SLACK_S: Final = 1.0

#: The shortest wait: what rounds to 0 ms is no wait to gloo, but one without an end.
SHORT_WAIT_S: Final = 0.001

#: The key that any rank sets which gives up.
GAVE_UP: Final = "gave-up"


class _Gloo(Protocol):
    """What is used of `ProcessGroupGloo`, whose stub leaves out its collectives."""

    def allreduce(self, tensors: list[torch.Tensor], opts: AllreduceOptions) -> Work:
        """Begin an allreduce."""
        ...


class TorchGroup(CheckedGroup):
    """One rank of a group of processes that share a torch store.

    Cost: an `all_and` is one allreduce over TCP: tenths of a millisecond for two ranks,
    milliseconds where ranks outnumber cores.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        epoch: int,
        store: Store,
        place: _Place,
        gloo: _Gloo,
    ) -> None:
        super().__init__(rank, size, epoch)
        #: Of all epochs of these ranks.
        self._store = store
        #: Of this epoch.
        self._place = place
        #: None when a collective failed in it, and after the end.
        self._gloo: _Gloo | None = gloo
        self._options = AllreduceOptions()
        self._options.reduceOp = ReduceOp(ReduceOp.BAND)
        #: The words of the collective that goes on; all frames have one size, so it is allocated
        #: once.
        self._words = torch.empty(0, dtype=torch.int64)
        #: A question to the store whether a rank gave up, that was not answered yet.
        self._asked: Future[bool] | None = None
        #: Where the ranks meet for the next epoch, when this rank went there.
        self._renewal: _Rendezvous | None = None
        self._num_splits = 0

    @classmethod
    def create(
        cls, store: Store, *, rank: int, size: int, timeout_s: float, name: str = "radixlink"
    ) -> Self:
        """A group of `size` ranks that meet in a store.

        Args:
            store: Reached by all ranks, and used by this process for nothing that blocks, for
                example `TCPStore(MASTER_ADDR, MASTER_PORT, is_master=False)` beside an engine that
                was started with `env://`.
            rank: This rank, 0..size-1.
            size: How many ranks there are.
            timeout_s: Seconds.
            name: Tells groups of different ranks in one store apart. Groups of the same ranks are
                told apart by the order in which they are created.

        Raises:
            AgreementError: Not all ranks took part in time.
            ContractError: There is no such rank, or `timeout_s` is no time.

        Ranks: all of the group; the engine's other ranks have no part in it.
        """
        if not 0 <= rank < size:
            raise ContractError(f"TorchGroup: expected a rank in 0..{size - 1}, got {rank}")
        deadline = deadline_after("create", timeout_s)
        errands = Errands()
        try:
            counted = errands.send(lambda: store.add(f"{name}/created-by-{rank}", 1))
            ours = PrefixStore(f"{name}/{_result(counted, deadline)}", store)
            return cls._first(rank, size, ours, errands, deadline)
        except CollectiveError as error:
            raise not_created(cls.__name__, timeout_s, error, rank, size) from error

    @classmethod
    def _first(cls, rank: int, size: int, store: Store, errands: Errands, deadline: float) -> Self:
        """The group of epoch 0, to which a part of a store belongs."""
        place = _Place(PrefixStore("epoch-0", store), rank, size, errands)
        rendezvous = _Rendezvous.begin(place, "in create")
        try:
            gloo = rendezvous.wait(deadline)
        except BaseException as error:
            # Nobody is to go on asking the store, also where a signal's exception ended the wait.
            rendezvous.given_up.set()
            if not isinstance(error, CollectiveError):
                raise
            marks = place.marks(MarkKind.RENEWING, "in create", time.monotonic() + ROLL_CALL_S)
            raise CollectiveError(error.reason, marks) from error
        return cls(rank, size, 0, store, place, gloo)

    @override
    def _and(self, words: bytearray, deadline: float) -> None:
        assert self._gloo is not None, "a broken group enters no collective"
        theirs = torch.frombuffer(words, dtype=torch.int64)
        if self._words.shape != theirs.shape:
            self._words = torch.empty_like(theirs)
        self._words.copy_(theirs)
        self._options.timeout = timedelta(seconds=time_left(deadline) + GLOO_SLACK_S)
        work: Work | None = None
        try:
            work = self._begun(self._gloo)
            self._wait(work, deadline)
        except BaseException as error:
            # Also where a signal's exception left it: to free it would wait for its end. Where gloo
            # could not begin it there is nothing to wait for.
            if work is not None or not isinstance(error, CollectiveError):
                _leak(self._gloo, work, self._words)
            self._gloo = None
            raise
        theirs.copy_(self._words)

    @override
    def _subgroup(self, members: tuple[int, ...], deadline: float) -> Self:
        self._num_splits += 1
        name = f"epoch-{self._epoch}/split-{self._num_splits}/{members[0]}"
        store = PrefixStore(name, self._store)
        rank = members.index(self._rank)
        return self._first(rank, len(members), store, self._place.errands, deadline)

    @override
    def _renewed(self, deadline: float) -> Self:
        epoch = self._epoch + 1
        if self._renewal is None:
            store = PrefixStore(f"epoch-{epoch}", self._store)
            place = _Place(store, self._rank, self._size, self._place.errands)
            self._renewal = _Rendezvous.begin(place, self._mark())
        place, gloo = self._renewal.place, self._renewal.wait(deadline)
        self._renewal = None
        return type(self)(self._rank, self._size, epoch, self._store, place, gloo)

    @override
    def _marks(self, kind: MarkKind, mark: str, deadline: float) -> dict[int, str]:
        if kind is not MarkKind.RENEWING:
            return self._place.marks(kind, mark, deadline)
        if self._renewal is None:
            # No thread went there. The others would take a mark for one that connects to them.
            return {self._rank: mark}
        return self._renewal.place.marks(kind, mark, deadline)

    @override
    def _release(self) -> None:
        self._gloo = None
        if self._renewal is not None:
            self._renewal.given_up.set()
        # No longer than a roll call: a store that does not answer may never do.
        self._place.errands.settle(ROLL_CALL_S)

    def _begun(self, gloo: _Gloo) -> Work:
        """The collective of the words, which goes on.

        Raises:
            CollectiveError: Gloo cannot begin it.
        """
        try:
            return gloo.allreduce([self._words], self._options)
        except RuntimeError as error:
            raise CollectiveError(f"gloo failed: {error}") from error

    def _wait(self, work: Work, deadline: float) -> None:
        """Return when a collective ended well.

        Raises:
            CollectiveError: It did not, or not in time, or another rank gave up.
        """
        while not work.is_completed():
            left_s = time_left(deadline)
            if not left_s:
                raise CollectiveError(LATE)
            # It raises when the slice is over, too, and tells no difference: whether it ended is
            # asked above.
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=max(min(left_s, SLICE_S), SHORT_WAIT_S)))
                return
            self._look_out()
        try:
            work.wait()
        except RuntimeError as error:
            raise CollectiveError(f"gloo failed: {error}") from error

    def _look_out(self) -> None:
        """Return if nobody gave up, as far as the store has answered.

        Raises:
            CollectiveError: A rank gave up.
        """
        if self._asked is None:
            # Where no thread can be had for it, the next look-out tries again.
            with contextlib.suppress(CollectiveError):
                self._asked = self._place.errands.send(self._place.gave_up)
        elif self._asked.done():
            answer, self._asked = self._asked, None
            if answer.exception() is None and answer.result():
                raise CollectiveError("another rank gave up")


class _Place:
    """The part of a store that belongs to one epoch of a group. Only errands ask the store."""

    def __init__(self, store: Store, rank: int, size: int, errands: Errands) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        #: Of all epochs of this rank.
        self.errands = errands

    def connect(self, mark: str, given_up: threading.Event) -> _Gloo:
        """Leave a mark, wait for those of all ranks, then connect to them. Blocks.

        Raises:
            CollectiveError: This rank gave up waiting.
            RuntimeError: The store, or a rank, went away.
        """
        self._store.set(_key(MarkKind.RENEWING, self._rank), mark)
        keys = [_key(MarkKind.RENEWING, other) for other in range(self._size)]
        while not self._store.check(keys):
            if given_up.wait(POLL_S):
                raise CollectiveError("this rank gave up")
        timeout = timedelta(seconds=CONNECT_S)
        store = PrefixStore("gloo", self._store)
        return cast("_Gloo", ProcessGroupGloo(store, self._rank, self._size, timeout))

    def gave_up(self) -> bool:
        """True if a rank left a mark that a collective failed. Blocks."""
        return bool(self._store.check([GAVE_UP]))

    def marks(self, kind: MarkKind, mark: str, deadline: float) -> dict[int, str]:
        """Leave a mark; return all as soon as they are there, else those there at the deadline."""
        found = {self._rank: mark}

        def ask() -> None:
            self._store.set(_key(kind, self._rank), mark)
            if kind is MarkKind.FAILED:
                self._store.set(GAVE_UP, mark)
            while True:
                for other in range(self._size):
                    key = _key(kind, other)
                    if other not in found and self._store.check([key]):
                        found[other] = self._store.get(key).decode()
                if len(found) == self._size or time.monotonic() >= deadline:
                    return
                time.sleep(POLL_S)

        # What was found until then is the answer, also where the store gave none, or nobody asked it.
        with contextlib.suppress(CollectiveError):
            _result(self.errands.send(ask), deadline)
        return dict(found)


@attrs.frozen
class _Rendezvous:
    """A rank that is connecting, off-thread, to those that come to a place."""

    place: _Place
    given_up: threading.Event
    connected: Future[_Gloo]

    @classmethod
    def begin(cls, place: _Place, mark: str) -> Self:
        """Go there: local.

        Raises:
            CollectiveError: No thread can be had to go there, so this rank left no mark.
        """
        given_up = threading.Event()
        return cls(place, given_up, place.errands.send(lambda: place.connect(mark, given_up)))

    def wait(self, deadline: float) -> _Gloo:
        """The connected group; may be asked again.

        Raises:
            CollectiveError: Not all ranks came in time, or they could not connect.
        """
        return _result(self.connected, deadline)


def _key(kind: MarkKind, rank: int) -> str:
    return f"{kind.name.lower()}/{rank}"


def _leak(*things: object) -> None:
    """Never free some objects, by a reference that nobody owns."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(things))


def _result(future: Future[_Answer], deadline: float) -> _Answer:
    """What an errand brings.

    Raises:
        CollectiveError: Nothing in time, or a failure of the store or of gloo.
    """
    try:
        return future.result(time_left(deadline))
    except TimeoutError as error:
        raise CollectiveError(LATE) from error
    except RuntimeError as error:
        raise CollectiveError(f"torch failed: {error}") from error
