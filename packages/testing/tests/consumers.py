"""A consumer that survives every fault of its store, and others with one mistake each."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from typing_extensions import override

from radixlink_contracts import PageBits
from radixlink_contracts.errors import StorageError
from radixlink_testing import SUITE_LAYOUT
from radixlink_testing.store_consumers import CONSUMER_PAGES, StoreConsumer

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import PageKeys
    from radixlink_testing.faults import FaultyStore

SIZES = SUITE_LAYOUT.range_bytes


class Careful(StoreConsumer):
    """Does each operation in a thread, with buffers of its own, and gives it up when it waits."""

    def __init__(self, store: FaultyStore) -> None:
        self.store = store
        self.memory = [bytearray(size * CONSUMER_PAGES) for size in SIZES]
        self.threads: list[threading.Thread] = []
        #: What the store raised.
        self.errors: list[StorageError] = []

    @override
    def lookup(self, keys: PageKeys) -> int | None:
        found = self.run(lambda given_up: self.store.contains(keys))
        return None if found is None else found.leading

    @override
    def load(self, keys: PageKeys, at: int) -> bool:
        def work(given_up: threading.Event) -> PageBits:
            handles = self.store.open(keys, 1.0)
            if not handles.found.complete:
                return handles.found
            for layer_range, size in enumerate(SIZES):
                out = bytearray(size * len(keys))
                right = self.store.read(handles, layer_range, out)
                if given_up.is_set() or not right.complete:
                    return PageBits.none(len(keys))
                self.memory[layer_range][at * size : at * size + len(out)] = out
            return handles.found

        done = self.run(work)
        return done is not None and done.complete

    @override
    def offload(self, keys: PageKeys, at: int) -> bool:
        parts = self.parts(keys, at)
        stored = self.run(lambda given_up: self.store.put(keys, parts))
        return stored is not None and stored.complete

    @override
    def write(self, at: int, pages: list[bytes]) -> None:
        for number, page in enumerate(pages, start=at):
            start = 0
            for memory, size in zip(self.memory, SIZES, strict=True):
                memory[number * size : (number + 1) * size] = page[start : start + size]
                start += size

    @override
    def read(self, at: int, count: int) -> list[bytes]:
        return [
            b"".join(
                memory[number * size : (number + 1) * size]
                for memory, size in zip(self.memory, SIZES, strict=True)
            )
            for number in range(at, at + count)
        ]

    @override
    def settle(self) -> None:
        for thread in self.threads:
            thread.join()
        self.threads.clear()
        self.store.waiting.clear()

    @override
    def close(self) -> None:
        """Nothing is left."""

    def parts(self, keys: PageKeys, at: int) -> list[bytes] | list[memoryview]:
        """Copies of pages."""
        return [
            bytes(memory[at * size : (at + len(keys)) * size])
            for memory, size in zip(self.memory, SIZES, strict=True)
        ]

    def run(self, work: Callable[[threading.Event], PageBits]) -> PageBits | None:
        """The answer of a thread; None if the store raises, or waits."""
        answers: list[PageBits] = []
        ended, given_up = threading.Event(), threading.Event()

        def target() -> None:
            try:
                answers.append(work(given_up))
            except StorageError as error:
                self.errors.append(error)
            finally:
                ended.set()

        thread = threading.Thread(target=target, daemon=True)
        self.threads.append(thread)
        thread.start()
        while not ended.wait(0.005):
            if self.store.waiting.is_set():
                given_up.set()
                return None
        return answers[0] if answers else None


class TrustsTheLookup(Careful):
    """Takes what the store contains for what it has read."""

    @override
    def load(self, keys: PageKeys, at: int) -> bool:
        return self.lookup(keys) == len(keys) and (super().load(keys, at) or True)


class TrustsOpen(Careful):
    """Does not look at what a read says."""

    @override
    def load(self, keys: PageKeys, at: int) -> bool:
        def work(given_up: threading.Event) -> PageBits:
            handles = self.store.open(keys, 1.0)
            for layer_range, size in enumerate(SIZES):
                out = bytearray(size * len(keys))
                self.store.read(handles, layer_range, out)
                if not given_up.is_set():
                    self.memory[layer_range][at * size : at * size + len(out)] = out
            return handles.found

        done = self.run(work)
        return done is not None and done.complete


class RaisesWhatTheStoreRaises(Careful):
    """Hands errors on."""

    @override
    def run(self, work: Callable[[threading.Event], PageBits]) -> PageBits | None:
        answer = super().run(work)
        if self.errors:
            raise self.errors.pop()
        return answer


class WaitsForEver(Careful):
    """Has no deadline for lookups."""

    @override
    def lookup(self, keys: PageKeys) -> int | None:
        return self.store.contains(keys).leading


class ReadsIntoItsMemory(Careful):
    """Lets the store write where the pages belong."""

    @override
    def load(self, keys: PageKeys, at: int) -> bool:
        def work(given_up: threading.Event) -> PageBits:
            handles = self.store.open(keys, 1.0)
            done = handles.found
            for layer_range, size in enumerate(SIZES):
                place = memoryview(self.memory[layer_range])[at * size : (at + len(keys)) * size]
                done &= self.store.read(handles, layer_range, place)
            return done

        done = self.run(work)
        return done is not None and done.complete


class PutsFromItsMemory(Careful):
    """Lets the store read where the pages are."""

    @override
    def parts(self, keys: PageKeys, at: int) -> list[bytes] | list[memoryview]:
        return [
            memoryview(memory)[at * size : (at + len(keys)) * size]
            for memory, size in zip(self.memory, SIZES, strict=True)
        ]


class CountsTheCallAsStored(Careful):
    """Does not look at what a put says."""

    @override
    def offload(self, keys: PageKeys, at: int) -> bool:
        super().offload(keys, at)
        return True


class GivesUpForGood(Careful):
    """Uses the store no more after its first failure."""

    def __init__(self, store: FaultyStore) -> None:
        super().__init__(store)
        self.broken = False

    @override
    def run(self, work: Callable[[threading.Event], PageBits]) -> PageBits | None:
        answer = None if self.broken else super().run(work)
        self.broken = answer is None
        return answer
