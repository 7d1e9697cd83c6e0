"""`PageMover`: moves pages between device pools and stores, through staging memory of its own.

A run is as many pages of one pool as fit the staging memory; it is opened once, so that all its
layers come from one write of each page. Before each copy the owner is asked, by `copy`.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Protocol

import attrs

from radixlink_linker._runtime import give_way

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    """Pages of one pool that a store promised to hold for a while.

    Attributes:
        pool: Where to.
        store: Where from.
        handles: Of the pages.
        rows: Their rows in the pool. Shape: (num_pages,) int64.
    """

    pool: DevicePool
    store: PageStore
    handles: PageHandles
    rows: torch.Tensor

    def __len__(self) -> int:
        """Number of pages."""
        return len(self.rows)

    def ranges_of(self, layer: int) -> list[int]:
        """The ranges of a page that belong to a layer of the model."""
        return [place for place, owner in enumerate(self.pool.layers) if owner == layer]


class PageMover:
    """Moves the pages of jobs. Failures are raised, with what was missing.

    Thread: one; it owns the staging memory.
    """

    def __init__(
        self,
        stores: PoolStores,
        copier: Copier,
        copy: GuardedCopy,
        *,
        staging_bytes: int,
        lease_s: float,
    ) -> None:
        """Take what it works with; nothing is allocated.

        Args:
            stores: Pools and their stores.
            copier: Between the device and staging.
            copy: Runs each copy.
            staging_bytes: How much to move at a time.
            lease_s: Seconds for which stores are asked to keep the pages of a load.
        """
        self._stores = stores
        self._copier = copier
        self._copy = copy
        self._staging_bytes = staging_bytes
        self._lease_s = lease_s
        self._staging: Staging | None = None

    def open(self, job: Job) -> Iterator[OpenRun]:
        """The runs of a load, each opened when it is asked for.

        Raises:
            TransferError: Some page is not to be had.
        """
        for pool, transfer in self._stores.resolve(job.transfers):
            store = self._stores.store_of(pool)
            rows = pool.page_rows(transfer)
            for keys, some_rows in self._runs(pool, transfer.keys.resolve(give_way), rows):
                handles = store.open(keys, self._lease_s)
                if not handles.found.complete:
                    raise job.failed(f"{_absent(handles.found)} are gone")
                yield OpenRun(pool=pool, store=store, handles=handles, rows=some_rows)

    def load(self, job: Job, run: OpenRun, layer_range: int) -> None:
        """Bring one range of a run to the device.

        Raises:
            TransferError: Some page cannot be read, or the load was given up.
        """
        staging = self._staging_of(len(run) * run.pool.range_bytes[layer_range])
        good = run.store.read(run.handles, layer_range, staging.buffer)
        if not good.complete:
            raise job.failed(f"{_absent(good)} cannot be read in range {layer_range}")
        region = run.pool.region(layer_range, run.rows)
        self._copy(job, partial(self._copier.scatter, region, staging.tensor))

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
            for keys, some_rows in self._runs(pool, transfer.keys.resolve(give_way), rows):
                stored = store.put(keys, self._gathered(job, pool, some_rows))
                if not stored.complete:
                    raise job.failed(f"{_absent(stored)} found no room")
                yield len(keys)

    def release(self) -> None:
        """Let the staging memory go."""
        self._staging = None

    def _gathered(self, job: Job, pool: DevicePool, rows: torch.Tensor) -> list[memoryview]:
        """The bytes of some rows, range after range."""
        staging = self._staging_of(len(rows) * sum(pool.range_bytes))
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
        self, pool: DevicePool, keys: PageKeys, rows: torch.Tensor
    ) -> Iterator[tuple[PageKeys, torch.Tensor]]:
        """The pages in runs that fit the staging memory, at least one page each."""
        step = max(1, self._staging_bytes // sum(pool.range_bytes))
        for start in range(0, len(keys), step):
            stop = min(start + step, len(keys))
            yield keys.span(start, stop), rows[start:stop]

    def _staging_of(self, num_bytes: int) -> Staging:
        """The first `num_bytes` of the staging memory, which grows as needed."""
        whole = self._staging
        if whole is None or whole.tensor.numel() < num_bytes:
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


def _absent(bits: PageBits) -> str:
    """How many pages of how many are not set, for people."""
    return f"{len(bits) - bits.total} of {len(bits)} pages"
