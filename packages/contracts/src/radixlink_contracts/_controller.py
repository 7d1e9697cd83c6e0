"""The controller: the calls an engine makes, at which point of its loop, and what they answer.

A request's life::

    match_prefix        -> UNKNOWN: keep it waiting   MISS: compute   HIT: init_load_back
    init_load_back      -> LoadWaiting: it stays in the queue   LoadAdmitted: run it   LoadMiss: compute
    ready_to_load_host_cache   starts everything queued, once a scheduler iteration
    step                -> which requests landed or failed, and which may match again

All calls are made on the scheduler thread, on all ranks, in the same order with the same arguments. An abort is told
only after the engine's ranks agreed on it.

A call that is left in its middle ends the replica until `reset` by all ranks: by a signal's exception, or by one out of
what the engine handed in, which is its `RequestKV.repoint`, its allocators, its copy of states and its clock. The ranks
that went through with the call hold what this one does not; here every later call that needs agreement raises
`AgreementError`. `reset` and `detach` bring everything back, and where they raise they are called again: they go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

import attrs

from radixlink_contracts._linker import LoadMode

if TYPE_CHECKING:
    from radixlink_contracts._engine import RequestKV
    from radixlink_contracts._evict import EvictParams, EvictResult
    from radixlink_contracts._explain import Explanation, Holders
    from radixlink_contracts._ids import BatchIndex, OperationId, RequestId
    from radixlink_contracts._insert import InsertParams, InsertResult
    from radixlink_contracts._linker import UnifiedCacheLinker
    from radixlink_contracts._locks import DecLockRefParams, IncLockRefParams, IncLockRefResult
    from radixlink_contracts._match import MatchPrefixParams, MatchResult


@attrs.frozen(kw_only=True)
class LoadWaiting:
    """A staged load was queued: the request stays in the queue until `step` names it.

    Attributes:
        operation_id: The load.
    """

    operation_id: OperationId


@attrs.frozen(kw_only=True)
class LoadAdmitted:
    """A layer-wise load was queued: the request runs at once, and its forward waits for each layer.

    Nothing computed from it leaves the request before `step` or `finish_loads` says that it landed: no token, no
    insert. The request's KV lies in slots that stay the cache's: it was told by `RequestKV.repoint`, and is told again
    where the tree has the pages by then. Of a window, the last one of the tokens is there, as after a device hit.

    Attributes:
        operation_id: The load.
        num_tokens: Tokens that will be there, beyond the device prefix.
    """

    operation_id: OperationId

    num_tokens: int


@attrs.frozen(kw_only=True)
class LoadMiss:
    """Nothing will be loaded: compute what the device lacks.

    Attributes:
        reason: Why, for people.
    """

    reason: str


LoadBack: TypeAlias = LoadWaiting | LoadAdmitted | LoadMiss
"""What `init_load_back` answers."""


@attrs.frozen(kw_only=True)
class StepReport:
    """What one step decided, the same on every rank. Each request is named once for each operation it had.

    Attributes:
        landed: Requests whose pages are in the tree now: match again, and the device has them. One that was admitted
            locks what it matches now; its results count.
        failed: Requests whose load failed: match again, and compute. The results of one that was admitted do not count,
            and what it was told to use beyond its device prefix is no longer its own.
        ready: Other requests that may match again: their lookup is answered, or what they waited for ended.
        num_offloads_stored: Offloads that every rank confirmed.
        num_offloads_failed: Offloads that some rank did not.
        detached: Too many slots are held by ranks that never let go of them, so the cache goes on without its store:
            what was on its way has failed, matches ask no more, until `reset` by all ranks.
    """

    landed: tuple[RequestId, ...] = ()
    failed: tuple[RequestId, ...] = ()
    ready: tuple[RequestId, ...] = ()
    num_offloads_stored: int = 0
    num_offloads_failed: int = 0
    detached: bool = False


NOTHING_HAPPENED = StepReport()
"""The report of an idle step."""


class PrefixCache(Protocol):
    """The calls that engines know by these names.

    Ranks: all, the same order.
    Thread: the scheduler's.
    """

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match a request; the first match with a request id also opens its external lookup.

        When: for each waiting request, before admission; again whenever `step` names it.
        A request id names one sequence, which may grow; release it before it is used for another.
        Mutates: splits and recency only; allocates nothing, communicates nothing. Twice without a `step` between
            gives the same answer.

        Raises:
            AgreementError: The replica has failed; only `reset` helps.

        Cost: O(nodes on the path), plus one comparison of the matched bytes. The first match of a request with a
            linker also opens its lookup: O(pages behind the device prefix) copied; nothing is hashed.
        """
        ...

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert computed pages, give duplicates back, and start the offloads that are due.

        Returns:
            What the tree made of it, with nothing left for the caller to do: `cache_actions` is empty.

        When: after a batch's results are processed, for finished and chunked requests. Duplicates are free once the
            batches launched so far are processed: the request's next one may run on them already.

        Raises:
            ContractError: The value does not cover the key's whole pages, a length is not in whole pages or out of
                range, or something of a component that this cache has not is given. Nothing changes then but splits
                and recency: the slots are still the caller's.
            AgreementError: The replica has failed; only `reset` helps.

        Cost: O(nodes on the path), plus one comparison of the matched bytes and one free of the duplicates; with a
            linker, O(1) for each node that is offloaded or touched, since hashing and copying are off this thread.
        """
        ...

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict, and give the slots back.

        Returns:
            How much went, with nothing left for the caller to do: `cache_actions` is empty.

        When: before an allocation that would not fit.

        Cost: O(log leaves) for each leaf given up, O(1) for each window and state, and one free for each of them.
        """
        ...

    def inc_lock_ref(self, params: IncLockRefParams) -> IncLockRefResult:
        """Lock what a request matched.

        When: at admission, right after the match.
        """
        ...

    def dec_swa_lock_only(self, params: DecLockRefParams) -> IncLockRefResult:
        """Release the window and the state of what a request locked, and keep the full path.

        When: once the request has moved on by a window, so that others may have the room.

        Returns:
            The receipt to release at the end; the one given is void.
        """
        ...

    def dec_lock_ref(self, params: DecLockRefParams) -> None:
        """Release it.

        When: after the request's insert, or its abort.
        """
        ...

    def init_load_back(self, request: RequestKV, mode: LoadMode = LoadMode.STAGED) -> LoadBack:
        """Queue the load of what a HIT promised.

        Args:
            request: Whom it is for.
            mode: LAYER_WISE admits it at once. A tree with states, and a linker that does not offer it on every rank,
                stage it all the same.

        When: at admission of a request whose match said HIT, instead of computing.
        Mutates: evicts and allocates; takes a lock first. A miss leaves everything else as it was.

        Raises:
            AgreementError: The replica has failed; only `reset` helps.
        """
        ...

    def ready_to_load_host_cache(self) -> BatchIndex | None:
        """Start all queued loads, and ask the store for what was matched or prefetched since the last time.

        Returns:
            What this rank's forward of the batch waits on (`LayerCounter.set_consumer`); None for nothing.

        When: once an iteration, after admission and before the batch is launched; it counts as a launch.

        Raises:
            AgreementError: The replica has failed; only `reset` helps.
        """
        ...

    def fork_state(self, receipt: IncLockRefResult) -> int | None:
        """Copy the recurrent state at the end of a locked match into a slot of the request's own.

        The tree's state is a checkpoint that nobody writes to; the request goes on from its copy, and frees it.

        When: at admission, after `inc_lock_ref`.
        Mutates: evicts a state where no slot is free.

        Returns:
            The slot, or None when there is no room.

        Raises:
            ContractError: The match ends at no state: the cache has none, or the receipt is the root's.
            StaleHandleError: The receipt was released before.

        Cost: one copy of a state, ordered as the next forward is.
        """
        ...

    def release_aborted_request(self, request_id: RequestId) -> None:
        """Forget a request in whatever state it is. Idempotent; a load that was started is decided for nobody.

        When: after the engine's ranks agreed on the abort, and also when a request is finished.
        """
        ...

    def reset(self) -> None:
        """Drop every operation, node and slot; afterwards nothing is locked, pending or leaked. Idempotent.

        The slots that requests of the engine hold stay theirs, and the receipts it holds are void.

        When: no forward runs. The only way on after an `AgreementError`.

        Raises:
            AgreementError: Not all ranks reset in time.
            TransferError: A transfer here could not be ended; nothing is given back; call it again.
        """
        ...

    def release_host_resources(self) -> None:
        """Close the linker. Idempotent.

        When: the engine ends.
        """
        ...


