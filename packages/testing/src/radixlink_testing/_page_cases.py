"""What a page store does with pages that fit: lookups, reads, writes, and calls that it refuses."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import pytest

from radixlink_contracts import PageBits, PageKeys
from radixlink_contracts.errors import ContractError
from radixlink_testing._deadlines import within
from radixlink_testing._places import (
    SUITE_LAYOUT,
    put_pages,
    read_page_range,
    read_right,
)
from radixlink_testing._store_suite import StoreSuite
from radixlink_testing.pages import page_column, page_key, page_keys, page_parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from radixlink_contracts import PageStore

_TTL_S: Final = 0.0
_ROW: Final = SUITE_LAYOUT.range_bytes[0]
_RANGES: Final = range(len(SUITE_LAYOUT.range_bytes))

_BUFFERS: Final[dict[str, Callable[[bytes], Buffer]]] = {
    "bytearray": bytearray,
    "array": lambda data: array("B", data),
    "middle": lambda data: memoryview(bytearray(b"<<" + data + b">>>"))[2:-3],
    "rows": lambda data: memoryview(bytearray(data)).cast("B", (2, len(data) // 2)),
}
"""Makes writable buffers of the bytes of two pages."""


def _flipped(key: bytes, bit: int) -> bytes:
    """A key that differs in one bit."""
    return (int.from_bytes(key, "little") ^ 1 << bit).to_bytes(len(key), "little")


class PageCases(StoreSuite):
    """Pages that fit."""

    # --- lookups ---------------------------------------------------------------------------------

    def test_layout_is_what_was_opened(self, store: PageStore) -> None:
        assert store.layout == SUITE_LAYOUT

    def test_miss_is_a_value(self, store: PageStore) -> None:
        keys = page_keys(range(3))
        handles = store.open(keys, _TTL_S)
        assert store.contains(keys) == PageBits.none(3)
        assert handles.found == PageBits.none(3)
        assert handles.keys == keys
        assert read_page_range(store, handles, 0)[0] == PageBits.none(3)

    def test_partial_hits_keep_their_places(self, store: PageStore) -> None:
        put_pages(store, page_keys(range(0, 12, 3)))
        asked = page_keys(range(12))
        expected = PageBits.of(range(0, 12, 3), 12)
        assert store.contains(asked) == expected
        handles = store.open(asked, _TTL_S)
        assert handles.found == expected
        assert read_right(store, handles) == expected

    def test_keys_that_differ_in_one_bit_are_different_pages(self, store: PageStore) -> None:
        put_pages(store, page_keys([0]))
        neighbours = PageKeys.join(_flipped(page_key(0), bit) for bit in range(256))
        assert store.contains(neighbours) == PageBits.none(256)
        assert store.open(neighbours, _TTL_S).found == PageBits.none(256)
        both_ends = PageKeys.join([neighbours[0], page_key(0), neighbours[255]])
        assert put_pages(store, both_ends) == PageBits.all(3)
        assert read_right(store, store.open(both_ends, _TTL_S)) == PageBits.all(3)

    def test_thousands_of_keys_in_one_call_are_all_looked_for(self, store: PageStore) -> None:
        there = [0, 255, 256, 1023, 1024, 2047, 2999]
        put_pages(store, page_keys(there))
        asked, expected = page_keys(range(3000)), PageBits.of(there, 3000)
        assert store.contains(asked) == expected
        handles = store.open(asked, _TTL_S)
        assert handles.found == expected
        assert read_right(store, handles) == expected

    def test_no_pages_are_a_call_like_any_other(self, store: PageStore) -> None:
        keys = PageKeys()
        nothing = PageBits.none(0)
        assert store.put(keys, [b""] * 3) == nothing
        assert store.contains(keys) == nothing
        handles = store.open(keys, _TTL_S)
        assert handles.found == nothing
        assert store.read(handles, 0, bytearray()) == nothing

    # --- reading ---------------------------------------------------------------------------------

    def test_pages_come_back_in_every_layer_range(self, store: PageStore) -> None:
        keys = page_keys(range(20))
        assert put_pages(store, keys) == PageBits.all(20)
        assert store.contains(keys) == PageBits.all(20)
        handles = store.open(keys, _TTL_S)
        assert handles.found == PageBits.all(20)
        assert read_right(store, handles) == PageBits.all(20)

    def test_layer_ranges_are_read_in_any_order_and_again(self, store: PageStore) -> None:
        keys = page_keys(range(4))
        put_pages(store, keys)
        handles = store.open(keys, _TTL_S)
        for layer_range in (2, 0, 1, 2):
            bits, rows = read_page_range(store, handles, layer_range)
            assert bits == PageBits.all(4)
            assert rows == page_column(keys, SUITE_LAYOUT, layer_range)

    def test_page_stored_after_open_is_not_read_by_its_handle(self, store: PageStore) -> None:
        put_pages(store, page_keys([0]))
        keys = page_keys(range(2))
        handles = store.open(keys, _TTL_S)
        put_pages(store, keys)
        assert read_right(store, handles) == PageBits.of([0], 2)

    def test_handles_are_read_by_any_thread(self, store: PageStore) -> None:
        keys = page_keys(range(4))
        put_pages(store, keys)
        handles = store.open(keys, _TTL_S)
        elsewhere = within(
            self.case_deadline_s, "read in another thread", lambda: read_right(store, handles)
        )
        assert elsewhere == PageBits.all(4)

    @pytest.mark.parametrize("kind", _BUFFERS)
    def test_out_may_be_any_writable_buffer(self, store: PageStore, kind: str) -> None:
        keys = page_keys(range(2))
        put_pages(store, keys)
        handles = store.open(keys, _TTL_S)
        out = _BUFFERS[kind](bytes(2 * _ROW))
        assert store.read(handles, 0, out) == PageBits.all(2)
        assert bytes(out) == page_column(keys, SUITE_LAYOUT, 0)

    def test_nothing_beside_out_is_written(self, store: PageStore) -> None:
        keys = page_keys(range(2))
        put_pages(store, keys)
        backing = bytearray(2 * _ROW + 10)
        window = memoryview(backing)[5:-5]
        assert store.read(store.open(keys, _TTL_S), 0, window) == PageBits.all(2)
        assert backing[:5] + backing[-5:] == bytes(10)

    # --- writing ---------------------------------------------------------------------------------

    def test_first_writer_wins(self, store: PageStore) -> None:
        keys = page_keys(range(5))
        put_pages(store, keys)
        put_pages(store, keys, "second")
        assert read_right(store, store.open(keys, _TTL_S)) == PageBits.all(5)

    def test_put_counts_pages_that_were_there(self, store: PageStore) -> None:
        put_pages(store, page_keys([0, 3]))
        assert put_pages(store, page_keys(range(5))) == PageBits.all(5)
        assert put_pages(store, page_keys(range(5))) == PageBits.all(5)

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

    @pytest.mark.parametrize("kind", _BUFFERS)
    def test_parts_may_be_any_buffer(self, store: PageStore, kind: str) -> None:
        keys = page_keys(range(2))
        parts = [_BUFFERS[kind](part) for part in page_parts(keys, SUITE_LAYOUT)]
        assert store.put(keys, parts) == PageBits.all(2)
        assert read_right(store, store.open(keys, _TTL_S)) == PageBits.all(2)

    def test_contains_says_what_put_said(self, store: PageStore) -> None:
        keys = page_keys(range(64))
        assert put_pages(store, keys) == store.contains(keys)

    # --- broken preconditions --------------------------------------------------------------------

    @pytest.mark.parametrize("change", [-1, 1])
    @pytest.mark.parametrize("layer_range", _RANGES)
    def test_parts_of_another_size_are_refused(
        self, store: PageStore, layer_range: int, change: int
    ) -> None:
        keys = page_keys(range(2))
        parts = page_parts(keys, SUITE_LAYOUT)
        parts[layer_range] = bytes(len(parts[layer_range]) + change)
        with pytest.raises(ContractError):
            store.put(keys, parts)

    @pytest.mark.parametrize("count", [0, 2, 4])
    def test_another_number_of_parts_is_refused(self, store: PageStore, count: int) -> None:
        keys = page_keys(range(2))
        parts = (page_parts(keys, SUITE_LAYOUT) * 2)[:count]
        with pytest.raises(ContractError):
            store.put(keys, parts)

    def test_refused_put_stores_nothing(self, store: PageStore) -> None:
        keys = page_keys(range(2))
        parts = page_parts(keys, SUITE_LAYOUT)
        with pytest.raises(ContractError):
            store.put(keys, [*parts[:-1], parts[-1][:-1]])
        assert store.contains(keys) == PageBits.none(2)
        assert put_pages(store, keys, "right") == PageBits.all(2)
        assert read_right(store, store.open(keys, _TTL_S), "right") == PageBits.all(2)

    @pytest.mark.parametrize("change", [-1, 1])
    def test_out_of_another_size_is_refused(self, store: PageStore, change: int) -> None:
        handles = store.open(page_keys(range(2)), _TTL_S)
        with pytest.raises(ContractError):
            store.read(handles, 0, bytearray(2 * _ROW + change))

    def test_out_that_cannot_be_written_is_refused(self, store: PageStore) -> None:
        handles = store.open(page_keys(range(2)), _TTL_S)
        with pytest.raises(ContractError):
            store.read(handles, 0, bytes(2 * _ROW))

    @pytest.mark.parametrize("layer_range", [-1, 3])
    def test_layer_range_that_does_not_exist_is_refused(
        self, store: PageStore, layer_range: int
    ) -> None:
        handles = store.open(page_keys(range(2)), _TTL_S)
        with pytest.raises(ContractError):
            store.read(handles, layer_range, bytearray(2 * SUITE_LAYOUT.range_bytes[-1]))
