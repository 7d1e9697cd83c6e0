"""`Stay`: what one request holds of the cache, given back on every way out."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final, Self

import attrs
import torch

from radixlink_contracts import EvictParams, IncLockRefParams, MatchPrefixParams
from radixlink_contracts.errors import CapacityError, ContractError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from radixlink_contracts import (
        IncLockRefResult,
        InsertParams,
        LinkedPrefixCache,
        LinkedTreeCore,
        MatchResult,
        RequestId,
    )
    from radixlink_transformers._device import Device


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
    """A context in which one request locks its prefix and takes slots.

    Leaving it, in whatever way, gives back in this order: the slots that were not inserted, the
    lock, the request's name in the cache. Afterwards the cache is as if the request had never come,
    but for what it inserted, what was evicted for it, and a load that was started.

    Thread: the scheduler's.
    """

    def __init__(
        self,
        *,
        cache: LinkedPrefixCache,
        tree: LinkedTreeCore,
        device: Device,
        retire_batches: Callable[[], None],
        request_id: RequestId | None = None,
    ) -> None:
        """Hold nothing yet.

        Args:
            cache: The controller.
            tree: Its tree, to read where a prefix lies.
            device: Its slots.
            retire_batches: Says that no forward runs any more.
            request_id: Under which the cache is asked; None for no store.
        """
        self._cache: Final = cache
        self._tree: Final = tree
        self._device: Final = device
        self._retire_batches: Final = retire_batches
        self._request_id: Final = request_id
        self._whose: Final = "" if request_id is None else f"request {request_id}: "
        self._leaving: Final = ExitStack()
        #: What can be let go of while the request goes on.
        self._held: Final = ExitStack()
        self._slots = torch.empty(0, dtype=torch.int64)
        self._state_slots: list[int] = []
        #: Window slots that are not beside a full slot yet.
        self._window_slots = torch.empty(0, dtype=torch.int64)

    def __enter__(self) -> Self:
        """Begin; the cache may know the request from now on."""
        if self._request_id is not None:
            self._leaving.callback(self._cache.release_aborted_request, self._request_id)
        self._leaving.callback(self.let_go)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give everything back. One failure on the way does not keep the rest from it."""
        self._leaving.__exit__(exc_type, exc, traceback)

    def let_go(self) -> None:
        """The request holds nothing but its name, and may begin again."""
        self._held.close()

    def lock(self, found: MatchResult) -> LockedPrefix:
        """What was matched stays."""
        receipt = self._cache.inc_lock_ref(IncLockRefParams(node_id=found.last_device_node))
        self._held.callback(self._cache.dec_lock_ref, receipt.to_dec_params())
        slots = self._tree.path_indices(found.last_device_node)
        return LockedPrefix(slots=slots, receipt=receipt)

    # -- room ------------------------------------------------------------------------------------

    def try_reserve(self, num_tokens: int, num_loading: int = 0) -> bool:
        """The request has slots for so many tokens; evicts what it must.

        Slots that it had reserved before are given back first.

        Args:
            num_tokens: Whole pages.
            num_loading: So many are loaded before them, and take slots too: their window is left.

        Returns:
            False where there is no room even so. The request has no slots then.
        """
        self._free_slots()
        self._held.callback(self._free_slots)
        return self._take_slots(num_tokens, num_loading)

    def no_room(self, num_tokens: int, num_locked: int) -> CapacityError:
        """Why slots cannot be had.

        Args:
            num_tokens: What was asked for.
            num_locked: Tokens that the request itself keeps locked.
        """
        full, windows = self._device.full, self._device.windows
        beside = "" if windows is None else f" and one of {windows.pair.swa.size} for windows"
        return CapacityError(
            f"{self._whose}expected room for {num_tokens} tokens in a pool of {full.size}{beside} beside "
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

    def try_take_state(self, prefix: LockedPrefix) -> int | None:
        """A state slot of the request's own, with a copy of the state at the end of a prefix.

        Args:
            prefix: Where it is empty, what is in the slot is anything.

        Returns:
            None where there is no room, even after eviction.
        """
        if not len(prefix.slots):
            return self.spare_state()
        slot = self._cache.fork_state(prefix.receipt)
        return None if slot is None else self._own(slot)

    def no_state(self) -> CapacityError:
        """Why a state slot cannot be had."""
        states = self._device.states
        assert states is not None, "only a model with states needs their slots"
        return CapacityError(
            f"{self._whose}expected room for a state in a pool of {states.slots.size}, got none after "
            "eviction; the rest is in use, or the pool is too small",
            needed=1,
            available=0,
        )

    def spare_state(self) -> int | None:
        """A state slot of the request's own, evicting for it; None when none can be had now."""
        states = self._device.states
        assert states is not None, "only a model with states needs their slots"
        if not states.slots.available_size:
            self._cache.evict(EvictParams(mamba_num=1))
        slot = states.slots.alloc()
        return None if slot is None else self._own(slot)

    def _own(self, slot: int) -> int:
        if not self._state_slots:
            self._held.callback(self._free_states)
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
            self._retire_batches()
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

    def _take_slots(self, num_tokens: int, num_loading: int) -> bool:
        """Take slots, evicting what is missing; False, with none taken, where that is not enough."""
        full, windows = self._device.full, self._device.windows
        swa, least, most, left = None, 0, 0, 0
        if windows is not None:
            swa, geometry = windows.pair.swa, windows.pool.geometry
            left = geometry.pages_of(num_loading) * geometry.page_size
            most = min(num_tokens, swa.size)
            least = min(num_tokens, geometry.pages_of(num_tokens) * geometry.page_size)
        missing = EvictParams(
            num_tokens=max(0, num_tokens - full.available_size),
            swa_num_tokens=0 if swa is None else max(0, most + left - swa.available_size),
        )
        if missing.num_tokens or missing.swa_num_tokens:
            self._cache.evict(missing)
        if swa is not None and swa.available_size < least + left:
            return False
        slots = full.alloc(num_tokens)
        if slots is None:
            return False
        self._slots = slots
        if swa is not None:
            window_slots = swa.alloc(min(most, swa.available_size - left))
            assert window_slots is not None, "no more than what is available was asked for"
            self._window_slots = window_slots
        return True

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
