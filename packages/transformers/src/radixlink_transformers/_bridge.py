"""Between the pages of a pool and the cache object of a forward.

The layers of a pool may be restored at once, or announced first and filled one by one: a forward
asks for lengths before its first layer runs, and for the bytes of a layer when that runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from radixlink_contracts.errors import ContractError
from radixlink_transformers._hugging_face import kv_layer, window_layer

if TYPE_CHECKING:
    from radixlink_transformers._hugging_face import KVCache
    from radixlink_transformers._pool import PagedKVPool


def restore_prefix(
    cache: KVCache, pool: PagedKVPool, page_rows: torch.Tensor, num_tokens: int | None = None
) -> None:
    """The pool's layers of the empty `cache` are as if a forward had just computed these pages.

    Layers with a window keep from now on what leaves it too, for `save_pages`.

    Args:
        cache: New, of the pool's model.
        pool: Where the pages are.
        page_rows: The last pages of the prefix: all of them, or, of layers with a window, those
            that are still seen behind it. Shape: (n,) int64; n may be 0.
        num_tokens: Tokens of the prefix. None: as many as these pages have.

    Raises:
        ContractError: The cache is of another model or holds tokens already, or there are not just
            the pages that are seen.
    """
    total = len(page_rows) * pool.geometry.page_size if num_tokens is None else num_tokens
    announce_prefix(cache, pool, total)
    for layer in pool.geometry.layers:
        fill_layer(cache, pool, layer, page_rows, total)


def announce_prefix(cache: KVCache, pool: PagedKVPool, num_tokens: int) -> None:
    """The pool's layers of the empty `cache` say that they hold a prefix; its bytes are NaN so far.

    Args:
        cache: New, of the pool's model.
        pool: Of these layers.
        num_tokens: Tokens of the prefix; may be 0.

    Raises:
        ContractError: The cache is of another model, or holds tokens already.
    """
    geometry = pool.geometry
    if geometry.layers[-1] >= len(cache.layers):
        raise ContractError(
            f"expected a cache of the pool's layers {geometry.layers}, got {len(cache.layers)}"
        )
    if any(kv_layer(cache, index).is_initialized for index in geometry.layers):
        raise ContractError("restore_prefix: expected an empty cache, got one that holds tokens")
    nothing = torch.full((1, 1, 1, 1), torch.nan, dtype=geometry.dtype, device=pool.device)
    held = geometry.held_of(num_tokens)
    for index in geometry.layers:
        if geometry.sliding_window:
            window = window_layer(cache, index)
            window.activate_past_recording()
            window.cumulative_length = num_tokens
        if held:
            layer = kv_layer(cache, index)
            layer.lazy_initialization(nothing, nothing)
            # A layer has no other length: it holds as many tokens as its tensors do.
            layer.keys = layer.values = nothing.expand(
                1, geometry.num_kv_heads, held, geometry.head_dim
            )


def fill_layer(
    cache: KVCache, pool: PagedKVPool, layer: int, page_rows: torch.Tensor, num_tokens: int
) -> None:
    """One layer of an announced prefix holds its bytes.

    Args:
        cache: After `announce_prefix`.
        pool: Where the pages are.
        layer: Index of the layer in the model.
        page_rows: As of `restore_prefix`.
        num_tokens: As it was announced.

    Raises:
        ContractError: There are not just the pages that are seen.

    Cost: one strided copy.
    """
    geometry = pool.geometry
    if len(page_rows) != geometry.pages_of(num_tokens):
        raise ContractError(
            f"expected {geometry.pages_of(num_tokens)} pages before token {num_tokens} in layer "
            f"{layer}, got {len(page_rows)}"
        )
    held = geometry.held_of(num_tokens)
    if held:
        states = pool.read(layer, page_rows)
        into = kv_layer(cache, layer)
        into.keys, into.values = states.keys[:, :, -held:], states.values[:, :, -held:]


def save_pages(cache: KVCache, pool: PagedKVPool, page_rows: torch.Tensor, start: int) -> None:
    """The pages hold the tokens of `cache` from `start` on.

    Args:
        cache: After the forwards that computed them.
        pool: Where the pages are.
        page_rows: Pages to write. Shape: (n,) int64; n may be 0.
        start: First token.

    Raises:
        ContractError: The cache is of another model, does not hold these tokens, or its heads are
            not what the pool was made for.
    """
    geometry = pool.geometry
    if geometry.layers[-1] >= len(cache.layers):
        raise ContractError(
            f"expected a cache of the pool's layers {geometry.layers}, got {len(cache.layers)}"
        )
    if not len(page_rows):
        return
    for index in geometry.layers:
        layer = kv_layer(cache, index)
        first = 0
        if geometry.sliding_window:
            first = window_layer(cache, index).cumulative_length - layer.keys.shape[2]
        if start < first:
            raise ContractError(
                f"save_pages: expected tokens from {start} on in layer {index}, got a window that "
                f"begins at {first}"
            )
        end = start + len(page_rows) * geometry.page_size
        tokens = slice(start - first, end - first)
        pool.write(page_rows, index, layer.keys[:, :, tokens], layer.values[:, :, tokens])
