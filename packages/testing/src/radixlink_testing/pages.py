"""Pages whose bytes are a function of their key, so that wrong bytes are seen anywhere."""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING

from radixlink_contracts import PageKeys

if TYPE_CHECKING:
    from collections.abc import Iterable

    from radixlink_contracts import PoolLayout


def page_key(page: int, series: str = "") -> bytes:
    """The key of a numbered page of a series: a SHA-256 digest, as real keys are."""
    return hashlib.sha256(f"{series}/{page}".encode()).digest()


def page_keys(pages: Iterable[int], series: str = "") -> PageKeys:
    """The keys of numbered pages."""
    return PageKeys.join(page_key(page, series) for page in pages)


@functools.lru_cache(maxsize=1 << 16)
def range_bytes(key: bytes, layer_range: int, size: int, variant: str = "") -> bytes:
    """What a page has in one layer range.

    Args:
        key: The page.
        layer_range: Which range.
        size: Its length in bytes.
        variant: Another one gives other bytes for the same key, which a real page never has.
    """
    seed = key + layer_range.to_bytes(4, "little") + variant.encode()
    return hashlib.shake_128(seed).digest(size)


def page_column(keys: PageKeys, layout: PoolLayout, layer_range: int, variant: str = "") -> bytes:
    """One layer range of pages. Shape: (num_pages, range_bytes[layer_range]) bytes."""
    size = layout.range_bytes[layer_range]
    return b"".join(range_bytes(key, layer_range, size, variant) for key in keys)


def page_parts(keys: PageKeys, layout: PoolLayout, variant: str = "") -> list[bytes]:
    """Pages as `PageStore.put` takes them: one buffer for each layer range."""
    return [
        page_column(keys, layout, layer_range, variant)
        for layer_range in range(len(layout.range_bytes))
    ]
