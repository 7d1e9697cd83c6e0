"""`SimulatedRank`: the real cache of one rank, put together of real parts and simulated surroundings.

The one place that knows how a rank is made. A component more is a component more here, with the pool
that its pages live in.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final, Self

import attrs
from typing_extensions import override

from radixlink_components import FullComponent, MambaComponent, SWAComponent
from radixlink_contracts import PoolName, RequestId
from radixlink_linker import DeviceSlots, LinkerSettings, UnifiedRadixCache
from radixlink_pools import FullSwaAllocator, PagedAllocator, StateSlotAllocator
from radixlink_testing.allocators import WatchedAllocator, WatchedPair, WatchedStates
from radixlink_testing.simulator._backend import SimulatedLinker
from radixlink_testing.simulator._device import Device
from radixlink_testing.simulator._executor import SimulatedExecutor
from radixlink_testing.simulator._group import SimulatedClock, SimulatedGroup
from radixlink_testing.simulator._watch import Watch
from radixlink_testing.simulator._watched_tree import WatchedTree
from radixlink_tree import StateRules

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from radixlink_contracts import LinkerComponent, RadixKey
    from radixlink_testing.simulator._group import Meetings, Time
    from radixlink_testing.simulator._operations import Operations
    from radixlink_testing.simulator._rules import Referee
    from radixlink_testing.simulator._shelf import Shelf

#: In so many steps each backend that moves gets to what it has queued.
_PATIENT_STEPS: Final = 30


@attrs.frozen(kw_only=True)
class Shape:
    """What a replica is like.

    Attributes:
        num_ranks: 1 to 4.
        page_size: Tokens.
        num_pages: Pages of the device.
        num_layers: Layer ranges of a page.
        window: Tokens that sliding-window attention looks back; 0 for none.
        num_window_pages: Pages of the window pool.
        num_states: Recurrent states of the device; 0 for none.
        states_per_path: The tree's cap of states on a path; None for none.
        layer_wise: Backends offer layer-wise loads, and the engine asks for some.
        settings: Of the linker.
        verify: Backends compare what they read with its checksum.
        prompt: Backends let go of what is decided when they are next asked.
    """

    num_ranks: int = 2
    page_size: int = 2
    num_pages: int = 32
    num_layers: int = 2
    window: int = 0
    num_window_pages: int = 24
    num_states: int = 0
    states_per_path: int | None = None
    layer_wise: bool = False
    settings: LinkerSettings = attrs.field(factory=LinkerSettings)
    verify: bool = True
    prompt: bool = True

    @property
    def kind(self) -> str:
        """What attention it has, for people."""
        names = ["full"] + ["swa"] * bool(self.window) + ["mamba"] * bool(self.num_states)
        return "+".join(names)

    @property
    def hasty(self) -> bool:
        """Slots may be written off of a backend that is not stuck, but only behind.

        A verdict may come from one rank alone, at once, and a backend lets go no sooner than its
        thread gets to the operation: where it is not prompt, behind all that was queued before; where
        it is, to the end of a copy that runs.
        """
        return self.settings.write_off_steps < _PATIENT_STEPS

    @property
    def window_pages(self) -> int:
        """Pages of a window."""
        return -(-self.window // self.page_size)

    @property
    def pools(self) -> dict[PoolName, int]:
        """Pages, or states, of each pool."""
        pools = {PoolName.KV: self.num_pages}
        if self.window:
            pools[PoolName.SWA] = self.num_window_pages
        if self.num_states:
            pools[PoolName.MAMBA] = self.num_states
        return pools

    def storers(self, rank: int) -> dict[PoolName, int]:
        """Which rank stores each pool of a rank: itself, or one that has the same bytes."""
        elsewhere = self.settings.stored_elsewhere(rank, self.num_ranks)
        return {
            pool: self.settings.storing_ranks[rank] if pool in elsewhere else rank
            for pool in self.pools
        }


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


@attrs.define(kw_only=True, eq=False)
class HandedIn:
    """A request as the cache gets it. A `RequestKV`.

    Attributes:
        told: (first token, slots) of each time that it was told where its KV lies.
    """

    request_id: RequestId
    key: RadixKey
    told: list[tuple[int, torch.Tensor]] = attrs.field(factory=list)

    def repoint(self, start: int, indices: torch.Tensor) -> None:
        """From here on its KV lies there."""
        self.told.append((start, indices.clone()))


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
        shelves: Sequence[Shelf],
        referee: Referee,
    ) -> None:
        """Put a rank together; no linker is attached yet."""
        self.rank = rank
        storers = shape.storers(rank)
        # Clocks of different machines: far apart, and nothing may depend on it.
        self.clock = SimulatedClock(time, offset_s=1000.0 * rank)
        self.device = Device(
            rank,
            shape.pools,
            page_size=shape.page_size,
            num_layers=shape.num_layers,
            referee=referee,
            bytes_of=storers,
        )
        self.watch = Watch(
            rank,
            device=self.device,
            page_size=shape.page_size,
            num_layers=shape.num_layers,
            settings=shape.settings,
            shelves=shelves,
            storers=storers,
            clock=self.clock,
            operations=operations,
            referee=referee,
        )
        self.tree = WatchedTree(
            self.watch,
            page_size=shape.page_size,
            window=shape.window,
            states=StateRules(max_per_path=shape.states_per_path) if shape.num_states else None,
        )
        self.pair: WatchedPair | None = None
        self.states: WatchedStates | None = None
        if shape.window:
            inner = FullSwaAllocator(shape.num_pages, shape.num_window_pages, shape.page_size)
            self.pair = WatchedPair(inner, self.watch)
        if shape.num_states:
            self.states = WatchedStates(StateSlotAllocator(shape.num_states), self.watch)
        self.allocator: WatchedAllocator | WatchedPair = self.pair or WatchedAllocator(
            PagedAllocator(shape.num_pages, shape.page_size), PoolName.KV, self.watch
        )
        self.slots = DeviceSlots(
            tree=self.tree,
            allocator=self.allocator,
            states=self.states,
            copy_state=self.device.pools[PoolName.MAMBA].copied if self.states else None,
        )
        self.executor = SimulatedExecutor(self.watch)
        self.backend = SimulatedLinker(
            self.watch,
            pools=shape.pools,
            layer_wise=shape.layer_wise,
            verify=shape.verify,
            prompt=shape.prompt,
        )
        self.cache = UnifiedRadixCache(
            tree=self.tree,
            slots=self.slots,
            components=self._components(shape),
            group=SimulatedGroup(rank, meetings, self.watch.collectives),
            executor=self.executor,
            clock=self.clock,
            settings=shape.settings,
        )

    def _components(self, shape: Shape) -> list[LinkerComponent]:
        """What the tree holds, full attention first."""
        slots = self.slots
        components: list[LinkerComponent] = [
            FullComponent(allocator=self.full, evict=slots.make_room, release=slots.retire)
        ]
        if self.pair is not None:
            components.append(
                SWAComponent(
                    pair=self.pair,
                    sliding_window=shape.window,
                    evict=slots.make_room_swa,
                    release=slots.retire_swa,
                )
            )
        if self.states is not None:
            components.append(
                MambaComponent(
                    states=self.states, evict=slots.make_room_states, release=slots.retire_state
                )
            )
        return components

    @property
    def full(self) -> WatchedAllocator:
        """The allocator of full slots alone."""
        return self.allocator.full if isinstance(self.allocator, WatchedPair) else self.allocator

    @property
    def available(self) -> dict[PoolName, int]:
        """Free slots of each pool."""
        free = {PoolName.KV: self.full.available_size}
        if self.pair is not None:
            free[PoolName.SWA] = self.pair.swa.available_size
        if self.states is not None:
            free[PoolName.MAMBA] = self.states.available_size
        return free

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
