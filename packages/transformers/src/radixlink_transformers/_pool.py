"""`PagedKVPool`: the device pages of one rank, and the way in and out of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from radixlink_contracts import PoolName
from radixlink_contracts.errors import ContractError
from radixlink_pools import DevicePoolEntry, byte_rows

if TYPE_CHECKING:
    from radixlink_transformers._geometry import KVGeometry


@attrs.frozen(kw_only=True, eq=False)
class LayerKV:
    """Keys and values of some tokens in one layer, as a model takes them.

    Attributes:
        keys: Shape: (1, KV heads, tokens, head dim).
        values: Shape: as `keys`.
    """

    keys: torch.Tensor
    values: torch.Tensor


class PagedKVPool:
    """For each layer one tensor of pages. A page never written is NaN, so that reading it shows.

    A page's bytes of one layer lie together: keys, then values, each head's tokens in order. That
    is the row a store keeps. `write` and `read` are the only ways of a forward to it.

    Thread: the scheduler's; a transfer touches other pages meanwhile.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        num_pages: int,
        device: torch.device,
        name: PoolName = PoolName.KV,
    ) -> None:
        """Allocate the pages, all NaN.

        Args:
            geometry: What a page is.
            num_pages: How many there are.
            device: Where.
            name: Under which name transfers know it.

        Raises:
            ContractError: No page is asked for.
        """
        if num_pages < 1:
            raise ContractError(f"PagedKVPool: expected at least 1 page, got {num_pages}")
        self._geometry = geometry
        self._num_pages = num_pages
        self._device = device
        shape = (num_pages, *geometry.page_shape)
        #: By the layer's index in the model.
        self._layers = {
            layer: torch.full(shape, torch.nan, dtype=geometry.dtype, device=device)
            for layer in geometry.layers
        }
        #: The same memory as (k|v, head, page, token, element): a run of pages is one index away.
        self._by_head = {
            layer: pages.permute(1, 2, 0, 3, 4) for layer, pages in self._layers.items()
        }
        self._device_pool = DevicePoolEntry(
            name=name,
            rows=tuple(byte_rows(pages) for pages in self._layers.values()),
            page_size=geometry.page_size,
            layers=geometry.layers,
        )

    @property
    def geometry(self) -> KVGeometry:
        """What a page is."""
        return self._geometry

    @property
    def num_pages(self) -> int:
        """How many pages there are."""
        return self._num_pages

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._device

    @property
    def device_pool(self) -> DevicePoolEntry:
        """The same pages, as a transfer sees them."""
        return self._device_pool

    def rows_of(self, indices: torch.Tensor) -> torch.Tensor:
        """The pages of slots.

        Args:
            indices: Slots of whole pages. Shape: (num_pages * page_size,) int64.

        Returns:
            Shape: (num_pages,) int64, in the slots' order.
        """
        return indices[:: self._geometry.page_size] // self._geometry.page_size

    def read(self, layer: int, page_rows: torch.Tensor) -> LayerKV:
        """Copies of the pages, strung together, in one layer.

        Args:
            layer: Index of the layer in the model.
            page_rows: Shape: (n,) int64; n may be 0.

        Returns:
            Keys and values of n * page_size tokens.

        Cost: one strided copy, no loop over pages.
        """
        pages = self._by_head[layer].index_select(2, page_rows)
        # Contiguous, so joining page and token is a view.
        keys_and_values = pages.flatten(2, 3).unsqueeze(1)
        return LayerKV(keys=keys_and_values[0], values=keys_and_values[1])

    def write(
        self, page_rows: torch.Tensor, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """The pages hold these tokens in that layer.

        Args:
            page_rows: Shape: (n,) int64, each page once.
            layer: Index of the layer in the model.
            keys: Shape: (1, KV heads, n * page_size, head dim).
            values: Shape: as `keys`.

        Raises:
            ContractError: They are of another shape: the model keeps its KV otherwise than its
                configuration says, for example not spread over the ranks.

        Cost: one strided copy for keys and one for values.
        """
        geometry = self._geometry
        num_tokens = len(page_rows) * geometry.page_size
        expected = (1, geometry.num_kv_heads, num_tokens, geometry.head_dim)
        for states in (keys, values):
            if tuple(states.shape) != expected:
                raise ContractError(
                    f"PagedKVPool.write: expected shape {expected} in layer {layer}, "
                    f"got {tuple(states.shape)}"
                )
        heads, tokens, elements = geometry.num_kv_heads, geometry.page_size, geometry.head_dim
        for half, states in enumerate((keys, values)):
            pages = states.view(heads, len(page_rows), tokens, elements)
            self._by_head[layer][half].index_copy_(1, page_rows, pages)

    def poison(self, page_rows: torch.Tensor) -> None:
        """The pages are NaN again, as new: whoever reads them by mistake will see it."""
        for pages in self._layers.values():
            pages.index_fill_(0, page_rows, torch.nan)
