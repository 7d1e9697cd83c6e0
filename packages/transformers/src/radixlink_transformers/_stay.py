"""`Stay`: what one request holds of the cache, given back on every way out."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final, Self, TypeVar

import attrs
import torch

from radixlink_contracts import EvictParams, IncLockRefParams, MatchPrefixParams
from radixlink_contracts.errors import CapacityError, ContractError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from radixlink_contracts import (
        BatchIndex,
        IncLockRefResult,
        InsertParams,
        LinkedPrefixCache,
        LinkedTreeCore,
        MatchResult,
        RequestId,
        StepReport,
    )
    from radixlink_transformers._device import Device
    from radixlink_transformers._patience import Patience

_T = TypeVar("_T")


@attrs.frozen(kw_only=True, eq=False)
class LockedPrefix:
    """A prefix on the device that stays there.

    Attributes:
        slots: Its full slots. Shape: (num_tokens,) int64.
        receipt: Of the lock.
    """

    slots: torch.Tensor
    receipt: IncLockRefResult


@attrs.frozen(kw_only=True, eq=False)
class NewSlots:
    """Slots for the end of a sequence.

    Attributes:
        full: Full slots. Shape: (n,) int64, whole pages.
        num_without_window: The first so many of them have no window slot beside.
    """

    full: torch.Tensor
    num_without_window: int


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
        tree: LinkedTreeCore,
        device: Device,
        begin_wait: Callable[[], Patience],
    ) -> None:
        """Hold nothing yet.

        Args:
            cache: The controller.
            tree: Its tree, to read where a prefix lies.
            device: Its slots.
            begin_wait: Begins to wait for room.
        """
        self._cache: Final = cache
        self._tree: Final = tree
        self._device: Final = device
        self._begin_wait: Final = begin_wait
        self._leaving: Final = ExitStack()
        self._request_id: RequestId | None = None
        self._load_failed = False
        self._num_launched = 0
        self._slots = torch.empty(0, dtype=torch.int64)
        self._state_slots: list[int] = []
        #: Window slots that are not beside a full slot yet.
        self._window_slots = torch.empty(0, dtype=torch.int64)

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
        self._request_id = request_id
        self._leaving.callback(self._cache.release_aborted_request, request_id)

    def launch(self) -> BatchIndex | None:
        """Start the queued loads and count a batch: what is retired now is free after `retire`.

        Returns:
            What the layers of its forward wait for; None for nothing.
        """
        batch = self._cache.ready_to_load_host_cache()
        self._num_launched += 1
        return batch

    def finish_loads(self, batch: BatchIndex | None) -> None:
        """It is decided how the layer-wise load of a launch ended: see `load_failed`."""
        self._note(self._cache.finish_loads(batch))

    @property
    def load_failed(self) -> bool:
        """The request's layer-wise load failed: nothing that was computed of it counts."""
        return self._load_failed

    def _note(self, report: StepReport) -> None:
        if self._request_id in report.failed:
            self._load_failed = True

    def retire(self) -> None:
        """The results of all batches launched here are processed."""
        if self._num_launched:
            num_batches, self._num_launched = self._num_launched, 0
            self._cache.batch_retired(num_batches)

    def lock(self, found: MatchResult) -> LockedPrefix:
        """What was matched stays."""
        receipt = self._cache.inc_lock_ref(IncLockRefParams(node_id=found.last_device_node))
        self._leaving.callback(self._cache.dec_lock_ref, receipt.to_dec_params())
        slots = self._tree.path_indices(found.last_device_node)
        return LockedPrefix(slots=slots, receipt=receipt)

    # -- room ------------------------------------------------------------------------------------

    def reserve(self, num_tokens: int, num_locked: int) -> None:
        """The request has slots for so many tokens; evicts and waits for offloads where it must.

        Slots that it had reserved before are given back first.

        Args:
            num_tokens: Whole pages.
            num_locked: Tokens that the request itself keeps locked, for the message.

        Raises:
            CapacityError: There is no room even so. The request has no slots then.
        """
        self._free_slots()
        self._leaving.callback(self._free_slots)
        full, windows = self._device.full, self._device.windows
        # What does not fit into an empty pool is not worth evicting everything for.
        fits = num_tokens + num_locked <= full.size
        if not fits or not self._until(lambda: self._take_slots(num_tokens) or None):
            beside = "" if windows is None else f" and one of {windows.pair.swa.size} for windows"
            raise CapacityError(
                f"expected room for {num_tokens} tokens in a pool of {full.size}{beside} beside "
                f"the {num_locked} that the request has there, got {full.available_size} after "
                "eviction; the rest is in use, or the pool is too small",
                needed=num_tokens,
                available=full.available_size,
            )

    def new_slots(self, num_tokens: int) -> NewSlots:
        """The first of the reserved slots, the last of them with window slots beside.

        There may be fewer window slots than full ones, but always enough for one window.

        Args:
            num_tokens: Whole pages.
        """
        full, windows = self._slots[:num_tokens], self._device.windows
        num_beside = 0
        if windows is not None:
            num_beside = min(num_tokens, len(self._window_slots))
            beside, rest = self._window_slots[:num_beside], self._window_slots[num_beside:]
            if num_beside:
                windows.pair.map_full_to_swa(full[num_tokens - num_beside :], beside)
            self._window_slots = rest
        return NewSlots(full=full, num_without_window=num_tokens - num_beside)

    def take_state(self, prefix: LockedPrefix) -> int:
        """A state slot of the request's own, with a copy of the state at the end of a prefix.

        Args:
            prefix: Where it is empty, what is in the slot is anything.

        Raises:
            CapacityError: There is no room, even after eviction.
        """
        begins = not len(prefix.slots)
        slot = self._until(self.spare_state if begins else lambda: self._forked(prefix.receipt))
        if slot is None:
            states = self._device.states
            assert states is not None
            raise CapacityError(
                f"expected room for a state in a pool of {states.slots.size}, got none after "
                "eviction; the rest is in use, or the pool is too small",
                needed=1,
                available=0,
            )
        return slot

    def spare_state(self) -> int | None:
        """A state slot of the request's own, evicting for it; None when none can be had now."""
        states = self._device.states
        assert states is not None, "only a model with states needs their slots"
        if not states.slots.available_size:
            self._cache.evict(EvictParams(mamba_num=1))
        slot = states.slots.alloc()
        return None if slot is None else self._own(slot)

    def _forked(self, receipt: IncLockRefResult) -> int | None:
        slot = self._cache.fork_state(receipt)
        return None if slot is None else self._own(slot)

    def _own(self, slot: int) -> int:
        if not self._state_slots:
            self._leaving.callback(self._free_states)
        self._state_slots.append(slot)
        return slot

    def insert(self, params: InsertParams, num_new: int) -> None:
        """The cache holds a sequence, and owns the first of the reserved slots, and the state.

        Args:
            params: The sequence; its value ends with those slots, and its state is one of the
                request's. What the cache has already is the request's to the end.
            num_new: How many they are. The rest is freed at the end.
        """
        slots, rest = self._slots[:num_new], self._slots[num_new:]
        try:
            result = self._cache.insert(params)
        except BaseException:
            # It may have come from any point of the insert: look who has the slots now. No forward
            # runs, so what the insert retired is free.
            self.retire()
            found = self._cache.match_prefix(MatchPrefixParams(key=params.key))
            in_tree = torch.isin(slots, self._tree.path_indices(found.last_device_node))
            self._slots = rest
            if self._tree.node(found.last_device_node).mamba_slot == params.mamba_value:
                self._give_state(params.mamba_value)
            # All or nothing, and refused where the insert had freed them as duplicates.
            with suppress(ContractError):
                self._device.allocator.free(slots[~in_tree])
            raise
        self._slots = rest
        if not result.mamba_exist:
            self._give_state(params.mamba_value)

    def _give_state(self, slot: int | None) -> None:
        """A state is the cache's now; nothing to do for none."""
        if slot is not None:
            self._state_slots.remove(slot)

    def _take_slots(self, num_tokens: int) -> bool:
        """Take slots, evicting what is missing; False, with none taken, where that is not enough."""
        full, windows = self._device.full, self._device.windows
        swa, least, most = None, 0, 0
        if windows is not None:
            swa, geometry = windows.pair.swa, windows.pool.geometry
            most = min(num_tokens, swa.size)
            least = min(num_tokens, geometry.pages_of(num_tokens) * geometry.page_size)
        missing = EvictParams(
            num_tokens=max(0, num_tokens - full.available_size),
            swa_num_tokens=0 if swa is None else max(0, most - swa.available_size),
        )
        if missing.num_tokens or missing.swa_num_tokens:
            self._cache.evict(missing)
        if swa is not None and swa.available_size < least:
            return False
        slots = full.alloc(num_tokens)
        if slots is None:
            return False
        self._slots = slots
        if swa is not None:
            window_slots = swa.alloc(min(most, swa.available_size))
            assert window_slots is not None, "no more than what is available was asked for"
            self._window_slots = window_slots
        return True

    def _until(self, take: Callable[[], _T | None]) -> _T | None:
        """What `take` gives in the end, when pages that offloads still read are free; else None."""
        patience = self._begin_wait()
        while True:
            taken = take()
            # Such pages are locked; the end of an offload is a matter of steps.
            if taken is not None or not self._cache.num_outstanding or not patience.pause():
                return taken
            self._note(self._cache.step())

    def _free_slots(self) -> None:
        if len(self._slots):
            slots, self._slots = self._slots, self._slots[:0]
            self._device.allocator.free(slots)
        if len(self._window_slots):
            window_slots, self._window_slots = self._window_slots, self._window_slots[:0]
            assert self._device.windows is not None
            self._device.windows.pair.swa.free(window_slots)

    def _free_states(self) -> None:
        states = self._device.states
        assert states is not None
        while self._state_slots:
            states.slots.free(self._state_slots.pop())
