"""Page stores with one fault each. `test_broken_stores.py` runs the suite against all of them.

Each is the in-memory store but for what its docstring says.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import zlib
from array import array
from typing import TYPE_CHECKING, ClassVar

import attrs
from typing_extensions import override

from radixlink_contracts import PageBits, PageHandles, PageKeys, PoolName, Shard, StoreConfig
from radixlink_contracts.errors import CapacityError, ContractError, StaleHandleError
from radixlink_testing import (
    SUITE_CAPACITY_BYTES,
    InMemoryPageStore,
    InMemoryPlace,
    InMemoryStoreFactory,
    StorePlace,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import PoolLayout, StoreFactory
    from radixlink_testing._memory_store import _Pool


class Working(InMemoryPageStore):
    """No fault: what the others are compared with."""

    #: Seconds after which a case counts as hanging.
    deadline_s: ClassVar[float] = 30.0


class _Factory(InMemoryStoreFactory):
    """Opens stores of a given class."""

    def __init__(self, kind: type[Working], config: StoreConfig, place: InMemoryPlace) -> None:
        super().__init__(config, place)
        self.kind = kind

    @override
    def open(self, layout: PoolLayout) -> InMemoryPageStore:
        super().open(layout)
        self._stores[-1] = self.kind(self._stores[-1]._opened())
        return self._stores[-1]


class BrokenPlace(StorePlace):
    """A dict whose stores, factories or itself have a fault."""

    def __init__(
        self, kind: type[Working], memory: InMemoryPlace, factory_kind: type[_Factory]
    ) -> None:
        super().__init__()
        self.kind = kind
        self.memory = memory
        self.factory_kind = factory_kind

    @override
    def factory(self, capacity_bytes: int = SUITE_CAPACITY_BYTES) -> _Factory:
        return self.factory_kind(self.kind, StoreConfig(capacity_bytes=capacity_bytes), self.memory)

    @override
    def corrupt(self, layout: PoolLayout, key: bytes, layer_range: int) -> None:
        self._raw(layout).corrupt(key, layer_range)

    @override
    def drop(self, layout: PoolLayout, key: bytes) -> None:
        self._raw(layout).drop(key)

    @override
    def pass_time(self, seconds: int) -> None:
        """Nothing: recency is an order."""

    def _raw(self, layout: PoolLayout) -> InMemoryPageStore:
        return InMemoryPageStore(self.memory.pool(layout, SUITE_CAPACITY_BYTES))


# --- lookups --------------------------------------------------------------------------------------


class NamesAnotherLayout(Working):
    """Says that its ranges are in another order than those it was opened with."""

    @property
    @override
    def layout(self) -> PoolLayout:
        layout = super().layout
        return attrs.evolve(layout, identity=attrs.evolve(layout.identity, revision="0"))


class RaisesOnMiss(Working):
    """Has an error for a page that is not there."""

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        bits = super().read(handles, layer_range, out)
        if bits.count and not handles.found.mask:
            raise KeyError(handles.keys[0])
        return bits


class PacksItsAnswers(Working):
    """Answers for the pages that are there, one after the other, without the holes."""

    @override
    def contains(self, keys: PageKeys) -> PageBits:
        return PageBits.of(range(super().contains(keys).total), len(keys))


class LooksAtHalfTheKey(Working):
    """Takes pages whose keys begin alike for one."""

    @override
    def contains(self, keys: PageKeys) -> PageBits:
        pool = self._opened()
        with pool.mutex:
            begun = {key[:16] for key in pool.pages}
            there = [page for page, key in enumerate(keys) if key[:16] in begun]
        return PageBits.of(there, len(keys))


class LooksForSomeKeys(Working):
    """Looks for the first 1,024 keys of a call."""

    @override
    def contains(self, keys: PageKeys) -> PageBits:
        return PageBits(super().contains(keys.span(0, 1024)).mask, len(keys))


class NeedsAPage(Working):
    """Cannot be asked for nothing."""

    @override
    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        keys.data[0]
        return super().open(keys, ttl_s)


# --- reading --------------------------------------------------------------------------------------


class ReadsOnce(Working):
    """A handle is used up, range by range."""

    def __init__(self, pool: _Pool) -> None:
        super().__init__(pool)
        self._used: list[tuple[PageHandles, int]] = []

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        bits = super().read(handles, layer_range, out)
        if any(used is handles and again == layer_range for used, again in self._used):
            return PageBits.none(bits.count)
        self._used.append((handles, layer_range))
        return bits


class MixesBatchesUp(Working):
    """Reads 16 pages at a time, and forgets where the next ones belong."""

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        bits = super().read(handles, layer_range, out)
        rows = memoryview(out).cast("B") if bits.count > 16 else memoryview(b"")
        batch = 16 * (len(rows) // max(1, bits.count))
        for start in range(batch, len(rows), max(1, batch)):
            length = len(rows[start : start + batch])
            rows[start : start + length] = bytes(rows[:length])
        return bits


class ReadsByKeyAlone(Working):
    """Reads whatever write of a page is there; its handles name none."""

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        now = super().open(handles.keys, 0)
        return super().read(attrs.evolve(now, found=handles.found), layer_range, out)


class ReadsWhatWasNotFound(Working):
    """Reads every page that is there by now, found or not."""

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        now = super().open(handles.keys, 0)
        generations = array("Q", now.generations)
        for page in handles.found:
            generations[page] = handles.generations[page]
        return super().read(attrs.evolve(now, generations=generations), layer_range, out)


class ReadsInOneThread(Working):
    """Its handles belong to the thread that opened them."""

    def __init__(self, pool: _Pool) -> None:
        super().__init__(pool)
        self._mine = threading.local()

    @override
    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        self._mine.opened = True
        return super().open(keys, ttl_s)

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        bits = super().read(handles, layer_range, out)
        return bits if hasattr(self._mine, "opened") else PageBits.none(bits.count)


class NeedsFlatBuffers(Working):
    """Reads into one dimension only."""

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        if memoryview(out).ndim != 1:
            raise ContractError("expected one dimension")
        return super().read(handles, layer_range, out)


class WritesBesideOut(Working):
    """Writes on to the end of the memory that `out` is in."""

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        bits = super().read(handles, layer_range, out)
        memory = memoryview(out).obj
        if isinstance(memory, bytearray) and len(memory) > memoryview(out).nbytes:
            memory[-1] = 255
        return bits


# --- writing --------------------------------------------------------------------------------------


class LastWriterWins(Working):
    """Writes over pages that are there."""

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        pool = self._opened()
        with pool.mutex:
            before = dict(pool.pages)
            for key in keys:
                pool.pages.pop(key, None)
            try:
                return super().put(keys, parts)
            except ContractError:
                pool.pages.update(before)
                raise


class CountsOnlyNewPages(Working):
    """Says of a page that was there that it has not stored it."""

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        pool = self._opened()
        with pool.mutex:
            before = super().contains(keys)
            stored = super().put(keys, parts)
        return PageBits(stored.mask & ~before.mask, len(keys))


class LastDuplicateWins(Working):
    """Of a page that is twice in a call it keeps the second."""

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        last = {key: page for page, key in enumerate(keys)}
        sizes = self.layout.range_bytes
        whole = [memoryview(part).nbytes for part in parts] == [len(keys) * size for size in sizes]
        if len(last) < len(keys) and whole:
            parts = [
                b"".join(
                    memoryview(part).cast("B")[last[key] * size : (last[key] + 1) * size]
                    for key in keys
                )
                for part, size in zip(parts, sizes, strict=True)
            ]
        return super().put(keys, parts)


class KeepsReferences(Working):
    """Copies nothing that it is given in a bytearray."""

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        pool = self._opened()
        with pool.mutex:
            before = super().contains(keys)
            stored = super().put(keys, parts)
            if all(isinstance(part, bytearray) for part in parts):
                for page in stored:
                    if page not in before:
                        shared = _shared(pool, page, parts)
                        kept = pool.pages[keys[page]]
                        pool.pages[keys[page]] = attrs.evolve(kept, ranges=shared)
        return stored


def _shared(pool: _Pool, page: int, parts: Sequence[Buffer]) -> tuple[bytearray, ...]:
    """The layer ranges of a page, in the caller's memory."""
    views = (
        memoryview(part)[page * size : (page + 1) * size]
        for part, size in zip(parts, pool.layout.range_bytes, strict=True)
    )
    return tuple(views)  # type: ignore[arg-type] # close enough to a bytearray for a broken store


