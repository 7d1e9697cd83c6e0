"""`ExternalMatcher`: what is agreed about the part of a key behind its device prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from radixlink_contracts import ExternalMatch, HitCause, MatchResult
from radixlink_linker._lookup import is_shorter

if TYPE_CHECKING:
    from radixlink_contracts import (
        Clock,
        OperationId,
        RadixKey,
        RequestId,
        TreeCore,
    )
    from radixlink_linker._counters import LinkerCounters
    from radixlink_linker._lookup import Lookup
    from radixlink_linker._operation_table import OperationTable
    from radixlink_linker._prober import Prober
    from radixlink_linker._requests import RequestTable
    from radixlink_linker._settings import LinkerSettings


_EXTERNAL_OF: Final = {
    HitCause.OWN_LOAD: ExternalMatch.UNKNOWN,
    HitCause.OTHER_LOAD: ExternalMatch.UNKNOWN,
    HitCause.ASKED: ExternalMatch.UNKNOWN,
    HitCause.FAILED_LATELY: ExternalMatch.MISS,
    HitCause.LOAD_FAILED: ExternalMatch.MISS,
    HitCause.PREFIX_SHRANK: ExternalMatch.MISS,
    HitCause.NOT_STORED: ExternalMatch.MISS,
    HitCause.RESTORABLE: ExternalMatch.HIT,
}


class ExternalMatcher:
    """Answers matches of what frames have agreed, and asks the store at the first match of a request.

    Ranks: all, the same calls in the same order.
    Thread: the scheduler's.
    """

    def __init__(
        self,
        *,
        tree: TreeCore,
        requests: RequestTable,
        operations: OperationTable,
        prober: Prober,
        clock: Clock,
        settings: LinkerSettings,
        counters: LinkerCounters,
    ) -> None:
        """Take what it works with."""
        self._tree = tree
        self._requests = requests
        self._operations = operations
        self._prober = prober
        self._clock = clock
        self._settings = settings
        self._counters = counters

    def match(self, key: RadixKey, request_id: RequestId, device: MatchResult) -> MatchResult:
        """Say what is agreed about the part of a key behind its device prefix.

        Mutates: the first match of a request opens its lookup. Twice without a `step` between
        gives the same answer.
        """
        start = device.device_prefix_len
        cause, operation = self._cause(key, request_id, device)
        hit_length = 0
        request = self._requests.get(request_id)
        if request is not None:
            if cause is HitCause.RESTORABLE:
                assert request.lookup is not None, "an answer is what it is restorable by"
                hit_length = self._hit_end(request.lookup) - start
            request.cause, request.device_len, request.hit_len = cause, start, hit_length
            request.waiting_on = operation
        if cause is HitCause.NOTHING_MISSING:
            return device
        # Written out: to copy it with changes costs more than the rest of a match.
        return MatchResult(
            device_prefix_len=start,
            last_device_node=device.last_device_node,
            external=_EXTERNAL_OF[cause],
            host_hit_length=hit_length,
            waiting_on=operation,
            full_kv_hit_length=device.full_kv_hit_length,
            branching_len=device.branching_len,
        )

    def _cause(
        self, key: RadixKey, request_id: RequestId, device: MatchResult
    ) -> tuple[HitCause, OperationId | None]:
        """What a match has to say, and the operation that it waits for."""
        start = device.device_prefix_len
        request = self._requests.get(request_id)
        if request is not None and request.load is not None:
            return HitCause.OWN_LOAD, request.load.op
        if len(key) - start < self._tree.page_size:
            return HitCause.NOTHING_MISSING, None
        other = self._operations.load_of(key, start)
        if other is not None:
            self._requests.wait_for(other, request_id)
            return HitCause.OTHER_LOAD, other.op
        if self._requests.is_missing(key, start):
            return HitCause.FAILED_LATELY, None
        if request is None or request.num_tokens != len(key):
            self._ask(key, request_id, device)
            return HitCause.ASKED, None
        if request.lookup is None:
            return HitCause.LOAD_FAILED, None
        if not request.answered:
            return HitCause.ASKED, None
        if is_shorter(device, request.lookup, self._tree.page_size):
            return HitCause.PREFIX_SHRANK, None
        if self._hit_end(request.lookup) <= start:
            return HitCause.NOT_STORED, None
        return HitCause.RESTORABLE, None

    def _ask(self, key: RadixKey, request_id: RequestId, device: MatchResult) -> None:
        """Open the lookup of a request; the store is asked at the end of the iteration."""
        deadline = self._clock.now() + self._settings.lookup_timeout_s
        lookup = self._requests.ask(key, request_id, device, deadline)
        self._counters.lookups += 1
        self._prober.add(lookup)

    def _hit_end(self, lookup: Lookup) -> int:
        """Token behind the longest agreed prefix."""
        return lookup.start + lookup.longest(lookup.num_pages) * self._tree.page_size
