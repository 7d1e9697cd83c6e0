"""`PageMover`: moves pages between device pools and stores, through memory on the host.

A run is as many pages of one pool as fit that memory; it is opened once, so that all its layers come
from one write of each page. The owner is asked before each copy, and before each call that is for
one: whose job was given up may be beside another mover already, with the same copier.

The memory is the store's where the store lends it and the copier can use it: then what is copied
from the device is what the store sends, and the reverse. Each run borrows for itself, and gives back
when it has ended. Where nothing is lent, it is staging memory of the mover's own, and the store
copies.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Protocol

import attrs

from radixlink_contracts.texts import named
from radixlink_linker._answers import answer_of
from radixlink_linker._lent_pages import LentPages, max_lent
from radixlink_linker._runtime import give_way

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import torch

    from radixlink_contracts import (
        Copier,
        DevicePool,
        Fence,
        PageBits,
        PageHandles,
        PageKeys,
        PageStore,
        Staging,
    )
    from radixlink_linker._jobs import Job
    from radixlink_linker._pool_stores import PoolStores
    from radixlink_linker._store_linker_counters import StoreLinkerTally


class GuardedCopy(Protocol):
    """Starts a copy of a job, if it may still touch its slots, and waits for its end."""

    def __call__(self, job: Job, start: Callable[[], Fence]) -> None:
        """Return when the copy has ended.

        Raises:
            TransferError: The job was given up, or the copy was late.
        """
        ...


@attrs.frozen(kw_only=True, eq=False)
class OpenRun:
    """Pages of one pool that a store promised to hold for a while. Its mover closes it.

    Attributes:
        pool: Where to.
        store: Where from.
        handles: Of the pages.
        rows: Their rows in the pool. Shape: (num_pages,) int64.
        lent: The store's memory that they were fetched into; None where they are read from the store.
    """

    pool: DevicePool
    store: PageStore
    handles: PageHandles
    rows: torch.Tensor
    lent: LentPages | None

    def __len__(self) -> int:
        """Number of pages."""
        return len(self.rows)

    def ranges_of(self, layer: int) -> list[int]:
        """The ranges of a page that belong to a layer of the model."""
        return [place for place, owner in enumerate(self.pool.layers) if owner == layer]


class ExclusiveUse(Protocol):
    """Nobody else uses the copier, nor gives a job up, while it is for that job."""

    def __call__(self, job: Job) -> AbstractContextManager[None]:
        """Hold it meanwhile.

        Raises:
            TransferError: The job was given up.
        """
        ...


class PageMover:
    """Moves the pages of jobs. Failures are raised, with what was missing.

    Thread: one; it owns the staging memory, and what is lent.
    """

    def __init__(
        self,
        stores: PoolStores,
        copier: Copier,
        copy: GuardedCopy,
        exclusive: ExclusiveUse,
        tally: StoreLinkerTally,
        *,
        staging_bytes: int,
        lease_s: float,
    ) -> None:
        """Take what it works with; nothing is allocated.

        Args:
            stores: Pools and their stores.
            copier: Between the device and staging.
            copy: Runs each copy.
            exclusive: Around all else that is asked of the copier.
            tally: Counts memory that a store does not take back.
            staging_bytes: How much to move at a time.
            lease_s: Seconds for which stores are asked to keep the pages of a load.
        """
        self._stores = stores
        self._copier = copier
        self._copy = copy
        self._exclusive = exclusive
        self._tally = tally
        self._staging_bytes = staging_bytes
        self._lease_s = lease_s
        self._staging: Staging | None = None

    def open(self, job: Job) -> Iterator[OpenRun]:
        """The runs of a load, each opened when it is asked for.

        Raises:
            TransferError: Some page is not to be had, or the load was given up.

        Owns: the caller has each closed, by `close`.
        """
        for pool, transfer in self._stores.resolve(job.transfers):
            store = self._stores.store_of(pool)
            rows = pool.page_rows(transfer)
            for keys, some_rows in self._runs(pool, store, transfer.keys.resolve(give_way), rows):
                job.ask()
                yield self._opened(job, pool, store, keys, some_rows)

    def close(self, run: OpenRun) -> None:
        """Give back what was lent for a run. Idempotent, and raises nothing."""
        self._give_back(run.lent)

    def load(self, job: Job, run: OpenRun, layer_range: int) -> None:
        """Bring one range of a run to the device.

        Raises:
            TransferError: Some page cannot be read, or the load was given up.
        """
        job.ask()
        region = run.pool.region(layer_range, run.rows)
        if run.lent is not None:
            good = answer_of(
                run.store, "verify", run.lent.verify(run.handles, layer_range), len(run)
            )
            scatter = partial(run.lent.scatter, region, layer_range)
        else:
            staging = self._staging_of(job, len(run) * run.pool.range_bytes[layer_range])
            good = answer_of(
                run.store,
                "read",
                run.store.read(run.handles, layer_range, staging.buffer),
                len(run),
            )
            scatter = partial(self._copier.scatter, region, staging.tensor)
        if not good.complete:
            raise job.failed(f"{_absent(good, run.pool)} cannot be read in range {layer_range}")
        self._copy(job, scatter)

    def offload(self, job: Job) -> Iterator[int]:
        """Put all pages of a node into the stores, windows and states before the full pages.

        Yields:
            How many pages each run had, when it is stored.

        Raises:
            TransferError: Some page found no room, or the offload was given up.
        """
        for pool, transfer in reversed(self._stores.resolve(job.transfers)):
            store = self._stores.store_of(pool)
            rows = pool.page_rows(transfer)
            for keys, some_rows in self._runs(pool, store, transfer.keys.resolve(give_way), rows):
                job.ask()
                bits = self._put(job, pool, store, keys, some_rows)
                stored = answer_of(store, "put", bits, len(keys))
                if not stored.complete:
                    raise job.failed(f"{_absent(stored, pool)} found no room")
                yield len(keys)

    def release(self) -> None:
        """Let the staging memory go."""
        self._staging = None

    def _opened(
        self, job: Job, pool: DevicePool, store: PageStore, keys: PageKeys, rows: torch.Tensor
    ) -> OpenRun:
        """A run, in memory that its store lends if that can be.

        Raises:
            TransferError: Some page is not to be had.
        """
        lent = LentPages.borrow(store, self._copier, len(keys))
        with ExitStack() as unless_opened:
            unless_opened.callback(self._give_back, lent)
            opener: PageStore | LentPages = store if lent is None else lent
            handles = opener.open(keys, self._lease_s)
            found = answer_of(store, "open", handles.found, len(keys))
            if not found.complete:
                raise job.failed(f"{_absent(found, pool)} are gone")
            unless_opened.pop_all()
        return OpenRun(pool=pool, store=store, handles=handles, rows=rows, lent=lent)

    def _put(
        self, job: Job, pool: DevicePool, store: PageStore, keys: PageKeys, rows: torch.Tensor
    ) -> PageBits:
        """Copy a run out of its pool and put it: which pages are stored.

        Raises:
            TransferError: The offload was given up.
        """
        lent = LentPages.borrow(store, self._copier, len(keys))
        if lent is None:
            return store.put(keys, self._gathered(job, pool, rows))
        try:
            for layer_range in range(len(pool.range_bytes)):
                region = pool.region(layer_range, rows)
                self._copy(job, partial(lent.gather, region, layer_range))
            return lent.put(keys)
        finally:
            self._give_back(lent)

    def _give_back(self, lent: LentPages | None) -> None:
        """Give back what was lent, if anything was: a store that does not take it is only counted."""
        if lent is None:
            return
        try:
            lent.release()
        except BaseException as raised:  # noqa: BLE001 -- how the job ended is told elsewhere
            self._tally.count_failure(f"give lent memory back: {named(raised)}")

    def _gathered(self, job: Job, pool: DevicePool, rows: torch.Tensor) -> list[memoryview]:
        """The bytes of some rows, range after range."""
        staging = self._staging_of(job, len(rows) * sum(pool.range_bytes))
        parts: list[memoryview] = []
        at = 0
        for layer_range, size in enumerate(pool.range_bytes):
            end = at + len(rows) * size
            region = pool.region(layer_range, rows)
            self._copy(job, partial(self._copier.gather, region, staging.tensor[at:end]))
            parts.append(staging.buffer[at:end])
            at = end
        return parts

    def _runs(
        self, pool: DevicePool, store: PageStore, keys: PageKeys, rows: torch.Tensor
    ) -> Iterator[tuple[PageKeys, torch.Tensor]]:
        """The pages in runs that fit the memory on the host, at least one page each."""
        step = max(1, self._staging_bytes // sum(pool.range_bytes))
        most = max_lent(store, self._copier)
        if most is not None:
            step = min(step, most)
        for start in range(0, len(keys), step):
            stop = min(start + step, len(keys))
            yield keys.span(start, stop), rows[start:stop]

    def _staging_of(self, job: Job, num_bytes: int) -> Staging:
        """The first `num_bytes` of the staging memory, which grows as needed.

        Raises:
            TransferError: The job was given up.
        """
        whole = self._staging
        if whole is None or whole.tensor.numel() < num_bytes:
            with self._exclusive(job):
                whole = self._staging = self._copier.staging(num_bytes)
        if whole.tensor.numel() == num_bytes:
            return whole
        return attrs.evolve(whole, tensor=whole.tensor[:num_bytes], buffer=whole.buffer[:num_bytes])


def writers_of(runs: list[OpenRun]) -> Counter[int]:
    """How many pages of some runs each process had written."""
    writers: Counter[int] = Counter()
    for run in runs:
        writers.update(run.handles.writers)
    return writers


def _absent(bits: PageBits, pool: DevicePool) -> str:
    """How many pages of how many are not set, for people."""
    return f"{bits.count - bits.total} of {bits.count} pages of {pool.name}"
