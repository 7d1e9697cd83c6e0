from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlink_contracts.errors import ContractError
from radixlink_pools import StateSlotAllocator


def test_slots_go_out_from_the_first_on_and_then_run_out() -> None:
    allocator = StateSlotAllocator(3, first_slot=1)
    assert [allocator.alloc() for _ in range(4)] == [1, 2, 3, None]
    assert (allocator.size, allocator.available_size) == (3, 0)


def test_what_was_given_back_last_goes_out_first() -> None:
    allocator = StateSlotAllocator(3)
    for _ in range(3):
        allocator.alloc()
    allocator.free(0)
    allocator.free(2)
    assert [allocator.alloc() for _ in range(2)] == [2, 0]


@pytest.mark.parametrize(
    ("slot", "message"),
    [
        (0, r"a slot in 1\.\.3, got 0"),
        (4, r"a slot in 1\.\.3, got 4"),
        (-1, "got -1"),
        (2, "slot 2 is free"),
    ],
)
def test_free_refuses_and_changes_nothing(slot: int, message: str) -> None:
    allocator = StateSlotAllocator(3, first_slot=1)
    assert allocator.alloc() == 1
    with pytest.raises(ContractError, match=message):
        allocator.free(slot)
    assert allocator.available_size == 2
    allocator.free(1)
    assert [allocator.alloc() for _ in range(4)] == [1, 2, 3, None]


def test_clear_takes_every_slot_back() -> None:
    allocator = StateSlotAllocator(3)
    allocator.alloc()
    allocator.clear()
    assert [allocator.alloc() for _ in range(4)] == [0, 1, 2, None]
    allocator.free(1)


@pytest.mark.parametrize(("num_slots", "first_slot"), [(0, 0), (-1, 0), (1, -1)])
def test_a_pool_has_slots(num_slots: int, first_slot: int) -> None:
    with pytest.raises(ContractError, match="num_slots >= 1"):
        StateSlotAllocator(num_slots, first_slot)


@given(num_slots=st.integers(1, 5), calls=st.lists(st.none() | st.integers(-1, 6), max_size=40))
def test_it_does_as_a_set_does(num_slots: int, calls: list[int | None]) -> None:
    """None is an alloc, a number the free of that slot."""
    allocator, in_use = StateSlotAllocator(num_slots), set[int]()
    for call in calls:
        if call is None:
            slot = allocator.alloc()
            assert (slot is None) == (len(in_use) == num_slots)
            if slot is not None:
                assert slot in set(range(num_slots)) - in_use
                in_use.add(slot)
        elif call in in_use:
            allocator.free(call)
            in_use.remove(call)
        else:
            with pytest.raises(ContractError):
                allocator.free(call)
        assert allocator.available_size == num_slots - len(in_use)
