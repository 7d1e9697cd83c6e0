"""Not run: only type-checked by mypy (`tox -e types`). What values, ids and unions allow.

An `assert_type` states what a type is. A `type: ignore[code]` states that a line is an error: under
`warn_unused_ignores` mypy fails where it is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never, assert_type

import torch

from radixlink_contracts import (
    NOTHING_HAPPENED,
    AdoptedRanges,
    ComponentType,
    DecLockRefParams,
    ExternalLinkerLoadPhase,
    ExternalMatch,
    IncLockRefParams,
    LinkerTransferPhase,
    LoadAdmitted,
    LoadBack,
    LoadMiss,
    LoadWaiting,
    MatchResult,
    NodeId,
    OperationId,
    PageBits,
    PageHandles,
    PageKeys,
    PageKeySource,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    RadixKey,
    RequestId,
)
from radixlink_contracts.actions import (
    BackupKV,
    CacheAction,
    FreeDeviceKV,
    FreeDeviceKVFullOnly,
    FreeMambaSlots,
    FreeSWA,
    MoveSWA,
)
from radixlink_contracts.errors import AgreementError, CapacityError, LinkError, StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from radixlink_contracts import (
        IncLockRefResult,
        InsertResult,
        PageStore,
        PrefixCache,
        StepReport,
        TreeNodeView,
    )


def bits(keys: PageKeys, store: PageStore) -> None:
    """Page bits are numbers of pages in, a value out."""
    found = store.contains(keys)
    assert_type(found, PageBits)
    assert_type(found & PageBits.all(3), PageBits)
    assert_type(found.leading, int)
    assert_type(list(found), list[int])
    found.mask = 1  # type: ignore[misc]
    found & 3  # type: ignore[operator]
    PageBits.of(["a"], 3)  # type: ignore[list-item]


def keys_of_pages(keys: PageKeys, source: PageKeySource) -> None:
    """Resolved keys are a source; a source is not resolved."""
    assert_type(keys[0], bytes)
    assert_type(keys.span(0, 1), PageKeys)
    assert_type(keys.resolve(), PageKeys)
    assert_type(source.span(0, 1), PageKeySource)
    assert_type(source.resolve(), PageKeys)
    as_source: PageKeySource = keys
    as_keys: PageKeys = source  # type: ignore[assignment]
    PageKeys.join([keys])  # type: ignore[list-item]
    del as_source, as_keys


def keys_are_not_bytes(store: PageStore, digests: bytes, names: list[str]) -> None:
    """A store takes keys, not what is in them; nor does a transfer."""
    store.contains(digests)  # type: ignore[arg-type]
    store.open(names, 1.0)  # type: ignore[arg-type]
    PoolTransfer(name=PoolName.KV, keys=digests)  # type: ignore[arg-type]
    PageHandles.without_places(digests, PageBits.none(0))  # type: ignore[arg-type]
    RadixKey([1, 2, 3])  # type: ignore[arg-type]


def ids(node: NodeId, operation: OperationId, request: RequestId) -> None:
    """One kind of id does not pass for another, nor a number for any."""
    IncLockRefParams(node_id=node)
    IncLockRefParams(node_id=operation)  # type: ignore[arg-type]
    IncLockRefParams(node_id=7)  # type: ignore[arg-type]
    LoadWaiting(operation_id=operation)
    LoadWaiting(operation_id=node)  # type: ignore[arg-type]
    BackupKV(node_ids=(node, operation))  # type: ignore[arg-type]
    LinkError("m", operation=node)  # type: ignore[arg-type]
    assert_type(NOTHING_HAPPENED.landed, tuple[RequestId, ...])
    landed: tuple[NodeId, ...] = NOTHING_HAPPENED.landed  # type: ignore[assignment]
    del request, landed


def values(
    transfer: PoolTransfer, result: MatchResult, inserted: InsertResult, report: StepReport
) -> None:
    """Values are frozen and made by keyword; what may be missing says so."""
    assert_type(transfer.device_indices, torch.Tensor | None)
    assert_type(transfer.keys, PageKeySource)
    assert_type(result.external, ExternalMatch)
    assert_type(result.waiting_on, OperationId | None)
    assert_type(inserted.adopted_ranges, AdoptedRanges | None)
    transfer.device_indices = None  # type: ignore[misc]
    result.host_hit_length = 8  # type: ignore[misc]
    report.landed = ()  # type: ignore[misc]
    PoolTransfer(PoolName.KV, PageKeys())  # type: ignore[call-arg]
    PoolTransfer(name="kv", keys=PageKeys())  # type: ignore[arg-type]
    PoolTransferResult(restorable_prefix_pages=[1, 2])  # type: ignore[arg-type]
    inserted.adopted_ranges.ranges(ComponentType.FULL)  # type: ignore[union-attr]


def receipts(receipt: IncLockRefResult, node: NodeId) -> None:
    """A release takes a receipt, not a node."""
    assert_type(receipt.to_dec_params(), DecLockRefParams)
    DecLockRefParams(receipt=node)  # type: ignore[arg-type]


def errors(error: LinkError, full: CapacityError, split: AgreementError) -> None:
    """Errors keep typed fields, by keyword."""
    assert_type(error.operation, OperationId | None)
    assert_type(full.needed, int)
    by_rank: Mapping[int, str] = split.by_rank
    CapacityError("full")  # type: ignore[call-arg]
    StorageError("gone", True)  # type: ignore[call-arg]  # noqa: FBT003 -- that is the mistake
    del by_rank


def nodes(node: TreeNodeView) -> None:
    """What a node holds and lacks in the store; a view is read, never written."""
    assert_type(node.has_swa, bool)
    assert_type(node.mamba_slot, int | None)
    assert_type(node.unstored, tuple[ComponentType, ...])
    node.mamba_slot = 3  # type: ignore[misc]


def a_fork(cache: PrefixCache, receipt: IncLockRefResult) -> None:
    """A state is forked for a receipt, and the caller must look whether there was room."""
    slot = cache.fork_state(receipt)
    assert_type(slot, int | None)
    cache.fork_state(receipt.node_id)  # type: ignore[arg-type]


def every_action(action: CacheAction) -> str:
    """All actions there are: one more, and `assert_never` here is an error."""
    match action:
        case FreeDeviceKV(indices=indices) | FreeDeviceKVFullOnly(indices=indices):
            assert_type(indices, torch.Tensor)
            return "slots"
        case BackupKV(node_ids=node_ids):
            assert_type(node_ids, tuple[NodeId, ...])
            return "nodes"
        case FreeSWA(full_indices=beside):
            assert_type(beside, torch.Tensor)
            return "windows"
        case MoveSWA(from_full=old, to_full=new):
            assert_type((old, new), tuple[torch.Tensor, torch.Tensor])
            return "pairs"
        case FreeMambaSlots(slots=states):
            assert_type(states, tuple[int, ...])
            return "states"
        case _:
            assert_never(action)


def a_forgotten_action(action: CacheAction) -> str:
    """`BackupKV` is missing."""
    kind = ""
    match action:  # type: ignore[exhaustive-match]
        case FreeDeviceKV() | FreeDeviceKVFullOnly() | FreeSWA() | FreeMambaSlots():
            kind = "slots"
        case MoveSWA():
            kind = "pairs"
    return kind


def a_forgotten_action_and_never(action: CacheAction) -> str:
    """`FreeDeviceKVFullOnly` is missing."""
    match action:
        case BackupKV():
            return "nodes"
        case FreeDeviceKV() | FreeSWA() | MoveSWA() | FreeMambaSlots():
            return "slots"
        case _:
            assert_never(action)  # type: ignore[arg-type]


def every_load_back(answer: LoadBack) -> str:
    """All answers of `init_load_back`."""
    match answer:
        case LoadWaiting(operation_id=operation):
            assert_type(operation, OperationId)
            return "waiting"
        case LoadAdmitted(num_tokens=num_tokens):
            assert_type(num_tokens, int)
            return "admitted"
        case LoadMiss(reason=reason):
            return reason
        case _:
            assert_never(answer)


def a_forgotten_load_back(answer: LoadBack) -> str:
    """`LoadMiss` is missing."""
    match answer:
        case LoadWaiting() | LoadAdmitted():
            return "later"
        case _:
            assert_never(answer)  # type: ignore[arg-type]


def every_phase(phase: LinkerTransferPhase, load: ExternalLinkerLoadPhase) -> str:
    """Phases are closed too."""
    match phase:
        case LinkerTransferPhase.LOOKUP | LinkerTransferPhase.LOAD:
            return "keys"
        case LinkerTransferPhase.OFFLOAD:
            pass
        case _:
            assert_never(phase)
    match load:  # type: ignore[exhaustive-match]
        case ExternalLinkerLoadPhase.PREPARE | ExternalLinkerLoadPhase.COMMIT:
            return "kept"
    return "given up"
