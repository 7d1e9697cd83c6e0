"""What a store's calls are given and give back, in the store's own terms: rows, distinct keys, handles."""

from __future__ import annotations

import os
from array import array
from typing import TYPE_CHECKING

import numpy as np

from radixlink_contracts import PageBits, PageHandles
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from typing_extensions import Buffer

    from radixlink_contracts import PageKeys
    from radixlink_store_mooncake._object import Header
    from radixlink_store_mooncake._staging import Bytes


def check_ttl(ttl_s: float) -> None:
    """Refuse what is no time.

    Raises:
        ContractError: It is not a number of at least 0.
    """
    if not ttl_s >= 0:
        raise ContractError(f"Mooncake store: expected a ttl_s of at least 0, got {ttl_s}")


def new_generations(count: int) -> array[int]:
    """Some that no other write has."""
    return array("Q", os.urandom(8 * count))


def handles_of(keys: PageKeys, headers: Iterable[tuple[int, Header]]) -> PageHandles:
    """Handles of pages, of which these were found."""
    count = len(keys)
    generations, writers = array("Q", bytes(8 * count)), array("Q", bytes(8 * count))
    found = 0
    for page, header in headers:
        found |= 1 << page
        generations[page] = header.generation
        writers[page] = header.writer
    return PageHandles(
        keys=keys,
        found=PageBits(found, count),
        slots=array("Q", bytes(8 * count)),
        generations=generations,
        writers=writers,
    )


def distinct(keys: PageKeys) -> tuple[dict[bytes, int], list[int]]:
    """The first place of each key, which is the one that counts, and these places in order."""
    first = {key: page for page, key in reversed(list(enumerate(keys)))}
    return first, sorted(first.values())


def with_copies(keys: PageKeys, first: Mapping[bytes, int], stored: set[int]) -> PageBits:
    """The pages whose key's first place was stored."""
    there = (page for page, key in enumerate(keys) if first[key] in stored)
    return PageBits.of(there, len(keys))


def rows_of(buffer: Buffer, count: int, size: int, *, what: str, writable: bool) -> Bytes:
    """A buffer as one row of bytes for each page. Shape: (count, size).

    Raises:
        ContractError: It is of another size, not contiguous, or cannot be written.
    """
    view = memoryview(buffer)
    if view.nbytes != count * size or not view.c_contiguous or (writable and view.readonly):
        raise ContractError(
            f"Mooncake store: expected {what} as {count} pages x {size} contiguous"
            f"{' writable' if writable else ''} bytes, got {view.nbytes} bytes, "
            f"contiguous={view.c_contiguous}, readonly={view.readonly}"
        )
    if not count:
        return np.empty((0, size), np.uint8)
    return np.frombuffer(view, np.uint8).reshape(count, size)
