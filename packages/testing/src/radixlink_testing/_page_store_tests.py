"""`PageStoreTests`: what every page store must do.

Subclass it in your own tests:

```python
class TestMyStore(PageStoreTests):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[StorePlace]:
        place = MyPlace(tmp_path)
        yield place
        place.close()
```

The cases only use the contract, and what they compare are bytes. A case that your store cannot pass
is overridden with `@pytest.mark.xfail(reason=...)` above it; any other override fails
`test_no_case_is_overridden`.
"""

from __future__ import annotations

import abc
import threading
from typing import TYPE_CHECKING, ClassVar, Final

import attrs
import pytest
from typing_extensions import override

from radixlink_contracts import (
    CacheIdentity,
    PageBits,
    PageKeys,
    PoolLayout,
    PoolName,
    Shard,
)
from radixlink_contracts.errors import ContractError, IdentityError, StaleHandleError
from radixlink_testing._overrides import unexplained_overrides
from radixlink_testing.pages import page_column, page_key, page_keys, page_parts

if TYPE_CHECKING:
    from radixlink_contracts import PageHandles, PageStore

SUITE_IDENTITY: Final = CacheIdentity(
    model="radixlink-testing",
    revision="1",
    dtype="uint8",
    page_size=4,
    num_layers=3,
    layout="bytes",
)

SUITE_LAYOUT: Final = PoolLayout(
    identity=SUITE_IDENTITY, pool=PoolName.KV, range_bytes=(96, 33, 160)
)
"""The layout of most cases: ranges of different sizes, one of them odd."""

SUITE_CAPACITY_BYTES: Final = 64 * 320
"""Open the stores of a `StorePlace` with this capacity: 64 pages of the suite's layout, or
somewhat less.

A store that cannot be made that small may be larger, up to 32 times; the cases about pressure take
longer then.
"""

_MAX_PAGES_TO_FILL: Final = 32 * 64
_TTL_S: Final = 0.0


class StorePlace(abc.ABC):
    """A place where stores are opened, empty at first: a directory, a server, a dict."""

    @abc.abstractmethod
    def open(self, layout: PoolLayout) -> PageStore:
        """Open the store of a layout here, with a capacity of `SUITE_CAPACITY_BYTES`.

        Each call is another opener: what it returns shares the pages but can be closed alone.
        """

    def corrupt(self, layout: PoolLayout, key: bytes, layer_range: int) -> None:
        """Flip a bit of one layer range of a page that is there, behind the store's back."""
        del layout, key, layer_range
        pytest.xfail("this store gives no way to damage a page behind its back")


def read_page_range(
    store: PageStore, handles: PageHandles, layer_range: int
) -> tuple[PageBits, bytes]:
    """One layer range of pages as the store reads it: which rows are right, and all rows."""
    out = bytearray(b"\xee" * (len(handles.keys) * store.layout.range_bytes[layer_range]))
    return store.read(handles, layer_range, out), bytes(out)


def read_right(store: PageStore, handles: PageHandles, variant: str = "") -> PageBits:
    """The pages of which every layer range is right; fails if a row is not that is said to be."""
    right = PageBits.all(len(handles.keys))
    for layer_range, size in enumerate(store.layout.range_bytes):
        bits, rows = read_page_range(store, handles, layer_range)
        expected = page_column(handles.keys, store.layout, layer_range, variant)
        for page in bits:
            row = slice(page * size, (page + 1) * size)
            assert rows[row] == expected[row], f"page {page}, layer range {layer_range}"
        right &= bits
    return right


