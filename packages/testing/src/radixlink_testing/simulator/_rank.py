"""`SimulatedRank`: the real cache of one rank, put together of real parts and simulated surroundings.

The one place that knows how a rank is made. A component more is a component more here, with the pool
that its pages live in.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Self

import attrs
from typing_extensions import override

from radixlink_components import FullComponent
from radixlink_contracts import RequestId
from radixlink_linker import DeviceSlots, LinkerSettings, UnifiedRadixCache
from radixlink_pools import PagedAllocator
from radixlink_testing.simulator._backend import SimulatedExecutor, SimulatedLinker
from radixlink_testing.simulator._group import SimulatedClock, SimulatedGroup
from radixlink_testing.simulator._watch import Watch, WatchedAllocator, WatchedTree

if TYPE_CHECKING:
    import torch

    from radixlink_contracts import ComponentType, RadixKey
    from radixlink_testing.simulator._group import Meetings, Time
    from radixlink_testing.simulator._operations import Operations
    from radixlink_testing.simulator._rules import Referee


@attrs.frozen(kw_only=True)
class Shape:
    """What a replica is like.

    Attributes:
        num_ranks: 1 to 4.
        page_size: Tokens.
        num_pages: Pages of the device.
        num_layers: Layer ranges of a page.
        settings: Of the linker.
        verify: Backends compare what they read with its checksum.
        prompt: Backends let go of what is decided when they are next asked.
    """

    num_ranks: int = 2
    page_size: int = 2
    num_pages: int = 32
    num_layers: int = 2
    settings: LinkerSettings = attrs.field(factory=LinkerSettings)
    verify: bool = True
    prompt: bool = True


class _SaltedId(str):
    """A request id with a hash of its rank's own, as in processes of different PYTHONHASHSEED."""

    __slots__ = ("_hash",)
    _hash: int

    def __new__(cls, name: str, rank: int) -> Self:
        salted = super().__new__(cls, name)
        salted._hash = zlib.crc32(f"{name}/{rank}".encode())
        return salted

    @override
    def __hash__(self) -> int:
        return self._hash


def request_id(name: str, rank: int) -> RequestId:
    """A request's id on a rank: equal on all, and in another order in their sets."""
    return RequestId(_SaltedId(name, rank))


@attrs.frozen(kw_only=True)
class HandedIn:
    """A request as the cache gets it. A `RequestKV`."""

    request_id: RequestId
    key: RadixKey

    @property
    def kv_allocated_len(self) -> int:
        """It has no slots: a staged load is its own."""
        return 0

    def evicted_floor(self, component: ComponentType) -> int:  # noqa: ARG002 -- as the protocol has it
        """Nothing of it is gone."""
        return 0

    def repoint(self, start: int, indices: torch.Tensor) -> None:
        """It matches again by itself."""

    @property
    def state_slot(self) -> int | None:
        """It has no recurrent state."""
        return None


class SimulatedRank:
    """One rank.

    Thread: one at a time.
    """

    def __init__(
        self,
        rank: int,
        shape: Shape,
        *,
        meetings: Meetings,
        time: Time,
        operations: Operations,
        referee: Referee,
    ) -> None:
        """Put a rank together; no linker is attached yet."""
        self.rank = rank
        # Clocks of different machines: far apart, and nothing may depend on it.
        self.clock = SimulatedClock(time, offset_s=1000.0 * rank)
        self.watch = Watch(
            rank,
            page_size=shape.page_size,
            num_pages=shape.num_pages,
            num_layers=shape.num_layers,
            settings=shape.settings,
            clock=self.clock,
            operations=operations,
            referee=referee,
        )
        self.tree = WatchedTree(self.watch, page_size=shape.page_size)
        self.allocator = WatchedAllocator(
            self.watch, PagedAllocator(shape.num_pages, shape.page_size)
        )
        self.slots = DeviceSlots(tree=self.tree, allocator=self.allocator)
        self.executor = SimulatedExecutor(self.watch)
        self.backend = SimulatedLinker(self.watch, verify=shape.verify, prompt=shape.prompt)
        self.cache = UnifiedRadixCache(
            tree=self.tree,
            slots=self.slots,
            components=[
                FullComponent(
                    allocator=self.allocator,
                    evict=self.slots.make_room,
                    release=self.slots.retire,
                )
            ],
            group=SimulatedGroup(rank, meetings, self.watch.collectives),
            executor=self.executor,
            clock=self.clock,
            settings=shape.settings,
        )

    def work(self, which: int) -> bool:
        """One quantum of one of this rank's threads. False where none has anything to do."""
        tasks = len(self.executor.tasks)
        jobs = 0 if self.backend.dead else self.backend.num_jobs
        if not tasks + jobs:
            return False
        # Every other quantum goes to the oldest, so that nothing starves.
        place = which // 2 % (tasks + jobs) if which % 2 else 0
        self.watch.working = True
        try:
            if place < tasks:
                task = self.executor.tasks[place]
                del self.executor.tasks[place]
                task()
            else:
                self.backend.advance(place - tasks)
        finally:
            self.watch.working = False
        return True
