"""`StateSlotAllocator`: deals out recurrent-state slots, one at a time.

A list of free slots and a byte for each: a state is taken or given back once in a request, so
plain Python is as fast as it need be, and no tensor is made for one number. What was given back
last goes out first.
"""

from __future__ import annotations

from typing import Final

from typing_extensions import override

from radixlink_contracts import StateAllocator
from radixlink_contracts.errors import ContractError


class StateSlotAllocator(StateAllocator):
    """Deals out the slots of one state pool.

    Ranks: all, the same calls in the same order; the answers are then the same.
    Thread: the scheduler's.
    """

    def __init__(self, num_slots: int, first_slot: int = 0) -> None:
        """Start with every slot free.

        Args:
            num_slots: Slots to deal out.
            first_slot: The first one; those before it are the engine's own (padding, for example).

        Raises:
            ContractError: A number is out of range.
        """
        if num_slots < 1 or first_slot < 0:
            msg = (
                "StateSlotAllocator: expected num_slots >= 1 and first_slot >= 0, "
                f"got {num_slots} and {first_slot}"
            )
            raise ContractError(msg)
        self._num_slots: Final = num_slots
        self._first_slot: Final = first_slot
        #: The free slots; the next to give last.
        self._free: Final[list[int]] = []
        #: 1 for each slot in use, by its distance from the first.
        self._in_use: Final = bytearray(num_slots)
        self.clear()

    @property
    @override
    def size(self) -> int:
        """States of the pool, without reserved ones."""
        return self._num_slots

    @property
    @override
    def available_size(self) -> int:
        """States that `alloc` can still give."""
        return len(self._free)

    @override
    def alloc(self) -> int | None:
        """Take one slot, or None when there is none. What is in it is anything.

        Cost: O(1).
        """
        if not self._free:
            return None
        slot = self._free.pop()
        self._in_use[slot - self._first_slot] = 1
        return slot

    @override
    def free(self, slot: int) -> None:
        """Give one slot back.

        Raises:
            ContractError: It is free already, or no slot of this pool. Nothing is freed then.

        Cost: O(1).
        """
        place = slot - self._first_slot
        if not 0 <= place < self._num_slots:
            end = self._first_slot + self._num_slots
            msg = (
                f"StateSlotAllocator.free: expected a slot in {self._first_slot}..{end - 1}, "
                f"got {slot}"
            )
            raise ContractError(msg)
        if not self._in_use[place]:
            msg = f"StateSlotAllocator.free: expected a slot in use, but slot {slot} is free"
            raise ContractError(msg)
        self._in_use[place] = 0
        self._free.append(slot)

    def clear(self) -> None:
        """Take every slot back, whoever has it: for a reset, when nobody uses one any more.

        Cost: O(size).
        """
        end = self._first_slot + self._num_slots
        self._free[:] = range(end - 1, self._first_slot - 1, -1)
        self._in_use[:] = bytes(self._num_slots)
