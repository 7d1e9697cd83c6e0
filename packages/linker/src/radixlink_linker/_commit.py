"""COMMIT: what a load brought is published, in the order that design gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import attrs

from radixlink_contracts import ComponentType, IncLockRefParams, InsertOrigin, InsertParams
from radixlink_contracts.actions import (
    BackupKV,
    FreeDeviceKV,
    FreeDeviceKVFullOnly,
    FreeMambaSlots,
    FreeSWA,
    MoveSWA,
)

if TYPE_CHECKING:
    import torch

    from radixlink_contracts import LinkedTreeCore, NodeId
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
    start, end, key = operation.start, operation.end, operation.key
    anchor = operation.receipt
    floors, state = transfers.brought(operation.transfers, end)
    result = tree.insert(
        InsertParams(
            key=attrs.evolve(key, token_ids=key.token_ids[:end]),
            value=_joined(tree.path_indices(anchor.node_id), operation.full_slots),
            prev_prefix_len=start,
            origin=InsertOrigin.RESTORED,
            track_adopted_ranges=True,
            component_evicted_seqlens=floors,
            mamba_value=state,
        )
    )
    offloads: list[NodeId] = []
    for action in result.cache_actions:
        match action:
            case BackupKV(node_ids=node_ids):
                offloads.extend(node_ids)
            case MoveSWA():
                slots.apply((action,))
            case FreeDeviceKV() | FreeDeviceKVFullOnly() | FreeSWA() | FreeMambaSlots():
                operation.surplus.append(action)
            case _:
                assert_never(action)
    if state is not None and result.mamba_exist:
        operation.surplus.append(FreeMambaSlots(slots=(state,)))
    transfers.commit(operation.transfers, end, result)
    # Where the tree took all full slots, the request runs on the tree's already.
    adopted = result.adopted_ranges
    assert adopted is not None, "they were asked for"
    if operation.running is not None and adopted.ranges(ComponentType.FULL) != ((start, end),):
        canonical = tree.path_indices(result.last_device_node)
        operation.running.repoint(start, canonical[start:end])
    operation.receipt = tree.inc_lock_ref(IncLockRefParams(node_id=result.last_device_node))
    tree.dec_lock_ref(anchor.to_dec_params())
    return offloads


def _joined(prefix: torch.Tensor, loaded: torch.Tensor) -> torch.Tensor:
    """Slots of the device prefix, then those of the load. Shape: (n,) int64."""
    if not len(prefix):
        return loaded
    value = prefix.new_empty(len(prefix) + len(loaded))
    value[: len(prefix)] = prefix
    value[len(prefix) :] = loaded
    return value
