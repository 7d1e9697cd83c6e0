"""`LayerDoneCounter`: a forward waits on it, layer by layer, while a thread brings the layers.

A batch is open from `update_producer` on. Its layers come in any order, each once; what will never
come is failed, by whoever knows or by the first wait that is too late, or that sees a store hang. No
wait raises: a forward that went on without a layer is dropped when its loads are decided.
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

_LOOK_S: Final = 0.05
"""How often who waits looks whether a store hangs."""


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

    def __init__(
        self, num_layers: int, timeout_s: float, hangs: Callable[[], bool] | None = None
    ) -> None:
        """Know how many layers there are.

        Args:
            num_layers: Of the model.
            timeout_s: Seconds from the opening of a batch after which nobody waits for it.
            hangs: Says whether what brings the layers hangs, so that nobody waits for it either;
                None where nothing can say so. Thread: any, also while a batch is waited for.
        """
        self._num_layers: Final = num_layers
        self._timeout_s: Final = timeout_s
        self._hangs: Final = hangs
        # Drawn from, not called as a type: a NewType is a call of a Python function.
        self._indices: Final = cast("Iterator[BatchIndex]", count())
        #: Guards all below. Entered itself, and not by its condition: see `_transfer_thread`.
        self._lock: Final = threading.RLock()
        #: Tells who waits of layers.
        self._changed: Final = threading.Condition(self._lock)
        self._batches: dict[BatchIndex, _Batch] = {}
        self._consumer: BatchIndex | None = None

    @override
    def update_producer(self) -> BatchIndex:
        """Open a batch; all its layers are outstanding."""
        with self._lock:
            batch = next(self._indices)
            deadline = time.monotonic() + self._timeout_s
            self._batches[batch] = _Batch(set(range(self._num_layers)), deadline)
            return batch

    @override
    def set_consumer(self, batch: BatchIndex | None) -> None:
        """The next forward waits for this batch, or for none."""
        with self._lock:
            self._consumer = batch

    @override
    def complete(self, batch: BatchIndex, layer: int) -> None:
        """A layer has landed; one of a batch that is over or failed says nothing."""
        with self._lock:
            found = self._batches.get(batch)
            if found is not None and not found.failed:
                found.missing.discard(layer)
                self._changed.notify_all()

    @override
    def fail(self, batch: BatchIndex) -> None:
        """The layers that have not landed never will; those that have, have."""
        with self._lock:
            found = self._batches.get(batch)
            if found is not None:
                found.failed = True
                self._changed.notify_all()

    @override
    def wait_until(self, layer: int) -> None:
        """Return when the consumer's layer is decided, or its deadline has passed."""
        with self._lock:
            batch = None if self._consumer is None else self._batches.get(self._consumer)
            if batch is not None:
                self._wait(batch, lambda: layer not in batch.missing)

    @override
    def finish(self, batch: BatchIndex) -> bool:
        """Wait until every layer is decided and forget the batch; see `LayerCounter.finish`."""
        with self._lock:
            found = self._batches.get(batch)
            if found is None:
                return True
            self._wait(found, lambda: not found.missing)
            self._batches.pop(batch, None)
            if self._consumer == batch:
                self._consumer = None
            return not found.missing

    @contextmanager
    def landing(self, batch: BatchIndex, layer: int) -> Iterator[bool]:
        """A layer lands when the caller leaves; until then no forward gives it up, nor goes on.

        Yields:
            False where a forward went on without some layer of the batch.
        """
        with self._lock:
            found = self._batches.get(batch)
            # One that was finished already was finished without this layer.
            yield found is not None and not found.failed
            self.complete(batch, layer)

    @override
    def reset(self) -> None:
        """Forget every batch, and let go who waits."""
        with self._lock:
            for batch in self._batches.values():
                batch.failed = True
            self._batches.clear()
            self._consumer = None
            self._changed.notify_all()

    def _wait(self, batch: _Batch, landed: Callable[[], bool]) -> None:
        """Wait for a layer; a deadline that passes, or a store that hangs, fails the batch.

        The lock is held.
        """
        while not (batch.failed or landed()):
            left = batch.deadline - time.monotonic()
            if left <= 0 or (self._hangs is not None and self._hangs()):
                batch.failed = True
                self._changed.notify_all()
            else:
                self._changed.wait(left if self._hangs is None else min(left, _LOOK_S))
