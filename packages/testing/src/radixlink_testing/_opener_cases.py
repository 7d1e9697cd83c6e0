"""Who else is there: other openers, other layouts, other threads, and the factory of them all."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Final

import attrs
import pytest

from radixlink_contracts import PageBits, PoolName, Shard
from radixlink_contracts.errors import (
    BackendUnavailableError,
    CapacityError,
    IdentityError,
    StaleHandleError,
)
from radixlink_testing._deadlines import run_at_once
from radixlink_testing._places import (
    SUITE_IDENTITY,
    SUITE_LAYOUT,
    put_pages,
    read_right,
    read_variants,
)
from radixlink_testing._store_suite import StoreSuite
from radixlink_testing.pages import page_keys, page_parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import PageStore, PoolLayout
    from radixlink_testing._places import StorePlace

_TTL_S: Final = 0.0
_NUM_THREADS: Final = 4


class OpenerCases(StoreSuite):
    """Openers, layouts, threads and factories."""

    # --- closing ---------------------------------------------------------------------------------

    @pytest.mark.parametrize("call", ["contains", "open", "read", "put"])
    def test_closed_store_refuses_every_call(self, store: PageStore, call: str) -> None:
        keys = page_keys(range(2))
        put_pages(store, keys)
        handles = store.open(keys, _TTL_S)
        store.close()
        calls: dict[str, Callable[[], object]] = {
            "contains": lambda: store.contains(keys),
            "open": lambda: store.open(keys, _TTL_S),
            "read": lambda: store.read(handles, 0, bytearray(2 * 96)),
            "put": lambda: store.put(keys, page_parts(keys, SUITE_LAYOUT)),
        }
        with pytest.raises(StaleHandleError):
            calls[call]()

    def test_close_is_idempotent(self, store: PageStore) -> None:
        store.close()
        store.close()

    def test_close_in_the_middle_of_calls_is_safe(self, store: PageStore) -> None:
        give_up = time.monotonic() + self.case_deadline_s

        def work(number: int) -> None:
            keys = page_keys(range(number * 4, number * 4 + 8))
            with pytest.raises(StaleHandleError):
                while time.monotonic() < give_up:
                    put_pages(store, keys)
                    read_right(store, store.open(keys, _TTL_S))

        def close() -> None:
            for turn in range(4):
                put_pages(store, page_keys(range(turn, turn + 2)))
            store.close()

        workers = [functools.partial(work, number) for number in range(_NUM_THREADS - 1)]
        run_at_once(self.case_deadline_s, "closing", [*workers, close])

    # --- other openers ---------------------------------------------------------------------------

    def test_second_opener_sees_the_pages_of_the_first(
        self, place: StorePlace, store: PageStore
    ) -> None:
        other = place.open(SUITE_LAYOUT)
        keys = page_keys(range(6))
        put_pages(store, keys)
        assert read_right(other, other.open(keys, _TTL_S)) == PageBits.all(6)

    def test_first_writer_wins_whoever_opened_the_store(
        self, place: StorePlace, store: PageStore
    ) -> None:
        other = place.open(SUITE_LAYOUT)
        keys = page_keys(range(6))
        put_pages(store, keys)
        assert put_pages(other, keys, "second") == PageBits.all(6)
        for each in (store, other):
            assert read_right(each, each.open(keys, _TTL_S)) == PageBits.all(6)

    def test_pages_outlive_the_opener_that_wrote_them(
        self, place: StorePlace, store: PageStore
    ) -> None:
        other = place.open(SUITE_LAYOUT)
        keys = page_keys(range(6))
        put_pages(store, keys)
        store.close()
        assert read_right(other, other.open(keys, _TTL_S)) == PageBits.all(6)

    def test_pages_stay_when_all_have_closed(self, place: StorePlace, store: PageStore) -> None:
        keys = page_keys(range(6))
        put_pages(store, keys)
        store.close()
        again = place.open(SUITE_LAYOUT)
        assert read_right(again, again.open(keys, _TTL_S)) == PageBits.all(6)

    # --- other layouts ---------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "other",
        [
            attrs.evolve(SUITE_LAYOUT, pool=PoolName.SWA),
            attrs.evolve(SUITE_LAYOUT, shard=Shard(index=1, count=2)),
        ],
        ids=["pool", "shard"],
    )
    def test_equal_keys_of_another_layout_are_other_pages(
        self, place: StorePlace, store: PageStore, other: PoolLayout
    ) -> None:
        second = place.open(other)
        keys = page_keys(range(6))
        put_pages(store, keys)
        assert second.contains(keys) == PageBits.none(6)
        put_pages(second, keys, "second")
        assert read_right(store, store.open(keys, _TTL_S)) == PageBits.all(6)
        assert read_right(second, second.open(keys, _TTL_S), "second") == PageBits.all(6)

    def test_place_of_another_identity_is_refused(
        self, place: StorePlace, store: PageStore
    ) -> None:
        keys = page_keys(range(2))
        put_pages(store, keys)
        identity = attrs.evolve(SUITE_IDENTITY, revision="2")
        with pytest.raises(IdentityError, match="revision"):
            place.open(attrs.evolve(SUITE_LAYOUT, identity=identity))
        assert store.contains(keys) == PageBits.all(2)

    # --- factories -------------------------------------------------------------------------------

    def test_factory_opens_a_layout_again(self, place: StorePlace) -> None:
        factory = place.factory()
        first, second = factory.open(SUITE_LAYOUT), factory.open(SUITE_LAYOUT)
        keys = page_keys(range(6))
        put_pages(first, keys)
        first.close()
        assert read_right(second, second.open(keys, _TTL_S)) == PageBits.all(6)
        factory.close()

    def test_closing_a_factory_closes_its_stores(self, place: StorePlace) -> None:
        factory = place.factory()
        stores = [factory.open(SUITE_LAYOUT) for _ in range(2)]
        factory.close()
        for store in stores:
            with pytest.raises(StaleHandleError):
                store.contains(page_keys(range(2)))

    def test_closing_a_factory_is_idempotent(self, place: StorePlace) -> None:
        factory = place.factory()
        factory.open(SUITE_LAYOUT).close()
        factory.close()
        factory.close()

    def test_closed_factory_opens_nothing(self, place: StorePlace) -> None:
        factory = place.factory()
        factory.close()
        with pytest.raises(StaleHandleError):
            factory.open(SUITE_LAYOUT)

    def test_pages_outlive_their_factory(self, place: StorePlace) -> None:
        factory = place.factory()
        keys = page_keys(range(6))
        put_pages(factory.open(SUITE_LAYOUT), keys)
        factory.close()
        again = place.open(SUITE_LAYOUT)
        assert read_right(again, again.open(keys, _TTL_S)) == PageBits.all(6)

    def test_factory_without_room_for_one_page_is_refused(self, place: StorePlace) -> None:
        factory = place.factory(SUITE_LAYOUT.page_bytes // 2)
        with pytest.raises(CapacityError) as caught:
            factory.open(SUITE_LAYOUT)
        assert caught.value.available < caught.value.needed
        factory.close()

    def test_place_that_cannot_be_used_is_told(self, place: StorePlace) -> None:
        factory = place.unusable_factory()
        with pytest.raises(BackendUnavailableError):
            factory.open(SUITE_LAYOUT)
        factory.close()

    # --- threads ---------------------------------------------------------------------------------

    def test_threads_only_ever_read_right_bytes(self, place: StorePlace, store: PageStore) -> None:
        stores = [store, place.open(SUITE_LAYOUT)]
        hits = [0] * _NUM_THREADS

        def work(number: int) -> None:
            mine = stores[number % len(stores)]
            for turn in range(20):
                # Neighbours ask for half of each other's pages; all together do not fit.
                first = (turn * 48 + number * 16) % 640
                keys = page_keys(range(first, first + 32))
                put_pages(mine, keys)
                hits[number] += read_right(mine, mine.open(keys, _TTL_S)).total

        steps = [functools.partial(work, number) for number in range(_NUM_THREADS)]
        run_at_once(self.case_deadline_s, "writing and reading", list(steps))
        assert sum(hits) > 0

    def test_threads_that_write_one_page_never_mix_their_bytes(
        self, place: StorePlace, store: PageStore
    ) -> None:
        stores = [store, place.open(SUITE_LAYOUT)]
        variants = [f"thread {number}" for number in range(_NUM_THREADS)]

        def work(number: int) -> None:
            mine = stores[number % len(stores)]
            for turn in range(3):
                keys = page_keys(range(turn * 4, turn * 4 + 4))
                assert put_pages(mine, keys, variants[number]) == PageBits.all(4)
                assert None not in read_variants(mine, mine.open(keys, _TTL_S), variants)

        steps = [functools.partial(work, number) for number in range(_NUM_THREADS)]
        run_at_once(self.case_deadline_s, "writing the same", list(steps))
        keys = page_keys(range(12))
        assert None not in read_variants(store, store.open(keys, _TTL_S), variants)
