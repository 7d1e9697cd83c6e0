from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from radixlink_contracts.errors import ContractError
from radixlink_pools import FullSwaAllocator

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import SlotAllocator


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def take(allocator: SlotAllocator, num_tokens: int) -> torch.Tensor:
    taken = allocator.alloc(num_tokens)
    assert taken is not None
    return taken


def snapshot(allocator: FullSwaAllocator) -> tuple[int, int, list[int]]:
    return (
        allocator.full.available_size,
        allocator.swa.available_size,
        allocator.full_to_swa.tolist(),
    )


def test_alloc_gives_pairs() -> None:
    allocator = FullSwaAllocator(4, 3, 2, first_page=1)
    # So that the two sides are not in step.
    take(allocator.full, 2)
    assert take(allocator, 4).tolist() == [4, 5, 6, 7]
    assert allocator.swa_indices(slots(4, 5, 6, 7)).tolist() == [2, 3, 4, 5]
    assert allocator.full_to_swa.tolist() == [-1, -1, -1, -1, 2, 3, 4, 5, -1, -1]
    assert (allocator.size, allocator.available_size, allocator.page_size) == (8, 2, 2)
    assert (allocator.full.size, allocator.swa.size, allocator.swa.page_size) == (8, 6, 2)


@pytest.mark.parametrize(("num_full", "num_swa"), [(2, 4), (4, 2)])
def test_a_side_that_is_short_lets_nothing_be_taken(num_full: int, num_swa: int) -> None:
    allocator = FullSwaAllocator(num_full, num_swa, 2)
    before = snapshot(allocator)
    assert allocator.alloc(6) is None
    assert snapshot(allocator) == before
    assert take(allocator, 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("num_tokens", [3, -2, 99])
def test_alloc_refuses_what_is_no_number_of_pages(num_tokens: int) -> None:
    with pytest.raises(ContractError, match="multiple of page_size 2"):
        FullSwaAllocator(4, 4, 2).alloc(num_tokens)


def test_free_gives_back_both_sides_of_pairs_and_one_of_the_rest() -> None:
    allocator = FullSwaAllocator(4, 4, 1)
    paired, alone = take(allocator, 2), take(allocator.full, 2)
    allocator.free(torch.cat([alone[:1], paired, alone[1:]]))
    assert snapshot(allocator) == (4, 4, [-1] * 4)


def test_window_slots_go_first_and_full_slots_alone_later() -> None:
    allocator = FullSwaAllocator(4, 4, 1)
    full = take(allocator, 4)
    assert allocator.free_swa(full[:3]) == 3
    assert allocator.swa_indices(full).tolist() == [-1, -1, -1, 3]
    # Those without a partner are passed over.
    assert allocator.free_swa(full) == 1
    allocator.full.free(full)
    assert snapshot(allocator) == (4, 4, [-1] * 4)


def test_freeing_window_slots_themselves_parts_their_pairs() -> None:
    allocator = FullSwaAllocator(4, 4, 1)
    full = take(allocator, 4)
    allocator.swa.free(allocator.swa_indices(full)[1:3])
    assert allocator.full_to_swa.tolist() == [0, -1, -1, 3]
    # Their next owner is another's partner, or nobody's, and not found through the old one.
    take(allocator.swa, 2)
    allocator.free(full)
    assert snapshot(allocator) == (4, 2, [-1] * 4)


def test_a_full_slot_with_a_partner_does_not_go_back_alone() -> None:
    allocator = FullSwaAllocator(4, 4, 1)
    full = take(allocator, 2)
    allocator.free_swa(full[:1])
    before = snapshot(allocator)
    with pytest.raises(ContractError, match="got slot 1, beside which window slot 1 is in use"):
        allocator.full.free(full)
    assert snapshot(allocator) == before


def test_a_load_is_mapped_and_given_up_in_reverse_order() -> None:
    """Case I19: prefix 10, page 2, window 3: the last 4 of the loaded full slots have partners."""
    allocator = FullSwaAllocator(8, 4, 2)
    full, swa = take(allocator.full, 10), take(allocator.swa, 4)
    allocator.map_full_to_swa(full[-4:], swa)
    assert allocator.swa_indices(full).tolist() == [-1] * 6 + swa.tolist()
    allocator.swa.free(swa)
    assert allocator.swa_indices(full).tolist() == [-1] * 10
    allocator.full.free(full)
    assert snapshot(allocator) == (16, 8, [-1] * 16)


def test_a_recovered_window_moves_to_the_full_slots_that_stay() -> None:
    """Case I3 with FULL locked: old ids keep the node, the caller's window goes to them."""
    allocator = FullSwaAllocator(16, 8, 1)
    kept, incoming = take(allocator.full, 8), take(allocator, 8)
    window = allocator.swa_indices(incoming)
    allocator.map_full_to_swa(kept, window)
    assert torch.equal(allocator.swa_indices(kept), window)
    allocator.full.free(incoming)
    assert allocator.full.available_size == 8
    allocator.free(kept)
    assert snapshot(allocator) == (16, 8, [-1] * 16)


def test_a_new_partner_leaves_the_old_one_to_its_owner() -> None:
    allocator = FullSwaAllocator(2, 4, 1)
    full = take(allocator, 2)
    old, new = allocator.swa_indices(full), take(allocator.swa, 2)
    allocator.map_full_to_swa(full, new)
    assert torch.equal(allocator.swa_indices(full), new)
    allocator.swa.free(old)
    assert torch.equal(allocator.swa_indices(full), new)
    allocator.free(full)
    assert snapshot(allocator) == (2, 4, [-1] * 2)


def test_a_pair_can_be_mapped_again_as_it_is() -> None:
    allocator = FullSwaAllocator(2, 2, 1)
    full = take(allocator, 2)
    before = snapshot(allocator)
    allocator.map_full_to_swa(full, allocator.swa_indices(full))
    assert snapshot(allocator) == before
    allocator.map_full_to_swa(full, slots(1, 0))
    assert allocator.full_to_swa.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("full", "swa", "message"),
    [
        # Case I20: different lengths, different page counts.
        (slots(0, 1), slots(0, 1, 2, 3), r"got \(4,\) for \(2,\)"),
        (slots(0, 1, 2, 3), slots(0, 1), r"got \(2,\) for \(4,\)"),
        (slots(), slots(0, 1), r"got \(2,\) for \(0,\)"),
        (slots(0), slots(0), "multiple of page_size 2"),
        (slots(1, 2), slots(0, 1), "aligned contiguous pages"),
        (slots(0, 1), slots(1, 0), "aligned contiguous pages"),
        (slots(4, 5), slots(0, 1), "that of slot 4 is free"),
        (slots(0, 1), slots(4, 5), "that of slot 4 is free"),
        (slots(8, 9), slots(0, 1), "exceeds the pool"),
        (slots(0, 1), slots(-2, -1), "exceeds the pool"),
        (slots(0, 1, 0, 1), slots(0, 1, 2, 3), "slot 0 twice"),
        (slots(0, 1, 2, 3), slots(2, 3, 2, 3), "slot 2 twice"),
        (slots(0, 1).to(torch.int32), slots(0, 1), "int64"),
    ],
)
def test_a_mapping_is_refused_before_anything_changes(
    full: torch.Tensor, swa: torch.Tensor, message: str
) -> None:
    allocator = FullSwaAllocator(4, 3, 2)
    take(allocator, 4)
    before = snapshot(allocator)
    with pytest.raises(ContractError, match=message):
        allocator.map_full_to_swa(full, swa)
    assert snapshot(allocator) == before


