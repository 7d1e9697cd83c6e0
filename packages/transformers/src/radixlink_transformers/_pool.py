"""`PagedKVPool`: the device pages of one rank, and the way in and out of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from radixlink_contracts import PoolName
from radixlink_contracts.errors import ContractError
from radixlink_pools import DevicePoolEntry, byte_rows

if TYPE_CHECKING:
    from radixlink_contracts import DevicePool
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
    is the row a store keeps. `write` and `read_prefix` are the only ways of a forward to it.

    Thread: the scheduler's; a transfer touches other pages meanwhile.
    """

    def __init__(self, geometry: KVGeometry, num_pages: int, device: torch.device) -> None:
        """Allocate the pages, all NaN.

        Args:
            geometry: What a page is.
            num_pages: How many there are.
            device: Where.

        Raises:
            ContractError: No page is asked for.
        """
        if num_pages < 1:
            raise ContractError(f"PagedKVPool: expected at least 1 page, got {num_pages}")
        self._geometry = geometry
        self._num_pages = num_pages
        shape = (num_pages, *geometry.page_shape)
        self._layers = tuple(
            torch.full(shape, torch.nan, dtype=geometry.dtype, device=device)
            for _ in range(geometry.num_layers)
        )
        #: The same memory as (k|v, head, page, token, element): a run of pages is one index away.
        self._by_head = tuple(layer.permute(1, 2, 0, 3, 4) for layer in self._layers)
        self._device_pool = DevicePoolEntry(
            name=PoolName.KV,
            rows=tuple(byte_rows(layer) for layer in self._layers),
            page_size=geometry.page_size,
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
    def device_pool(self) -> DevicePool:
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

    def read_prefix(self, page_rows: torch.Tensor) -> tuple[LayerKV, ...]:
        """Copies of the pages, strung together, for each layer.

        Args:
            page_rows: Shape: (n,) int64; n may be 0.

        Returns:
            Keys and values of n * page_size tokens, in layer order.

        Cost: one strided copy for each layer, no loop over pages.
        """
        result: list[LayerKV] = []
        for layer in self._by_head:
            pages = layer.index_select(2, page_rows)
            # Contiguous, so joining page and token is a view.
            keys_and_values = pages.flatten(2, 3).unsqueeze(1)
            result.append(LayerKV(keys=keys_and_values[0], values=keys_and_values[1]))
        return tuple(result)

    def write(
        self, page_rows: torch.Tensor, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """The pages hold these tokens in that layer.

        Args:
            page_rows: Shape: (n,) int64, each page once.
            layer: Index of the layer.
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
        for layer in self._layers:
            layer.index_fill_(0, page_rows, torch.nan)
