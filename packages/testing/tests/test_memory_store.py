"""What the in-memory store does beside the contract, and the guard of the suites."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs
import pytest
from typing_extensions import override

from radixlink_contracts import PageBits, StoreConfig, StoreFactory, Touchable
from radixlink_contracts.errors import CapacityError, StaleHandleError
from radixlink_testing import (
    SUITE_LAYOUT,
    InMemoryPlace,
    InMemoryStoreFactory,
    PageStoreTests,
    read_right,
)
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from radixlink_contracts import PageStore


def test_factory_is_a_store_factory() -> None:
    factory: StoreFactory = InMemoryStoreFactory()
    store: PageStore = factory.open(SUITE_LAYOUT)
    assert store.layout == SUITE_LAYOUT


def test_touch_keeps_a_page_from_being_evicted() -> None:
    factory = InMemoryStoreFactory(StoreConfig(capacity_bytes=3 * SUITE_LAYOUT.page_bytes))
    store = factory.open(SUITE_LAYOUT)
    touchable: Touchable = store
    for page in range(3):
        keys = page_keys([page])
        store.put(keys, page_parts(keys, SUITE_LAYOUT))
    assert touchable.touch(page_keys([0, 9])) == PageBits.of([0], 2)
    keys = page_keys([3])
    store.put(keys, page_parts(keys, SUITE_LAYOUT))
    assert store.contains(page_keys(range(4))) == PageBits.of([0, 2, 3], 4)


def test_more_pages_than_fit_are_reported_as_not_stored() -> None:
    factory = InMemoryStoreFactory(StoreConfig(capacity_bytes=3 * SUITE_LAYOUT.page_bytes))
    store = factory.open(SUITE_LAYOUT)
    keys = page_keys(range(5))
    assert store.put(keys, page_parts(keys, SUITE_LAYOUT)) == PageBits.of([2, 3, 4], 5)
    assert read_right(store, store.open(keys, 0)) == PageBits.of([2, 3, 4], 5)


def test_place_that_holds_no_page_is_refused() -> None:
    factory = InMemoryStoreFactory(StoreConfig(capacity_bytes=SUITE_LAYOUT.page_bytes - 1))
    with pytest.raises(CapacityError) as caught:
        factory.open(SUITE_LAYOUT)
    assert caught.value.needed == SUITE_LAYOUT.page_bytes
    assert caught.value.available == SUITE_LAYOUT.page_bytes - 1


def test_closing_the_factory_closes_its_stores_and_keeps_the_pages() -> None:
    place = InMemoryPlace()
    factory = InMemoryStoreFactory(place=place)
    store = factory.open(SUITE_LAYOUT)
    keys = page_keys(range(2))
    store.put(keys, page_parts(keys, SUITE_LAYOUT))
    factory.close()
    factory.close()
    with pytest.raises(StaleHandleError):
        store.contains(keys)
    with pytest.raises(StaleHandleError):
        factory.open(SUITE_LAYOUT)
    assert InMemoryStoreFactory(place=place).open(SUITE_LAYOUT).contains(keys) == PageBits.all(2)


def test_guard_names_a_case_that_a_subclass_replaced() -> None:
    class Replaces(PageStoreTests):
        @override
        def test_miss_is_a_value(self, store: PageStore) -> None:
            """Pass whatever the store does."""

    class Explains(PageStoreTests):
        @pytest.mark.xfail(reason="this store has no generations")
        @override
        def test_miss_is_a_value(self, store: PageStore) -> None:
            super().test_miss_is_a_value(store)

    class Deletes(PageStoreTests):
        test_first_writer_wins: ClassVar[None] = None  # type: ignore[assignment]

    with pytest.raises(AssertionError):
        Replaces().test_no_case_is_overridden()
    with pytest.raises(AssertionError):
        Deletes().test_no_case_is_overridden()
    Explains().test_no_case_is_overridden()


def test_layouts_of_one_identity_have_capacities_of_their_own() -> None:
    factory = InMemoryStoreFactory(StoreConfig(capacity_bytes=4 * SUITE_LAYOUT.page_bytes))
    half = attrs.evolve(SUITE_LAYOUT, range_bytes=(48, 16, 80))
    assert factory.open(SUITE_LAYOUT).num_slots == 4
    assert factory.open(half).num_slots == 8
