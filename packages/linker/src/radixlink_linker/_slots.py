"""`DeviceSlots`: carries out what a tree decided about slots, at once or when no batch can read them."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never

from radixlink_contracts import ComponentType, EvictParams, EvictResult, PairedAllocator
from radixlink_contracts.actions import (
    BackupKV,
    FreeDeviceKV,
    FreeDeviceKVFullOnly,
    FreeMambaSlots,
    FreeSWA,
    MoveSWA,
)
from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from radixlink_contracts import (
        IncLockRefResult,
        NodeId,
        SlotAllocator,
        StateAllocator,
        TreeCore,
    )
    from radixlink_contracts.actions import CacheAction


class DeviceSlots:
    """The slots that a tree and its components hold: who frees them, and when.

    A retired slot is one that a launched batch may still read. Batches end in launch order, so it
    is free as soon as the last batch launched before its retirement has been processed: a
    replicated fact, not an event of the device.

    Ranks: all, the same calls in the same order.
    Thread: the scheduler's.
    """

    def __init__(
        self,
        *,
        tree: TreeCore,
        allocator: SlotAllocator,
        states: StateAllocator | None = None,
        copy_state: Callable[[int, int], None] | None = None,
    ) -> None:
        """Free for this tree.

        Args:
            tree: Whose slots they are.
            allocator: Deals them out; a `PairedAllocator` for a tree with windows.
            states: Deals out the state slots of a tree with states.
            copy_state: Copies the state in one slot to another, ordered as the next forward is.

        Raises:
            ContractError: The page sizes differ, or an allocator that the tree needs is not there.
        """
        if tree.page_size != allocator.page_size:
            msg = (
                f"DeviceSlots: expected one page size, got {tree.page_size} of the tree "
                f"and {allocator.page_size} of the allocator"
            )
            raise ContractError(msg)
        pair = allocator if isinstance(allocator, PairedAllocator) else None
        kinds = tree.components
        if (ComponentType.SWA in kinds) != (pair is not None):
            msg = (
                f"DeviceSlots: expected a PairedAllocator for a tree with windows and for no "
                f"other, got {type(allocator).__name__} for one of {[kind.name for kind in kinds]}"
            )
            raise ContractError(msg)
        if (ComponentType.MAMBA in kinds) != (states is not None and copy_state is not None):
            msg = (
                "DeviceSlots: expected states and copy_state for a tree with states and for no "
                f"other, got {states} and {copy_state} for one of {[kind.name for kind in kinds]}"
            )
            raise ContractError(msg)
        self.allocator: Final = allocator
        self._full: Final = allocator if pair is None else pair.full
        self._pair: Final = pair
        self._states: Final = states
        self._copy_state: Final = copy_state
        self._tree: Final = tree
        #: Batches launched and processed so far.
        self._launched = 0
        self._processed = 0
        #: (batches launched at retirement, how many slots, what frees them), oldest first.
        self._retired: deque[tuple[int, int, Callable[[], None]]] = deque()
        #: What a tree decided and nobody has carried out, oldest first, and whether its slots are
        #: to be retired: empty but in `carry_out`, and behind one that was left in its middle.
        self._undone: deque[tuple[CacheAction, bool]] = deque()
        #: Slots in `_retired`, of all kinds.
        self.num_retired = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Slots of each pool, in the components' order."""
        sizes = [self._full.size]
        if self._pair is not None:
            sizes.append(self._pair.swa.size)
        if self._states is not None:
            sizes.append(self._states.size)
        return tuple(sizes)

    @property
    def available_sizes(self) -> tuple[int, ...]:
        """Slots of each pool that can still be had, in the components' order."""
        sizes = [self._full.available_size]
        if self._pair is not None:
            sizes.append(self._pair.swa.available_size)
        if self._states is not None:
            sizes.append(self._states.available_size)
        return tuple(sizes)

    # -- room --------------------------------------------------------------------------------------

    def make_room(self, num_tokens: int) -> None:
        """Evict so that up to `num_tokens` more tokens of full attention can be allocated."""
        self.evict(EvictParams(num_tokens=num_tokens))

    def make_room_swa(self, num_tokens: int) -> None:
        """Evict so that up to `num_tokens` more tokens of windows can be allocated."""
        self.evict(EvictParams(swa_num_tokens=num_tokens))

    def make_room_states(self, num_states: int) -> None:
        """Evict so that up to `num_states` more states can be allocated."""
        self.evict(EvictParams(mamba_num=num_states))

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict, and free what went. What is returned has no actions left."""
        result = self._tree.evict(params)
        self.apply(result.cache_actions)
        return result.carried_out()

    def fork_state(self, source: int) -> int | None:
        """A copy of a state that is locked, in a slot of the caller's; None when there is no room."""
        states, copy_state = self._states, self._copy_state
        assert states is not None, "a tree without states locks none"
        assert copy_state is not None, "a tree with states has a way to copy them"
        if not states.available_size:
            self.make_room_states(1)
        slot = states.alloc()
        if slot is not None:
            try:
                copy_state(source, slot)
            except BaseException:
                states.free(slot)
                raise
        return slot

    # -- actions -----------------------------------------------------------------------------------

    def apply(self, actions: Sequence[CacheAction]) -> list[NodeId]:
        """Carry out what a tree decided, in its order.

        Owns: each action until it is carried out; see `carry_out`.

        Returns:
            The nodes that are to be offloaded.

        Raises:
            ContractError: An action is of a component that is not here, or an allocator refuses it.
                None that follows is carried out.
        """
        return self._decided(actions, retiring=False)

    def apply_retiring(self, actions: Sequence[CacheAction]) -> list[NodeId]:
        """`apply`, but slots are free once the batches launched so far are processed.

        For an insert: the next batch of its request may be running on the duplicates.

        Returns:
            The nodes that are to be offloaded.
        """
        return self._decided(actions, retiring=True)

    def carry_out(self) -> None:
        """Go on with what a call was left in the middle of. Idempotent.

        Raises:
            ContractError: As in `apply`.
        """
        undone = self._undone
        while undone:
            action, retiring = undone[0]
            try:
                if retiring and not isinstance(action, MoveSWA):
                    self.retire_action(action)
                else:
                    self._apply_one(action)
            except ContractError:
                # It would be refused again, and the others go by it.
                undone.clear()
                raise
            undone.popleft()

    def pair(self, full_indices: torch.Tensor, swa_indices: torch.Tensor) -> None:
        """Put window slots that came late beside full slots of the tree.

        Shape: (n,) int64 both, whole pages.
        """
        pair = self._pair
        assert pair is not None, "only a tree with windows has window slots"
        pair.map_full_to_swa(full_indices, swa_indices)

    def free(self, indices: torch.Tensor) -> None:
        """Give full slots back, and window slots beside them, that nobody reads or writes any more.

        Shape: (n,) int64, whole pages.
        """
        self.allocator.free(indices)

    # -- retirement --------------------------------------------------------------------------------

    def retire(self, indices: torch.Tensor) -> None:
        """`free`, once the batches launched so far are processed. Shape: (n,) int64, whole pages.

        Owns: the caller, where this raises; so with everything that is retired.
        """
        self._retire(len(indices), partial(self.allocator.free, indices))

    def retire_swa(self, swa_indices: torch.Tensor) -> None:
        """Give window slots back, likewise. Shape: (n,) int64, whole pages."""
        pair = self._pair
        assert pair is not None, "only a tree with windows has window slots"
        self._retire(len(swa_indices), partial(pair.swa.free, swa_indices))

    def retire_state(self, slot: int) -> None:
        """Give a state slot back, likewise."""
        self._retire(1, partial(self._free_states, (slot,)))

    def retire_action(self, action: CacheAction) -> None:
        """Carry an action that frees slots out, likewise."""
        match action:
            case FreeDeviceKV(indices=indices) | FreeDeviceKVFullOnly(indices=indices):
                count = len(indices)
            case FreeSWA(full_indices=full):
                count = len(full)
            case FreeMambaSlots(slots=slots):
                count = len(slots)
            case MoveSWA() | BackupKV():
                msg = f"retire_action: expected an action that frees slots, got {action}"
                raise ContractError(msg)
            case _:
                assert_never(action)
        self._retire(count, partial(self._apply_one, action))

    def retire_lock(self, receipt: IncLockRefResult) -> None:
        """Release a lock of the tree, once the batches launched so far are processed."""
        self._retire(0, partial(self._tree.dec_lock_ref, receipt.to_dec_params()))

    def batch_launched(self) -> None:
        """One more batch may read the slots of now."""
        self._launched += 1

    def batch_retired(self, num_batches: int) -> None:
        """So many more batches were processed, in launch order.

        Raises:
            ContractError: More were processed than launched. Nothing changes.

        What else raises, an allocator for one, leaves the rest for the next call.
        """
        if not 0 <= num_batches <= self._launched - self._processed:
            msg = (
                f"batch_retired: expected at most {self._launched - self._processed} batches, "
                f"which are launched and not processed, got {num_batches}"
            )
            raise ContractError(msg)
        self._processed += num_batches
        while self._retired and self._retired[0][0] <= self._processed:
            try:
                self._retired[0][2]()
            except ContractError:
                # It would be refused again.
                self._forget_oldest()
                raise
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """What was retired first is free."""
        _, count, _ = self._retired.popleft()
        self.num_retired -= count

    def release_all(self) -> None:
        """No batch runs any more: free everything retired, and what is not carried out. Idempotent."""
        self.carry_out()
        self.batch_retired(self._launched - self._processed)

    def _retire(self, count: int, free: Callable[[], None]) -> None:
        """Free now where no batch runs, else when those that run are processed."""
        if self._launched == self._processed:
            free()
            return
        self._retired.append((self._launched, count, free))
        self.num_retired += count

    def _decided(self, actions: Sequence[CacheAction], *, retiring: bool) -> list[NodeId]:
        """Take actions over, and carry them out.

        Returns:
            The nodes that are to be offloaded.
        """
        due: list[NodeId] = []
        for action in actions:
            match action:
                case BackupKV(node_ids=node_ids):
                    due.extend(node_ids)
                case FreeMambaSlots(slots=slots):
                    # One by one, so that none is given back twice.
                    self._undone.extend((FreeMambaSlots(slots=(slot,)), retiring) for slot in slots)
                case _:
                    self._undone.append((action, retiring))
        self.carry_out()
        return due

    def _apply_one(self, action: CacheAction) -> None:
        """Carry out one action that asks for no offload."""
        match action:
            case FreeDeviceKV(indices=indices):
                self.allocator.free(indices)
            case FreeDeviceKVFullOnly(indices=indices):
                self._full.free(indices)
            case FreeSWA(full_indices=full):
                self._pair_for(action).free_swa(full)
            case MoveSWA(from_full=old, to_full=new):
                pair = self._pair_for(action)
                pair.map_full_to_swa(new, pair.swa_indices(old))
            case FreeMambaSlots(slots=slots):
                self._free_states(slots)
            case BackupKV():
                msg = f"cache action: expected one of slots, got {action}"
                raise ContractError(msg)
            case _:
                assert_never(action)

    def _free_states(self, slots: Sequence[int]) -> None:
        """Give state slots back."""
        if self._states is None:
            msg = f"cache action: expected no states in a tree without, got slots {slots}"
            raise ContractError(msg)
        for slot in slots:
            self._states.free(slot)

    def _pair_for(self, action: CacheAction) -> PairedAllocator:
        """The allocator of windows, or an error that names what needs it."""
        if self._pair is None:
            msg = f"cache action: expected none of windows in a tree without, got {action}"
            raise ContractError(msg)
        return self._pair
