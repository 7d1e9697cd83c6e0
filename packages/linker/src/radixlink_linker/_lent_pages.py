"""`LentPages`: pages in memory that a store lends, between that store and a copier that takes rows."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import attrs
import torch

from radixlink_contracts import LendingStore, RowCopier
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from radixlink_contracts import (
        ByteRegion,
        Copier,
        Fence,
        LentFrames,
        PageBits,
        PageHandles,
        PageKeys,
        PageStore,
    )


def max_lent(store: PageStore, copier: Copier) -> int | None:
    """The most pages that the store lends memory for at once; None where it or the copier cannot."""
    if isinstance(copier, RowCopier) and isinstance(store, LendingStore):
        return store.frames.max_pages
    return None


@attrs.frozen(kw_only=True, eq=False)
class LentPages:
    """A loan for one put or one load.

    Attributes:
        store: Whose memory it is.
        copier: Between the device and it.
        lent: The loan.
        frames: The same memory. Shape: (num_pages, frame_bytes) uint8.
    """

    store: LendingStore
    copier: RowCopier
    lent: LentFrames
    frames: torch.Tensor

    @classmethod
    def borrow(cls, store: PageStore, copier: Copier, num_pages: int) -> LentPages | None:
        """Memory for some pages; None where there is none to be had.

        Raises:
            ContractError: What is lent is no frame for each page; it is given back.

        Owns: the caller releases it.
        """
        if not (isinstance(copier, RowCopier) and isinstance(store, LendingStore)):
            return None
        lent = store.lend(num_pages)
        if lent is None:
            return None
        with ExitStack() as unless_borrowed:
            unless_borrowed.callback(lent.release)
            frame_bytes = store.frames.frame_bytes
            flat = torch.frombuffer(lent.buffer, dtype=torch.uint8)
            if len(flat) != num_pages * frame_bytes:
                # Frames of another size would put each page where the store has none.
                msg = (
                    f"lend: expected {num_pages} frames of {frame_bytes} bytes for pages of "
                    f"{store.layout.pool}, got {len(flat)} bytes"
                )
                raise ContractError(msg)
            frames = flat.view(num_pages, frame_bytes)
            unless_borrowed.pop_all()
        return cls(store=store, copier=copier, lent=lent, frames=frames)

    def open(self, keys: PageKeys, lease_s: float) -> PageHandles:
        """Have the pages fetched."""
        return self.store.open_lent(keys, lease_s, self.lent)

    def verify(self, handles: PageHandles, layer_range: int) -> PageBits:
        """Which pages have that range right."""
        return self.store.verify(handles, layer_range, self.lent)

    def put(self, keys: PageKeys) -> PageBits:
        """Store the pages: which of them are there."""
        return self.store.put_lent(keys, self.lent)

    def gather(self, region: ByteRegion, layer_range: int) -> Fence:
        """Start copying one range of the pages out of the device."""
        return self.copier.gather_rows(region, self._rows(region, layer_range))

    def scatter(self, region: ByteRegion, layer_range: int) -> Fence:
        """Start copying one range of the pages into the device."""
        return self.copier.scatter_rows(region, self._rows(region, layer_range))

    def release(self) -> None:
        """Give the memory back. No copy of it runs. Idempotent."""
        self.lent.release()

    def _rows(self, region: ByteRegion, layer_range: int) -> torch.Tensor:
        """One range of all pages. Shape: (num_pages, row bytes)."""
        start = self.store.frames.range_offsets[layer_range]
        return self.frames[:, start : start + region.rows.shape[1]]
