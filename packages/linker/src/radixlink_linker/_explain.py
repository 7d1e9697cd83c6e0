"""Explanations made of what requests and operations remember anyway; see `LinkedPrefixCache.explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from radixlink_contracts import (
    Explanation,
    HitCause,
    LoadFailure,
    LoadMode,
    LockHolder,
    LookupAnswer,
    OperationKind,
    OperationStatus,
    Outcome,
    PoolAnswer,
    PoolHitPolicy,
)
from radixlink_linker._operation import (
    LoadOperation,
    LockingOperation,
    OffloadOperation,
    TouchOperation,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from radixlink_contracts import HeldBack, IncLockRefResult, ReceiptId, RequestId
    from radixlink_linker._lookup import Lookup
    from radixlink_linker._operation import AnyOperation
    from radixlink_linker._requests import Request

_OUTCOMES = {Verdict.PENDING: None, Verdict.DONE: Outcome.LANDED, Verdict.FAILED: Outcome.FAILED}


def status_of(operation: AnyOperation, step: int) -> OperationStatus:
    """An operation, as it is in a step."""
    load = operation if isinstance(operation, LoadOperation) else None
    match operation:
        case LoadOperation(mode=LoadMode.STAGED):
            kind = OperationKind.STAGED_LOAD
        case LoadOperation():
            kind = OperationKind.LAYER_WISE_LOAD
        case OffloadOperation():
            kind = OperationKind.OFFLOAD
        case TouchOperation():
            kind = OperationKind.TOUCH
        case _:
            assert_never(operation)
    return OperationStatus(
        op=operation.op,
        kind=kind,
        request_id=None if load is None else load.request_id,
        queued=load is not None and load.queued,
        verdict=_OUTCOMES[operation.verdict],
        local=_OUTCOMES[operation.local_verdict],
        quiesced=operation.local_quiesced,
        age=step - operation.minted_step,
        node_id=operation.node_id,
        slots=operation.slots,
        waiters=() if load is None else tuple(load.waiters),
    )


def explanation_of(
    request_id: RequestId,
    request: Request,
    *,
    page_size: int,
    max_loads: int,
    rank: int,
    num_ranks: int,
    step: int,
    waits_for: AnyOperation | None,
    held_back: tuple[HeldBack, ...],
) -> Explanation:
    """Why the last match of a request said what it said."""
    lookup = request.lookup
    return Explanation(
        request_id=request_id,
        rank=rank,
        num_ranks=num_ranks,
        cause=request.cause or HitCause.NOT_MATCHED,
        device_pages=request.device_len // page_size,
        hit_pages=request.hit_len // page_size,
        lookup=None if lookup is None else _answer_of(lookup, page_size, agreed=request.answered),
        waits_for=None if waits_for is None else status_of(waits_for, step),
        num_loads=request.num_loads,
        max_loads=max_loads,
        failures=tuple(
            LoadFailure(op=failure.op, age=step - failure.step, here=failure.here, why=failure.why)
            for failure in request.failures
        ),
        load_miss=request.load_miss,
        published=request.published is not None,
        held_back=held_back,
    )


def _answer_of(lookup: Lookup, page_size: int, *, agreed: bool) -> LookupAnswer:
    """What became of a lookup."""
    answer = None if lookup.error is not None else lookup.answer
    local = None if answer is None else answer.mask.bit_length()
    reach = lookup.longest(lookup.num_pages) if agreed else None
    every_page = all(one.hit_policy is PoolHitPolicy.ALL_PAGES for one in lookup.asked)
    lacks = reach is not None and local is not None and reach < local and every_page
    return LookupAnswer(
        start_page=lookup.start // page_size,
        num_pages=lookup.num_pages,
        ready=answer is not None or lookup.error is not None,
        agreed=reach,
        local=local,
        missing_elsewhere=lookup.start // page_size + (reach or 0) if lacks else None,
        pools=tuple(
            PoolAnswer(
                pool=pool,
                found=bits,
                restorable=lookup.restorable_in(pool),
                held=lookup.held_of(pool),
            )
            for pool, bits in lookup.found.items()
        ),
        error=lookup.error,
    )


def locks_of(
    receipts: Iterable[IncLockRefResult],
    operations: Iterable[AnyOperation],
    published: Mapping[ReceiptId, RequestId],
) -> tuple[LockHolder, ...]:
    """Who holds each lock: an operation, what was restored for a request, or else the engine."""
    held_by = {
        operation.receipt.receipt_id: operation.op
        for operation in operations
        if isinstance(operation, LockingOperation)
    }
    return tuple(
        LockHolder(
            receipt_id=receipt.receipt_id,
            node_id=receipt.node_id,
            op=held_by.get(receipt.receipt_id),
            request_id=published.get(receipt.receipt_id),
        )
        for receipt in receipts
    )
