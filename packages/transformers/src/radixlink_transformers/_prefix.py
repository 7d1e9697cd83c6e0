"""`PrefixFinder`: brings what a store has of a prompt to the device, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from radixlink_contracts import (
    ExternalMatch,
    LoadAdmitted,
    LoadMiss,
    LoadWaiting,
    MatchPrefixParams,
)
from radixlink_transformers._values import LoadStarted, LookupStarted

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import (
        LinkedPrefixCache,
        LoadBack,
        LoadMode,
        MatchResult,
        RadixKey,
        RequestId,
    )
    from radixlink_transformers._patience import Patience
    from radixlink_transformers._request import EngineRequest
    from radixlink_transformers._stay import Stay
    from radixlink_transformers._values import Progress


@attrs.frozen(kw_only=True)
class FoundPrefix:
    """What of a prompt need not be computed.

    Attributes:
        match: Where it lies, on the device.
        device_tokens: How much of it was there before.
        loading_tokens: How much comes behind it, layer by layer while they run.
    """

    match: MatchResult
    device_tokens: int
    loading_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """How much it is."""
        return self.match.device_prefix_len + self.loading_tokens

    @property
    def restored_tokens(self) -> int:
        """How much of it comes from the store."""
        return self.num_tokens - self.device_tokens


class PrefixFinder:
    """Takes one request through match, lookup and load.

    What the cache answers decides, never a clock of this rank alone: see `_patience`.

    Thread: the scheduler's.
    """

    def __init__(self, cache: LinkedPrefixCache, mode: LoadMode) -> None:
        """Ask this cache, for loads of this mode."""
        self._cache: Final = cache
        self._mode: Final = mode

    def find_on_device(self, key: RadixKey) -> FoundPrefix:
        """What the device has; no store is asked."""
        match = self._cache.match_prefix(MatchPrefixParams(key=key))
        return FoundPrefix(match=match, device_tokens=match.device_prefix_len)

    def find(
        self,
        request: EngineRequest,
        stay: Stay,
        begin_wait: Callable[[], Patience],
        tell: Callable[[Progress], None],
    ) -> FoundPrefix:
        """What the device has after the store, if any, gave what it can.

        Args:
            request: Who asks.
            stay: Of that request.
            begin_wait: Begins to wait for the store.
            tell: Is told when something starts.

        Raises:
            AgreementError: The ranks do not agree; the replica has failed.
        """
        stay.name(request.request_id)
        params = MatchPrefixParams(key=request.key, request_id=request.request_id)
        match = self._cache.match_prefix(params)
        before = match.device_prefix_len
        patience: Patience | None = None
        while match.external in {ExternalMatch.UNKNOWN, ExternalMatch.HIT}:
            if patience is None:
                patience = begin_wait()
                tell(LookupStarted(num_device_tokens=before))
            if match.external is ExternalMatch.HIT:
                answer = self._queue_load(request, match, stay, tell)
                if isinstance(answer, LoadAdmitted):
                    return FoundPrefix(
                        match=match, device_tokens=before, loading_tokens=answer.num_tokens
                    )
                if isinstance(answer, LoadMiss):
                    match = self.find_on_device(request.key).match
                    break
            if not self._wait(request.request_id, patience):
                # The store is too slow: do without. A load that was started ends for nobody.
                self._cache.release_aborted_request(request.request_id)
                match = self.find_on_device(request.key).match
                break
            match = self._cache.match_prefix(params)
        return FoundPrefix(match=match, device_tokens=min(before, match.device_prefix_len))

    def _queue_load(
        self,
        request: EngineRequest,
        match: MatchResult,
        stay: Stay,
        tell: Callable[[Progress], None],
    ) -> LoadBack:
        """Queue the load of a HIT, and start it if the request waits for it."""
        answer = self._cache.init_load_back(request, self._mode)
        if not isinstance(answer, LoadMiss):
            tell(LoadStarted(num_tokens=match.host_hit_length))
        if isinstance(answer, LoadWaiting):
            # A launch without a forward: nothing of it can read a slot, so it is over at once.
            stay.launch()
            stay.retire()
        return answer

    def _wait(self, request_id: RequestId, patience: Patience) -> bool:
        """Step until it is worth to match again; False when that takes too long."""
        while True:
            report = self._cache.step()
            if any(request_id in named for named in (report.landed, report.failed, report.ready)):
                return True
            if not patience.pause():
                return False
