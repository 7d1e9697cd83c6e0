"""An engine's tensors as rows of bytes, without a copy.

An engine keeps its pools typed and shaped as its kernels want them. What a store moves is one row
of bytes for each page and layer range.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Sequence


def byte_rows(tensor: torch.Tensor, rows_per_page: int = 1) -> torch.Tensor:
    """The same memory as one row of bytes for each page.

    Args:
        tensor: One layer range of a pool, any dtype. Shape: (num_pages * rows_per_page, ...), each
            row contiguous. There may be gaps between rows (one layer of a pool that keeps all
            layers of a page together), but not within a page.
        rows_per_page: Rows of the tensor that make a page: the page size where a row holds a token.

    Returns:
        Shape: (num_pages, bytes of a page) uint8.

    Raises:
        ContractError: The tensor is empty, or there are no such rows without a copy, or it shows no
            memory at all (sparse, or on the meta device), or other values than are there (a view
            that is conjugate or negative).
    """
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        msg = (
            "byte_rows: expected a tensor that shows its memory, "
            f"got a hidden one: {tensor.layout} on {tensor.device}"
        )
        raise ContractError(msg)
    if tensor.is_conj() or tensor.is_neg():
        view = "conjugate" if tensor.is_conj() else "negative"
        msg = (
            "byte_rows: expected a tensor that shows its memory, "
            f"got a hidden one: a {view} view of other values"
        )
        raise ContractError(msg)
    if not tensor.ndim or not tensor.numel() or not _has_rows(tensor, rows_per_page):
        msg = (
            "byte_rows: expected a contiguous tensor of at least one page, "
            f"got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        )
        raise ContractError(msg)
    if rows_per_page < 1 or len(tensor) % rows_per_page:
        msg = (
            "byte_rows: expected whole pages, at least 1 row each, "
            f"got {len(tensor)} rows, {rows_per_page} for each page"
        )
        raise ContractError(msg)
    shape = (len(tensor) // rows_per_page, tensor[0].numel() * rows_per_page)
    # `view` would do but for rows of one element, which keep whatever stride their axis had.
    by_page = tensor.detach().as_strided(shape, (tensor.stride(0) * rows_per_page, 1))
    return by_page.view(torch.uint8)


def _has_rows(tensor: torch.Tensor, rows_per_page: int) -> bool:
    """True when a page of the tensor is one run of memory and shares none with another page."""
    if rows_per_page > 1:
        return tensor.is_contiguous()
    row = tensor[0]
    apart = len(tensor) == 1 or tensor.stride(0) >= row.numel()
    return apart and row.is_contiguous()


@attrs.frozen(kw_only=True, eq=False)
class LayerBuffers:
    """The tensors of one pool, as an engine has them.

    Attributes:
        groups: One tensor for each layer of the pool, in one group for each kind of bytes, for
            example (keys of each layer, values of each layer). They may differ in width and dtype.
            Shape of each: (rows, ...), every one with equally many rows.
        layers: Which layer of the model each tensor of a group belongs to, the same for each group;
            a layer may have several. None: tensor i is of layer i.
        rows_are_pages: A row holds a page or a state; otherwise a token.
    """

    groups: Sequence[Sequence[torch.Tensor]]
    layers: Sequence[int] | None = None
    rows_are_pages: bool = False

    def __attrs_post_init__(self) -> None:
        """Refuse tensors of which it is not known which layer's they are."""
        lengths = [len(group) for group in self.groups]
        if not lengths or 0 in lengths:
            msg = f"LayerBuffers: expected groups of tensors, got no storage buffers: {lengths}"
            raise ContractError(msg)
        expected = lengths[0] if self.layers is None else len(self.layers)
        if set(lengths) != {expected}:
            msg = f"LayerBuffers: expected {expected} tensors in each group, got {lengths}"
            raise ContractError(msg)

    @property
    def layer_of(self) -> tuple[int, ...]:
        """The layer of each tensor of a group."""
        return tuple(range(len(self.groups[0])) if self.layers is None else self.layers)

    def rows(self, page_size: int) -> tuple[torch.Tensor, ...]:
        """Each tensor as rows of bytes, group after group.

        Args:
            page_size: Slots of a page.

        Returns:
            Shape of each: (num_pages, bytes of a page) uint8.

        Raises:
            ContractError: One has no such rows; see `byte_rows`.
        """
        rows_per_page = 1 if self.rows_are_pages else page_size
        return tuple(byte_rows(tensor, rows_per_page) for group in self.groups for tensor in group)
