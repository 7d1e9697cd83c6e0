"""COMMIT: what a load brought is published, in the order that design gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import attrs

from radixlink_contracts import (
    ComponentType,
    IncLockRefParams,
    InsertOrigin,
    InsertParams,
    PoolName,
)
from radixlink_contracts.actions import (
    BackupKV,
    FreeDeviceKV,
    FreeDeviceKVFullOnly,
    FreeMambaSlots,
    FreeSWA,
    MoveSWA,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from radixlink_contracts import LinkedTreeCore, NodeId, RadixKey
    from radixlink_contracts.actions import CacheAction
    from radixlink_linker._component_transfers import ComponentTransfers
    from radixlink_linker._operation import LoadOperation
    from radixlink_linker._slots import DeviceSlots


def commit_load(
    operation: LoadOperation,
    tree: LinkedTreeCore,
    slots: DeviceSlots,
    transfers: ComponentTransfers,
) -> list[NodeId]:
    """Insert what landed, with its pages stored; move windows to the tree's own slots.

    Then tell the request that runs where its KV lies by now, and move the load's lock to the new
    end. What the tree did not take stays the operation's until every rank is quiesced.

    Ranks: all, in the order of the operations.

    Returns:
        The nodes that are to be offloaded.
    """
    plan = operation.plan
    start, end = plan.full_start, plan.end
    key = attrs.evolve(operation.key, token_ids=operation.key.token_ids[:end])
    prefix = tree.path_indices(operation.node_id)
    full, windows = operation.slots_of(PoolName.KV), operation.slots_of(PoolName.SWA)
    num_late = sum(last - first for first, last in plan.late_windows)
    late = _pair_late(operation, tree, slots, key, prefix)
    floors: dict[ComponentType, int] = {}
    if windows is not None:
        floors[ComponentType.SWA] = end - (len(windows) - num_late)
    elif ComponentType.SWA in tree.components:
        floors[ComponentType.SWA] = end
    state_slots = operation.slots_of(PoolName.MAMBA)
    state = None if state_slots is None else int(state_slots)
    result = tree.insert(
        InsertParams(
            key=key,
            value=prefix if full is None else _joined(prefix, full),
            prev_prefix_len=start,
            origin=InsertOrigin.RESTORED,
            track_adopted_ranges=True,
            component_evicted_seqlens=floors,
            late_windows=late,
            mamba_value=state,
        )
    )
    # From here on what it allocated is the tree's, so nothing comes before this note of it.
    at_once, operation.surplus = _divided(result.cache_actions)
    if state is not None and result.mamba_exist:
        operation.surplus.append(FreeMambaSlots(slots=(state,)))
    operation.committed = True
    offloads = slots.apply(at_once)
    transfers.commit(operation.transfers, end, result)
    # Where the tree took all full slots, the request runs on the tree's already.
    adopted = result.adopted_ranges
    assert adopted is not None, "they were asked for"
    if operation.running is not None and adopted.ranges(ComponentType.FULL) != ((start, end),):
        canonical = tree.path_indices(result.last_device_node)
        operation.running.repoint(plan.start, canonical[plan.start : end])
    receipt = tree.inc_lock_ref(IncLockRefParams(node_id=result.last_device_node))
    operation.anchor, operation.receipt = operation.receipt, receipt
    tree.dec_lock_ref(operation.anchor.to_dec_params())
    operation.anchor = None
    return offloads


def _divided(actions: Iterable[CacheAction]) -> tuple[list[CacheAction], list[CacheAction]]:
    """Those to carry out at once, and those that free what some rank may still write."""
    at_once: list[CacheAction] = []
    frees: list[CacheAction] = []
    for action in actions:
        match action:
            case BackupKV() | MoveSWA():
                at_once.append(action)
            case FreeDeviceKV() | FreeDeviceKVFullOnly() | FreeSWA() | FreeMambaSlots():
                frees.append(action)
            case _:
                assert_never(action)
    return at_once, frees


def _pair_late(
    operation: LoadOperation,
    tree: LinkedTreeCore,
    slots: DeviceSlots,
    key: RadixKey,
    prefix: torch.Tensor,
) -> tuple[tuple[int, int], ...]:
    """Put the windows that came late beside the tree's full slots, where still none is.

    Those that somebody else has brought since are the operation's surplus.

    Args:
        operation: The load.
        tree: Has the full slots.
        slots: Pairs.
        key: The part of the sequence that is published.
        prefix: The tree's full slots of it. Shape: (n,) int64.

    Returns:
        Where they stand now, in tokens.
    """
    ranges = operation.plan.late_windows
    if not ranges:
        return ()
    windows = operation.slots_of(PoolName.SWA)
    assert windows is not None, "windows that come late are its own"
    there = tree.holdings(key).windows
    late: list[tuple[int, int]] = []
    # The first of its window slots are these, token after token.
    offset = 0
    for start, end in ranges:
        for first, last, live in _cut(start, end, there):
            some = windows[offset : offset + last - first]
            offset += last - first
            if live:
                operation.surplus_windows.append(some)
            else:
                slots.pair(prefix[first:last], some)
                late.append((first, last))
    return tuple(late)


def _cut(
    start: int, end: int, ranges: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int, bool]]:
    """A range in pieces that lie inside some ascending ranges, or outside of all."""
    at = start
    for first, last in ranges:
        low, high = max(first, at), min(last, end)
        if low >= high:
            continue
        if at < low:
            yield at, low, False
        yield low, high, True
        at = high
    if at < end:
        yield at, end, False


def _joined(prefix: torch.Tensor, loaded: torch.Tensor) -> torch.Tensor:
    """Slots of the device prefix, then those of the load. Shape: (n,) int64."""
    if not len(prefix):
        return loaded
    value = prefix.new_empty(len(prefix) + len(loaded))
    value[: len(prefix)] = prefix
    value[len(prefix) :] = loaded
    return value
