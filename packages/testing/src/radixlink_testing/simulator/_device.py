"""`Device`: all pools of one rank: which window slots are beside which full ones, and what the tree has.

Whose each page is follows from the calls alone: what the allocators deal out and take back, what the
tree is given and the actions that it answers with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixlink_contracts import POOL_OF, ComponentType, PoolName
from radixlink_contracts.actions import (
    BackupKV,
    FreeDeviceKV,
    FreeDeviceKVFullOnly,
    FreeMambaSlots,
    FreeSWA,
    MoveSWA,
)
from radixlink_testing.simulator._pages import DevicePages, Holder, marks_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch

    from radixlink_contracts import InsertParams, InsertResult, OperationId
    from radixlink_contracts.actions import CacheAction
    from radixlink_testing.simulator._operations import Parts
    from radixlink_testing.simulator._rules import Referee


def pages_of(indices: torch.Tensor, page_size: int) -> list[int]:
    """The pages of slots. Shape: (num_pages * page_size,) int64."""
    slots: list[int] = indices.tolist()
    return slots if page_size == 1 else [slot // page_size for slot in slots[::page_size]]


class Device:
    """The pools of one rank, as they are seen from outside.

    Thread: any; one at a time.
    """

    def __init__(
        self,
        rank: int,
        sizes: Mapping[PoolName, int],
        *,
        page_size: int,
        num_layers: int,
        referee: Referee,
        bytes_of: Mapping[PoolName, int],
    ) -> None:
        """Start with every page free.

        Args:
            rank: Whose.
            sizes: Pages, or states, of each pool.
            page_size: Tokens.
            num_layers: Layer ranges of a page.
            referee: Hears what is wrong.
            bytes_of: Of each pool the rank that has the same bytes, or this one.
        """
        self._page_size = page_size
        self.pools = {
            pool: DevicePages(rank, pool, size, num_layers, referee, bytes_of=bytes_of[pool])
            for pool, size in sizes.items()
        }
        self.full = self.pools[PoolName.KV]
        #: What stores have of the tree's nodes, or are being given, by pool: a node that gets a part
        #: back which it had before is stored with it still.
        self._offered: dict[PoolName, set[bytes]] = {pool: set() for pool in sizes}
        #: What touches on their way speak of, by pool, as far as its nodes are there still.
        self._touching: dict[OperationId, dict[PoolName, set[bytes]]] = {}
        #: Window pages beside full pages, and the other way round.
        self._window_of: dict[int, int] = {}
        self._full_of: dict[int, int] = {}

    def pages_in(self, pool: PoolName, slots: Sequence[int]) -> list[int]:
        """The pages of whole slots of a pool."""
        if pool is PoolName.MAMBA:
            return list(slots)
        size = self._page_size
        return [slot // size for slot in slots[::size]]

    # -- pairs -------------------------------------------------------------------------------------

    def windows_of(self, full: Iterable[int]) -> list[int]:
        """The window pages beside full pages, where there are any."""
        beside = self._window_of
        return [beside[page] for page in full if page in beside]

    def paired(self, full: Iterable[int], windows: Iterable[int]) -> None:
        """These are beside each other from now on, and beside nothing else."""
        for page, window in zip(full, windows, strict=True):
            self.pools[PoolName.SWA].put_beside(window, self.full.holds[page].mark)
            self._part(window)
            if page in self._window_of:
                del self._full_of[self._window_of.pop(page)]
            self._window_of[page] = window
            self._full_of[window] = page

    def _part(self, window: int) -> None:
        """A window page is beside nothing."""
        full = self._full_of.pop(window, None)
        if full is not None:
            del self._window_of[full]

    def freed(self, pool: PoolName, pages: Sequence[int]) -> None:
        """They went back to their allocator."""
        if pool is PoolName.SWA:
            for window in pages:
                self._part(window)
        self.pools[pool].freed(pages)

    # -- the tree ----------------------------------------------------------------------------------

    def inserted(self, params: InsertParams, result: InsertResult) -> set[OperationId]:
        """The tree took a sequence.

        Returns:
            The loads whose pages were in it.
        """
        size = self._page_size
        total, before = result.total_len // size, params.prev_prefix_len // size
        whole = pages_of(params.value[: total * size], size)
        pages = whole[before:]
        marks = marks_of(params.key, size)[:total]
        late = [
            (window, marks[place])
            for first, last in params.late_windows
            for place in range(first // size, last // size)
            for window in self.windows_of((whole[place],))
        ]
        loads = self._loads_of(pages, [window for window, _ in late], params.mamba_value)
        gone, moved = self._not_taken(result.cache_actions)
        for page, mark in zip(pages, marks[before:], strict=True):
            windows = self.windows_of((page,))
            if page not in gone:
                self.full.adopted(page, mark)
            else:
                self.full.unadopted(page)
            for window in windows:
                if page in gone and page not in moved:
                    self.pools[PoolName.SWA].unadopted(window)
                else:
                    self.pools[PoolName.SWA].adopted(window, mark)
        for window, mark in late:
            self.pools[PoolName.SWA].adopted(window, mark)
        # Full pages in whose place the tree took these, with their windows.
        committed = next(iter(loads), None)
        replaced = gone.difference(pages)
        for page in replaced:
            self.full.left_tree(page, committed)
        if params.mamba_value is not None:
            states = self.pools[PoolName.MAMBA]
            if not result.mamba_exist:
                states.adopted(params.mamba_value, marks[-1])
            elif states.holds[params.mamba_value].holder is Holder.LOAD:
                states.unadopted(params.mamba_value)
        for action in result.cache_actions:
            if isinstance(action, FreeMambaSlots):
                for slot in action.slots:
                    self.pools[PoolName.MAMBA].left_tree(slot, committed)
        return loads

    def left_over(self, operation: OperationId) -> None:
        """A load is published: the windows that it still has the tree has of others."""
        if PoolName.SWA in self.pools:
            self.pools[PoolName.SWA].left_over(operation)

    def _loads_of(
        self, full: Iterable[int], windows: Iterable[int], state: int | None
    ) -> set[OperationId]:
        """The loads that these pages and this state are of."""
        parts = {
            PoolName.KV: full,
            PoolName.SWA: windows,
            PoolName.MAMBA: () if state is None else (state,),
        }
        return {
            hold.operation
            for pool, pages in parts.items()
            for hold in (self.pools[pool].holds[page] for page in pages)
            if hold.holder is Holder.LOAD and hold.operation is not None
        }

    def _not_taken(self, actions: Iterable[CacheAction]) -> tuple[set[int], set[int]]:
        """The full pages that an insert gives up, and those whose windows it keeps."""
        size = self._page_size
        gone: set[int] = set()
        moved: set[int] = set()
        for action in actions:
            match action:
                case FreeDeviceKV(indices=indices) | FreeDeviceKVFullOnly(indices=indices):
                    gone.update(pages_of(indices, size))
                case MoveSWA(from_full=old):
                    moved.update(pages_of(old, size))
                case _:
                    pass
        return gone, moved

    def gave_up(self, actions: Iterable[CacheAction]) -> Iterator[tuple[PoolName, list[int]]]:
        """The tree gave pages up: those of each pool."""
        for action in actions:
            match action:
                case FreeDeviceKV(indices=indices):
                    pages = pages_of(indices, self._page_size)
                    yield from self._left(PoolName.SWA, self.windows_of(pages))
                    yield from self._left(PoolName.KV, pages)
                case FreeDeviceKVFullOnly(indices=indices):
                    yield from self._left(PoolName.KV, pages_of(indices, self._page_size))
                case FreeSWA(full_indices=full):
                    windows = self.windows_of(pages_of(full, self._page_size))
                    yield from self._left(PoolName.SWA, windows)
                case FreeMambaSlots(slots=slots):
                    yield from self._left(PoolName.MAMBA, list(slots))
                case MoveSWA() | BackupKV():
                    pass

    def _left(self, pool: PoolName, pages: list[int]) -> Iterator[tuple[PoolName, list[int]]]:
        """Pages of one pool left the tree, with their nodes where it is that of full attention."""
        if pool is PoolName.KV:
            gone = [self.full.holds[page].mark for page in pages]
            for stored in (self._offered, *self._touching.values()):
                for marks in stored.values():
                    marks.difference_update(gone)
        for page in pages:
            self.pools[pool].left_tree(page)
        if pages:
            yield pool, pages

    def forget_restored(self) -> None:
        """Without a linker nothing counts as stored."""
        for offered in self._offered.values():
            offered.clear()
        self._touching.clear()
        for pool in self.pools.values():
            pool.forget_restored()

    # -- stored ------------------------------------------------------------------------------------

    def offered(self, parts: Parts) -> None:
        """A store has these, or is being given them."""
        for pool, marks in parts:
            self._offered[pool].update(marks)

    def not_stored(self, parts: Parts) -> None:
        """No store has these after all: they are to be offered when they are next used."""
        for pool, marks in parts:
            self._offered[pool].difference_update(marks)

    def held_by(self, full: Sequence[int], state: int | None) -> dict[PoolName, tuple[bytes, ...]]:
        """What a node with these full pages and this state has of each pool."""
        pages = {
            PoolName.KV: full,
            PoolName.SWA: self.windows_of(full),
            PoolName.MAMBA: [] if state is None else [state],
        }
        return {
            pool: tuple([self.pools[pool].holds[page].mark for page in there])
            for pool, there in pages.items()
            if there
        }

    def touched(self, op: OperationId, parts: Parts) -> list[str]:
        """A touch of these is on its way. Returns what of them no store was ever given."""
        self._touching[op] = {pool: set(marks) for pool, marks in parts}
        return [
            f"{pool} page {mark.hex()}"
            for pool, marks in parts
            for mark in marks
            if mark not in self._offered[pool]
        ]

    def touch_ended(self, op: OperationId, *, present: bool) -> None:
        """What a touch spoke of, and is there still, is stored or is not."""
        spoken_of = self._touching.pop(op, {})
        if not present:
            for pool, marks in spoken_of.items():
                self._offered[pool] -= marks
                self.pools[pool].forget_restored(marks)

    def not_offered(self, path: Iterable[int], state: int | None) -> list[str]:
        """Pages of a path in the tree, and its state, that no store has or is being given."""
        full = list(path)
        parts: list[tuple[ComponentType, list[int]]] = [
            (ComponentType.FULL, full),
            (ComponentType.SWA, self.windows_of(full)),
            (ComponentType.MAMBA, [] if state is None else [state]),
        ]
        left: list[str] = []
        for kind, pages in parts:
            if not pages:
                continue
            pool = self.pools[POOL_OF[kind]]
            for page in pages:
                hold = pool.holds[page]
                if hold.holder is Holder.TREE and hold.mark not in self._offered[pool.pool]:
                    left.append(f"{pool.pool} page {page}")
        return left
