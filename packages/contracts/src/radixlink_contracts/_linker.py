"""`UnifiedCacheLinker`: an external store, as the wrapper drives it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts._device import LayerCounter
    from radixlink_contracts._ids import BatchIndex, OperationId, RequestId
    from radixlink_contracts._pools import PoolName
    from radixlink_contracts._transfers import PoolTransfer, PoolTransferResult


class Outcome(enum.Enum):
    """How this rank's part of an operation ended."""

    #: All bytes are where they belong.
    LANDED = "landed"
    #: Not all are, and no more will come.
    FAILED = "failed"


@attrs.frozen(kw_only=True)
class Completion:
    """One event in the life of an operation on this rank.

    Attributes:
        op: The operation.
        outcome: How it ended. The first one said is the one that counts.
        quiesced: True when this rank touches the operation's slots no more. One that is not is followed by a second
            that is: a deadline may say failed, never quiesced.
        why: What went wrong, for people; no part of what a completion is equal to.
    """

    op: OperationId
    outcome: Outcome
    quiesced: bool
    why: str = attrs.field(default="", eq=False)


class LoadMode(enum.Enum):
    """How a load meets its request."""

    #: The request waits until every rank has all bytes.
    STAGED = "staged"
    #: The forward waits for each layer.
    LAYER_WISE = "layer_wise"


class OperationTicket(Protocol):
    """An operation, as a backend sees it."""

    @property
    def op(self) -> OperationId:
        """Its id."""
        ...

    @property
    def decided(self) -> bool:
        """True once the ranks agreed on how it ended: touch no more of its slots.

        Thread: any. Asked before each copy.
        """
        ...


class UnifiedCacheLinker(Protocol):
    """Moves pages between the device pools of one rank and an external store.

    Every accepted operation ends in exactly one outcome, by a deadline, and is quiesced soon after. Nothing here
    communicates between ranks: agreement is the wrapper's.

    Ranks: local.
    Thread: the scheduler's, but for `lookup`.
    Errors: an exception out of any method counts as that operation's failure on this rank. `load` and `offload` that
        raise have kept nothing of the operation.
    """

    @property
    def pools(self) -> frozenset[PoolName]:
        """The pools that it can hold."""
        ...

    @property
    def layer_done_counter(self) -> LayerCounter | None:
        """What a forward waits on; None where layer-wise loads are not offered."""
        ...

    def lookup(
        self, request_id: RequestId, transfers: Sequence[PoolTransfer]
    ) -> PoolTransferResult:
        """Say which prefixes of the asked pages can be restored on this rank. Changes nothing but recency.

        Thread: an executor's; several at once.
        """
        ...

    def load(
        self, ticket: OperationTicket, transfers: Sequence[PoolTransfer], mode: LoadMode
    ) -> bool:
        """Queue a load; nothing moves before the start call.

        Returns:
            False where it is refused; nothing of it stays then.
        """
        ...

    def start_layer_wise_loading(self) -> BatchIndex | None:
        """Start all queued loads, staged ones too.

        Returns:
            The batch of the layer-wise ones for the layer counter; None where there are none.
        """
        ...

    def finish_layer_wise_loading(self, batch: BatchIndex | None) -> bool:
        """Wait, with a deadline of the linker's own, until the layer-wise loads of a batch have ended, and forget it.

        How each of them ended is told by its completion. Nothing is waited for where the ranks decided all of them.

        Returns:
            True when all of them ended in time, so also for None. False fails all of them on this rank: a forward that
            stopped waiting went on without the layers that came later.
        """
        ...

    def cancel_queued_load(self, op: OperationId) -> bool:
        """Take back a load that was not started.

        Returns:
            True when it was queued and is now forgotten; no completion follows.
        """
        ...

    def num_completed_loads(self) -> int:
        """How many load completions wait to be popped."""
        ...

    def pop_completed_load(self) -> Completion:
        """The oldest load completion.

        Raises:
            ContractError: There is none.
        """
        ...

    def offload(self, ticket: OperationTicket, transfers: Sequence[PoolTransfer]) -> bool:
        """Queue the storing of one node, all or nothing. What a failed one left in the store is harmless.

        Returns:
            False where it is refused.
        """
        ...

    def num_completed_offloads(self) -> int:
        """How many offload completions wait to be popped."""
        ...

    def pop_completed_offload(self) -> Completion:
        """The oldest offload completion.

        Raises:
            ContractError: There is none.
        """
        ...

    def reset(self) -> None:
        """Drop what is queued and every completion; return when no transfer touches device memory. Idempotent.

        Raises:
            TransferTimeoutError: A copy did not end in time; it is the last of its operation.
        """
        ...

    def close(self) -> None:
        """`reset`, and release everything. Idempotent."""
        ...


@runtime_checkable
class TouchingLinker(Protocol):
    """What a `UnifiedCacheLinker` may offer beside: to keep pages in the store that nobody reads there.

    A head that the device always has is never read from the store, and would be its coldest page. A linker without
    this call works as ever; no page is touched then. All ranks have it, or none.
    """

    def touch(self, ticket: OperationTicket, transfers: Sequence[PoolTransfer]) -> bool:
        """Queue the touching of one node: raise the recency of its pages, and find out whether all are there.

        The transfers name keys; they have no slots. It ends as an offload does, with a completion among those of the
        offloads: LANDED where all pages are there, else FAILED.

        Thread: the scheduler's; no store is asked within the call.

        Returns:
            False where it is refused.
        """
        ...


@runtime_checkable
class BatchingLinker(Protocol):
    """What a `UnifiedCacheLinker` may offer beside: to look several requests up at once.

    A linker without this call is asked for each request by itself.
    """

    def lookup_batch(
        self, questions: Sequence[tuple[RequestId, Sequence[PoolTransfer]]]
    ) -> Sequence[PoolTransferResult]:
        """`lookup` for several requests, with as few calls of the store as may be.

        Args:
            questions: Who asks, and the transfers of its lookup.

        Returns:
            One result for each question, in their order. What it raises is a miss of all of them.

        Thread: an executor's; several at once.
        """
        ...
