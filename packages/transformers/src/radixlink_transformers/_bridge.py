"""Between the pages of a pool and the cache object of a forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    import torch

    from radixlink_transformers._hugging_face import KVCache
    from radixlink_transformers._pool import PagedKVPool


def restore_prefix(cache: KVCache, pool: PagedKVPool, page_rows: torch.Tensor) -> None:
    """The empty `cache` holds copies of these pages, as if a forward had just computed them.

    Args:
        cache: New, of the pool's model.
        pool: Where the pages are.
        page_rows: The sequence's pages from its first on. Shape: (n,) int64; n may be 0.

    Raises:
        ContractError: The cache is of another model, or holds tokens already.
    """
    _require_same_layers(cache, pool)
    if any(layer.is_initialized for layer in cache.layers):
        raise ContractError("restore_prefix: expected an empty cache, got one that holds tokens")
    if not len(page_rows):
        return
    for layer, states in zip(cache.layers, pool.read_prefix(page_rows), strict=True):
        layer.lazy_initialization(states.keys, states.values)
        # A layer has no length of its own: it holds as many tokens as its tensors do.
        layer.keys = states.keys
        layer.values = states.values


def save_pages(cache: KVCache, pool: PagedKVPool, page_rows: torch.Tensor, start: int) -> None:
    """The pages hold the tokens of `cache` from `start` on.

    Args:
        cache: After the forwards that computed them.
        pool: Where the pages are.
        page_rows: Pages to write. Shape: (n,) int64; n may be 0.
        start: First token.

    Raises:
        ContractError: The cache is of another model, holds fewer tokens, or its heads are not
            what the pool was made for.
    """
    _require_same_layers(cache, pool)
    if not len(page_rows):
        return
    tokens = slice(start, start + len(page_rows) * pool.geometry.page_size)
    for index, layer in enumerate(cache.layers):
        pool.write(page_rows, index, layer.keys[:, :, tokens], layer.values[:, :, tokens])


def _require_same_layers(cache: KVCache, pool: PagedKVPool) -> None:
    if len(cache.layers) != pool.geometry.num_layers:
        raise ContractError(
            f"expected a cache of the pool's {pool.geometry.num_layers} layers, "
            f"got {len(cache.layers)}"
        )
