"""What must hold of a rank at any time: each slot has one owner and right bytes, each lock a reason."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import attrs
import torch

from radixlink_contracts import ComponentType, PoolName
from radixlink_contracts.actions import (
    BackupKV,
    FreeDeviceKV,
    FreeDeviceKVFullOnly,
    FreeMambaSlots,
    FreeSWA,
    MoveSWA,
)
from radixlink_linker._operation import LoadOperation, LockingOperation, Verdict
from radixlink_tree import check_invariants

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.linker.rank import Rank

    from radixlink_contracts import TreeNodeView
    from radixlink_contracts.actions import CacheAction
    from radixlink_linker._operation import Operation
    from radixlink_linker._wrapper import UnifiedCacheLinkerWrapper


def check(rank: Rank) -> None:
    """Everything that must hold at any time."""
    check_invariants(rank.tree)
    _check_slots(rank)
    out = {receipt.receipt_id for receipt in rank.tree._receipts.out()}
    assert _receipts(rank) == out, "a lock leaked, or was given up"
    for node in rank.nodes():
        _check_node(rank, node)


def check_idle(rank: Rank) -> None:
    """`check`, and nothing of any request is left."""
    check(rank)
    assert not rank.computing
    assert rank.cache.num_outstanding == 0
    assert not rank.tree._receipts.out()
    for component in rank.tree.components:
        assert rank.tree.protected(component) == 0
    assert in_use(rank) == live(rank).sets()


def live(rank: Rank) -> Owned:
    """The slots of the tree."""
    owned = Owned(rank)
    for node in rank.nodes():
        owned.full += node.device_indices.tolist()
        if node.has_swa:
            owned.swa += owned.partners(node.device_indices)
        if node.mamba_slot is not None:
            owned.states.append(node.mamba_slot)
    return owned


@attrs.define
class Owned:
    """Slots of each pool, one entry for each owner."""

    rank: Rank
    full: list[int] = attrs.field(factory=list)
    swa: list[int] = attrs.field(factory=list)
    states: list[int] = attrs.field(factory=list)

    def partners(self, full: torch.Tensor) -> list[int]:
        """The window slots beside full slots, where there are any."""
        pair = self.rank.device.pair
        partners: list[int] = [] if pair is None else pair.swa_indices(full).tolist()
        return [slot for slot in partners if slot >= 0]

    def pairs(self, full: torch.Tensor) -> None:
        """Full slots, and what is beside them."""
        self.full += full.tolist()
        self.swa += self.partners(full)

    def action(self, action: CacheAction) -> None:
        """What an action will free."""
        match action:
            case FreeDeviceKV(indices=indices):
                self.pairs(indices)
            case FreeDeviceKVFullOnly(indices=indices):
                assert not self.partners(indices), "a window slot that nothing names"
                self.full += indices.tolist()
            case FreeSWA(full_indices=full):
                self.swa += self.partners(full)
            case FreeMambaSlots(slots=slots):
                self.states += slots
            case MoveSWA() | BackupKV():
                raise AssertionError(f"{action} frees nothing")

    def sets(self) -> tuple[set[int], ...]:
        return (set(self.full), set(self.swa), set(self.states))


def in_use(rank: Rank) -> tuple[set[int], ...]:
    """What is not free, in each pool."""
    device = rank.device
    return (
        device.full.in_use,
        set() if device.pair is None else device.pair.swa.in_use,
        set() if device.states is None else device.states.in_use,
    )


def _check_slots(rank: Rank) -> None:
    """Free slots, the tree's, requests' and loads' are all that there are, and disjoint."""
    owned = live(rank)
    for computation in rank.computing:
        owned.pairs(computation.slots)
        if computation.state is not None:
            owned.states.append(computation.state)
    _retired(rank, owned)
    wrapper = rank.cache._wrapper
    for operation in _operations(wrapper):
        if isinstance(operation, LoadOperation):
            _staged(operation, owned)
    for slots in (owned.full, owned.swa, owned.states):
        assert len(slots) == len(set(slots)), "a slot has two owners"
    assert owned.sets() == in_use(rank), "slots leaked, or freed in use"


def _retired(rank: Rank, owned: Owned) -> None:
    """What waits for a batch to end."""
    slots, device = rank.slots, rank.device
    windows: set[int] = set()
    for _, _, free in slots._retired:
        assert isinstance(free, partial)
        (what,) = free.args
        if free.func == slots._apply_one:
            owned.action(what)
        elif free.func == slots._free_states:
            owned.states += what
        elif device.pair is not None and free.func == device.pair.swa.free:
            windows.update(what.tolist())
            owned.swa += what.tolist()
        elif free.func == rank.tree.dec_lock_ref:
            # It keeps what is the tree's.
            continue
        else:
            assert free.func == device.allocator.free
            owned.full += what.tolist()
            # A load that was given up retires its window before the full slots beside it.
            owned.swa += [slot for slot in owned.partners(what) if slot not in windows]


def _staged(operation: LoadOperation, owned: Owned) -> None:
    """What a load holds: all it was given, or after COMMIT what the tree did not take."""
    if operation.verdict is Verdict.DONE:
        for action in operation.surplus:
            owned.action(action)
        return
    for transfer in operation.transfers:
        assert transfer.device_indices is not None
        slots = transfer.device_indices.tolist()
        match transfer.name:
            case PoolName.KV:
                owned.full += slots
            case PoolName.SWA:
                owned.swa += slots
            case _:
                owned.states += slots


def _operations(wrapper: UnifiedCacheLinkerWrapper | None) -> Iterator[Operation]:
    """Those that hold slots or locks."""
    if wrapper is not None:
        yield from wrapper._operations
        yield from wrapper._written_off


def _receipts(rank: Rank) -> set[int]:
    """The locks that somebody can account for."""
    receipts = [computation.receipt for computation in rank.computing] + rank.locks
    # Of loads that are over, until the batches that read what was lent are processed.
    receipts += [
        free.args[0].receipt
        for _, _, free in rank.slots._retired
        if isinstance(free, partial) and free.func == rank.tree.dec_lock_ref
    ]
    wrapper = rank.cache._wrapper
    receipts += [
        operation.receipt
        for operation in _operations(wrapper)
        if isinstance(operation, LockingOperation)
    ]
    if wrapper is not None:
        published = (request.published for request in wrapper._requests._requests.values())
        receipts += [receipt for receipt in published if receipt is not None]
    assert len({receipt.receipt_id for receipt in receipts}) == len(receipts)
    return {receipt.receipt_id for receipt in receipts}


def _check_node(rank: Rank, node: TreeNodeView) -> None:
    """A node's bytes, and that the store has what it is said to have."""
    keys = node.page_keys.resolve()
    device, unstored = rank.device, node.unstored
    held = {ComponentType.FULL: (PoolName.KV, node.device_indices, list(keys))}
    if device.pair is not None:
        partners = device.pair.swa_indices(node.device_indices)
        if node.has_swa:
            held[ComponentType.SWA] = (PoolName.SWA, partners, list(keys))
        else:
            assert (partners == -1).all(), "a tombstone with a window"
    if node.mamba_slot is not None:
        state = torch.tensor([node.mamba_slot])
        held[ComponentType.MAMBA] = (PoolName.MAMBA, state, list(keys)[-1:])
    assert set(unstored) <= held.keys()
    for component, (pool, slots, names) in held.items():
        device.check(pool, slots, names)
        if component not in unstored:
            pages = keys if pool is not PoolName.MAMBA else keys.span(len(keys) - 1, len(keys))
            there = rank.stores[pool].inner.contains(pages)
            assert there.complete, f"{pool} is stored, but not in the store"
