"""`RequestTable`: what is agreed about each request: its lookup, its load, its lock, and what is missing.

All of it is replicated: it changes by calls that every rank makes and by frames, never by what this
rank alone knows.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeAlias

import attrs

from radixlink_contracts import POOL_OF, IncLockRefParams
from radixlink_linker._load_plan import held_pages
from radixlink_linker._lookup import Lookup

if TYPE_CHECKING:
    from radixlink_contracts import (
        HitCause,
        IncLockRefResult,
        LinkedTreeCore,
        MatchResult,
        Namespace,
        NodeId,
        OperationId,
        PageBits,
        PoolName,
        RadixKey,
        ReceiptId,
        RequestId,
    )
    from radixlink_linker._operation import LoadOperation
    from radixlink_linker._settings import LinkerSettings

_Page: TypeAlias = "tuple[Namespace, int, bytes]"
"""A page by namespace, first token and tokens."""


@attrs.frozen(kw_only=True)
class FailedLoad:
    """A load that failed.

    Attributes:
        op: The load.
        step: Of the verdict.
        here: This rank had failed.
        why: What it knows of it.
    """

    op: OperationId
    step: int
    here: bool
    why: str


@attrs.define(kw_only=True, eq=False)
class Request:
    """What is agreed about one request.

    Attributes:
        num_tokens: Length of the key that was matched; a match with another length asks anew.
        lookup: The question, answered or not; None when no more is to be had.
        answered: The lookup's mask is agreed.
        load: Its own load that is not over.
        num_loads: Loads that were begun for it.
        published: The lock on what was restored for it.
        cause: Why its last match said what it said; None before there is one. Like all below, it is
            for explanations: nothing is decided of it.
        device_len: Tokens that the device had at that match.
        device_end: Where they ended when the lookup was opened; the node may be gone by now.
        hit_len: Tokens beyond those that could be restored.
        waiting_on: The operation that it was told to wait for.
        failures: Its loads that failed.
        load_miss: Why it was not loaded, when it was last refused.
    """

    num_tokens: int = 0
    lookup: Lookup | None = None
    answered: bool = False
    load: LoadOperation | None = None
    num_loads: int = 0
    published: IncLockRefResult | None = None
    cause: HitCause | None = None
    device_len: int = 0
    device_end: NodeId | None = None
    hit_len: int = 0
    waiting_on: OperationId | None = None
    failures: list[FailedLoad] = attrs.field(factory=list)
    load_miss: str | None = None


class RequestTable:
    """The requests of one replica, and the pages that count as missing.

    Ranks: all, the same calls in the same order.
    Thread: the scheduler's.
    """

    def __init__(self, tree: LinkedTreeCore, settings: LinkerSettings) -> None:
        """Start with no request."""
        self._tree = tree
        self._settings = settings
        self._requests: dict[RequestId, Request] = {}
        #: Lookups that are not answered, oldest first.
        self.lookups: list[Lookup] = []
        #: The first page of loads that failed, and the step until which it counts as missing;
        #: oldest first.
        self._missing: dict[_Page, int] = {}
        #: (step at which it ends, request, lock) of what was restored; oldest first.
        self._publications: deque[tuple[int, RequestId, IncLockRefResult]] = deque()

    def __contains__(self, request_id: RequestId) -> bool:
        """True while a request is remembered."""
        return request_id in self._requests

    def get(self, request_id: RequestId) -> Request | None:
        """What is agreed about a request; None for one that is not remembered."""
        return self._requests.get(request_id)

    def remember(self, request_id: RequestId) -> Request:
        """What is agreed about a request; from now on that is something."""
        return self._requests.setdefault(request_id, Request())

    def wait_for(self, operation: LoadOperation, request_id: RequestId) -> None:
        """Tell a request when a load ends; one that is new here is remembered for that."""
        if request_id not in operation.waiters:
            operation.waiters.append(request_id)
        self.remember(request_id)

    # -- lookups -----------------------------------------------------------------------------------

    def ask(
        self,
        key: RadixKey,
        request_id: RequestId,
        device: MatchResult,
        deadline: float,
    ) -> Lookup:
        """Open the question about what follows a device prefix; one that was open is dropped.

        What the device holds behind that prefix, without all that a match needs, is not asked for.
        """
        request = self.remember(request_id)
        self._forget_lookup(request)
        start = device.device_prefix_len
        keys = self._tree.key_source(device.last_device_node, key, start)
        held: dict[PoolName, PageBits] = {}
        if device.full_kv_hit_length > start:
            pages = held_pages(
                self._tree.holdings(key),
                self._tree.components,
                start=start,
                num_pages=len(keys),
                page_size=self._tree.page_size,
            )
            held = {POOL_OF[kind]: bits for kind, bits in pages.items()}
        lookup = Lookup(
            request_id=request_id, key=key, start=start, keys=keys, deadline=deadline, held=held
        )
        request.num_tokens = len(key)
        request.device_end = device.last_device_node
        request.lookup = lookup
        request.answered = False
        self.lookups.append(lookup)
        return lookup

    def answered(self, lookup: Lookup) -> None:
        """The mask of an open lookup is agreed."""
        self.lookups.remove(lookup)
        self._requests[lookup.request_id].answered = True

    def _forget_lookup(self, request: Request) -> None:
        """Ask no more for a request; an answer that comes later is nobody's."""
        if request.lookup is not None and not request.answered:
            self.lookups.remove(request.lookup)
        request.lookup = None

    # -- what is missing ---------------------------------------------------------------------------

    def is_missing(self, key: RadixKey, start: int) -> bool:
        """True while the page at a token of a key counts as missing."""
        return bool(self._missing) and self._page_at(key, start) in self._missing

    def mark_missing(self, key: RadixKey, start: int, step: int) -> None:
        """The page at a token of a key failed to load: it counts as missing for some steps."""
        page = self._page_at(key, start)
        self._missing.pop(page, None)
        self._missing[page] = step + self._settings.miss_steps

    def _page_at(self, key: RadixKey, start: int) -> _Page:
        """What names a missing page: replicated, unlike its hash, which may not be computed yet."""
        page = key.token_ids[start : start + self._tree.page_size].tobytes()
        return (key.namespace, start, page)

    # -- what was restored -------------------------------------------------------------------------

    def publish(self, request_id: RequestId, end: NodeId, step: int) -> None:
        """Keep a restored path for its request for some steps, so that it gets to match it."""
        request = self._requests[request_id]
        self._unpublish(request)
        receipt = self._tree.inc_lock_ref(IncLockRefParams(node_id=end))
        request.published = receipt
        until = step + self._settings.publish_lock_steps
        self._publications.append((until, request_id, receipt))

    def published(self) -> dict[ReceiptId, RequestId]:
        """For whom each lock on something restored is kept."""
        return {
            request.published.receipt_id: request_id
            for request_id, request in self._requests.items()
            if request.published is not None
        }

    def _unpublish(self, request: Request) -> None:
        """Release the lock on what was restored for a request."""
        if request.published is not None:
            self._tree.dec_lock_ref(request.published.to_dec_params())
            request.published = None

    # -- the end of things -------------------------------------------------------------------------

    def expire(self, step: int) -> None:
        """End the locks and the misses whose steps are over. Cost: O(those that are over)."""
        while self._publications and self._publications[0][0] <= step:
            _, request_id, receipt = self._publications.popleft()
            request = self._requests.get(request_id)
            if request is not None and request.published is receipt:
                self._unpublish(request)
        while self._missing:
            page, until = next(iter(self._missing.items()))
            if until > step:
                return
            del self._missing[page]

    def release(self, request_id: RequestId) -> Request | None:
        """Forget a request, its lookup and its lock.

        Returns:
            What was agreed about it; None for one that was not remembered.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._forget_lookup(request)
            self._unpublish(request)
            # Last, so that where this is left in its middle, `clear` finds the lock.
            del self._requests[request_id]
        return request

    def give_up(self) -> None:
        """Forget all that has to do with a store. What was restored stays locked for its steps."""
        self._requests = {
            request_id: Request(published=request.published)
            for request_id, request in self._requests.items()
            if request.published is not None
        }
        self.lookups.clear()
        self._missing.clear()

    def clear(self) -> None:
        """Forget every request and every miss. Idempotent."""
        for request in self._requests.values():
            self._unpublish(request)
        self._requests.clear()
        self.lookups.clear()
        self._missing.clear()
        self._publications.clear()
