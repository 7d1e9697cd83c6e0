"""Some pages of a call: their keys, rows and bits; and which node to ask for which."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixlink_contracts import PageBits
from radixlink_store_mpi._pages import assign, keys_of, rows_of, spread, without
from radixlink_testing.pages import page_keys

PAGES = st.lists(st.booleans(), max_size=40).map(
    lambda flags: PageBits.of((page for page, flag in enumerate(flags) if flag), len(flags))
)


@given(PAGES)
def test_keys_and_rows_are_those_of_the_pages_in_order(pages: PageBits) -> None:
    keys = page_keys(range(pages.count))
    assert list(keys_of(keys, pages)) == [keys[page] for page in pages]
    rows = rows_of(memoryview(keys.data), 32, pages)
    assert bytes(rows) == b"".join(keys[page] for page in pages)


def test_rows_that_follow_each_other_are_not_copied() -> None:
    data = bytearray(10)
    rows_of(memoryview(data), 1, PageBits.of([3, 4, 5], 10))[1] = 9
    assert data[4] == 9


@given(PAGES, st.data())
def test_bits_of_some_pages_find_their_places(pages: PageBits, data: st.DataObject) -> None:
    bits = PageBits(data.draw(st.integers(0, (1 << pages.total) - 1)), pages.total)
    spread_bits = spread(pages, bits)
    assert spread_bits.count == pages.count
    assert [page in spread_bits for page in pages] == [row in bits for row in range(bits.count)]
    assert spread_bits & pages == spread_bits


@given(PAGES)
def test_without_is_the_rest(pages: PageBits) -> None:
    rest = without(page_keys(range(pages.count)), pages)
    assert rest.mask ^ pages.mask == PageBits.all(pages.count).mask


@given(
    wanted=st.integers(0, 255),
    holders=st.dictionaries(st.integers(0, 5), st.integers(0, 255)),
    first=st.integers(0, 5),
)
def test_each_page_that_somebody_has_is_asked_of_one(
    wanted: int, holders: dict[int, int], first: int
) -> None:
    assigned = assign(wanted, holders, first)
    had = 0
    for node, pages in assigned.items():
        assert pages
        assert pages & ~holders[node] == 0
        assert pages & had == 0
        had |= pages
    everywhere = 0
    for pages in holders.values():
        everywhere |= pages
    assert had == wanted & everywhere


def test_the_next_node_in_the_ring_is_asked_first() -> None:
    holders = {0: 0b11, 4: 0b01, 8: 0b11}
    assert assign(0b11, holders, 2) == {4: 0b01, 8: 0b10}
    assert assign(0b11, holders, 8) == {0: 0b11}
