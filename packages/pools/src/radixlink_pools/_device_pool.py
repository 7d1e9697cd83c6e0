"""`DevicePoolEntry` and `DevicePoolGroup`: an engine's pools as rows of bytes, by name.

An engine keeps its pools typed and shaped as its kernels want them. What a store moves is one row
of bytes for each page and layer range; `byte_rows` shows an engine's tensor so, without a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from typing_extensions import override

from radixlink_contracts import ByteRegion, DevicePool, PoolName, PoolTransfer
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def byte_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as one row of bytes for each page.

    Args:
        tensor: One layer range of a pool, any dtype. Shape: (num_pages, ...), contiguous.

    Returns:
        Shape: (num_pages, bytes of a page) uint8.

    Raises:
        ContractError: The tensor is empty or not contiguous, so that there are no such rows
            without a copy.
    """
    if tensor.ndim == 0 or not tensor.numel() or not tensor.is_contiguous():
        msg = (
            "byte_rows: expected a contiguous tensor of at least one page, "
            f"got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        )
        raise ContractError(msg)
    return tensor.detach().view(len(tensor), -1).view(torch.uint8)


class DevicePoolEntry(DevicePool):
    """One physical pool, a row of bytes for each page in each layer range.

    Thread: any; nothing here changes after construction.
    """

    def __init__(self, name: PoolName, rows: Sequence[torch.Tensor], page_size: int) -> None:
        """Take the rows as they are; they share memory with the engine's pool.

        Args:
            name: Which pool.
            rows: One tensor for each layer range, in layer order, as `byte_rows` returns it.
                Shape of each: (num_pages, bytes of a page in this range) uint8.
            page_size: Slots of a page; 1 where a slot holds a whole page's state.

        Raises:
            ContractError: There are no rows, or they are no rows of bytes, or not as many in each
                range.
        """
        if not rows:
            msg = f"DevicePoolEntry {name}: expected layer ranges, got no storage buffers"
            raise ContractError(msg)
        if page_size < 1:
            msg = f"DevicePoolEntry {name}: expected a page_size of at least 1, got {page_size}"
            raise ContractError(msg)
        for layer_range, tensor in enumerate(rows):
            if tensor.dtype is not torch.uint8 or tensor.ndim != 2 or not tensor.numel():  # noqa: PLR2004 -- rows of bytes
                msg = (
                    f"DevicePoolEntry {name}: expected (num_pages, row bytes) uint8 in range "
                    f"{layer_range}, got {tuple(tensor.shape)} {tensor.dtype}"
                )
                raise ContractError(msg)
            if len(tensor) != len(rows[0]) or tensor.device != rows[0].device:
                msg = (
                    f"DevicePoolEntry {name}: expected {len(rows[0])} pages on {rows[0].device} in "
                    f"range {layer_range}, got {len(tensor)} on {tensor.device}"
                )
                raise ContractError(msg)
        self._name: Final = name
        self._rows: Final = tuple(rows)
        self._page_size: Final = page_size
        self._num_pages: Final = len(rows[0])
        self._range_bytes: Final = tuple(tensor.shape[1] for tensor in rows)
        self._offsets: Final = torch.arange(page_size)

    @property
    @override
    def name(self) -> PoolName:
        """Which pool."""
        return self._name

    @property
    @override
    def range_bytes(self) -> tuple[int, ...]:
        """Bytes of a page in each layer range."""
        return self._range_bytes

    @property
    @override
    def page_size(self) -> int:
        """Slots of a page."""
        return self._page_size

    @property
    def num_pages(self) -> int:
        """Pages of the pool, reserved ones included."""
        return self._num_pages

    @override
    def page_rows(self, transfer: PoolTransfer) -> torch.Tensor:
        """The rows of a transfer's pages, on the pool's device.

        Returns:
            Shape: (num_pages,) int64.

        Raises:
            ContractError: The transfer has no slots or is another pool's, a page is not
                contiguous and aligned, or is outside the pool.

        Cost: O(slots), no loop over pages; waits for the device where the slots are on one.
        """
        slots = transfer.device_indices
        if slots is None or transfer.name is not self._name:
            got = "no slots" if slots is None else f"a transfer of {transfer.name}"
            msg = f"DevicePoolEntry {self._name}: expected a transfer of its own slots, got {got}"
            raise ContractError(msg)
        if slots.ndim != 1 or slots.dtype is not torch.int64:
            msg = (
                f"DevicePoolEntry {self._name}: expected (num_slots,) int64, "
                f"got {tuple(slots.shape)} {slots.dtype}"
            )
            raise ContractError(msg)
        if slots.numel() != len(transfer.keys) * self._page_size:
            msg = (
                f"DevicePoolEntry {self._name}: expected a multiple of page_size "
                f"{self._page_size}, a page for each of {len(transfer.keys)} keys, "
                f"got {slots.numel()} slots"
            )
            raise ContractError(msg)
        # Decided in host memory, where there is nothing to wait for.
        slots = slots.cpu()
        pages = slots
        if self._page_size > 1:
            pages = slots[:: self._page_size].div(self._page_size, rounding_mode="floor")
            expected = torch.add(self._offsets, pages.unsqueeze(1), alpha=self._page_size)
            if not torch.equal(slots, expected.view(-1)):
                place = int((slots != expected.view(-1)).nonzero()[0])
                msg = (
                    f"DevicePoolEntry {self._name}: expected aligned contiguous pages of "
                    f"{self._page_size} slots, got slot {int(slots[place])} at place {place}"
                )
                raise ContractError(msg)
        low, high = pages.aminmax()
        if low < 0 or high >= self._num_pages:
            page = int(low if low < 0 else high)
            msg = (
                f"DevicePoolEntry {self._name}: expected pages in 0..{self._num_pages - 1}, "
                f"got {page}, which exceeds the pool"
            )
            raise ContractError(msg)
        return pages.to(self._rows[0].device)

    @override
    def region(self, layer_range: int, page_rows: torch.Tensor) -> ByteRegion:
        """Those rows in one layer range.

        Args:
            layer_range: Index into `range_bytes`.
            page_rows: From `page_rows`. Shape: (num_pages,) int64.

        Raises:
            ContractError: There is no such range.
        """
        if not 0 <= layer_range < len(self._rows):
            msg = (
                f"DevicePoolEntry {self._name}: expected a layer range in "
                f"0..{len(self._rows) - 1}, got {layer_range}"
            )
            raise ContractError(msg)
        return ByteRegion(rows=self._rows[layer_range], index=page_rows)


class DevicePoolGroup:
    """The physical pools of one rank, by name.

    Thread: any; nothing here changes after construction.
    """

    def __init__(self, entries: Iterable[DevicePool]) -> None:
        """Take the pools.

        Raises:
            ContractError: Two have the same name, or there is none.
        """
        by_name: dict[PoolName, DevicePool] = {}
        for entry in entries:
            if by_name.setdefault(entry.name, entry) is not entry:
                msg = f"DevicePoolGroup: expected one pool of each name, got two of {entry.name}"
                raise ContractError(msg)
        if not by_name:
            msg = "DevicePoolGroup: expected at least one pool, got none"
            raise ContractError(msg)
        self._by_name: Final[Mapping[PoolName, DevicePool]] = by_name

    @property
    def pools(self) -> frozenset[PoolName]:
        """Which pools there are."""
        return frozenset(self._by_name)

    def pool(self, name: PoolName) -> DevicePool:
        """The pool of a name.

        Raises:
            ContractError: There is none.
        """
        try:
            return self._by_name[name]
        except KeyError as exc:
            msg = f"DevicePoolGroup: expected one of {sorted(self._by_name)}, got {name}"
            raise ContractError(msg) from exc

    def resolve(
        self, transfers: Iterable[PoolTransfer]
    ) -> tuple[tuple[DevicePool, PoolTransfer], ...]:
        """Each transfer that has keys, beside the pool that holds its slots; in their order.

        Provisional: one physical pool for each logical transfer, which is all that Full needs.
            Pools that borrow
        another's indices come with the pools of SWA and Mamba.

        Raises:
            ContractError: A transfer's pool is not here, or two transfers are of one pool.
        """
        resolved = tuple(
            (self.pool(transfer.name), transfer) for transfer in transfers if len(transfer.keys)
        )
        if len({pool.name for pool, _ in resolved}) < len(resolved):
            names = [str(pool.name) for pool, _ in resolved]
            msg = f"DevicePoolGroup: expected one transfer for each pool, got {names}"
            raise ContractError(msg)
        return resolved
