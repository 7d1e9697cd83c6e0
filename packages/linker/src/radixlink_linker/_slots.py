"""`DeviceSlots`: frees slots of the full pool, at once or when no batch can read them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from radixlink_contracts import EvictParams, EvictResult
from radixlink_contracts.actions import FreeDeviceKV
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    import torch

    from radixlink_contracts import SlotAllocator, TreeCore


class DeviceSlots:
    """Frees slots of one allocator for a tree and its components.

    A retired slot is one that a launched batch may still read. Batches end in launch order, so it
    is free as soon as the last batch launched before its retirement has been processed: a
    replicated fact, not an event of the device.

    Ranks: all, the same calls in the same order.
    Thread: the scheduler's.
    """

    def __init__(self, *, tree: TreeCore, allocator: SlotAllocator) -> None:
        """Free for this tree into this allocator.

        Raises:
            ContractError: Their page sizes differ.
        """
        if tree.page_size != allocator.page_size:
            msg = (
                f"DeviceSlots: expected one page size, got {tree.page_size} of the tree "
                f"and {allocator.page_size} of the allocator"
            )
            raise ContractError(msg)
        self.allocator = allocator
        self._tree = tree
        #: Batches launched and processed so far.
        self._launched = 0
        self._processed = 0
        #: (batches launched at retirement, slots), oldest first.
        self._retired: deque[tuple[int, torch.Tensor]] = deque()
        #: Slots in `_retired`.
        self.num_retired = 0

    def make_room(self, num_tokens: int) -> None:
        """Evict so that up to `num_tokens` more tokens can be allocated."""
        self.evict(EvictParams(num_tokens=num_tokens))

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict, and free what went."""
        result = self._tree.evict(params)
        for action in result.cache_actions:
            if not isinstance(action, FreeDeviceKV):
                msg = f"evict: expected only FreeDeviceKV of a tree of full attention, got {action}"
                raise ContractError(msg)
            self.free(action.indices)
        return result

    def free(self, indices: torch.Tensor) -> None:
        """Give slots back that nobody can read any more. Shape: (n,) int64, whole pages."""
        self.allocator.free(indices)

    def retire(self, indices: torch.Tensor) -> None:
        """Give slots back once the batches launched so far are processed.

        Shape: (n,) int64, whole pages.
        """
        if self._launched == self._processed:
            self.allocator.free(indices)
            return
        self._retired.append((self._launched, indices))
        self.num_retired += len(indices)

    def batch_launched(self) -> None:
        """One more batch may read the slots of now."""
        self._launched += 1

    def batch_retired(self, num_batches: int) -> None:
        """So many more batches were processed, in launch order.

        Raises:
            ContractError: More were processed than launched. Nothing changes.
        """
        if not 0 <= num_batches <= self._launched - self._processed:
            msg = (
                f"batch_retired: expected at most {self._launched - self._processed} batches, "
                f"which are launched and not processed, got {num_batches}"
            )
            raise ContractError(msg)
        self._processed += num_batches
        while self._retired and self._retired[0][0] <= self._processed:
            _, indices = self._retired.popleft()
            self.num_retired -= len(indices)
            self.allocator.free(indices)

    def release_all(self) -> None:
        """No batch runs any more: free everything retired. Idempotent."""
        self.batch_retired(self._launched - self._processed)
