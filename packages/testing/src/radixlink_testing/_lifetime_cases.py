"""How long a page stays: pressure, recency, leases, and pages that are damaged or vanish."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import pytest

from radixlink_contracts import PageBits
from radixlink_testing._places import (
    MAX_PAGES_TO_FILL,
    SUITE_LAYOUT,
    evict,
    put_pages,
    read_page_range,
    read_right,
)
from radixlink_testing._store_suite import StoreSuite
from radixlink_testing.pages import page_key, page_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import PageKeys, PageStore, Touchable
    from radixlink_testing._places import StorePlace

_TTL_S: Final = 0.0
_LONG_S: Final = 3600.0
_RANGES: Final = range(len(SUITE_LAYOUT.range_bytes))


class LifetimeCases(StoreSuite):
    """Pages that do not fit, are damaged, or vanish."""

    # --- pressure --------------------------------------------------------------------------------

    def test_pressure_evicts_and_never_mixes_bytes(self, store: PageStore) -> None:
        series = [page_keys(range(64), f"pressure {turn}") for turn in range(12)]
        for keys in series:
            put_pages(store, keys)
        for keys in series:
            handles = store.open(keys, _TTL_S)
            assert read_right(store, handles) == handles.found

    def test_more_pages_than_fit_are_no_error_and_told(self, store: PageStore) -> None:
        num_pages, stored = 32, PageBits.all(0)
        while stored.complete and num_pages < MAX_PAGES_TO_FILL:
            num_pages *= 2
            keys = page_keys(range(num_pages), f"batch of {num_pages}")
            stored = put_pages(store, keys)
            assert stored.total > 0
            assert store.contains(keys) == stored
            assert read_right(store, store.open(keys, _TTL_S)) == stored

    def test_handle_of_an_evicted_page_is_a_miss(self, store: PageStore) -> None:
        keys = page_keys(range(8))
        put_pages(store, keys)
        handles = store.open(keys, _TTL_S)
        evict(store, keys)
        assert read_right(store, handles) == PageBits.none(8)

    def test_handle_never_reads_a_later_write_of_its_page(self, store: PageStore) -> None:
        keys = page_keys(range(8))
        put_pages(store, keys)
        handles = store.open(keys, _TTL_S)
        evict(store, keys)
        assert put_pages(store, keys, "later") == PageBits.all(8)
        assert read_right(store, handles) == PageBits.none(8)
        assert read_right(store, store.open(keys, _TTL_S), "later") == PageBits.all(8)

    def test_lease_is_advice_and_never_an_error(self, store: PageStore) -> None:
        first, full = page_keys(range(32)), False
        for start in range(0, MAX_PAGES_TO_FILL, 32):
            keys = page_keys(range(start, start + 32))
            stored = put_pages(store, keys)
            handles = store.open(keys, _LONG_S)
            assert handles.found == stored
            assert read_right(store, handles) == stored
            if full:
                # It went on without room, whether it kept the leases or not.
                return
            full = not (stored.complete and store.contains(first).complete)
        pytest.fail(f"{MAX_PAGES_TO_FILL} pages did not fill the store")

    def test_open_raises_recency(self, place: StorePlace, store: PageStore) -> None:
        _outlives(place, store, lambda keys: store.open(keys, _TTL_S).found)

    def test_touch_raises_recency(self, place: StorePlace, store: PageStore) -> None:
        # A store without `touch` is asked `contains` instead, which need not raise anything.
        touch = cast("Touchable", store).touch if hasattr(store, "touch") else store.contains
        put_pages(store, page_keys([1]))
        assert touch(page_keys(range(3))) == PageBits.of([1], 3)
        if hasattr(store, "touch"):
            _outlives(place, store, touch)

    # --- damage ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("layer_range", _RANGES)
    def test_damaged_page_is_a_miss(
        self, place: StorePlace, store: PageStore, layer_range: int
    ) -> None:
        keys = page_keys(range(3))
        put_pages(store, keys)
        handles = store.open(keys, _TTL_S)
        place.corrupt(SUITE_LAYOUT, page_key(1), layer_range)
        assert read_page_range(store, handles, layer_range)[0] == PageBits.of([0, 2], 3)

    @pytest.mark.parametrize("layer_range", _RANGES)
    def test_damaged_page_can_be_stored_again(
        self, place: StorePlace, store: PageStore, layer_range: int
    ) -> None:
        keys = page_keys(range(3))
        put_pages(store, keys)
        handles = store.open(keys, _TTL_S)
        place.corrupt(SUITE_LAYOUT, page_key(1), layer_range)
        read_page_range(store, handles, layer_range)
        assert store.contains(keys) == PageBits.of([0, 2], 3)
        assert put_pages(store, keys) == PageBits.all(3)
        assert read_right(store, store.open(keys, _TTL_S)) == PageBits.all(3)
        # The old handle stays one of the write that was damaged.
        assert 1 not in read_page_range(store, handles, layer_range)[0]

    def test_page_that_vanished_is_a_miss_and_can_be_stored_again(
        self, place: StorePlace, store: PageStore
    ) -> None:
        keys = page_keys(range(3))
        put_pages(store, keys)
        handles = store.open(keys, _TTL_S)
        place.drop(SUITE_LAYOUT, page_key(1))
        assert read_right(store, handles) == PageBits.of([0, 2], 3)
        assert store.contains(keys) == PageBits.of([0, 2], 3)
        assert put_pages(store, keys) == PageBits.all(3)
        assert read_right(store, store.open(keys, _TTL_S)) == PageBits.all(3)
        assert 1 not in read_page_range(store, handles, 0)[0]


def _outlives(place: StorePlace, store: PageStore, use: Callable[[PageKeys], PageBits]) -> None:
    """Check that pages in use stay until pages of the same age that are not in use are gone."""
    kept, left = page_keys(range(4), "kept"), page_keys(range(4), "left")
    put_pages(store, kept)
    put_pages(store, left)
    for first in range(0, MAX_PAGES_TO_FILL, 4):
        if not store.contains(left).mask:
            return
        place.pass_time(1)
        assert use(kept) == PageBits.all(4)
        place.pass_time(1)
        put_pages(store, page_keys(range(first, first + 4), "filler"))
    pytest.fail(f"{MAX_PAGES_TO_FILL} other pages did not evict what was not in use")