class NeedsBytes(Working):
    """Takes no other buffers than bytes and bytearrays."""

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        if not all(isinstance(part, bytes | bytearray) for part in parts):
            raise ContractError("expected bytes")
        return super().put(keys, parts)


class ClaimsToHaveRoom(Working):
    """Says that it stored all there is, whatever it evicted for it."""

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        super().put(keys, parts)
        return PageBits.all(len(keys))


class CutsParts(Working):
    """Fills parts that are too short up, and cuts those that are too long."""

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        sizes = [len(keys) * size for size in self.layout.range_bytes]
        if len(parts) == len(sizes):
            plain = [memoryview(part).tobytes() for part in parts]
            parts = [part[:size].ljust(size, b"?") for part, size in zip(plain, sizes, strict=True)]
        return super().put(keys, parts)


class IgnoresMoreParts(Working):
    """Takes the parts it needs and leaves the rest."""

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        return super().put(keys, parts[: len(self.layout.range_bytes)])


class StoresBeforeItLooks(Working):
    """Has made the pages when it sees that it cannot fill them."""

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        try:
            return super().put(keys, parts)
        except ContractError:
            super().put(keys, [bytes(len(keys) * size) for size in self.layout.range_bytes])
            raise


class FillsWhatFits(Working):
    """Reads as many rows as `out` has room for."""

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        try:
            return super().read(handles, layer_range, out)
        except StaleHandleError:
            raise
        except ContractError:
            if memoryview(out).readonly or not 0 <= layer_range < len(self.layout.range_bytes):
                raise
            return PageBits.none(len(handles.keys))