BAD_FULL_SLOTS = [
    (slots(0, 1, 6, 7), "that of slot 6 is free"),
    (slots(0, 1, 0, 1), "slot 0 twice"),
    (slots(0, 1, 8, 9), "exceeds the pool"),
    (slots(1, 2), "aligned contiguous pages"),
    (slots(0), "multiple of page_size 2"),
    (slots(0, 1).to(torch.int32), "int64"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_FULL_SLOTS)
@pytest.mark.parametrize("way", ["both", "full", "swa of full"])
def test_a_double_free_is_refused_before_anything_changes(
    way: str, bad: torch.Tensor, message: str
) -> None:
    allocator = FullSwaAllocator(4, 4, 2)
    take(allocator, 4)
    take(allocator.full, 2)
    if way == "full":
        allocator.free_swa(slots(0, 1, 2, 3))
    call: dict[str, Callable[[torch.Tensor], object]] = {
        "both": allocator.free,
        "full": allocator.full.free,
        "swa of full": allocator.free_swa,
    }
    before = snapshot(allocator)
    with pytest.raises(ContractError, match=message):
        call[way](bad)
    assert snapshot(allocator) == before


@pytest.mark.parametrize(("bad", "message"), BAD_FULL_SLOTS)
def test_a_double_free_of_window_slots_is_refused_too(bad: torch.Tensor, message: str) -> None:
    allocator = FullSwaAllocator(4, 4, 2)
    take(allocator, 6)
    before = snapshot(allocator)
    with pytest.raises(ContractError, match=message):
        allocator.swa.free(bad)
    assert snapshot(allocator) == before


@pytest.mark.parametrize(
    "bad", [slots(-1), slots(4), slots(0).to(torch.float32), slots(0).view(1, 1)]
)
def test_partners_are_asked_for_slots_of_the_pool(bad: torch.Tensor) -> None:
    with pytest.raises(ContractError, match=r"in 0\.\.3"):
        FullSwaAllocator(4, 4, 1).swa_indices(bad)


def test_clear_takes_everything_back() -> None:
    allocator = FullSwaAllocator(4, 4, 1)
    before = snapshot(allocator)
    take(allocator, 2)
    take(allocator.swa, 1)
    allocator.clear()
    assert snapshot(allocator) == before
    assert take(allocator, 4).tolist() == [0, 1, 2, 3]


def test_no_slots_are_no_pairs() -> None:
    allocator = FullSwaAllocator(2, 2, 2)
    assert take(allocator, 0).shape == (0,)
    allocator.free(slots())
    allocator.map_full_to_swa(slots(), slots())
    assert allocator.free_swa(slots()) == 0
    assert allocator.swa_indices(slots()).shape == (0,)


class AgainstASetOfPairs(RuleBasedStateMachine):
    """The allocator beside two sets of pages in use and a set of pairs of pages."""

    @initialize(
        num_full=st.integers(1, 8),
        num_swa=st.integers(1, 8),
        page_size=st.integers(1, 3),
        first_page=st.integers(0, 1),
    )
    def start(self, num_full: int, num_swa: int, page_size: int, first_page: int) -> None:
        self.page_size = page_size
        self.num_full, self.num_swa, self.first_page = num_full, num_swa, first_page
        self.allocator = FullSwaAllocator(num_full, num_swa, page_size, first_page=first_page)
        self.full = set[int]()
        self.swa = set[int]()
        self.pairs = set[tuple[int, int]]()

    def slots_of(self, pages: list[int]) -> torch.Tensor:
        size = self.page_size
        return slots(*(page * size + place for page in pages for place in range(size)))

    def pages_of(self, indices: torch.Tensor) -> list[int]:
        pages = [slot // self.page_size for slot in indices.tolist()[:: self.page_size]]
        assert torch.equal(indices, self.slots_of(pages))
        return pages

    def part(self, full: set[int], swa: set[int]) -> None:
        self.pairs = {(f, s) for f, s in self.pairs if f not in full and s not in swa}

    @rule(num_pages=st.integers(0, 4))
    def alloc(self, num_pages: int) -> None:
        room = min(self.num_full - len(self.full), self.num_swa - len(self.swa))
        indices = self.allocator.alloc(num_pages * self.page_size)
        assert (indices is None) == (num_pages > room)
        if indices is None:
            return
        full = self.pages_of(indices)
        swa = self.pages_of(self.allocator.swa_indices(indices))
        assert len({*full}) == len({*swa}) == num_pages
        assert not self.full.intersection(full)
        assert not self.swa.intersection(swa)
        self.full.update(full)
        self.swa.update(swa)
        self.pairs.update(zip(full, swa, strict=True))

    @rule(num_pages=st.integers(0, 4), window=st.booleans())
    def alloc_one_side(self, num_pages: int, *, window: bool) -> None:
        side = self.allocator.swa if window else self.allocator.full
        in_use = self.swa if window else self.full
        indices = side.alloc(num_pages * self.page_size)
        room = (self.num_swa if window else self.num_full) - len(in_use)
        assert (indices is None) == (num_pages > room)
        if indices is not None:
            pages = self.pages_of(indices)
            assert not in_use.intersection(pages)
            in_use.update(pages)

    def some(self, data: st.DataObject, pages: set[int], limit: int = 4) -> list[int]:
        """Mostly pages of these; sometimes others, or one twice."""
        others = st.integers(self.first_page, self.first_page + 7)
        one = st.sampled_from(sorted(pages)) if pages else others
        if data.draw(st.integers(0, 5)) == 0:
            one |= others
            return data.draw(st.lists(one, max_size=limit))
        return data.draw(st.lists(one, max_size=limit, unique=True)) if pages else []

    @staticmethod
    def right(pages: list[int], in_use: set[int]) -> bool:
        return len({*pages}) == len(pages) and in_use.issuperset(pages)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = self.some(data, self.full)
        if not self.right(pages, self.full):
            with pytest.raises(ContractError):
                self.allocator.free(self.slots_of(pages))
            return
        self.allocator.free(self.slots_of(pages))
        self.full.difference_update(pages)
        self.swa -= {s for f, s in self.pairs if f in pages}
        self.part({*pages}, set())

    @rule(data=st.data())
    def free_full_alone(self, data: st.DataObject) -> None:
        pages = self.some(data, self.full)
        if not self.right(pages, self.full) or any(f in pages for f, _ in self.pairs):
            with pytest.raises(ContractError):
                self.allocator.full.free(self.slots_of(pages))
            return
        self.allocator.full.free(self.slots_of(pages))
        self.full.difference_update(pages)

    @rule(data=st.data())
    def free_window_slots(self, data: st.DataObject) -> None:
        pages = self.some(data, self.swa)
        if not self.right(pages, self.swa):
            with pytest.raises(ContractError):
                self.allocator.swa.free(self.slots_of(pages))
            return
        self.allocator.swa.free(self.slots_of(pages))
        self.swa.difference_update(pages)
        self.part(set(), {*pages})

    @rule(data=st.data())
    def free_windows_of_full_slots(self, data: st.DataObject) -> None:
        pages = self.some(data, self.full)
        if not self.right(pages, self.full):
            with pytest.raises(ContractError):
                self.allocator.free_swa(self.slots_of(pages))
            return
        leaving = {s for f, s in self.pairs if f in pages}
        count = self.allocator.free_swa(self.slots_of(pages))
        assert count == len(leaving) * self.page_size
        self.swa -= leaving
        self.part(set(), leaving)

    @rule(data=st.data())
    def map_again(self, data: st.DataObject) -> None:
        full, swa = self.some(data, self.full), self.some(data, self.swa)
        if data.draw(st.integers(0, 3)):
            full, swa = full[: len(swa)], swa[: len(full)]
        right = self.right(full, self.full) and self.right(swa, self.swa)
        if len(full) != len(swa) or not right:
            with pytest.raises(ContractError):
                self.allocator.map_full_to_swa(self.slots_of(full), self.slots_of(swa))
            return
        self.allocator.map_full_to_swa(self.slots_of(full), self.slots_of(swa))
        self.part({*full}, {*swa})
        self.pairs.update(zip(full, swa, strict=True))

    @invariant()
    def it_is_as_the_sets_are(self) -> None:
        allocator, size = self.allocator, self.page_size
        assert allocator.full.available_size == (self.num_full - len(self.full)) * size
        assert allocator.swa.available_size == (self.num_swa - len(self.swa)) * size
        table = allocator.full_to_swa.tolist()
        found = {(f, s) for f, s in enumerate(table) if s != -1}
        assert found == {(f * size + i, s * size + i) for f, s in self.pairs for i in range(size)}
        # Never dangling, and the way back is the same.
        assert {s // size for _, s in found} <= self.swa
        assert {f // size for f, _ in found} <= self.full
        assert found == {(f, s) for s, f in enumerate(allocator._full_of.tolist()) if f != -1}


TestAgainstASetOfPairs = AgainstASetOfPairs.TestCase
TestAgainstASetOfPairs.settings = settings(stateful_step_count=25, max_examples=50)
