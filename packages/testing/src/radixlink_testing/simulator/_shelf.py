"""`Shelf`: one rank's shard of the store: what a page store does, and what may befall it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import PoolName


@attrs.define(kw_only=True, eq=False)
class _Stored:
    """A page in the store.

    Attributes:
        layers: Its bytes, by layer range.
        sums: Their checksums, as they were written.
    """

    layers: list[bytes]
    sums: tuple[int, ...]


class Shelf:
    """Pages of all pools, by pool and key.

    Thread: any; one at a time.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._pages: dict[tuple[PoolName, bytes], _Stored] = {}
        #: Puts that find no room.
        self.full = 0

    def found(self, pool: PoolName, keys: Sequence[bytes]) -> list[bool]:
        """Which of these pages of a pool are here."""
        return [(pool, key) in self._pages for key in keys]

    def read(self, pool: PoolName, key: bytes, layer: int, *, verify: bool = True) -> bytes | None:
        """One layer range of a page; None where it is gone, or is not what was written."""
        stored = self._pages.get((pool, key))
        if stored is None:
            return None
        data = stored.layers[layer]
        return None if verify and crc32(data) != stored.sums[layer] else data

    def put(self, pool: PoolName, key: bytes, layers: Sequence[bytes]) -> bool:
        """Store a page; False where there is no room."""
        if self.full:
            self.full -= 1
            return False
        self._pages[pool, key] = _Stored(layers=list(layers), sums=tuple(map(crc32, layers)))
        return True

    def lose(self, which: int) -> bool:
        """Some page, window or state is gone. False where there is none."""
        if not self._pages:
            return False
        del self._pages[self._pick(which)]
        return True

    def flip(self, which: int) -> bool:
        """A bit of some page has changed. False where there is none."""
        if not self._pages:
            return False
        layers = self._pages[self._pick(which)].layers
        layer = which % len(layers)
        layers[layer] = bytes((layers[layer][0] ^ 0x80,)) + layers[layer][1:]
        return True

    def _pick(self, which: int) -> tuple[PoolName, bytes]:
        return list(self._pages)[which % len(self._pages)]