class NeverLooksAtOut(Working):
    """Sees that `out` cannot be written only when there is something to write."""

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        if memoryview(out).readonly:
            out = bytearray(out)
        return super().read(handles, layer_range, out)


class CountsRangesFromTheEnd(Working):
    """Takes -1 for the last range, as a list does."""

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        count = len(self.layout.range_bytes)
        return super().read(handles, layer_range % count if layer_range < 0 else layer_range, out)


# --- how long a page stays ------------------------------------------------------------------------


class ReadsTheSlot(Working):
    """Reads what has taken the place of a page that is gone."""

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        pool = self._opened()
        with pool.mutex:
            bits = super().read(handles, layer_range, out)
            gone = [page for page in handles.found if page not in bits and pool.pages]
            size = self.layout.range_bytes[layer_range]
            for page in gone:
                newest = next(reversed(pool.pages.values()))
                row = newest.ranges[layer_range]
                memoryview(out).cast("B")[page * size : (page + 1) * size] = row
        return PageBits.of([*bits, *gone], bits.count)


class RaisesWhenFull(Working):
    """Has an error for pages that find no room."""

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        if len(keys) > self.num_slots:
            raise CapacityError("full", needed=len(keys), available=self.num_slots)
        return super().put(keys, parts)


class PromisesLeases(Working):
    """Has an error when all pages are leased."""

    def __init__(self, pool: _Pool) -> None:
        super().__init__(pool)
        self._leased: set[bytes] = set()

    @override
    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        if ttl_s:
            self._leased.update(keys)
        return super().open(keys, ttl_s)

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        if len(self._leased) >= self.num_slots:
            raise CapacityError("all leased", needed=len(keys), available=0)
        return super().put(keys, parts)


class ForgetsUse(Working):
    """Evicts the page that was written first, used or not."""

    @override
    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        pool = self._opened()
        with pool.mutex:
            order = list(pool.pages)
            handles = super().open(keys, ttl_s)
            for key in order:
                pool.pages.move_to_end(key)
        return handles


class TouchesNothing(Working):
    """`touch` only looks."""

    @override
    def touch(self, keys: PageKeys) -> PageBits:
        return self.contains(keys)


class KeepsNoChecksums(Working):
    """Reads whatever is there."""

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        pool = self._opened()
        with pool.mutex:
            for page in handles.found:
                kept = pool.pages.get(handles.keys[page])
                if kept is not None:
                    sums = tuple(zlib.crc32(data) for data in kept.ranges)
                    pool.pages[handles.keys[page]] = attrs.evolve(kept, checksums=sums)
            return super().read(handles, layer_range, out)