class PageStoreTests:
    """The contract of `PageStore`, case by case."""

    #: What the guard compares with; set by Python when a subclass is made.
    _overridden: ClassVar[tuple[str, ...]] = ()

    @override
    def __init_subclass__(cls) -> None:
        """Note which cases a subclass replaces without saying why it must."""
        super().__init_subclass__()
        cls._overridden = unexplained_overrides(cls, (PageStoreTests,))

    @pytest.fixture
    def place(self) -> StorePlace:
        """The place under test. Every subclass gives its own."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, place: StorePlace) -> PageStore:
        """A store of the suite's layout."""
        return place.open(SUITE_LAYOUT)

    def test_no_case_is_overridden(self) -> None:
        assert self._overridden == ()

    # --- round trips -----------------------------------------------------------------------------

    def test_layout_is_what_was_opened(self, store: PageStore) -> None:
        assert store.layout == SUITE_LAYOUT

    def test_miss_is_a_value(self, store: PageStore) -> None:
        keys = page_keys(range(3))
        handles = store.open(keys, _TTL_S)
        assert store.contains(keys) == PageBits.none(3)
        assert handles.found == PageBits.none(3)
        assert handles.keys == keys
        assert read_page_range(store, handles, 0)[0] == PageBits.none(3)

    def test_pages_come_back_in_every_layer_range(self, store: PageStore) -> None:
        keys = page_keys(range(20))
        assert store.put(keys, page_parts(keys, SUITE_LAYOUT)) == PageBits.all(20)
        assert store.contains(keys) == PageBits.all(20)
        handles = store.open(keys, _TTL_S)
        assert handles.found == PageBits.all(20)
        assert read_right(store, handles) == PageBits.all(20)

    def test_layer_ranges_are_read_in_any_order_and_again(self, store: PageStore) -> None:
        keys = page_keys(range(4))
        store.put(keys, page_parts(keys, SUITE_LAYOUT))
        handles = store.open(keys, _TTL_S)
        for layer_range in (2, 0, 1, 2):
            bits, rows = read_page_range(store, handles, layer_range)
            assert bits == PageBits.all(4)
            assert rows == page_column(keys, SUITE_LAYOUT, layer_range)

    def test_no_pages_are_a_call_like_any_other(self, store: PageStore) -> None:
        keys = PageKeys()
        nothing = PageBits.none(0)
        assert store.put(keys, [b""] * 3) == nothing
        assert store.contains(keys) == nothing
        handles = store.open(keys, _TTL_S)
        assert handles.found == nothing
        assert store.read(handles, 0, bytearray()) == nothing

    def test_partial_hits_keep_their_places(self, store: PageStore) -> None:
        stored = page_keys(range(0, 12, 3))
        store.put(stored, page_parts(stored, SUITE_LAYOUT))
        asked = page_keys(range(12))
        expected = PageBits.of(range(0, 12, 3), 12)
        assert store.contains(asked) == expected
        handles = store.open(asked, _TTL_S)
        assert handles.found == expected
        assert read_right(store, handles) == expected

    def test_out_may_be_any_writable_buffer(self, store: PageStore) -> None:
        keys = page_keys(range(2))
        store.put(keys, page_parts(keys, SUITE_LAYOUT))
        handles = store.open(keys, _TTL_S)
        backing = bytearray(2 * 96 + 10)
        window = memoryview(backing)[5:-5]
        assert store.read(handles, 0, window) == PageBits.all(2)
        assert bytes(window) == page_column(keys, SUITE_LAYOUT, 0)
        assert backing[:5] + backing[-5:] == bytes(10)

    # --- writing ---------------------------------------------------------------------------------

    def test_first_writer_wins(self, store: PageStore) -> None:
        keys = page_keys(range(5))
        store.put(keys, page_parts(keys, SUITE_LAYOUT))
        assert store.put(keys, page_parts(keys, SUITE_LAYOUT, "second")) == PageBits.all(5)
        assert read_right(store, store.open(keys, _TTL_S)) == PageBits.all(5)

    def test_duplicates_in_one_put_are_one_page(self, store: PageStore) -> None:
        one = page_keys([7])
        twice = PageKeys(one.data * 2)
        first, second = page_parts(one, SUITE_LAYOUT), page_parts(one, SUITE_LAYOUT, "second")
        parts = [a + b for a, b in zip(first, second, strict=True)]
        assert store.put(twice, parts) == PageBits.all(2)
        assert read_right(store, store.open(twice, _TTL_S)) == PageBits.all(2)

    def test_put_keeps_no_reference_to_what_it_was_given(self, store: PageStore) -> None:
        keys = page_keys(range(3))
        parts = [bytearray(part) for part in page_parts(keys, SUITE_LAYOUT)]
        store.put(keys, parts)
        for part in parts:
            part[:] = bytes(len(part))
        assert read_right(store, store.open(keys, _TTL_S)) == PageBits.all(3)

    def test_contains_says_what_put_said(self, store: PageStore) -> None:
        keys = page_keys(range(64))
        assert store.put(keys, page_parts(keys, SUITE_LAYOUT)) == store.contains(keys)

    # --- pressure --------------------------------------------------------------------------------

    def test_pressure_evicts_and_never_mixes_bytes(self, store: PageStore) -> None:
        series = [page_keys(range(64), f"pressure {turn}") for turn in range(12)]
        for keys in series:
            store.put(keys, page_parts(keys, SUITE_LAYOUT))
        for keys in series:
            handles = store.open(keys, _TTL_S)
            assert read_right(store, handles) == handles.found

    def test_handle_of_an_evicted_page_is_a_miss(self, store: PageStore) -> None:
        keys = page_keys(range(8))
        store.put(keys, page_parts(keys, SUITE_LAYOUT))
        handles = store.open(keys, _TTL_S)
        _evict(store, keys)
        assert read_right(store, handles) == PageBits.none(8)

    def test_handle_never_reads_a_later_write_of_its_page(self, store: PageStore) -> None:
        keys = page_keys(range(8))
        store.put(keys, page_parts(keys, SUITE_LAYOUT))
        handles = store.open(keys, _TTL_S)
        _evict(store, keys)
        assert store.put(keys, page_parts(keys, SUITE_LAYOUT, "later")) == PageBits.all(8)
        assert read_right(store, handles) == PageBits.none(8)
        assert read_right(store, store.open(keys, _TTL_S), "later") == PageBits.all(8)

    # --- damage ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("layer_range", [0, 1, 2])
    def test_damaged_page_is_a_miss_and_can_be_stored_again(
        self, place: StorePlace, store: PageStore, layer_range: int
    ) -> None:
        keys = page_keys(range(3))
        store.put(keys, page_parts(keys, SUITE_LAYOUT))
        handles = store.open(keys, _TTL_S)
        place.corrupt(SUITE_LAYOUT, page_key(1), layer_range)
        assert read_page_range(store, handles, layer_range)[0] == PageBits.of([0, 2], 3)
        assert store.contains(keys) == PageBits.of([0, 2], 3)
        assert store.put(keys, page_parts(keys, SUITE_LAYOUT)) == PageBits.all(3)
        assert read_right(store, store.open(keys, _TTL_S)) == PageBits.all(3)
        # The old handle stays one of the write that was damaged.
        assert read_page_range(store, handles, layer_range)[0] == PageBits.of([0, 2], 3)

    # --- broken preconditions --------------------------------------------------------------------

    @pytest.mark.parametrize("change", [-1, 1])
    def test_parts_of_another_size_are_refused(self, store: PageStore, change: int) -> None:
        keys = page_keys(range(2))
        parts = page_parts(keys, SUITE_LAYOUT)
        parts[1] = bytes(len(parts[1]) + change)
        with pytest.raises(ContractError):
            store.put(keys, parts)
        assert store.contains(keys) == PageBits.none(2)

    @pytest.mark.parametrize("count", [0, 2, 4])
    def test_another_number_of_parts_is_refused(self, store: PageStore, count: int) -> None:
        keys = page_keys(range(2))
        parts = (page_parts(keys, SUITE_LAYOUT) * 2)[:count]
        with pytest.raises(ContractError):
            store.put(keys, parts)

    @pytest.mark.parametrize("change", [-1, 1])
    def test_out_of_another_size_is_refused(self, store: PageStore, change: int) -> None:
        keys = page_keys(range(2))
        handles = store.open(keys, _TTL_S)
        with pytest.raises(ContractError):
            store.read(handles, 0, bytearray(2 * 96 + change))

    def test_out_that_cannot_be_written_is_refused(self, store: PageStore) -> None:
        handles = store.open(page_keys(range(2)), _TTL_S)
        with pytest.raises(ContractError):
            store.read(handles, 0, bytes(2 * 96))

    @pytest.mark.parametrize("layer_range", [-1, 3])
    def test_layer_range_that_does_not_exist_is_refused(
        self, store: PageStore, layer_range: int
    ) -> None:
        handles = store.open(page_keys(range(2)), _TTL_S)
        with pytest.raises(ContractError):
            store.read(handles, layer_range, bytearray(2 * 96))

    # --- openers, layouts, threads ---------------------------------------------------------------

    def test_closed_store_refuses_every_call(self, store: PageStore) -> None:
        keys = page_keys(range(2))
        handles = store.open(keys, _TTL_S)
        store.close()
        store.close()
        with pytest.raises(StaleHandleError):
            store.contains(keys)
        with pytest.raises(StaleHandleError):
            store.open(keys, _TTL_S)
        with pytest.raises(StaleHandleError):
            store.read(handles, 0, bytearray(2 * 96))
        with pytest.raises(StaleHandleError):
            store.put(keys, page_parts(keys, SUITE_LAYOUT))

    def test_second_opener_sees_the_pages_of_the_first(
        self, place: StorePlace, store: PageStore
    ) -> None:
        other = place.open(SUITE_LAYOUT)
        keys = page_keys(range(6))
        store.put(keys, page_parts(keys, SUITE_LAYOUT))
        assert read_right(other, other.open(keys, _TTL_S)) == PageBits.all(6)

    def test_pages_outlive_the_opener_that_wrote_them(
        self, place: StorePlace, store: PageStore
    ) -> None:
        other = place.open(SUITE_LAYOUT)
        keys = page_keys(range(6))
        store.put(keys, page_parts(keys, SUITE_LAYOUT))
        store.close()
        assert read_right(other, other.open(keys, _TTL_S)) == PageBits.all(6)
        other.close()
        again = place.open(SUITE_LAYOUT)
        assert read_right(again, again.open(keys, _TTL_S)) == PageBits.all(6)

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
        store.put(keys, page_parts(keys, SUITE_LAYOUT))
        assert second.contains(keys) == PageBits.none(6)
        second.put(keys, page_parts(keys, other, "second"))
        assert read_right(store, store.open(keys, _TTL_S)) == PageBits.all(6)
        assert read_right(second, second.open(keys, _TTL_S), "second") == PageBits.all(6)

    def test_place_of_another_identity_is_refused(
        self, place: StorePlace, store: PageStore
    ) -> None:
        keys = page_keys(range(2))
        store.put(keys, page_parts(keys, SUITE_LAYOUT))
        identity = attrs.evolve(SUITE_IDENTITY, revision="2")
        with pytest.raises(IdentityError, match="revision"):
            place.open(attrs.evolve(SUITE_LAYOUT, identity=identity))
        assert store.contains(keys) == PageBits.all(2)

    def test_threads_only_ever_read_right_bytes(self, place: StorePlace, store: PageStore) -> None:
        stores = [store, place.open(SUITE_LAYOUT)]
        threads = 4
        start = threading.Barrier(threads)
        failures: list[BaseException] = []
        hits = [0] * threads

        def work(number: int) -> None:
            mine = stores[number % len(stores)]
            try:
                start.wait()
                for turn in range(20):
                    # Neighbours ask for half of each other's pages; all together do not fit.
                    first = (turn * 48 + number * 16) % 640
                    keys = page_keys(range(first, first + 32))
                    mine.put(keys, page_parts(keys, SUITE_LAYOUT))
                    hits[number] += read_right(mine, mine.open(keys, _TTL_S)).total
            except BaseException as error:  # noqa: BLE001 - told to the main thread below
                failures.append(error)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert failures == []
        assert sum(hits) > 0


def _evict(store: PageStore, keys: PageKeys) -> None:
    """Put other pages until none of these is there."""
    for first in range(0, _MAX_PAGES_TO_FILL, 32):
        if not store.contains(keys).mask:
            return
        others = page_keys(range(first, first + 32), "filler")
        store.put(others, page_parts(others, store.layout))
    pytest.fail(f"{_MAX_PAGES_TO_FILL} other pages did not evict these")
