from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from radixlink_contracts.errors import ContractError
from radixlink_pools import PagedAllocator


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def take(allocator: PagedAllocator, num_tokens: int) -> torch.Tensor:
    taken = allocator.alloc(num_tokens)
    assert taken is not None
    return taken


def drain(allocator: PagedAllocator) -> list[int]:
    """Every free slot, in the order in which the pool gives them."""
    return [
        slot
        for _ in range(allocator.available_size // allocator.page_size)
        for slot in take(allocator, allocator.page_size).tolist()
    ]


def test_alloc_gives_whole_pages_from_the_first_on() -> None:
    allocator = PagedAllocator(4, 2)
    assert take(allocator, 4).tolist() == [0, 1, 2, 3]
    assert (allocator.available_size, allocator.size, allocator.page_size) == (4, 8, 2)
    assert take(allocator, 4).dtype is torch.int64


@pytest.mark.parametrize("page_size", [1, 3])
def test_reserved_pages_are_never_given_nor_taken(page_size: int) -> None:
    allocator = PagedAllocator(2, page_size, first_page=1)
    assert drain(allocator) == list(range(page_size, 3 * page_size))
    with pytest.raises(ContractError, match="exceeds the pool"):
        allocator.free(torch.arange(page_size))


@pytest.mark.parametrize("page_size", [1, 4])
def test_exhaustion_returns_none_and_takes_nothing(page_size: int) -> None:
    allocator = PagedAllocator(3, page_size)
    take(allocator, page_size)
    assert allocator.alloc(3 * page_size) is None
    assert allocator.available_size == 2 * page_size
    assert len(take(allocator, 2 * page_size)) == 2 * page_size
    assert allocator.alloc(page_size) is None


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_was_given_back_last_goes_out_first_and_in_the_same_order(page_size: int) -> None:
    allocator = PagedAllocator(8, page_size)
    first = take(allocator, 2 * page_size)
    second = take(allocator, 2 * page_size)
    allocator.free(first)
    allocator.free(second)
    assert torch.equal(take(allocator, 4 * page_size), torch.cat([second, first]))


def test_no_tokens_are_no_pages() -> None:
    allocator = PagedAllocator(2, 2)
    assert take(allocator, 0).shape == (0,)
    allocator.free(slots())
    assert allocator.available_size == 4


@pytest.mark.parametrize("num_tokens", [3, -2, -1])
def test_alloc_refuses_what_is_no_number_of_pages(num_tokens: int) -> None:
    allocator = PagedAllocator(4, 2)
    with pytest.raises(ContractError, match="multiple of page_size 2"):
        allocator.alloc(num_tokens)


@pytest.mark.parametrize("numbers", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_a_pool_has_pages_and_slots(numbers: tuple[int, int, int]) -> None:
    num_pages, page_size, first_page = numbers
    with pytest.raises(ContractError, match="num_pages >= 1"):
        PagedAllocator(num_pages, page_size, first_page=first_page)


@pytest.mark.parametrize(
    ("page_size", "indices", "message"),
    [
        (1, slots(0, 4, 1), "that of slot 4 is free"),
        (2, slots(0, 1, 4, 5), "that of slot 4 is free"),
        (1, slots(2, 0, 2), "that of slot 2 twice"),
        (2, slots(0, 1, 2, 3, 0, 1), "that of slot 0 twice"),
        # Three times the same: more often than once free and once in use.
        (1, slots(3, 3, 3), "that of slot 3 twice"),
        (1, slots(0, 8), "got 8, which exceeds the pool"),
        (1, slots(0, -1), "got -1, which exceeds the pool"),
        (2, slots(0, 1, 8, 9), "got 8, which exceeds the pool"),
        (2, slots(-2, -1), "got -2, which exceeds the pool"),
        (2, slots(0), "multiple of page_size 2, got 1 slots"),
        (2, slots(1, 2), "aligned contiguous pages"),
        (2, slots(0, 2), "aligned contiguous pages of 2 slots, got otherwise at place 1"),
        (2, slots(0, 1, 3, 2), "aligned contiguous pages"),
        (1, slots(0, 1).to(torch.int32), "torch.int32"),
        (2, slots(0, 1).to(torch.float32), "torch.float32"),
        (2, slots(0, 1).view(1, 2), r"\(1, 2\)"),
    ],
)
def test_free_refuses_and_changes_nothing(
    page_size: int, indices: torch.Tensor, message: str
) -> None:
    def used() -> PagedAllocator:
        allocator = PagedAllocator(8 // page_size, page_size)
        assert take(allocator, 4).tolist() == [0, 1, 2, 3]
        return allocator

    allocator = used()
    with pytest.raises(ContractError, match=message):
        allocator.free(indices)
    untouched = used()
    assert allocator.available_size == untouched.available_size
    allocator.free(slots(2, 3, 0, 1))
    untouched.free(slots(2, 3, 0, 1))
    assert drain(allocator) == drain(untouched)


def test_free_keeps_no_reference_to_what_it_was_given() -> None:
    allocator = PagedAllocator(4, 1)
    taken = take(allocator, 4)
    allocator.free(taken)
    taken.fill_(0)
    assert drain(allocator) == [0, 1, 2, 3]


def test_alloc_gives_memory_of_its_own() -> None:
    allocator = PagedAllocator(4, 1)
    take(allocator, 4).fill_(0)
    allocator.free(slots(3, 2, 1, 0))
    assert drain(allocator) == [3, 2, 1, 0]


def test_free_takes_slices_that_are_not_contiguous() -> None:
    allocator = PagedAllocator(8, 1)
    take(allocator, 8)
    allocator.free(torch.arange(8)[::2])
    assert drain(allocator) == [0, 2, 4, 6]


@pytest.mark.parametrize("named", [1 << 16, (1 << 16) + 1])
@pytest.mark.parametrize("slot", [0, 99_999])
def test_a_page_named_so_often_that_its_count_comes_round_is_refused(slot: int, named: int) -> None:
    """Slot 0 is in use, the last one free; enough are in use for a call of this length."""
    allocator = PagedAllocator(100_000, 1)
    taken = take(allocator, 99_999)
    with pytest.raises(ContractError, match=r"twice|is free"):
        allocator.free(torch.full((named,), slot))
    allocator.free(taken)
    assert allocator.available_size == 100_000


def test_more_pages_than_are_in_use_are_refused() -> None:
    allocator = PagedAllocator(4, 1)
    take(allocator, 2)
    with pytest.raises(ContractError, match="slot 0 twice"):
        allocator.free(slots(0, 1, 0))
    assert drain(allocator) == [2, 3]


def test_more_pages_than_one_tally_counts_go_out_and_come_back() -> None:
    num_pages = (1 << 17) + 5
    allocator = PagedAllocator(num_pages, 1)
    everything = take(allocator, num_pages)
    assert torch.equal(everything, torch.arange(num_pages))
    # The last names a page of the first part again.
    again = everything.clone()
    again[-1] = 0
    with pytest.raises(ContractError, match="that of slot 0 twice"):
        allocator.free(again)
    assert allocator.available_size == 0
    allocator.free(everything)
    assert torch.equal(take(allocator, num_pages), everything)


def test_calls_of_many_lengths_are_counted_alike() -> None:
    allocator = PagedAllocator(200, 1)
    for length in [*range(1, 60), *range(1, 60)]:
        taken = take(allocator, length)
        with pytest.raises(ContractError, match="twice"):
            allocator.free(torch.cat([taken, taken[:1]]))
        allocator.free(taken)
    assert drain(allocator) == list(range(200))


@pytest.mark.parametrize("page_size", [1, 2])
def test_check_in_use_says_what_free_would_say_and_frees_nothing(page_size: int) -> None:
    allocator = PagedAllocator(4, page_size)
    taken = take(allocator, 2 * page_size)
    allocator.check_in_use(taken)
    allocator.check_in_use(slots())
    for bad, message in (
        (torch.cat([taken, taken]), "twice"),
        (taken + 2 * page_size, "is free"),
        (taken + 4 * page_size, "exceeds the pool"),
        (taken - 4 * page_size, "exceeds the pool"),
        (taken.to(torch.int32), "int64"),
    ):
        with pytest.raises(ContractError, match=message):
            allocator.check_in_use(bad)
    assert allocator.available_size == 2 * page_size
    allocator.free(taken)


@pytest.mark.parametrize("page_size", [1, 2])
def test_clear_takes_every_page_back(page_size: int) -> None:
    allocator = PagedAllocator(4, page_size, first_page=1)
    everything = drain(allocator)
    allocator.free(torch.tensor(everything[-page_size:]))
    allocator.clear()
    assert drain(allocator) == everything
    allocator.free(torch.tensor(everything))


@given(
    page_size=st.sampled_from([1, 2, 5]),
    indices=st.lists(st.integers(-3, 18), max_size=8),
)
def test_free_accepts_just_distinct_whole_pages_in_use(page_size: int, indices: list[int]) -> None:
    allocator = PagedAllocator(15 // page_size, page_size)
    in_use = set(take(allocator, 10).tolist())
    starts = indices[::page_size]
    whole = indices == [s + i for s in starts for i in range(page_size)]
    aligned = all(start % page_size == 0 for start in starts)
    distinct = len(set(indices)) == len(indices)
    available = allocator.available_size
    if whole and aligned and distinct and in_use.issuperset(indices):
        allocator.free(torch.tensor(indices, dtype=torch.int64))
        assert allocator.available_size == available + len(indices)
    else:
        with pytest.raises(ContractError):
            allocator.free(torch.tensor(indices, dtype=torch.int64))
        assert allocator.available_size == available


class AgainstASet(RuleBasedStateMachine):
    """The allocator beside a plain set of free slots."""

    @initialize(
        num_pages=st.integers(1, 12), page_size=st.integers(1, 4), first_page=st.integers(0, 2)
    )
    def start(self, num_pages: int, page_size: int, first_page: int) -> None:
        self.allocator = PagedAllocator(num_pages, page_size, first_page=first_page)
        self.twin = PagedAllocator(num_pages, page_size, first_page=first_page)
        first = first_page * page_size
        self.free_slots = set(range(first, first + num_pages * page_size))
        self.pages_in_use: list[tuple[int, ...]] = []

    @rule(num_pages=st.integers(0, 5))
    def alloc(self, num_pages: int) -> None:
        page_size = self.allocator.page_size
        taken = self.allocator.alloc(num_pages * page_size)
        again = self.twin.alloc(num_pages * page_size)
        if num_pages * page_size > len(self.free_slots):
            assert taken is None
            assert again is None
            return
        assert taken is not None
        assert again is not None
        assert torch.equal(taken, again), "two allocators with the same calls differ"
        rows = [tuple(row) for row in taken.view(-1, page_size).tolist()]
        for row in rows:
            assert row == tuple(range(row[0], row[0] + page_size))
            assert row[0] % page_size == 0
        given_out = [slot for row in rows for slot in row]
        assert len(set(given_out)) == len(given_out)
        assert self.free_slots.issuperset(given_out)
        self.free_slots.difference_update(given_out)
        self.pages_in_use += rows

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(self.pages_in_use or [()]), unique=True))
        indices = torch.tensor([slot for row in rows for slot in row], dtype=torch.int64)
        self.allocator.free(indices)
        self.twin.free(indices)
        self.free_slots.update(indices.tolist())
        self.pages_in_use = [row for row in self.pages_in_use if row not in rows]

    @rule(data=st.data())
    def free_of_a_free_page_is_refused(self, data: st.DataObject) -> None:
        page_size = self.allocator.page_size
        starts = sorted(slot for slot in self.free_slots if slot % page_size == 0)
        if not starts:
            return
        start = data.draw(st.sampled_from(starts))
        rows = [*self.pages_in_use[:2], tuple(range(start, start + page_size))]
        rows = data.draw(st.permutations(rows))
        with pytest.raises(ContractError, match="is free"):
            self.allocator.free(torch.tensor([slot for row in rows for slot in row]))

    @invariant()
    def counts_are_those_of_the_set(self) -> None:
        assert self.allocator.available_size == len(self.free_slots)


TestAgainstASet = AgainstASet.TestCase
TestAgainstASet.settings = settings(stateful_step_count=25)
