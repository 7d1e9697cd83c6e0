"""What whoever uses a page store must survive: every operation with every fault.

Subclass `StoreConsumerTests` and give a fixture that makes a `StoreConsumer` of a store:

```python
class TestMyLinker(StoreConsumerTests):
    @pytest.fixture
    def make_consumer(self) -> MakeConsumer:
        return MyConsumer
```

The cases compare the consumer's memory, byte by byte, with what its answers promise. They set no
time: a consumer that has a deadline takes `FaultyStore.waiting` for its end, so that no case waits
for seconds.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Final, Protocol

import pytest

from radixlink_contracts import PageBits
from radixlink_testing._memory_store import InMemoryStoreFactory
from radixlink_testing._places import SUITE_LAYOUT, put_pages, read_right
from radixlink_testing._store_suite import StoreSuite
from radixlink_testing.faults import FAULT_MATRIX, Fault, FaultKind, FaultyStore, StoreCall
from radixlink_testing.pages import page_keys, range_bytes

if TYPE_CHECKING:
    from radixlink_contracts import PageKeys

CONSUMER_PAGES: Final = 8
"""Places for pages in a consumer's memory."""

_LOADED: Final = range(4)
_OFFLOADED: Final = range(4, 8)
_SENTINEL: Final = b"\xa5"
_KINDS: Final = tuple(FaultKind)
_WAITING: Final = (FaultKind.HANGS, FaultKind.LATE)


class StoreConsumer(abc.ABC):
    """Somebody who keeps pages in a store, and has memory of `CONSUMER_PAGES` pages.

    The pages are of `SUITE_LAYOUT`. No method raises what the store raises. None waits for the
    store longer than its deadline; once `FaultyStore.waiting` is set, that is over at once.
    """

    @abc.abstractmethod
    def lookup(self, keys: PageKeys) -> int | None:
        """How many leading pages can probably be loaded; None if the store does not tell."""

    @abc.abstractmethod
    def load(self, keys: PageKeys, at: int) -> bool:
        """Bring pages to the places `at` and following. True: all of them are there now.

        False: nothing is promised of those places until the next `write`, and nothing that this
        load began changes them after that.
        """

    @abc.abstractmethod
    def offload(self, keys: PageKeys, at: int) -> bool:
        """Store what is at the places `at` and following. True: the store has all of it.

        False: nothing that this offload began looks at those places after the next `write`.
        """

    @abc.abstractmethod
    def write(self, at: int, pages: list[bytes]) -> None:
        """Fill the places `at` and following: the layer ranges of each page in one."""

    @abc.abstractmethod
    def read(self, at: int, count: int) -> list[bytes]:
        """What is at the places `at` and following."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Return once nothing is under way; called when no call of the store waits any more."""

    @abc.abstractmethod
    def close(self) -> None:
        """End; the store is not the consumer's."""


class MakeConsumer(Protocol):
    """The type of the fixture `make_consumer`."""

    def __call__(self, store: FaultyStore) -> StoreConsumer:
        """Make a consumer of a store."""
        ...


def whole_pages(keys: PageKeys, variant: str = "") -> list[bytes]:
    """Pages as a consumer's memory has them."""
    return [
        b"".join(
            range_bytes(key, layer_range, size, variant)
            for layer_range, size in enumerate(SUITE_LAYOUT.range_bytes)
        )
        for key in keys
    ]


_FAULTS: Final = pytest.mark.parametrize(
    "fault", FAULT_MATRIX, ids=lambda fault: f"{fault.call.value}-{fault.kind.name.lower()}"
)