class KeepsDamagedPages(Working):
    """Sees the damage, and leaves the page where it is."""

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        pool = self._opened()
        with pool.mutex:
            before = list(pool.pages.items())
            bits = super().read(handles, layer_range, out)
            pool.pages.clear()
            pool.pages.update(before)
        return bits


class TrustsItsOwnList(Working):
    """Looks for pages in a list of its own, which knows of evictions and of damage that it met."""

    def __init__(self, pool: _Pool) -> None:
        super().__init__(pool)
        self._known: set[bytes] = set()

    @override
    def contains(self, keys: PageKeys) -> PageBits:
        there = super().contains(keys)
        known = [page for page, key in enumerate(keys) if key in self._known]
        return PageBits.of([*there, *known], len(keys))

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        pool = self._opened()
        with pool.mutex:
            self._known.clear()
            stored = super().put(keys, parts)
            self._known.update(pool.pages)
        return stored

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        pool = self._opened()
        with pool.mutex:
            before = set(pool.pages)
            bits = super().read(handles, layer_range, out)
            self._known -= before - set(pool.pages)
        return bits


# --- who else is there ----------------------------------------------------------------------------


class ReadsWhenClosed(Working):
    """Goes on reading by handles from before."""

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        if not self._closed:
            return super().read(handles, layer_range, out)
        return InMemoryPageStore(self._pool).read(handles, layer_range, out)


class ClosesOnce(Working):
    """Has an error when it is closed again."""

    @override
    def close(self) -> None:
        if self._closed:
            raise StaleHandleError("closed")
        super().close()


class ForgetsItsPagesAtClose(Working):
    """Takes its pages along."""

    def __init__(self, pool: _Pool) -> None:
        super().__init__(pool)
        self._mine: list[bytes] = []

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        stored = super().put(keys, parts)
        self._mine.extend(keys)
        return stored

    @override
    def close(self) -> None:
        with self._pool.mutex:
            for key in self._mine if not self._closed else ():
                self._pool.pages.pop(key, None)
        super().close()


class OnePoolPlace(InMemoryPlace):
    """Tells shards apart but not pools."""

    @override
    def pool(self, layout: PoolLayout, capacity_bytes: int) -> _Pool:
        return super().pool(attrs.evolve(layout, pool=PoolName.KV), capacity_bytes)


class AnyIdentityPlace(InMemoryPlace):
    """Lets everybody in."""

    @override
    def pool(self, layout: PoolLayout, capacity_bytes: int) -> _Pool:
        self._identity = None
        return super().pool(layout, capacity_bytes)


class NoRoomPlace(InMemoryPlace):
    """Makes a store for which there is no room."""

    @override
    def pool(self, layout: PoolLayout, capacity_bytes: int) -> _Pool:
        return super().pool(layout, max(capacity_bytes, layout.page_bytes))


class LeavesOpen(_Factory):
    """Closes nothing."""

    @override
    def close(self) -> None:
        self._stores = []
        super().close()


class OpensForEver(_Factory):
    """Opens stores after its end."""

    @override
    def open(self, layout: PoolLayout) -> InMemoryPageStore:
        self._closed = False
        return super().open(layout)


class OpensOnce(_Factory):
    """Gives the same store to everybody who asks for a layout."""

    @override
    def open(self, layout: PoolLayout) -> InMemoryPageStore:
        for store in self._stores:
            if store.layout == layout:
                return store
        return super().open(layout)


class PublishesTooEarly(Working):
    """A page is there before its bytes are."""

    #: How long its bytes take: long for one call and short for the next, so that who came later reads
    #: first.
    _delays_s: ClassVar[Iterator[float]] = itertools.cycle((0.01, 0.001))

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        pool = self._opened()
        with pool.mutex:
            before = set(pool.pages)
            stored = super().put(keys, parts)
            new = {key: page for key, page in pool.pages.items() if key not in before}
            ranges = tuple(bytearray(size) for size in self.layout.range_bytes)
            sums = tuple(zlib.crc32(data) for data in ranges)
            empty = {
                key: attrs.evolve(page, ranges=ranges, checksums=sums) for key, page in new.items()
            }
            pool.pages.update(empty)
        time.sleep(next(self._delays_s))
        with pool.mutex:
            for key, page in new.items():
                if pool.pages.get(key) is empty[key]:
                    pool.pages[key] = page
        return stored


