"""The tree against a model that keeps a dictionary of prefixes and knows nothing of trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from .prefix_machine import TreeMachine
from .prefix_model import Rules

if TYPE_CHECKING:
    from .conftest import MakeRig

#: Tokens of a window for each page size: three pages, one and a half, one, and two and a bit.
WINDOW_TOKENS = {1: 3, 4: 6, 16: 16, 64: 130}
#: Where states can be taken, and how many a path may have.
CHUNK_AND_CAP = {1: (2, None), 4: (6, 2), 16: (8, 1), 64: (1, None)}


@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("page_size", [1, 4, 16, 64], ids=lambda page_size: f"page{page_size}")
@pytest.mark.parametrize("states", [False, True], ids=["", "states"])
@pytest.mark.parametrize("windows", [False, True], ids=["", "windows"])
def test_tree_does_what_a_dictionary_of_prefixes_does(
    make_rig: MakeRig,
    page_size: int,
    states: bool,  # noqa: FBT001 -- a parameter
    windows: bool,  # noqa: FBT001 -- a parameter
) -> None:
    window_tokens = WINDOW_TOKENS[page_size] if windows else 0
    chunk, cap = CHUNK_AND_CAP[page_size]
    rules = Rules(
        page_size=page_size,
        window=-(-window_tokens // page_size),
        states=states,
        chunk=chunk,
        cap=cap,
    )
    machine = type(
        "Machine",
        (TreeMachine,),
        {"make_rig": make_rig, "shape": rules, "window_tokens": window_tokens},
    )
    # A share of what the profile allows: an example is up to 40 calls.
    examples = settings().max_examples // 16
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=40)
    )
