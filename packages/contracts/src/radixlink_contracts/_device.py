"""Between a device pool and host memory: regions, copies, fences. No store ever sees a device pointer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from radixlink_contracts._ids import BatchIndex
    from radixlink_contracts._pools import PoolName
    from radixlink_contracts._transfers import PoolTransfer


@attrs.frozen(kw_only=True, eq=False)
class ByteRegion:
    """Some rows of one buffer: the pages of a transfer in one layer range.

    Attributes:
        rows: The whole buffer, a page's bytes of that range in each row, where the pool is: on the device, or in host
            memory for a pool there. Shape: (pages of the pool, row bytes) uint8.
        index: Which rows. Shape: (num_pages,) int64, on the same device as `rows`.
    """

    rows: torch.Tensor
    index: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class Staging:
    """Host memory that one operation owns while bytes go through it; pinned where that helps.

    Attributes:
        tensor: In host memory. Shape: (num_bytes,) uint8.
        buffer: The same memory, writable, for stores.
    """

    tensor: torch.Tensor
    buffer: memoryview

    def __attrs_post_init__(self) -> None:
        """Refuse two views of different size."""
        if self.tensor.numel() != self.buffer.nbytes:
            msg = f"Staging: expected {self.tensor.numel()} bytes, got {self.buffer.nbytes}"
            raise ContractError(msg)


class Fence(Protocol):
    """The end of copies that were started. Waiting is never hidden: whoever needs the bytes asks."""

    def done(self) -> bool:
        """True when the copies have ended. Does not wait."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the copies.

        Returns:
            False when `timeout_s` seconds passed first.
        """
        ...


class Copier(Protocol):
    """Copies between device rows and staging, a layer range at a time.

    Thread: any, one call at a time for each copier.
    """

    def staging(self, num_bytes: int) -> Staging:
        """New staging memory.

        Owns: the caller; it is free when nothing refers to it.
        """
        ...

    def gather(self, region: ByteRegion, out: torch.Tensor) -> Fence:
        """Copy rows out of the device.

        Args:
            region: What to read.
            out: Staging. Shape: (num_pages * row bytes,) uint8.

        Cost: one indexed copy, no loop over pages.
        """
        ...

    def scatter(self, region: ByteRegion, source: torch.Tensor) -> Fence:
        """Copy rows into the device.

        Args:
            region: What to write.
            source: Staging. Shape: (num_pages * row bytes,) uint8.

        Cost: one indexed copy, no loop over pages.
        """
        ...


@runtime_checkable
class RowCopier(Copier, Protocol):
    """A copier whose host side may be rows with gaps between them. Optional: for memory that a store lends."""

    def gather_rows(self, region: ByteRegion, out: torch.Tensor) -> Fence:
        """Copy rows out of the device.

        Args:
            region: What to read.
            out: Host memory. Shape: (num_pages, row bytes) uint8; each row is contiguous.

        Cost: as for `gather`.
        """
        ...

    def scatter_rows(self, region: ByteRegion, source: torch.Tensor) -> Fence:
        """Copy rows into the device.

        Args:
            region: What to write.
            source: Host memory. Shape: (num_pages, row bytes) uint8; each row is contiguous.

        Cost: as for `scatter`.
        """
        ...


class DevicePool(Protocol):
    """One physical pool, as a transfer needs to see it: a byte row for each page in each layer range."""

    @property
    def name(self) -> PoolName:
        """Which pool."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        ...

    @property
    def range_bytes(self) -> tuple[int, ...]:
        """Bytes of a page in each layer range. Equal to the `PoolLayout.range_bytes` of its store."""
        ...

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's layer of each range; several ranges may be of one. By default range i is of layer i."""
        return tuple(range(len(self.range_bytes)))

    def page_rows(self, transfer: PoolTransfer) -> torch.Tensor:
        """The rows of a transfer's pages.

        Returns:
            Shape: (num_pages,) int64, on the pool's device, whichever that of the transfer's slots is.

        Raises:
            ContractError: A page is not contiguous and aligned, or is outside the pool.
        """
        ...

    def region(self, layer_range: int, page_rows: torch.Tensor) -> ByteRegion:
        """Those rows in one layer range."""
        ...


class PoolGroup(Protocol):
    """The physical pools of one rank, and which of them take a component's transfer.

    Thread: any; nothing here changes.
    """

    @property
    def sources(self) -> frozenset[PoolName]:
        """Which transfers the pools take."""
        ...

    def resolve(
        self,
        transfers: Iterable[PoolTransfer],
        *,
        allow_partial: bool = False,
        allow_missing_kv: bool = False,
    ) -> Sequence[tuple[DevicePool, PoolTransfer]]:
        """The physical transfers: one for each pool that takes one of these, beside the pool.

        Args:
            transfers: At most one for each source.
            allow_partial: Sources may be missing.
            allow_missing_kv: KV may be missing too.

        Returns:
            Empty where a source is missing that may not be.

        Raises:
            ContractError: No pool takes a transfer, or two are of one source.
        """
        ...


class LayerCounter(Protocol):
    """Lets a forward wait for each layer of a batch of layer-wise loads.

    A layer that will never land is a value: `wait_until` returns, and `finish` says so. What a forward then computes is
    dropped: how each load ended is told elsewhere.

    Thread: `update_producer`, `complete` and `fail` the linker's; `set_consumer` and `wait_until` the one that launches
        forwards; `finish` and `reset` the scheduler's.
    """

    def update_producer(self) -> BatchIndex:
        """Open a batch; all its layers are outstanding."""
        ...

    def set_consumer(self, batch: BatchIndex | None) -> None:
        """The next forward waits for this batch, or for none."""
        ...

    def complete(self, batch: BatchIndex, layer: int) -> None:
        """A layer has landed."""
        ...

    def fail(self, batch: BatchIndex) -> None:
        """The layers that have not landed never will."""
        ...

    def wait_until(self, layer: int) -> None:
        """Return when the consumer's layer is decided, or its deadline has passed."""
        ...

    def finish(self, batch: BatchIndex) -> bool:
        """Wait until every layer is decided, or the deadline of the batch has passed, and forget the batch.

        Returns:
            True when every layer is complete, and for a batch that nobody knows.
        """
        ...

    def reset(self) -> None:
        """Forget every batch."""
        ...
