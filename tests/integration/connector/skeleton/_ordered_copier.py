"""`OrderedCopier`: copies that wait for what the engine has queued on its own stream.

A forward that was launched may run long after the call returned. `CudaCopier` knows the stream of
the thread that calls it, the linker's, and not the forward's; so the thread of the model records an
event, and the linker's waits for it before it touches a block. What a forward waits for it waits for
on the host, before a layer is launched: so no event ever waits for a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import torch
from typing_extensions import override

from radixlink_contracts import Copier

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import ByteRegion, Fence, Staging


class Event(Protocol):
    """An event of the stream that the model runs on."""

    def synchronize(self) -> None:
        """Return when all that was queued before it has run."""
        ...


def record_cuda_event() -> Event:
    """An event behind all that the calling thread's current stream was given. Needs a device."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class OrderedCopier(Copier):
    """Another copier, whose copies begin when what was queued before `record` has run.

    Thread: `record` the model's; the rest as the other copier's.
    """

    def __init__(self, copier: Copier, new_event: Callable[[], Event]) -> None:
        """Record by `new_event`: on the stream that the model runs on, always the same."""
        self._copier: Final = copier
        self._new_event: Final = new_event
        self._last: Event | None = None

    def record(self) -> None:
        """Copies that begin from now on come behind what is queued by now.

        Of one stream the last event says it all. Cost: one event.
        """
        self._last = self._new_event()

    @override
    def staging(self, num_bytes: int) -> Staging:
        """New staging memory; see `Copier.staging`."""
        return self._copier.staging(num_bytes)

    @override
    def gather(self, region: ByteRegion, out: torch.Tensor) -> Fence:
        """Copy rows out, when they are written; see `Copier.gather`."""
        self._wait()
        return self._copier.gather(region, out)

    @override
    def scatter(self, region: ByteRegion, source: torch.Tensor) -> Fence:
        """Copy rows in, when nothing reads what was there; see `Copier.scatter`."""
        self._wait()
        return self._copier.scatter(region, source)

    def _wait(self) -> None:
        event = self._last
        if event is not None:
            event.synchronize()
