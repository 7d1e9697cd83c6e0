"""`LayerDoneCounter`: a forward waits on it, layer by layer, while a thread brings the layers.

A batch is open from `update_producer` on. Its layers come in any order, each once; what will never
come is failed, by whoever knows or by the first wait that is too late. No wait raises: a forward
that went on without a layer is dropped when its loads are decided.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Final, cast

import attrs
from typing_extensions import override

from radixlink_contracts import LayerCounter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from radixlink_contracts import BatchIndex


@attrs.define(eq=False)
class _Batch:
    """Which layers of a batch are still to come.

    Attributes:
        missing: These.
        failed: None of them will.
        deadline: On the monotonic clock.
    """

    missing: set[int]
    deadline: float
    failed: bool = False


class LayerDoneCounter(LayerCounter):
    """The layers of batches of loads. A batch index is never used again.

    Thread: any; see `LayerCounter` for who calls what.
    """

    def __init__(self, num_layers: int, timeout_s: float) -> None:
        """Know how many layers there are.

        Args:
            num_layers: Of the model.
            timeout_s: Seconds from the opening of a batch after which nobody waits for it.
        """
        self._num_layers: Final = num_layers
        self._timeout_s: Final = timeout_s
        # Drawn from, not called as a type: a NewType is a call of a Python function.
        self._indices: Final = cast("Iterator[BatchIndex]", count())
        #: Guards all below, and tells who waits of layers.
        self._changed: Final = threading.Condition()
        self._batches: dict[BatchIndex, _Batch] = {}
        #: Batches that were finished without some layer and that may land yet.
        self._late: set[BatchIndex] = set()
        self._consumer: BatchIndex | None = None

    @override
    def update_producer(self) -> BatchIndex:
        """Open a batch; all its layers are outstanding."""
        with self._changed:
            batch = next(self._indices)
            deadline = time.monotonic() + self._timeout_s
            self._batches[batch] = _Batch(set(range(self._num_layers)), deadline)
            return batch

    @override
    def set_consumer(self, batch: BatchIndex | None) -> None:
        """The next forward waits for this batch, or for none."""
        with self._changed:
            self._consumer = batch

    @override
    def complete(self, batch: BatchIndex, layer: int) -> None:
        """A layer has landed; one of a batch that is over or failed says nothing."""
        with self._changed:
            found = self._batches.get(batch)
            if found is not None and not found.failed:
                found.missing.discard(layer)
                self._changed.notify_all()

    @override
    def fail(self, batch: BatchIndex) -> None:
        """The layers that have not landed never will; those that have, have."""
        with self._changed:
            found = self._batches.get(batch)
            if found is not None:
                found.failed = True
                self._changed.notify_all()

    @override
    def wait_until(self, layer: int) -> None:
        """Return when the consumer's layer is decided, or its deadline has passed."""
        with self._changed:
            batch = None if self._consumer is None else self._batches.get(self._consumer)
            if batch is not None:
                self._wait(batch, lambda: layer not in batch.missing)

    @override
    def finish(self, batch: BatchIndex) -> bool:
        """Wait until every layer is decided and forget the batch; see `LayerCounter.finish`."""
        with self._changed:
            found = self._batches.get(batch)
            if found is None:
                return True
            self._wait(found, lambda: not found.missing)
            self._batches.pop(batch, None)
            if found.missing:
                self._late.add(batch)
            if self._consumer == batch:
                self._consumer = None
            return not found.missing

    @contextmanager
    def landing(self, batch: BatchIndex, layer: int) -> Iterator[bool]:
        """A layer lands when the caller leaves; until then no forward gives it up, nor goes on.

        Yields:
            False where a forward went on without some layer of the batch.
        """
        with self._changed:
            found = self._batches.get(batch)
            went_on = batch in self._late if found is None else found.failed
            self._late.discard(batch)
            yield not went_on
            self.complete(batch, layer)

    @override
    def reset(self) -> None:
        """Forget every batch, and let go who waits."""
        with self._changed:
            for batch in self._batches.values():
                batch.failed = True
            self._batches.clear()
            self._late.clear()
            self._consumer = None
            self._changed.notify_all()

    def _wait(self, batch: _Batch, landed: Callable[[], bool]) -> None:
        """Wait for a layer; a deadline that passes fails the batch. The condition is held."""
        left = batch.deadline - time.monotonic()
        if not self._changed.wait_for(lambda: batch.failed or landed(), max(0.0, left)):
            batch.failed = True
