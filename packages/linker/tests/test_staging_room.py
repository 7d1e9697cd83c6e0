from __future__ import annotations

from typing import cast

import pytest

from radixlink_contracts import ComponentType, TreeCore
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


def test_full_attention_can_be_taken_in_parts() -> None:
    whole = room(100, kinds=(FULL,))
    assert (whole.cap, whole.held, whole.tokens_left()) == (25, (0,), 25)
    whole.take(10)
    assert (whole.held, whole.tokens_left()) == ((10,), 15)
    whole.take(15)
    assert whole.tokens_left() == 0
    whole.give_back(10)
    assert (whole.held, whole.tokens_left()) == ((15,), 10)
    whole.clear()
    assert (whole.held, whole.tokens_left()) == ((0,), 25)


def test_a_load_takes_one_window_at_most_and_one_state() -> None:
    whole = room(100, 40, 20, kinds=(FULL, SWA, MAMBA))
    assert whole.needs(2) == (2, 2, 1)
    assert whole.needs(9) == (9, 4, 1)
    whole.take(9)
    whole.take(2)
    assert whole.held == (11, 6, 2)
    whole.give_back(9)
    assert whole.held == (2, 2, 1)


@pytest.mark.parametrize(
    ("sizes", "kinds"),
    [((100, 40), (FULL, SWA)), ((100, 8), (FULL, MAMBA)), ((100, 40, 9), (FULL, SWA, MAMBA))],
)
def test_no_more_loads_than_windows_and_states_allow(
    sizes: tuple[int, ...], kinds: tuple[ComponentType, ...]
) -> None:
    """Ten tokens of windows, or two states."""
    whole = room(*sizes, kinds=kinds)
    for left in (25, 20):
        assert whole.tokens_left() == left
        whole.take(5)
    assert whole.tokens_left() == 0
    whole.give_back(5)
    assert whole.tokens_left() == 20


@pytest.mark.parametrize(("sizes", "kinds"), [((100, 4), (FULL, SWA)), ((100, 2), (FULL, MAMBA))])
def test_one_load_at_a_time_always_fits(
    sizes: tuple[int, ...], kinds: tuple[ComponentType, ...]
) -> None:
    """A cap of one token of a window of four, and of no state."""
    whole = room(*sizes, kinds=kinds)
    assert whole.tokens_left() == 25
    whole.take(4)
    assert whole.tokens_left() == 0
    whole.give_back(4)
    assert whole.tokens_left() == 25
