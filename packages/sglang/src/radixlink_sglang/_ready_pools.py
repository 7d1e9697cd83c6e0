"""`ReadyPools`: a group of pools whose slots an engine's streams are done with.

SGLang hands over slots that its scheduler's stream has yet to compute, and pages that its forward's
stream has yet to write or read. Events of both are recorded on the scheduler thread with each load
and offload, and the linker's thread waits for all that were recorded before it looks at any slot.
Waiting for later ones too is waiting for nothing that waits for this thread: a forward blocks the
host, before a layer is launched, and never a stream.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from radixlink_contracts import PoolGroup

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from radixlink_contracts import DevicePool, PoolName, PoolTransfer
    from radixlink_sglang._engine import EngineEvent


class ReadyPools(PoolGroup):
    """Another group, whose transfers are resolved when their slots are ready.

    Thread: `record` and `drop` the scheduler's; `resolve` any.
    """

    def __init__(self, group: PoolGroup) -> None:
        """Resolve by `group`."""
        self._group: Final = group
        self._mutex: Final = threading.Lock()
        self._events: Final[deque[EngineEvent]] = deque()

    def record(self, events: Iterable[EngineEvent]) -> None:
        """What is resolved from now on is ready when these have come."""
        with self._mutex:
            self._events.extend(events)

    def drop(self, events: Collection[EngineEvent]) -> None:
        """Nobody waits for these any more: no slots were handed over with them."""
        with self._mutex:
            kept = [event for event in self._events if not any(event is one for one in events)]
            self._events.clear()
            self._events.extend(kept)

    @property
    @override
    def sources(self) -> frozenset[PoolName]:
        """Which transfers the pools take."""
        return self._group.sources

    @override
    def resolve(
        self,
        transfers: Iterable[PoolTransfer],
        *,
        allow_partial: bool = False,
        allow_missing_kv: bool = False,
    ) -> Sequence[tuple[DevicePool, PoolTransfer]]:
        """The physical transfers; of transfers with slots, when these are ready."""
        asked = tuple(transfers)
        if any(transfer.device_indices is not None for transfer in asked):
            self._wait()
        return self._group.resolve(
            asked, allow_partial=allow_partial, allow_missing_kv=allow_missing_kv
        )

    def _wait(self) -> None:
        """Wait for every event recorded before, oldest first."""
        while True:
            with self._mutex:
                if not self._events:
                    return
                event = self._events[0]
            event.synchronize()
            with self._mutex:
                # `resolve` of another thread may have waited for the same one, or it was dropped.
                if self._events and self._events[0] is event:
                    self._events.popleft()
