"""Reaches into a segment behind its store's back: what a `StorePlace` on one needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radixlink_store._ages import SECONDS_SHIFT
from radixlink_store._layout import KEY_WORDS
from radixlink_store._state import STATE_MASK, SlotState, emptied

if TYPE_CHECKING:
    from radixlink_store._layout import Geometry


class RawSegment:
    """The bytes of a segment and where everything is in them.

    Nothing here knows what a store does with them; the offsets are those of `_layout`.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], geometry: Geometry) -> None:
        self._memory = memory
        self._geometry = geometry
        states = memory[geometry.states_offset :][: 8 * geometry.num_slots]
        self._states: npt.NDArray[np.uint64] = states.view(np.uint64)

    def corrupt(self, key: bytes, layer_range: int) -> None:
        """Flip a bit of a page that is there."""
        geometry = self._geometry
        payload = geometry.payload_offset + self._slot_of(key) * geometry.slot_bytes
        self._memory[payload + geometry.range_offsets[layer_range]] ^= 1

    def drop(self, key: bytes) -> None:
        """Empty the slot of a page that is there."""
        slot = self._slot_of(key)
        self._memory[self._geometry.tags_offset + slot] = 0
        self._states[slot] = emptied(int(self._states[slot]))

    def clear(self) -> None:
        """Empty all slots, while nobody has the segment open."""
        geometry = self._geometry
        self._memory[geometry.tags_offset : geometry.states_offset] = 0
        self._states[:] = [emptied(word) for word in self._states.tolist()]
        self._memory[geometry.ages_offset : geometry.headers_offset] = 0

    def pass_time(self, seconds: int) -> None:
        """Make all pages older."""
        geometry = self._geometry
        ages = self._memory[geometry.ages_offset :][: 8 * geometry.num_slots].view(np.uint64)
        passed = np.uint64(seconds << SECONDS_SHIFT)
        ages[:] = np.maximum(ages, passed) - passed

    def _slot_of(self, key: bytes) -> int:
        """The slot that is ready and has the page; slots that had it once keep its header."""
        geometry = self._geometry
        words = self._memory[geometry.headers_offset : geometry.payload_offset].view(np.uint64)
        headers = words[: geometry.num_slots * geometry.header_words]
        keys = headers.reshape(geometry.num_slots, geometry.header_words)[:, :KEY_WORDS]
        ready = self._states & np.uint64(STATE_MASK) == np.uint64(SlotState.READY)
        same = (keys == np.frombuffer(key, np.uint64)).all(axis=1)
        (slot,) = np.flatnonzero(ready & same)
        return int(slot)
