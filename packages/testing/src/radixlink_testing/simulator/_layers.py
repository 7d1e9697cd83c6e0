"""`SimulatedLayerCounter`: what a forward waits on; whoever waits has the backend's thread go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from radixlink_contracts import BatchIndex, LayerCounter

if TYPE_CHECKING:
    from collections.abc import Callable


class SimulatedLayerCounter(LayerCounter):
    """The layers of one rank's batches of layer-wise loads.

    Thread: any; one at a time.
    """

    def __init__(self, num_layers: int, go_on: Callable[[BatchIndex], bool]) -> None:
        """Know how many layers there are.

        Args:
            num_layers: Of the model.
            go_on: Has the thread do one quantum for a batch; False where nothing of it moves, so
                that its deadline passes.
        """
        self._num_layers = num_layers
        self._go_on = go_on
        self._opened = 0
        self._missing: dict[BatchIndex, set[int]] = {}
        self._failed: set[BatchIndex] = set()
        self._consumer: BatchIndex | None = None

    def decided(self, layer: int) -> bool:
        """True when the consumer need not wait for a layer."""
        return self._decided(self._consumer, layer)

    def _decided(self, batch: BatchIndex | None, layer: int) -> bool:
        missing = None if batch is None else self._missing.get(batch)
        return missing is None or layer not in missing or batch in self._failed

    @override
    def update_producer(self) -> BatchIndex:
        """Open a batch; all its layers are outstanding."""
        batch = BatchIndex(self._opened)
        self._opened += 1
        self._missing[batch] = set(range(self._num_layers))
        return batch

    @override
    def set_consumer(self, batch: BatchIndex | None) -> None:
        """The next forward waits for this batch, or for none."""
        self._consumer = batch

    @override
    def complete(self, batch: BatchIndex, layer: int) -> None:
        """A layer has landed."""
        if batch not in self._failed:
            self._missing.get(batch, set()).discard(layer)

    @override
    def fail(self, batch: BatchIndex) -> None:
        """The layers that have not landed never will."""
        if batch in self._missing:
            self._failed.add(batch)

    @override
    def wait_until(self, layer: int) -> None:
        """Return when the consumer's layer is decided."""
        self._wait(self._consumer, layer)

    @override
    def finish(self, batch: BatchIndex) -> bool:
        """Wait until every layer is decided, and forget the batch."""
        for layer in range(self._num_layers):
            self._wait(batch, layer)
        whole = batch not in self._failed
        self._missing.pop(batch, None)
        self._failed.discard(batch)
        return whole

    @override
    def reset(self) -> None:
        """Forget every batch."""
        self._missing.clear()
        self._failed.clear()
        self._consumer = None

    def _wait(self, batch: BatchIndex | None, layer: int) -> None:
        """Have the thread go on until a layer is decided; its deadline passes where it cannot."""
        while not self._decided(batch, layer):
            assert batch is not None, "nobody waits for no batch"
            if not self._go_on(batch):
                self.fail(batch)