class StoreConsumerTests(StoreSuite):
    """The fault matrix, and what is worst of it, case by case."""

    @pytest.fixture
    def make_consumer(self) -> MakeConsumer:
        """The consumer under test. Every subclass gives its own."""
        raise NotImplementedError

    @_FAULTS
    def test_what_is_promised_under_a_fault_is_true(
        self, make_consumer: MakeConsumer, fault: Fault
    ) -> None:
        """Bytes that were loaded are right, and pages that were stored are there, or nobody says so."""
        world = _World(make_consumer)
        world.store.plan(fault)
        _, loaded, stored = world.use(_LOADED, _OFFLOADED)
        lied_to = fault == Fault(StoreCall.PUT, FaultKind.LIES)
        assert not loaded or world.memory_is_right(_LOADED)
        assert not stored or lied_to or world.stored(_OFFLOADED) == PageBits.all(4)
        world.end()

    @_FAULTS
    def test_fault_of_one_operation_leaves_the_others(
        self, make_consumer: MakeConsumer, fault: Fault
    ) -> None:
        """What does not need the operation goes on; what is done twice goes on as well."""
        world = _World(make_consumer)
        world.store.plan(fault)
        found, loaded, stored = world.use(_LOADED, _OFFLOADED)
        if fault.kind is FaultKind.TWICE:
            assert (found, loaded, stored) == (4, True, True)
        if fault.call is StoreCall.PUT:
            assert (found, loaded) == (4, True)
        world.end()

    @_FAULTS
    def test_everything_works_again_after_a_fault(
        self, make_consumer: MakeConsumer, fault: Fault
    ) -> None:
        """No operation, thread or memory stays behind."""
        world = _World(make_consumer)
        world.store.plan(fault)
        world.use(_LOADED, _OFFLOADED)
        world.store.release()
        world.consumer.settle()
        # Other pages: a consumer may well remember that it did not get those.
        loaded, offloaded = range(8, 12), range(12, 16)
        put_pages(world.store.inner, page_keys(loaded))
        assert world.use(loaded, offloaded) == (4, True, True)
        assert world.memory_is_right(loaded)
        assert world.stored(offloaded) == PageBits.all(4)
        world.end()

    @pytest.mark.parametrize("kind", _KINDS)
    @pytest.mark.parametrize("first", [1, 2])
    def test_fault_in_the_middle_of_a_load_gives_no_torn_page(
        self, make_consumer: MakeConsumer, kind: FaultKind, first: int
    ) -> None:
        """Some layer ranges were read already."""
        world = _World(make_consumer)
        world.store.plan(Fault(StoreCall.READ, kind, first=first, count=1))
        loaded = world.load(_LOADED)
        assert not loaded or world.memory_is_right(_LOADED)
        assert loaded == (kind is FaultKind.TWICE)
        world.end()

    @pytest.mark.parametrize("kind", [FaultKind.FAILS, *_WAITING])
    def test_failed_put_is_not_told_as_stored(
        self, make_consumer: MakeConsumer, kind: FaultKind
    ) -> None:
        """A later load would wait for what is not there."""
        world = _World(make_consumer)
        world.store.plan(Fault(StoreCall.PUT, kind))
        assert world.offload(_OFFLOADED) is False
        world.end()

    def test_page_that_vanished_after_the_lookup_is_not_loaded(
        self, make_consumer: MakeConsumer
    ) -> None:
        """A lookup is a hint."""
        world = _World(make_consumer)
        assert world.consumer.lookup(page_keys(_LOADED)) == 4
        world.memory.drop(page_keys([2])[0])
        assert world.load(_LOADED) is False
        world.end()

    def test_page_that_is_damaged_is_not_loaded(self, make_consumer: MakeConsumer) -> None:
        """The store says so when it reads it, in the last range here."""
        world = _World(make_consumer)
        world.memory.corrupt(page_keys([1])[0], len(SUITE_LAYOUT.range_bytes) - 1)
        assert world.load(_LOADED) is False
        world.end()

    @pytest.mark.parametrize("kind", _WAITING)
    @pytest.mark.parametrize("first", [0, 1])
    def test_late_read_leaves_memory_alone_that_is_used_again(
        self, make_consumer: MakeConsumer, kind: FaultKind, first: int
    ) -> None:
        """The load was given up, and its places have an owner again."""
        world = _World(make_consumer)
        world.store.plan(Fault(StoreCall.READ, kind, first=first, count=1))
        assert world.load(_LOADED) is False
        others = whole_pages(page_keys(range(4), "others"))
        world.consumer.write(0, others)
        world.store.release()
        world.consumer.settle()
        assert world.consumer.read(0, 4) == others
        world.end()

    def test_late_put_stores_what_it_was_given(self, make_consumer: MakeConsumer) -> None:
        """The offload was given up, and its places have other bytes by now."""
        world = _World(make_consumer)
        world.store.plan(Fault(StoreCall.PUT, FaultKind.LATE))
        assert world.offload(_OFFLOADED) is False
        world.consumer.write(4, whole_pages(page_keys(range(4), "others")))
        world.store.release()
        world.consumer.settle()
        handles = world.store.inner.open(page_keys(_OFFLOADED), 0.0)
        assert read_right(world.store.inner, handles) == handles.found
        world.end()


class _World:
    """A consumer, and a store with pages 0..3; the consumer's places 4..7 are filled to be stored."""

    def __init__(self, make_consumer: MakeConsumer) -> None:
        self.memory: Final = InMemoryStoreFactory().open(SUITE_LAYOUT)
        self.store: Final = FaultyStore(self.memory)
        put_pages(self.memory, page_keys(_LOADED))
        self.consumer: Final = make_consumer(self.store)

    def use(self, loaded: range, offloaded: range) -> tuple[int | None, bool, bool]:
        """Look up and load some pages, and offload others; what the consumer said."""
        found = self.consumer.lookup(page_keys(loaded))
        return found, self.load(loaded), self.offload(offloaded)

    def load(self, pages: range) -> bool:
        """Load pages to places 0..3, which have other bytes before."""
        self.consumer.write(0, [_SENTINEL * SUITE_LAYOUT.page_bytes] * 4)
        return self.consumer.load(page_keys(pages), 0)

    def offload(self, pages: range) -> bool:
        """Offload pages from places 4..7."""
        self.consumer.write(4, whole_pages(page_keys(pages)))
        return self.consumer.offload(page_keys(pages), 4)

    def memory_is_right(self, pages: range) -> bool:
        """True if places 0..3 have these pages."""
        return self.consumer.read(0, 4) == whole_pages(page_keys(pages))

    def stored(self, pages: range) -> PageBits:
        """Which pages the store has, right in every byte."""
        return read_right(self.memory, self.memory.open(page_keys(pages), 0.0))

    def end(self) -> None:
        """Let go of what waits, and close."""
        self.store.release()
        self.consumer.settle()
        self.consumer.close()
