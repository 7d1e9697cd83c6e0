"""`Admission`: takes a request to where it can run: its prefix locked, its slots taken.

What the cache answers decides, never a clock of this rank alone: see `_patience`.

1. Match. UNKNOWN waits until a report names the request; too long a wait does without the store.
2. A staged HIT queues its load and waits for it likewise.
3. Lock what the device has and take slots for the rest, and for a state. A layer-wise HIT queues
   its load then, and takes slots only for what is behind it.
4. Where there is no room the request lets go of everything and begins again in a later iteration:
   who waits for room locks nothing that others could evict. It is the oldest who asks first, and
   those behind it ask for none before it has some. Where nobody else has any, and its own prefix
   is in the way (a lock keeps whole nodes, a state needs a copy), it is computed from nothing.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, TypeAlias

import attrs

from radixlink_contracts import (
    ExternalMatch,
    LoadAdmitted,
    LoadMiss,
    LoadMode,
    LoadWaiting,
    MatchPrefixParams,
    RadixKey,
)
from radixlink_contracts.errors import CapacityError
from radixlink_transformers._scheduler import Turn
from radixlink_transformers._values import LoadStarted, LookupStarted

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import torch

    from radixlink_contracts import LinkedPrefixCache, MatchResult
    from radixlink_transformers._device import Device
    from radixlink_transformers._patience import Patience
    from radixlink_transformers._request import EngineRequest
    from radixlink_transformers._scheduler import Traffic
    from radixlink_transformers._stay import Stay
    from radixlink_transformers._values import Progress

    Tell: TypeAlias = Callable[[Progress], None]

_NOTHING: Final = RadixKey(array("q"))


@attrs.frozen(kw_only=True, eq=False)
class Admitted:
    """What a request runs with.

    Attributes:
        match: What it begins with, on the device.
        slots: Full slots of what need not be computed. Shape: (tokens,) int64, whole pages.
        restored_tokens: How much of it came while the request waited for the store, or comes layer by
            layer.
        loading: The last tokens of it come layer by layer while they run.
        state: The slot in which its forwards change its states, for a model with states.
    """

    match: MatchResult
    slots: torch.Tensor
    restored_tokens: int
    loading: bool
    state: int | None

    @property
    def device_tokens(self) -> int:
        """How much of it the device had without that, whoever computed or restored it."""
        return len(self.slots) - self.restored_tokens


class Admission:
    """Admits the requests of one engine.

    Thread: the scheduler's.
    """

    def __init__(
        self,
        *,
        cache: LinkedPrefixCache,
        device: Device,
        traffic: Traffic,
        mode: LoadMode,
        begin_wait: Callable[[], Patience],
    ) -> None:
        """Ask this cache, for loads of this mode; with states they are staged all the same."""
        self._cache: Final = cache
        self._device: Final = device
        self._traffic: Final = traffic
        self._layer_wise: Final = mode is LoadMode.LAYER_WISE and device.states is None
        self._begin_wait: Final = begin_wait

    def on_device(self, key: RadixKey) -> MatchResult:
        """What the device has; no store is asked."""
        return self._cache.match_prefix(MatchPrefixParams(key=key))

    def admit(
        self, request: EngineRequest, stay: Stay, num_tokens: int, tell: Tell
    ) -> Generator[Turn, None, Admitted]:
        """Go on until the request can run. It holds what it needs then, in its stay.

        Args:
            request: Who asks.
            stay: Of that request; holds nothing.
            num_tokens: Slots of the whole sequence at its longest, whole pages.
            tell: Is told when something starts.

        Raises:
            AgreementError: The ranks do not agree; the replica has failed.
            CapacityError: There is no room, and none to come; nothing is held then.
        """
        # What came from the store so far, and what the device had when the last wait for it began.
        restored = 0
        awaited_on: int | None = None
        for_store: Patience | None = None
        for_room: Patience | None = None
        without_store = without_prefix = False
        while True:
            match = self._match(request, without_store=without_store, without_prefix=without_prefix)
            if awaited_on is not None:
                # A load of its own, or of another that begins alike.
                restored += max(0, match.device_prefix_len - awaited_on)
                awaited_on = None
            asked = match.external in {ExternalMatch.UNKNOWN, ExternalMatch.HIT}
            if asked and for_store is None:
                for_store = self._begin_wait()
                tell(LookupStarted(num_device_tokens=match.device_prefix_len))
            waits = match.external is ExternalMatch.UNKNOWN
            room: Admitted | CapacityError | None = None
            if not waits and not self._traffic.room_is_awaited:
                room = self._try(request, match, stay, num_tokens, restored, tell)
                waits = room is None
            if isinstance(room, Admitted):
                return room
            stay.let_go()
            if waits:
                awaited_on = match.device_prefix_len
                assert for_store is not None, "whoever waits for a store has asked it"
                if not (yield from self._until_told(request, for_store)):
                    # Too slow: do without. A load that was started ends for nobody.
                    self._cache.release_aborted_request(request.request_id)
                    without_store = True
                continue
            if isinstance(room, CapacityError):
                if self._is_alone and match.device_prefix_len:
                    # What its own prefix locks may be all that is in the way.
                    without_prefix = True
                    continue
                for_room = self._wait_for_room(room, for_room)
            yield Turn.WAITS

    def _match(
        self, request: EngineRequest, *, without_store: bool, without_prefix: bool
    ) -> MatchResult:
        if without_prefix:
            return self.on_device(_NOTHING)
        if without_store:
            return self.on_device(request.key)
        request.may_match = False
        return self._cache.match_prefix(
            MatchPrefixParams(key=request.key, request_id=request.request_id)
        )

    def _try(
        self,
        request: EngineRequest,
        match: MatchResult,
        stay: Stay,
        num_tokens: int,
        restored: int,
        tell: Tell,
    ) -> Admitted | CapacityError | None:
        """Load what can be loaded, and take what is needed to run.

        Returns:
            A `CapacityError` as a value where there is no room now; None where a load is waited
            for.

        Raises:
            CapacityError: There never will be.
        """
        hit = match.host_hit_length if match.external is ExternalMatch.HIT else 0
        if num_tokens > self._device.full.size:
            # Not worth evicting everything for.
            there = match.device_prefix_len
            raise stay.no_room(num_tokens - there, there)
        if hit and not self._layer_wise:
            if not isinstance(self._load(request, hit, LoadMode.STAGED, tell), LoadMiss):
                return None
            hit = 0
        prefix = stay.lock(match)
        behind = num_tokens - len(prefix.slots)
        if hit and not stay.try_reserve(behind - hit, hit):
            # There may be room for one window and not for two.
            hit = 0
        loading = 0
        if hit:
            answer = self._load(request, hit, LoadMode.LAYER_WISE, tell)
            if isinstance(answer, LoadWaiting):
                return None
            loading = answer.num_tokens if isinstance(answer, LoadAdmitted) else 0
        if (loading < hit or not hit) and not stay.try_reserve(behind - loading):
            if loading:
                # It is queued and not started, so that it ends here.
                self._cache.release_aborted_request(request.request_id)
            return stay.no_room(behind - loading, len(prefix.slots) + loading)
        state: int | None = None
        if self._device.states is not None:
            state = stay.try_take_state(prefix)
            if state is None:
                return stay.no_state()
        slots = prefix.slots
        if loading:
            slots = slots.new_empty(len(prefix.slots) + loading)
            slots[: len(prefix.slots)] = prefix.slots
            slots[len(prefix.slots) :] = request.loading[:loading]
        return Admitted(
            match=match,
            slots=slots,
            restored_tokens=min(restored, len(prefix.slots)) + loading,
            loading=loading > 0,
            state=state,
        )

    def _load(
        self, request: EngineRequest, hit: int, mode: LoadMode, tell: Tell
    ) -> LoadAdmitted | LoadWaiting | LoadMiss:
        """Queue the load of a HIT."""
        request.load_failed = False
        answer = self._cache.init_load_back(request, mode)
        if not isinstance(answer, LoadMiss):
            tell(LoadStarted(num_tokens=hit))
        return answer

    def _until_told(
        self, request: EngineRequest, patience: Patience
    ) -> Generator[Turn, None, bool]:
        """Wait until it is worth to match again; False when that takes too long."""
        while patience.lasts():
            yield Turn.WAITS
            if request.may_match:
                return True
        return False

    def _wait_for_room(self, refusal: CapacityError, patience: Patience | None) -> Patience | None:
        """Those behind wait too; while somebody runs, for as long as it takes.

        Raises:
            CapacityError: No room is to be had from anybody, or for too long.
        """
        self._traffic.room_is_awaited = True
        if self._traffic.num_running:
            return None
        patience = patience or self._begin_wait()
        if self._is_alone or not patience.lasts():
            raise refusal
        return patience

    @property
    def _is_alone(self) -> bool:
        """No other request and no transfer has anything that could become free."""
        return self._traffic.num_in_flight == 1 and not self._cache.num_outstanding
