"""`LayerGate`: what SGLang's pools wait on before they show a layer, over our layer counter.

SGLang speaks of batches by its own rules: an int, -1 where nothing is loaded. It also counts the
batches of whose loads none could be queued on this rank: other ranks may have queued theirs, and
all must give the batch a verdict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from radixlink_contracts import BatchIndex, LayerCounter

NO_BATCH: Final = -1
"""SGLang's word for no batch."""


class LayerGate:
    """The counter that SGLang registers with its pools and its worker.

    Thread: `open` and `forget` the scheduler's; the rest the one that launches forwards.
    """

    def __init__(self, counter: LayerCounter, num_layers: int) -> None:
        """Wait on `counter`, of a model with so many layers."""
        #: SGLang reads both.
        self.num_layers: Final = num_layers
        self.consumer_index = NO_BATCH
        self._counter: Final = counter
        self._batches: dict[int, BatchIndex | None] = {}
        self._next = 0

    def open(self, batch: BatchIndex | None) -> int:
        """The number by which SGLang knows a batch from now on."""
        number = self._next
        self._next += 1
        self._batches[number] = batch
        return number

    def forget(self, number: int) -> BatchIndex | None:
        """A batch is over; nobody waits for it any more."""
        return self._batches.pop(number, None)

    def clear(self) -> None:
        """All batches are over. Numbers are not used again: a forward may still name one."""
        self._batches.clear()
        self.consumer_index = NO_BATCH

    def set_consumer(self, index: int) -> None:
        """The next forward waits for this batch; for -1, for none."""
        self.consumer_index = index
        self._counter.set_consumer(self._batches.get(index))

    def wait_until(self, layer: int) -> None:
        """Return when the layer has landed, or never will; SGLang drops the forward's output then."""
        self._counter.wait_until(layer)
