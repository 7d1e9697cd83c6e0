from __future__ import annotations

from typing import cast

import pytest

from radixlink_contracts import POOL_OF, ComponentType, PoolName, TreeCore
from radixlink_linker._staging_room import StagingRoom

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA


class Tree:
    """As much of a tree as the room asks about."""

    def __init__(self, components: tuple[ComponentType, ...], sliding_window: int) -> None:
        self.components = components
        self.sliding_window = sliding_window


def room(*sizes: int, kinds: tuple[ComponentType, ...], percent: int = 25) -> StagingRoom:
    window = 4 if SWA in kinds else 0
    return StagingRoom(cast("TreeCore", Tree(kinds, window)), sizes, percent)


def load(*slots: int, kinds: tuple[ComponentType, ...]) -> dict[PoolName, int]:
    """What a load takes of each pool; of one of which it brings nothing it says nothing."""
    taken = zip(kinds, slots, strict=True)
    return {POOL_OF[kind]: count for kind, count in taken if count}


def test_full_attention_can_be_taken_in_parts() -> None:
    whole = room(100, kinds=(FULL,))
    assert (whole.cap, whole.held, whole.tokens_left()) == (25, (0,), 25)
    whole.take({PoolName.KV: 10})
    assert (whole.held, whole.tokens_left()) == ((10,), 15)
    whole.take({PoolName.KV: 15})
    assert whole.tokens_left() == 0
    whole.give_back({PoolName.KV: 10})
    assert (whole.held, whole.tokens_left()) == ((15,), 10)
    whole.clear()
    assert (whole.held, whole.tokens_left()) == ((0,), 25)


def test_what_there_is_when_loads_are_over() -> None:
    kinds = (FULL, MAMBA)
    whole = room(100, 8, kinds=kinds)
    loads = [load(20, 1, kinds=kinds), load(5, 1, kinds=kinds)]
    for one in loads:
        whole.take(one)
    assert whole.tokens_left() is None
    assert whole.tokens_left(loads) == 25
    assert whole.tokens_left(loads[:1]) == 20
    # Nothing of that is given back.
    assert whole.held == (25, 2)


def test_a_load_takes_what_it_brings_and_no_more() -> None:
    kinds = (FULL, SWA, MAMBA)
    whole = room(100, 40, 20, kinds=kinds)
    whole.take(load(9, 4, 1, kinds=kinds))
    # A window alone, and a state alone.
    whole.take(load(0, 2, 0, kinds=kinds))
    whole.take(load(0, 0, 1, kinds=kinds))
    assert whole.held == (9, 6, 2)
    whole.give_back(load(9, 4, 1, kinds=kinds))
    assert whole.held == (0, 2, 1)


@pytest.mark.parametrize(
    ("sizes", "kinds", "most"),
    [
        ((100, 40), (FULL, SWA), (5, 4)),
        ((100, 8), (FULL, MAMBA), (5, 1)),
        ((100, 40, 9), (FULL, SWA, MAMBA), (5, 4, 1)),
    ],
)
def test_no_more_loads_than_windows_and_states_allow(
    sizes: tuple[int, ...], kinds: tuple[ComponentType, ...], most: tuple[int, ...]
) -> None:
    """Ten tokens of windows, or two states."""
    whole = room(*sizes, kinds=kinds)
    for left in (25, 20):
        assert whole.tokens_left() == left
        whole.take(load(*most, kinds=kinds))
    assert whole.tokens_left() is None
    whole.give_back(load(*most, kinds=kinds))
    assert whole.tokens_left() == 20


@pytest.mark.parametrize(("kinds", "most"), [((FULL, SWA), (25, 4)), ((FULL, MAMBA), (25, 1))])
def test_a_load_without_full_attention_needs_no_room_of_it(
    kinds: tuple[ComponentType, ...], most: tuple[int, ...]
) -> None:
    whole = room(100, 100, kinds=kinds)
    whole.take(load(*most, kinds=kinds))
    assert whole.tokens_left() == 0


@pytest.mark.parametrize(
    ("sizes", "kinds", "most"),
    [((100, 4), (FULL, SWA), (4, 4)), ((100, 2), (FULL, MAMBA), (4, 1))],
)
def test_one_load_at_a_time_always_fits(
    sizes: tuple[int, ...], kinds: tuple[ComponentType, ...], most: tuple[int, ...]
) -> None:
    """A cap of one token of a window of four, and of no state."""
    whole = room(*sizes, kinds=kinds)
    assert whole.tokens_left() == 25
    whole.take(load(*most, kinds=kinds))
    assert whole.tokens_left() is None
    whole.give_back(load(*most, kinds=kinds))
    assert whole.tokens_left() == 25
