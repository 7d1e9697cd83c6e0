"""Some pages of a call: their keys, their rows, and what is said of them in terms of the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixlink_contracts import PAGE_KEY_BYTES, PageBits, PageKeys

if TYPE_CHECKING:
    from collections.abc import Mapping


def without(keys: PageKeys, bits: PageBits) -> PageBits:
    """Which pages of a call are not among some."""
    return PageBits(PageBits.all(len(keys)).mask & ~bits.mask, len(keys))


def keys_of(keys: PageKeys, pages: PageBits) -> PageKeys:
    """The keys of some pages, in their order."""
    if pages.complete:
        return keys
    return PageKeys(_rows_of(memoryview(keys.data), PAGE_KEY_BYTES, pages))


def rows_of(data: memoryview, row_bytes: int, pages: PageBits) -> memoryview:
    """The rows of some pages, one after the other; a view where they are that already.

    Args:
        data: A row for each page, as bytes in one dimension.
        row_bytes: Bytes of a row.
        pages: Which.
    """
    if pages.complete:
        return data
    first = (pages.mask & -pages.mask).bit_length() - 1
    if pages.mask == (1 << pages.total) - 1 << max(first, 0):
        return data[max(first, 0) * row_bytes :][: pages.total * row_bytes]
    return memoryview(_rows_of(data, row_bytes, pages))


def spread(pages: PageBits, bits: PageBits) -> PageBits:
    """What is said of some pages, in the terms of the call that they are of.

    Args:
        pages: Which pages of the call.
        bits: Of the i-th of them, bit i.
    """
    if pages.complete:
        return bits
    places = list(pages)
    return PageBits(sum(1 << places[row] for row in bits), pages.count)


def assign(wanted: int, holders: Mapping[int, int], first: int) -> dict[int, int]:
    """Which node to ask for which pages: each for those that none before it has.

    Args:
        wanted: A bit for each page to fetch.
        holders: The pages of each node.
        first: The nodes are gone through from the first one above this on, so that not all ask the
            same one.

    Returns:
        A bit for each page, for each node that is to be asked.
    """
    order = sorted(holders, key=lambda node: (node <= first, node))
    assigned: dict[int, int] = {}
    for node in order:
        mine = wanted & holders[node]
        if mine:
            assigned[node] = mine
            wanted &= ~mine
    return assigned


def _rows_of(data: memoryview, row_bytes: int, pages: PageBits) -> bytes:
    return b"".join(data[page * row_bytes : (page + 1) * row_bytes] for page in pages)
