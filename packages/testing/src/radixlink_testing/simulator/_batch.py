"""`Batch`: a forward of some requests: on each rank it reads, layer by layer, and then writes.

What came from the device is there when it is launched. Of a layer-wise load it reads each layer when
the counter lets it, at some moment between its launch and its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixlink_contracts import PoolName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from radixlink_contracts import BatchIndex
    from radixlink_testing.simulator._rank import SimulatedRank
    from radixlink_testing.simulator._requests import Part, Request


class Batch:
    """A batch that was launched.

    Thread: one at a time.
    """

    def __init__(
        self,
        requests: list[Request],
        ranks: Sequence[SimulatedRank],
        indices: Mapping[int, BatchIndex | None],
    ) -> None:
        """Launch it.

        Args:
            requests: Those in it.
            ranks: All.
            indices: What each rank's forward waits for.
        """
        self.requests = requests
        self.indices = indices
        self._ranks = ranks
        self._waits = any(part.awaited for request in requests for part in request.parts)
        #: The layer that each rank's forward reads next of what was loaded for it.
        self._layers = [0] * len(ranks)
        for rank, _, part in self._parts():
            for name, pages in part.busy.items():
                rank.device.pools[name].launched(pages)
        self._look()

    def go_on(self, rank: SimulatedRank) -> None:
        """One layer more on one rank, where the counter lets it."""
        if self._waits and self._layers[rank.rank] < rank.watch.num_layers:
            counter = rank.backend.counter
            counter.set_consumer(self.indices[rank.rank])
            if counter.decided(self._layers[rank.rank]):
                self._read_layer(rank)

    def end(self) -> None:
        """All that is left of it: what it read must have been there all the while."""
        if self._waits:
            for rank in self._ranks:
                rank.backend.counter.set_consumer(self.indices[rank.rank])
                while self._layers[rank.rank] < rank.watch.num_layers:
                    rank.backend.counter.wait_until(self._layers[rank.rank])
                    self._read_layer(rank)
        self._look()
        for rank, request, part in self._parts():
            if request.counts:
                _compute(rank, request, part)
        self.drop()

    def drop(self) -> None:
        """It touches nothing any more."""
        for rank, _, part in self._parts():
            for name, pages in part.busy.items():
                rank.device.pools[name].retired(pages)

    def _parts(self) -> list[tuple[SimulatedRank, Request, Part]]:
        return [
            (rank, request, part)
            for request in self.requests
            for rank, part in zip(self._ranks, request.parts, strict=True)
        ]

    def _look(self) -> None:
        """Read what is on the device."""
        for _, request, part in self._parts():
            if request.counts:
                why = f"is read by {request.name}'s forward"
                for pool, page, mark in part.reads:
                    pool.look(page, mark, why)

    def _read_layer(self, rank: SimulatedRank) -> None:
        """Read the next layer of what was loaded."""
        layer = self._layers[rank.rank]
        self._layers[rank.rank] += 1
        rank.watch.note(f"a forward reads layer {layer}")
        for request in self.requests:
            if not request.counts:
                continue
            part = request.parts[rank.rank]
            for pool, page, mark in part.awaited:
                if not part.misread and not pool.right(page, layer, mark):
                    part.misread = (
                        f"rank {rank.rank}: layer {layer} of {pool.pool} page {page} was read by "
                        f"{request.name}'s forward before it was there"
                    )


def _compute(rank: SimulatedRank, request: Request, part: Part) -> None:
    """A forward writes its own pages, the windows beside them, and its state."""
    device, marks = rank.device, request.marks[request.start : request.end]
    for page, mark in zip(part.own_pages, marks, strict=False):
        device.full.compute(page, mark)
        for window in device.windows_of((page,)):
            device.pools[PoolName.SWA].compute(window, mark)
    if part.state is not None and request.end:
        device.pools[PoolName.MAMBA].compute(part.state, request.marks[request.end - 1])
