"""Windows and states together: what goes with what, and where a match ends that needs both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from radixlink_contracts import ComponentType
from radixlink_contracts.actions import FreeDeviceKV, FreeMambaSlots, FreeSWA
from radixlink_tree import StateRules

if TYPE_CHECKING:
    from .conftest import MakeRig
    from .rig import Rig

SWA, MAMBA = ComponentType.SWA, ComponentType.MAMBA


@pytest.fixture(params=[1, 4, 16, 64], ids=lambda page_size: f"page{page_size}")
def both(make_rig: MakeRig, request: pytest.FixtureRequest) -> Rig:
    """A window of two pages, and states."""
    page_size: int = request.param
    return make_rig(page_size, window=2 * page_size, states=StateRules())


def test_match_needs_a_state_with_a_live_window_behind_it(both: Rig) -> None:
    rig = both
    # A state with its window; then three pages without a window and a state behind one live page;
    # then one more live page and no state.
    rig.insert(1)
    rig.insert(1, 2, 3, 4, 5, matched=1, floor=4)
    end = rig.insert(1, 2, 3, 4, 5, 6, floor=4, state=False).last_device_node
    assert rig.picture(end) == "1*|3-|1*|1"
    found = rig.match(1, 2, 3, 4, 5, 6)
    assert found.full_kv_hit_length == 6 * rig.page_size
    assert found.device_prefix_len == rig.page_size
    rig.insert(1, 2, 3, 4, 5, 6, floor=4)
    assert rig.matched_pages(1, 2, 3, 4, 5, 6) == 6
    # The state behind one page of a window is still none that a match can end at.
    assert rig.matched_pages(1, 2, 3, 4, 5) == 1


def test_window_that_goes_takes_the_state_that_stands_on_it(both: Rig) -> None:
    rig = both
    rig.insert(1, 2)
    slot = rig.tree.node(rig.match(1, 2).last_device_node).mamba_slot
    end = rig.leaf(1, 2, 3, matched=2)
    rig.match(1, 2, 3)
    result = rig.evict(windows=1)
    windows, states = result.cache_actions
    assert isinstance(windows, FreeSWA)
    assert isinstance(states, FreeMambaSlots)
    assert states.slots == (slot,)
    assert (result.num_tokens_evicted, result.mamba_num_evicted) == (0, 1)
    assert result.swa_num_tokens_evicted == 2 * rig.page_size
    assert rig.picture(end) == "2-|1*"
    assert rig.matched_pages(1, 2, 3) == 0


def test_window_of_a_locked_leaf_goes_with_its_unlocked_state(both: Rig) -> None:
    rig = both
    end = rig.leaf(1, 2)
    receipt = rig.move_on(rig.lock(end))
    result = rig.evict(windows=1)
    assert (result.num_tokens_evicted, result.mamba_num_evicted) == (0, 1)
    assert rig.picture(end) == "2-"
    assert rig.sizes == (0, 2)
    rig.unlock(receipt)


def test_window_goes_and_leaves_a_state_that_is_locked(both: Rig) -> None:
    rig = both
    end = rig.leaf(1, 2)
    receipt = rig.lock(end, SWA)
    assert rig.evict(windows=1).mamba_num_evicted == 0
    assert rig.picture(end) == "2-*"
    assert rig.evict(states=1).cache_actions == ()
    rig.unlock(receipt)
    assert rig.evict(states=1).num_tokens_evicted == 2 * rig.page_size


def test_state_goes_and_leaves_the_window_below_it(both: Rig) -> None:
    rig = both
    rig.insert(1)
    end = rig.leaf(1, 2, matched=1)
    result = rig.evict(states=1)
    assert (result.swa_num_tokens_evicted, result.mamba_num_evicted) == (0, 1)
    assert rig.picture(end) == "1|1*"
    assert rig.matched_pages(1, 2) == 2


def test_each_component_counts_what_went_with_the_one_before(both: Rig) -> None:
    rig = both
    for first in (1, 2, 3):
        rig.insert(first, 9)
    result = rig.evict(2, windows=2, states=1)
    assert result.num_tokens_evicted == result.swa_num_tokens_evicted == 2 * rig.page_size
    assert result.mamba_num_evicted == 1
    assert [type(action) for action in result.cache_actions] == [FreeDeviceKV, FreeMambaSlots]
    result = rig.evict(windows=3)
    assert result.num_tokens_evicted == result.swa_num_tokens_evicted == 4 * rig.page_size
    assert result.mamba_num_evicted == 2


def test_early_release_gives_back_both_at_once(both: Rig) -> None:
    rig = both
    end = rig.leaf(1, 2)
    receipt = rig.lock(end)
    assert [rig.sizes_of(kind) for kind in ComponentType] == [(0, 2), (0, 2), (0, 1)]
    receipt = rig.move_on(receipt)
    assert [rig.sizes_of(kind) for kind in ComponentType] == [(0, 2), (2, 0), (1, 0)]
    rig.unlock(receipt)
    assert [rig.sizes_of(kind) for kind in ComponentType] == [(2, 0), (2, 0), (1, 0)]


def test_tombstone_that_gets_its_window_back_keeps_the_state_it_kept(both: Rig) -> None:
    rig = both
    end = rig.leaf(1, 2)
    slot = rig.tree.node(end).mamba_slot
    receipt = rig.lock(end, SWA)
    rig.evict(windows=1)
    assert rig.matched_pages(1, 2) == 0
    assert rig.insert(1, 2).mamba_exist
    assert rig.picture(end) == "2*"
    assert rig.tree.node(end).mamba_slot == slot
    assert rig.matched_pages(1, 2) == 2
    rig.unlock(receipt)
    assert rig.sizes_of(MAMBA) == (1, 0)
