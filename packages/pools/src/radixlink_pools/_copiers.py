"""`CpuCopier`: copies between a pool in host memory and staging."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
import torch
from typing_extensions import override

from radixlink_contracts import Fence, RowCopier
from radixlink_contracts.errors import ContractError
from radixlink_pools._staging import new_staging

if TYPE_CHECKING:
    from radixlink_contracts import ByteRegion, Staging

#: Widest first. Torch copies indexed rows element by element, so eight bytes at a time are eight
#: times as fast.
_WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16))


@attrs.frozen
class CompletedFence(Fence):
    """The end of copies that had ended when it was made."""

    @override
    def done(self) -> bool:
        """True."""
        return True

    @override
    def wait(self, timeout_s: float) -> bool:
        """True at once."""
        return True


_COMPLETED: Final = CompletedFence()


def rows_of(region: ByteRegion, flat: torch.Tensor) -> torch.Tensor:
    """Staging as rows of a region.

    Args:
        region: Rows on the device.
        flat: Shape: (num_pages * row bytes,) uint8.

    Returns:
        Shape: (num_pages, row bytes) uint8.

    Raises:
        ContractError: The staging is not of the region's size.
    """
    num_pages, row_bytes = _num_pages(region), region.rows.shape[1]
    if flat.shape != (num_pages * row_bytes,):
        msg = (
            f"copier: expected staging of {num_pages} x {row_bytes} bytes, "
            f"got {tuple(flat.shape)} {flat.dtype}"
        )
        raise ContractError(msg)
    return flat.view(num_pages, row_bytes)


def _num_pages(region: ByteRegion) -> int:
    """How many rows a region names.

    Raises:
        ContractError: Its index is no list of rows.
    """
    if region.index.ndim != 1:
        raise ContractError(_bad_index(region))
    return len(region.index)


def widened(region: ByteRegion, staged: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a region and of staging, both in the widest words that fit.

    Args:
        region: Rows on the device.
        staged: Shape: (num_pages, row bytes) uint8.

    Returns:
        Shapes: (pages of the pool, words) and (num_pages, words), of one integer dtype. Views, that
        may be written outside inference mode too, where the tensors themselves may not.

    Raises:
        ContractError: The staging is not of the region's shape and dtype.
    """
    rows, num_pages = region.rows, _num_pages(region)
    row_bytes = rows.shape[1]
    if staged.shape != (num_pages, row_bytes) or staged.dtype is not torch.uint8:
        msg = (
            f"copier: expected staging of {num_pages} x {row_bytes} bytes, "
            f"got {tuple(staged.shape)} {staged.dtype}"
        )
        raise ContractError(msg)
    # Everything that a wider view needs to be a multiple of the word, of rows and staging in one
    # number.
    offsets = int(rows.storage_offset()) | int(staged.storage_offset())
    grain = row_bytes | rows.stride(0) | staged.stride(0) | offsets
    if rows.stride(1) == 1 == staged.stride(1):
        for size, dtype in _WORDS:
            if grain % size == 0:
                return rows.view(dtype), staged.view(dtype)
    return rows.detach(), staged.detach()


class CpuCopier(RowCopier):
    """Copies within host memory; each call returns when its copy has ended.

    Thread: any, several at once: it keeps nothing.
    """

    @override
    def staging(self, num_bytes: int) -> Staging:
        """New staging memory; what is in it is anything.

        Raises:
            ContractError: `num_bytes` is less than 1.

        Owns: the caller; it is free when nothing refers to it.
        """
        return new_staging(num_bytes, pinned=False)

    @override
    def gather(self, region: ByteRegion, out: torch.Tensor) -> Fence:
        """Copy rows out of the pool.

        Args:
            region: What to read.
            out: Staging. Shape: (num_pages * row bytes,) uint8.

        Raises:
            ContractError: `out` does not fit, or a row is outside the pool.

        Cost: one indexed copy, no loop over pages.
        """
        return self.gather_rows(region, rows_of(region, out))

    @override
    def scatter(self, region: ByteRegion, source: torch.Tensor) -> Fence:
        """Copy rows into the pool.

        Args:
            region: What to write; its rows are distinct.
            source: Staging. Shape: (num_pages * row bytes,) uint8.

        Raises:
            ContractError: `source` does not fit; nothing is copied then. Or a row is outside the
                pool; those named before it are copied then.

        Cost: one indexed copy, no loop over pages.
        """
        return self.scatter_rows(region, rows_of(region, source))

    @override
    def gather_rows(self, region: ByteRegion, out: torch.Tensor) -> Fence:
        """Copy rows out of the pool, to rows that need not lie side by side.

        Args:
            region: What to read.
            out: Host memory. Shape: (num_pages, row bytes) uint8.

        Raises:
            ContractError: `out` does not fit, or a row is outside the pool.

        Cost: as for `gather`.
        """
        rows, staged = widened(region, out)
        try:
            torch.index_select(rows, 0, region.index, out=staged)
        except (IndexError, RuntimeError) as exc:
            if _names_rows(region):
                raise
            raise ContractError(_bad_index(region)) from exc
        return _COMPLETED

    @override
    def scatter_rows(self, region: ByteRegion, source: torch.Tensor) -> Fence:
        """Copy rows into the pool, from rows that need not lie side by side.

        Args:
            region: What to write; its rows are distinct.
            source: Host memory. Shape: (num_pages, row bytes) uint8.

        Raises:
            ContractError: `source` does not fit; nothing is copied then. Or a row is outside the
                pool; those named before it are copied then.

        Cost: as for `scatter`.
        """
        rows, staged = widened(region, source)
        try:
            rows.index_copy_(0, region.index, staged)
        except (IndexError, RuntimeError) as exc:
            if _names_rows(region):
                raise
            raise ContractError(_bad_index(region)) from exc
        return _COMPLETED


def _names_rows(region: ByteRegion) -> bool:
    """True when its index is a list of rows, so that an error of torch is no fault of it."""
    index = region.index
    outside = (index < 0) | (index >= len(region.rows))
    return index.dtype is torch.int64 and not outside.any()


def _bad_index(region: ByteRegion) -> str:
    """Say what was wrong with a region that torch refused."""
    index = region.index
    named = f"from {index.min().item()} to {index.max().item()}" if index.numel() else "of none"
    return (
        f"copier: expected (num_pages,) int64 rows in 0..{len(region.rows) - 1}, "
        f"got {tuple(index.shape)} {index.dtype} {named}"
    )
