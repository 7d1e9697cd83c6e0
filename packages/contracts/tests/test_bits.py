from __future__ import annotations

from itertools import pairwise

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlink_contracts import PageBits
from radixlink_contracts.errors import ContractError


@st.composite
def pages_of(draw: st.DrawFn) -> tuple[int, set[int]]:
    count = draw(st.integers(0, 200))
    pages = draw(st.sets(st.integers(0, count - 1))) if count else set[int]()
    return count, pages


@given(pages_of())
def test_bits_say_what_a_set_of_pages_says(sample: tuple[int, set[int]]) -> None:
    count, pages = sample
    bits = PageBits.of(pages, count)
    assert list(bits) == sorted(pages)
    assert bits.total == len(pages)
    assert bits.count == count
    assert bits.complete == (len(pages) == count)
    assert bits.leading == next(page for page in range(count + 1) if page not in pages)
    assert [page for page in range(-2, count + 2) if page in bits] == sorted(pages)


@given(pages_of(), st.data())
def test_and_is_the_intersection(sample: tuple[int, set[int]], data: st.DataObject) -> None:
    count, pages = sample
    others = data.draw(st.sets(st.integers(0, count - 1))) if count else set[int]()
    both = PageBits.of(pages, count) & PageBits.of(others, count)
    assert both == PageBits.of(pages & others, count)


@given(st.integers(0, 200))
def test_all_and_none_are_the_ends(count: int) -> None:
    every, no = PageBits.all(count), PageBits.none(count)
    assert (every.complete, every.total, every.leading) == (True, count, count)
    assert (no.complete, no.total, no.leading) == (count == 0, 0, 0)
    assert every & no == no


@given(pages_of(), st.integers(1, 240))
def test_trailing_is_the_lengths_that_end_in_set_pages(
    sample: tuple[int, set[int]], num_pages: int
) -> None:
    count, pages = sample
    expected = [
        length
        for length in range(1, count + 1)
        if pages.issuperset(range(max(0, length - num_pages), length))
    ]
    assert [bit + 1 for bit in PageBits.of(pages, count).trailing(num_pages)] == expected


@given(pages_of())
def test_a_trail_of_one_is_the_pages_and_one_of_all_is_what_leads(
    sample: tuple[int, set[int]],
) -> None:
    count, pages = sample
    bits = PageBits.of(pages, count)
    assert bits.trailing(1) == bits
    assert list(bits.trailing(count + 1)) == list(range(bits.leading))


def test_a_hole_at_the_front_leaves_nothing_leading() -> None:
    assert PageBits.of([1, 2, 3], 4).leading == 0


@pytest.mark.parametrize("page", [-1, 4, 100])
def test_a_page_that_is_not_there_is_refused(page: int) -> None:
    with pytest.raises(ContractError, match=rf"0\.\.3, got {page}"):
        PageBits.of([0, page], 4)


@pytest.mark.parametrize(("mask", "count"), [(0b1_0000, 4), (1, 0), (-1, 4), (0, -1)])
def test_a_mask_has_no_bits_beyond_its_pages(mask: int, count: int) -> None:
    with pytest.raises(ContractError, match=f"mask of {count} bits"):
        PageBits(mask, count)


@given(pages_of(), st.data())
def test_or_is_the_union(sample: tuple[int, set[int]], data: st.DataObject) -> None:
    count, pages = sample
    others = data.draw(st.sets(st.integers(0, count - 1))) if count else set[int]()
    assert set(PageBits.of(pages, count) | PageBits.of(others, count)) == pages | others


@given(pages_of())
def test_inverse_is_the_other_pages(sample: tuple[int, set[int]]) -> None:
    count, pages = sample
    bits = ~PageBits.of(pages, count)
    assert set(bits) == set(range(count)) - pages
    assert bits.count == count


@given(pages_of())
def test_runs_are_the_pages_in_as_few_ranges_as_can_be(sample: tuple[int, set[int]]) -> None:
    count, pages = sample
    runs = list(PageBits.of(pages, count).runs())
    assert [page for first, last in runs for page in range(first, last)] == sorted(pages)
    assert all(first < last for first, last in runs)
    assert all(behind > last for (_, last), (behind, _) in pairwise(runs))


def test_or_of_different_numbers_of_pages_is_refused() -> None:
    with pytest.raises(ContractError, match=r"expected 3 pages on both sides of \|, got 2"):
        PageBits.all(3) | PageBits.all(2)


def test_and_of_different_numbers_of_pages_is_refused() -> None:
    with pytest.raises(ContractError, match="expected 3 pages on both sides of &, got 4"):
        PageBits.all(3) & PageBits.all(4)


def test_bits_are_frozen() -> None:
    bits = PageBits.all(3)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        bits.mask = 0  # type: ignore[misc]


def test_truth_of_bits_is_refused_as_ambiguous() -> None:
    with pytest.raises(TypeError, match="ask complete, total or count"):
        bool(PageBits.all(3))


def test_which_number_len_would_be_is_not_guessed() -> None:
    bits = PageBits.of([1], 3)
    with pytest.raises(TypeError, match="len"):
        len(bits)  # type: ignore[arg-type]
    assert (bits.count, bits.total, list(bits)) == (3, 1, [1])
