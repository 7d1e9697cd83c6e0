"""`Stay`: what one request holds of the cache, given back on every way out."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final, Self

import torch

from radixlink_contracts import EvictParams, IncLockRefParams, MatchPrefixParams
from radixlink_contracts.errors import CapacityError, ContractError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from radixlink_contracts import (
        InsertParams,
        LinkedPrefixCache,
        MatchResult,
        RequestId,
        SlotAllocator,
        TreeCore,
    )
    from radixlink_transformers._patience import Patience


class Stay:
    """A context in which one request locks its prefix, takes slots and launches batches.

    Leaving it, in whatever way, gives back in this order: the slots that were not inserted, the
    lock, the request's name in the cache, the batches. Afterwards the cache is as if the request
    had never come, but for what it inserted, what was evicted for it, and a load that was started.

    Thread: the scheduler's.
    """

    def __init__(
        self,
        *,
        cache: LinkedPrefixCache,
        tree: TreeCore,
        allocator: SlotAllocator,
    ) -> None:
        """Hold nothing yet.

        Args:
            cache: The controller.
            tree: Its tree, to read where a prefix lies.
            allocator: Of the pool.
        """
        self._cache: Final = cache
        self._tree: Final = tree
        self._allocator: Final = allocator
        self._leaving: Final = ExitStack()
        self._num_launched = 0
        self._slots = torch.empty(0, dtype=torch.int64)

    def __enter__(self) -> Self:
        """Begin; the batches are the last to be given back."""
        self._leaving.callback(self.retire)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give everything back. One failure on the way does not keep the rest from it."""
        self._leaving.__exit__(exc_type, exc, traceback)

    def name(self, request_id: RequestId) -> None:
        """The cache knows the request from now on."""
        self._leaving.callback(self._cache.release_aborted_request, request_id)

    def launch(self) -> None:
        """Start the queued loads and count a batch: what is retired now is free after `retire`."""
        self._cache.ready_to_load_host_cache()
        self._num_launched += 1

    def retire(self) -> None:
        """The results of all batches launched here are processed."""
        if self._num_launched:
            num_batches, self._num_launched = self._num_launched, 0
            self._cache.batch_retired(num_batches)

    def lock(self, found: MatchResult) -> torch.Tensor:
        """What was matched stays.

        Returns:
            Its slots. Shape: (found.device_prefix_len,) int64.
        """
        receipt = self._cache.inc_lock_ref(IncLockRefParams(node_id=found.last_device_node))
        self._leaving.callback(self._cache.dec_lock_ref, receipt.to_dec_params())
        return self._tree.path_indices(found.last_device_node)

    def reserve(self, num_tokens: int, num_locked: int, begin_wait: Callable[[], Patience]) -> None:
        """The request has slots for so many tokens; evicts and waits for offloads where it must.

        Args:
            num_tokens: Whole pages.
            num_locked: Tokens that the request itself keeps locked, for the message.
            begin_wait: Begins to wait for pages that are on their way to a store.

        Raises:
            CapacityError: There is no room even so. The request has no slots then.
        """
        self._leaving.callback(self._free_slots)
        allocator = self._allocator
        # What does not fit into an empty pool is not worth evicting everything for.
        patience = begin_wait() if num_tokens + num_locked <= allocator.size else None
        while patience is not None:
            missing = num_tokens - allocator.available_size
            if missing > 0:
                self._cache.evict(EvictParams(num_tokens=missing))
            slots = allocator.alloc(num_tokens)
            if slots is not None:
                self._slots = slots
                return
            # Pages that an offload still reads are locked; its end is a matter of steps.
            if not self._cache.num_outstanding or not patience.pause():
                break
            self._cache.step()
        raise CapacityError(
            f"expected room for {num_tokens} tokens in a pool of {allocator.size} beside the "
            f"{num_locked} that the request has there, got {allocator.available_size} after "
            "eviction; the rest is in use, or the pool is too small",
            needed=num_tokens,
            available=allocator.available_size,
        )

    def new_slots(self, num_tokens: int) -> torch.Tensor:
        """The first of the reserved slots. Shape: (num_tokens,) int64."""
        return self._slots[:num_tokens]

    def insert(self, params: InsertParams, num_new: int) -> None:
        """The cache holds a sequence, and owns the first of the reserved slots.

        Args:
            params: The sequence; its value ends with those slots.
            num_new: How many they are. The rest is freed at the end.
        """
        slots, rest = self._slots[:num_new], self._slots[num_new:]
        try:
            self._cache.insert(params)
        except BaseException:
            # It may have come from any point of the insert: look who has the slots now.
            found = self._cache.match_prefix(MatchPrefixParams(key=params.key))
            in_tree = torch.isin(slots, self._tree.path_indices(found.last_device_node))
            self._slots = rest
            # All or nothing, and refused where the insert had freed them as duplicates.
            with suppress(ContractError):
                self._allocator.free(slots[~in_tree])
            raise
        self._slots = rest

    def _free_slots(self) -> None:
        if len(self._slots):
            slots, self._slots = self._slots, self._slots[:0]
            self._allocator.free(slots)
