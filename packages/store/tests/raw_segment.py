"""Reaches into a segment behind its store's back: what a `StorePlace` on one needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radixlink_store._state import emptied

if TYPE_CHECKING:
    from radixlink_store._layout import Geometry


class RawSegment:
    """The bytes of a segment and where everything is in them.

    Nothing here knows what a store does with them; the offsets are those of `_layout`.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], geometry: Geometry) -> None:
        self._memory = memory
        self._geometry = geometry

    def corrupt(self, key: bytes, layer_range: int) -> None:
        """Flip a bit of a page that is there."""
        geometry = self._geometry
        payload = geometry.payload_offset + self._slot_of(key) * geometry.slot_bytes
        self._memory[payload + geometry.range_offsets[layer_range]] ^= 1

    def drop(self, key: bytes) -> None:
        """Empty the slot of a page that is there."""
        geometry = self._geometry
        states = self._memory[geometry.states_offset :][: 8 * geometry.num_slots].view(np.uint64)
        slot = self._slot_of(key)
        states[slot] = emptied(int(states[slot]))

    def clear(self) -> None:
        """Empty all slots, while nobody has the segment open."""
        geometry = self._geometry
        states = self._memory[geometry.states_offset :][: 8 * geometry.num_slots].view(np.uint64)
        states[:] = [emptied(word) for word in states.tolist()]
        self._memory[geometry.recency_offset : geometry.headers_offset] = 0

    def pass_time(self, seconds: int) -> None:
        """Make all pages older."""
        geometry = self._geometry
        stamps = self._memory[geometry.recency_offset :][: 4 * geometry.num_slots].view(np.uint32)
        stamps[:] = np.maximum(stamps, seconds) - seconds

    def _slot_of(self, key: bytes) -> int:
        geometry = self._geometry
        header = self._memory.tobytes().index(key, geometry.headers_offset, geometry.payload_offset)
        return (header - geometry.headers_offset) // (8 * geometry.header_words)
