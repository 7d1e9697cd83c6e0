"""What a load has to bring, against a count page by page."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixlink_contracts import (
    ComponentType,
    NodeId,
    PageBits,
    PageKeys,
    PrefixHoldings,
)
from radixlink_linker._load_plan import held_pages, keys_of, missing_pages

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
KINDS = (FULL, SWA, MAMBA)
PAGE_SIZE = 4


def held(
    full: set[int], windows: set[int], states: set[int], num_pages: int = 8
) -> dict[ComponentType, PageBits]:
    pages = zip(KINDS, (full, windows, states), strict=True)
    return {kind: PageBits.of(there, num_pages) for kind, there in pages}


def missing(
    there: dict[ComponentType, PageBits], skipped: int, stop: int, window_pages: int = 3
) -> dict[ComponentType, list[int]]:
    lacking = missing_pages(there, skipped=skipped, stop=stop, window_pages=window_pages)
    return {kind: list(pages) for kind, pages in lacking.items()}


def test_what_the_device_holds_is_told_by_page_behind_a_token() -> None:
    holdings = PrefixHoldings(
        full_len=24, last_node=NodeId(3), windows=((0, 8), (12, 24)), states=(8, 20)
    )
    there = held_pages(holdings, KINDS, start=8, num_pages=6, page_size=PAGE_SIZE)
    assert {kind: list(pages) for kind, pages in there.items()} == {
        FULL: [0, 1, 2, 3],
        SWA: [1, 2, 3],
        # The one at token 8 is of the prefix.
        MAMBA: [2],
    }


def test_nothing_behind_a_match_that_ends_where_full_attention_does() -> None:
    holdings = PrefixHoldings(full_len=8, last_node=NodeId(3))
    there = held_pages(holdings, KINDS, start=8, num_pages=6, page_size=PAGE_SIZE)
    assert missing(there, skipped=0, stop=6) == {
        FULL: [0, 1, 2, 3, 4, 5],
        SWA: [3, 4, 5],
        MAMBA: [5],
    }


def test_a_window_alone() -> None:
    there = held(set(range(8)), {6, 7}, {7})
    assert missing(there, skipped=0, stop=8) == {SWA: [5]}


def test_a_state_alone() -> None:
    there = held(set(range(8)), set(range(8)), set())
    assert missing(there, skipped=2, stop=6) == {MAMBA: [5]}


def test_the_pages_of_a_window_need_not_follow_each_other() -> None:
    there = held({0, 1, 2, 3}, {3}, set())
    assert missing(there, skipped=0, stop=5) == {FULL: [4], SWA: [2, 4], MAMBA: [4]}


pages = st.sets(st.integers(0, 7))


@given(
    full_len=st.integers(0, 8),
    windows=pages,
    states=pages,
    skipped=st.integers(0, 7),
    window_pages=st.integers(1, 9),
    data=st.data(),
)
def test_it_brings_what_the_end_needs_and_the_device_lacks(
    full_len: int,
    windows: set[int],
    states: set[int],
    skipped: int,
    window_pages: int,
    data: st.DataObject,
) -> None:
    stop = data.draw(st.integers(skipped + 1, 8))
    full = set(range(full_len))
    lacking = missing(held(full, windows, states), skipped, stop, window_pages)
    needed = {
        FULL: [page for page in range(8) if skipped <= page < stop and page not in full],
        SWA: [
            page
            for page in range(8)
            if skipped <= page < stop and page >= stop - window_pages and page not in windows
        ],
        MAMBA: [] if stop - 1 in states else [stop - 1],
    }
    assert lacking == {kind: some for kind, some in needed.items() if some}


@given(
    chosen=st.sets(st.integers(0, 7), min_size=1),
    cut=st.tuples(st.integers(0, 8), st.integers(0, 8)),
)
def test_the_keys_of_some_pages_are_theirs_in_order(chosen: set[int], cut: tuple[int, int]) -> None:
    """Also those of a span of them, as a component takes one."""
    digests = [bytes([page]) * 32 for page in range(8)]
    some = keys_of(PageKeys(b"".join(digests)), PageBits.of(chosen, 8))
    expected = [digests[page] for page in sorted(chosen)]
    assert len(some) == len(expected)
    assert list(some.resolve()) == expected
    start, stop = sorted(min(end, len(expected)) for end in cut)
    assert list(some.span(start, stop).resolve()) == expected[start:stop]