class LinkedPrefixCache(PrefixCache, Protocol):
    """The calls that drive a linker.

    Ranks: all, the same order.
    Thread: the scheduler's.
    """

    def init_cache_linker(self, linker: UnifiedCacheLinker) -> None:
        """Attach an external store to this cache.

        When: before serving, or between batches; what is in the tree already takes part.

        Raises:
            ContractError: The linker lacks the pool of a component.
            InvalidTransitionError: A linker is attached already.
            AgreementError: Ranks attach with different settings, or another one could not or did not come: none is
                attached that hears of it. One that does not, since it alone got to the end of the last collective,
                hears it at its first frame. Where a rank did not come, the way on is `detach` and `reset` by all.
        """
        ...

    @property
    def num_outstanding(self) -> int:
        """Lookups and operations that are not over, a replicated number: 0 when `step` has nothing to agree."""
        ...

    def check_hicache_events(self) -> StepReport:
        """`step`, under the name that engines know."""
        ...

    def step(self) -> StepReport:
        """Exchange what each rank knows, and carry out what is agreed. `check_hicache_events` is its alias.

        When: once a scheduler iteration, before any decision about a request.

        Raises:
            AgreementError: Ranks differ, or one did not come in time. Fatal until `reset` by all ranks.

        Cost: one collective when anything is outstanding and every 64th step; none in a group of one.
        """
        ...

    def finish_loads(self, batch: BatchIndex | None) -> StepReport:
        """Agree on the layer-wise loads that were started, whatever is still missing of them counts as failed.

        Args:
            batch: What `ready_to_load_host_cache` returned on this rank.

        When: after the forward of their batch was launched and before its results are processed; after every launch,
            since only the cache knows whether there is something to agree on.

        Raises:
            AgreementError: Ranks differ, or one did not come in time. Fatal until `reset` by all ranks.

        Cost: waits until this rank's part has ended, with a deadline; one collective when a load was layer-wise.
        """
        ...

    def prefetch(self, *params: MatchPrefixParams) -> None:
        """Ask the store for requests before their first match.

        What is asked for in one iteration, here or by a first match, is one question to each store, submitted by
        `ready_to_load_host_cache`, or by the next `step` at the latest.

        When: as soon as the requests are known to all ranks.
        """
        ...

    def batch_retired(self, num_batches: int) -> None:
        """So many launched batches have had their results processed, in launch order.

        When: after each batch. Slots retired before are free once no batch can read them.
        """
        ...

    def detach(self) -> None:
        """Take the linker off: what is outstanding is dropped, the tree stays. Idempotent.

        A request that was admitted and is not decided is as if its load had failed; its slots are free once the batches
        launched before are processed.

        Raises:
            TransferError: A transfer here could not be ended; nothing is given back; call it again.
        """
        ...

    def explain(self, request_id: RequestId) -> Explanation | None:
        """Why a request's hit was what it was, by page, pool and rank, as far as this rank knows it.

        When: any time; nothing is kept or formatted for it beyond what an engine's calls leave behind anyway.
        Mutates: nothing.

        Returns:
            None for a request that is not remembered, so also without a linker.

        Ranks: local; each says what it knows.
        Cost: O(operations + pages of the request's lookup).
        """
        ...

    def holders(self) -> Holders:
        """Who holds a lock, a slot or an operation.

        When: any time.
        Mutates: nothing.

        Ranks: local; but for each operation's own columns all ranks say the same.
        Cost: O(operations + locks).
        """
        ...
