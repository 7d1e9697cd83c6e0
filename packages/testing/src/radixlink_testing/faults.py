"""`FaultyStore`: any page store, with faults by plan; and the matrix of all of them.

A store may fail, hang, lie, be late or do a thing twice, at each of its operations. Who uses one
must survive that: `store_consumers` has the cases.
"""

from __future__ import annotations

import enum
import itertools
import threading
from collections import Counter
from typing import TYPE_CHECKING, Final, Never, TypeVar

import attrs
from typing_extensions import override

from radixlink_contracts import PageBits, PageStore
from radixlink_contracts.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import PageHandles, PageKeys, PoolLayout

_Answer = TypeVar("_Answer")


class Nameless(Exception):  # noqa: N818 -- one that does not say what it is
    """A backend's exception of which no text can be had."""

    @override
    def __str__(self) -> Never:
        """Raise."""
        raise ValueError("no text")

    @override
    def __repr__(self) -> Never:
        """Raise."""
        raise ValueError("no text")


class StoreCall(enum.Enum):
    """An operation of a page store."""

    CONTAINS = "contains"
    OPEN = "open"
    READ = "read"
    PUT = "put"


class FaultKind(enum.Enum):
    """What an operation does instead of its work."""

    #: Raises a `StorageError`, having done nothing.
    FAILS = enum.auto()
    #: Waits for `release`, then raises a `StorageError`, having done nothing.
    HANGS = enum.auto()
    #: Answers the opposite: `contains`, `open` and `read` say yes of the pages that are not there or
    #: not right and no of the others; `put` stores nothing, and says that it stored all.
    LIES = enum.auto()
    #: Waits for `release`, then does its work and answers right.
    LATE = enum.auto()
    #: Does its work twice, as a call that is sent again; the second answer is given.
    TWICE = enum.auto()


@attrs.frozen
class Fault:
    """One entry of a plan.

    Attributes:
        call: Which operation.
        kind: What it does.
        first: The first of these calls that does it, counted from 0 when the plan was made.
        count: How many calls do it from there on; None for all.
    """

    call: StoreCall
    kind: FaultKind
    first: int = 0
    count: int | None = None

    def covers(self, number: int) -> bool:
        """True for the call of that number."""
        return self.first <= number and (self.count is None or number < self.first + self.count)


FAULT_MATRIX: Final = tuple(
    Fault(call, kind) for call, kind in itertools.product(StoreCall, FaultKind)
)
"""Each operation with each fault, for ever."""


class FaultyStore(PageStore):
    """Another page store, with faults.

    Thread: as the other store's; a test changes plans from any thread.
    """

    def __init__(self, inner: PageStore, plan: Iterable[Fault] = ()) -> None:
        """Hand every call on that no fault covers; of several faults the first counts."""
        self.inner: Final = inner
        #: The calls so far, by name.
        self.calls: list[str] = []
        #: Set once a call waits.
        self.waiting: Final = threading.Event()
        #: What it waits for.
        self.gate: Final = threading.Event()
        self._mutex: Final = threading.Lock()
        self._plan: tuple[Fault, ...] = ()
        self._numbers: Counter[StoreCall] = Counter()
        self.plan(*plan)

    def plan(self, *faults: Fault) -> None:
        """Have these faults from now on, and no others; what waits goes on waiting."""
        with self._mutex:
            self._plan = faults
            self._numbers.clear()

    def release(self) -> None:
        """End all faults, and let go of what waits."""
        self.plan()
        self.gate.set()

    @property
    @override
    def layout(self) -> PoolLayout:
        """What its objects are."""
        return self.inner.layout

    @override
    def contains(self, keys: PageKeys) -> PageBits:
        """Which pages are there."""
        there, lies = self._do(StoreCall.CONTAINS, lambda: self.inner.contains(keys))
        return _opposite(there) if lies else there

    @override
    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        """Find pages for a load."""
        handles, lies = self._do(StoreCall.OPEN, lambda: self.inner.open(keys, ttl_s))
        return attrs.evolve(handles, found=_opposite(handles.found)) if lies else handles

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        """Read one layer range of each page that was found."""
        right, lies = self._do(StoreCall.READ, lambda: self.inner.read(handles, layer_range, out))
        return _opposite(right) if lies else right

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        """Store pages."""
        fault = self._enter(StoreCall.PUT)
        if fault is FaultKind.LIES:
            return PageBits.all(len(keys))
        if fault is FaultKind.TWICE:
            self.inner.put(keys, parts)
        return self.inner.put(keys, parts)

    @override
    def close(self) -> None:
        """Close the other store."""
        self.inner.close()

    def fault_of(self, call: StoreCall) -> FaultKind | None:
        """Which fault the next of these calls has; counts it."""
        with self._mutex:
            number = self._numbers[call]
            self._numbers[call] += 1
            covering = (fault for fault in self._plan if fault.call is call)
            return next((fault.kind for fault in covering if fault.covers(number)), None)

    def _do(self, call: StoreCall, work: Callable[[], _Answer]) -> tuple[_Answer, bool]:
        """The answer of the other store, and whether to give the opposite."""
        fault = self._enter(call)
        if fault is FaultKind.TWICE:
            work()
        return work(), fault is FaultKind.LIES

    def _enter(self, call: StoreCall) -> FaultKind | None:
        """Note a call, and do what its fault does before the work.

        Raises:
            StorageError: It fails, or hung.
        """
        self.calls.append(call.value)
        fault = self.fault_of(call)
        if fault in {FaultKind.HANGS, FaultKind.LATE}:
            self.waiting.set()
            self.gate.wait()
        if fault in {FaultKind.FAILS, FaultKind.HANGS}:
            raise StorageError(f"{call.value}: a fault that the test asked for", transient=True)
        return fault


def _opposite(bits: PageBits) -> PageBits:
    return PageBits(PageBits.all(bits.count).mask & ~bits.mask, bits.count)