class MixesTwoWriters(Working):
    """The first writer wins of each layer range for itself."""

    _openers: ClassVar[itertools.count[int]] = itertools.count()
    _drafts: ClassVar[dict[tuple[_Pool, bytes], dict[int, bytes]]] = {}

    def __init__(self, pool: _Pool) -> None:
        super().__init__(pool)
        self._first_range = next(self._openers) % len(pool.layout.range_bytes)

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        pool = self._opened()
        with pool.mutex:
            before = set(pool.pages)
            stored = super().put(keys, parts)
            for key in set(keys) - before:
                pool.pages.pop(key, None)
        sizes = self.layout.range_bytes
        for step in range(len(sizes)):
            layer_range = (self._first_range + step) % len(sizes)
            rows, size = memoryview(parts[layer_range]).cast("B"), sizes[layer_range]
            with pool.mutex:
                for page, key in enumerate(keys):
                    draft = self._drafts.setdefault((pool, key), {})
                    draft.setdefault(layer_range, bytes(rows[page * size : (page + 1) * size]))
            time.sleep(0.001)
        with pool.mutex:
            for page in stored:
                draft = self._drafts.pop((pool, keys[page]), {})
                if keys[page] not in pool.pages and len(draft) == len(sizes):
                    pool.write(keys[page], tuple(bytearray(draft[r]) for r in range(len(sizes))))
        return stored


class HangsWhenTwoPutAtOnce(Working):
    """Waits for a turn that does not come."""

    deadline_s = 1.0
    _turns: ClassVar[dict[_Pool, threading.Lock]] = {}

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        turn = self._turns.setdefault(self._opened(), threading.Lock())
        if not turn.acquire(blocking=False):
            threading.Event().wait()
        try:
            stored = super().put(keys, parts)
            time.sleep(0.001)
            return stored
        finally:
            turn.release()


class HangsAtNoPages(Working):
    """Waits for a first page."""

    deadline_s = 1.0

    @override
    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        if not len(keys):
            threading.Event().wait()
        return super().open(keys, ttl_s)


class SeesOnlyItsOwnPages(Working):
    """Finds what it has put itself."""

    def __init__(self, pool: _Pool) -> None:
        super().__init__(pool)
        self._mine: set[bytes] = set()

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        stored = super().put(keys, parts)
        self._mine.update(keys)
        return stored

    @override
    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        handles = super().open(keys, ttl_s)
        mine = PageBits.of((p for p, key in enumerate(keys) if key in self._mine), len(keys))
        return attrs.evolve(handles, found=handles.found & mine)


class NoShardPlace(InMemoryPlace):
    """Tells pools apart but not shards."""

    @override
    def pool(self, layout: PoolLayout, capacity_bytes: int) -> _Pool:
        return super().pool(attrs.evolve(layout, shard=Shard()), capacity_bytes)


class FactoryClosesOnce(_Factory):
    """Has an error when it is closed again."""

    @override
    def close(self) -> None:
        if self._closed:
            raise StaleHandleError("closed")
        super().close()


class DiesInOpen(_Factory):
    """Takes its process along."""

    @override
    def open(self, layout: PoolLayout) -> InMemoryPageStore:
        os._exit(3)


class HangsInOpen(_Factory):
    """Waits for somebody else to make the store."""

    @override
    def open(self, layout: PoolLayout) -> InMemoryPageStore:
        threading.Event().wait()
        return super().open(layout)


def working_factory(config: StoreConfig) -> StoreFactory:
    """What another process opens: pages that nobody shares."""
    return _Factory(Working, config, InMemoryPlace())


def dying_factory(config: StoreConfig) -> StoreFactory:
    """See `DiesInOpen`."""
    return DiesInOpen(Working, config, InMemoryPlace())


def hanging_factory(config: StoreConfig) -> StoreFactory:
    """See `HangsInOpen`."""
    return HangsInOpen(Working, config, InMemoryPlace())


def place_of(broken: type) -> BrokenPlace:
    """A place with one of the faults below, or with none."""
    store = broken if issubclass(broken, Working) else Working
    memory = broken if issubclass(broken, InMemoryPlace) else InMemoryPlace
    factory = broken if issubclass(broken, _Factory) else _Factory
    return BrokenPlace(store, memory(), factory)
