"""Each policy gives up the leaf that its rule names, whatever moved its value meanwhile."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from radixlink_contracts import InsertParams
from radixlink_contracts.errors import ContractError
from radixlink_tree import EvictionPolicy, UnifiedTreeCore, check_invariants

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import IncLockRefResult, NodeId
    from radixlink_tree._node import Node

    from .conftest import MakeRig
    from .rig import Rig

every_policy = pytest.mark.parametrize("policy", EvictionPolicy)


@pytest.fixture
def make(make_rig: MakeRig) -> Callable[..., Rig]:
    def make(policy: EvictionPolicy, tail_pages: int = 0) -> Rig:
        return make_rig(4, policy=policy, tail_pages=tail_pages)

    return make


def order(rig: Rig, *firsts: int) -> list[int]:
    """The order in which leaves of one page go."""
    gone: list[int] = []
    while len(gone) < len(firsts):
        rig.evict(1)
        # Not by matching, which would be a use.
        left = {node.tokens[0] for node in rig.tree._nodes.values() if node.tokens}
        gone += [first for first in firsts if first not in left and first not in gone]
    return gone


def four_leaves(rig: Rig) -> None:
    """1 is used twice and last, 2 and 3 once, in this order; 4 has priority."""
    for first in (1, 2, 3):
        rig.insert(first)
    rig.insert(4, priority=1)
    rig.insert(1)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (EvictionPolicy.LRU, [2, 3, 4, 1]),
        (EvictionPolicy.LFU, [2, 3, 4, 1]),
        (EvictionPolicy.FIFO, [1, 2, 3, 4]),
        (EvictionPolicy.FILO, [4, 3, 2, 1]),
        (EvictionPolicy.MRU, [1, 4, 3, 2]),
        (EvictionPolicy.PRIORITY, [2, 3, 1, 4]),
        (EvictionPolicy.SLRU, [2, 3, 4, 1]),
        (EvictionPolicy.TLRU, [2, 3, 4, 1]),
    ],
)
def test_policy_orders_four_leaves(
    make: Callable[..., Rig], policy: EvictionPolicy, expected: list[int]
) -> None:
    rig = make(policy)
    four_leaves(rig)
    assert order(rig, 1, 2, 3, 4) == expected


def test_lru_is_the_default(rig: Rig) -> None:
    four_leaves(rig)
    assert order(rig, 1, 2, 3, 4) == [2, 3, 4, 1]


def test_lfu_counts_inserts_and_not_matches(make: Callable[..., Rig]) -> None:
    rig = make(EvictionPolicy.LFU)
    rig.insert(1)
    rig.insert(1)
    rig.insert(2)
    for _ in range(5):
        rig.match(2)
    assert order(rig, 1, 2) == [2, 1]


def test_lfu_does_not_count_what_the_same_request_inserted_before(make: Callable[..., Rig]) -> None:
    rig = make(EvictionPolicy.LFU)
    rig.insert(1)
    rig.insert(1, matched=1, inserted=1)
    rig.insert(2)
    rig.insert(2)
    rig.insert(3)
    rig.match(1)
    assert order(rig, 1, 2, 3) == [3, 1, 2]


def test_lfu_lets_go_of_the_less_recent_of_equals(make: Callable[..., Rig]) -> None:
    rig = make(EvictionPolicy.LFU)
    rig.insert(1)
    rig.insert(2)
    rig.match(1)
    assert order(rig, 1, 2) == [2, 1]


def test_slru_keeps_an_old_leaf_that_came_again_before_new_ones(make: Callable[..., Rig]) -> None:
    rig = make(EvictionPolicy.SLRU)
    for first in (1, 1, 2, 3, 2, 4, 4, 4):
        rig.insert(first)
    # Came again: 1, then 2, then 4. How often does not count.
    assert order(rig, 1, 2, 3, 4) == [3, 1, 2, 4]


@pytest.mark.parametrize("policy", [EvictionPolicy.FIFO, EvictionPolicy.FILO])
def test_age_is_that_of_the_tokens_and_not_that_of_a_split(
    make: Callable[..., Rig], policy: EvictionPolicy
) -> None:
    rig = make(policy)
    rig.insert(1, 2)
    rig.insert(3)
    rig.match(1)  # Splits: the upper half is a newer node, of older tokens.
    rig.evict(2 if policy is EvictionPolicy.FIFO else 1)
    left = [rig.matched_pages(1, 2), rig.matched_pages(3)]
    assert left == ([0, 1] if policy is EvictionPolicy.FIFO else [2, 0])


def test_priority_ten_outlives_priority_zero(make: Callable[..., Rig]) -> None:
    rig = make(EvictionPolicy.PRIORITY)
    rig.insert(1, priority=10)
    rig.insert(2, priority=0)
    rig.insert(3, priority=-1)
    assert order(rig, 1, 2, 3) == [3, 2, 1]


def test_priority_rises_with_a_later_insert_and_never_sinks(make: Callable[..., Rig]) -> None:
    rig = make(EvictionPolicy.PRIORITY)
    rig.insert(1, priority=-3)
    rig.insert(2, priority=1)
    rig.insert(1, priority=2)
    rig.insert(2, priority=0)
    assert order(rig, 1, 2) == [2, 1]


def test_priority_of_a_sequence_is_that_of_its_prefixes_too(make: Callable[..., Rig]) -> None:
    rig = make(EvictionPolicy.PRIORITY)
    rig.insert(1)
    rig.insert(1, 2, priority=5)
    rig.insert(3, priority=4)
    rig.evict(1)
    assert rig.matched_pages(3) == 0
    assert rig.matched_pages(1, 2) == 2


def test_mru_lets_go_of_what_was_just_matched(make: Callable[..., Rig]) -> None:
    rig = make(EvictionPolicy.MRU)
    for first in (1, 2, 3):
        rig.insert(first)
    for first in (2, 1, 2):
        rig.match(first)
    assert order(rig, 1, 2, 3) == [2, 1, 3]


def test_refused_insert_is_a_use_too(make: Callable[..., Rig]) -> None:
    rig = make(EvictionPolicy.MRU)
    rig.insert(1)
    rig.insert(2)
    with pytest.raises(ContractError, match="was not locked"):
        rig.tree.insert(InsertParams(key=rig.key(1, 3), value=torch.arange(8), prev_prefix_len=8))
    assert order(rig, 1, 2) == [1, 2]


def test_used_leaf_does_not_fill_the_queue(make: Callable[..., Rig]) -> None:
    rig = make(EvictionPolicy.MRU)
    for first in (1, 2, 3):
        rig.insert(first)
    for _ in range(1000):
        rig.match(1)
        assert len(rig.tree._queue._heap) <= 8
    assert order(rig, 1, 2, 3) == [1, 3, 2]


def test_tlru_trims_a_long_conversation_first_and_once(make: Callable[..., Rig]) -> None:
    rig = make(EvictionPolicy.TLRU, tail_pages=2)
    rig.insert(9, 8, 7)
    for length in range(1, 7):
        rig.insert(*range(1, length + 1))
    # The last two pages go although they are newest; then it is as with LRU.
    assert [rig.evict(1).num_tokens_evicted for _ in range(2)] == [4, 4]
    assert [rig.matched_pages(1, 2, 3, 4, 5, 6), rig.matched_pages(9, 8, 7)] == [4, 3]
    rig.match(1, 2, 3, 4)
    rig.evict(1)
    assert [rig.matched_pages(1, 2, 3, 4), rig.matched_pages(9, 8, 7)] == [4, 0]


def test_tlru_keeps_a_page_that_lies_partly_before_the_tail(make: Callable[..., Rig]) -> None:
    rig = make(EvictionPolicy.TLRU, tail_pages=2)
    rig.insert(9, 8, 7)
    rig.insert(1, 2, 3, 4)
    rig.evict(1)
    assert [rig.matched_pages(1, 2, 3, 4), rig.matched_pages(9, 8, 7)] == [4, 0]


def test_tlru_sees_that_a_split_made_a_leaf_part_of_the_tail(make: Callable[..., Rig]) -> None:
    rig = make(EvictionPolicy.TLRU, tail_pages=2)
    rig.insert(9, 8, 7)
    rig.insert(1, 2, 3, 4)
    rig.match(1, 2)
    rig.evict(1)
    assert rig.matched_pages(1, 2, 3, 4) == 2
    assert rig.matched_pages(9, 8, 7) == 3


def test_tlru_gives_up_a_conversation_that_is_all_tail(make: Callable[..., Rig]) -> None:
    rig = make(EvictionPolicy.TLRU, tail_pages=2)
    rig.insert(1, 2, 3)
    rig.insert(4, 5)
    rig.evict(1)
    assert [rig.matched_pages(1, 2, 3), rig.matched_pages(4, 5)] == [3, 0]


def test_tlru_without_a_tail_is_lru(make: Callable[..., Rig]) -> None:
    rig = make(EvictionPolicy.TLRU)
    rig.insert(1, 2)
    rig.insert(1, 2, 3)
    rig.insert(4)
    rig.match(1, 2, 3)
    rig.evict(1)
    assert [rig.matched_pages(1, 2, 3), rig.matched_pages(4)] == [3, 0]


@pytest.mark.parametrize(
    ("policy", "tail_tokens"), [(EvictionPolicy.TLRU, -1), (EvictionPolicy.LRU, 8)]
)
def test_tail_that_makes_no_sense_is_refused(policy: EvictionPolicy, tail_tokens: int) -> None:
    with pytest.raises(ContractError, match=f"got {tail_tokens} for {policy.name}"):
        UnifiedTreeCore(page_size=4, policy=policy, tail_tokens=tail_tokens)


@every_policy
def test_locked_leaf_stays(make: Callable[..., Rig], policy: EvictionPolicy) -> None:
    rig = make(policy)
    for first in (1, 2, 3):
        receipt = rig.lock(rig.leaf(first))
        rig.evict(100)
        assert rig.matched_pages(first) == 1
        rig.unlock(receipt)


@every_policy
def test_parent_left_alone_is_given_up_too(
    make: Callable[..., Rig], policy: EvictionPolicy
) -> None:
    rig = make(policy)
    rig.insert(1)
    rig.insert(1, 2)
    rig.insert(1, 2, 3)
    assert rig.evict(3).num_tokens_evicted == 3 * rig.page_size
    assert len(rig.tree._nodes) == 1


@every_policy
@pytest.mark.parametrize("seed", range(3))
def test_what_goes_is_what_a_scan_of_all_leaves_would_take(
    make: Callable[..., Rig], policy: EvictionPolicy, seed: int
) -> None:
    rig = make(policy, tail_pages=3 if policy is EvictionPolicy.TLRU else 0)
    rng = random.Random(seed)
    locked: list[IncLockRefResult] = []
    for _ in range(150):
        pages = [rng.randrange(3) for _ in range(rng.randrange(1, 7))]
        if rng.random() < 0.5:
            end = rig.match(*pages).last_device_node
        elif len(rig.free_pages) < len(pages):
            assert_scan_agrees(rig, len(pages))
            continue
        else:
            end = rig.insert(*pages, priority=rng.randrange(-2, 3)).last_device_node
        if rng.random() < 0.3:
            locked.append(rig.lock(end))
        if locked and rng.random() < 0.4:
            rig.unlock(locked.pop(rng.randrange(len(locked))))
        if rng.random() < 0.2:
            assert_scan_agrees(rig, rng.randrange(4))
        check_invariants(rig.tree)
    for receipt in locked:
        rig.unlock(receipt)
    assert_scan_agrees(rig, rig.num_pages)
    assert rig.sizes == (0, 0)


def assert_scan_agrees(rig: Rig, num_pages: int) -> None:
    """Evict one leaf after another; each is the least of all that a scan finds."""
    evicted = 0
    while evicted < num_pages:
        expected = least_by_scan(rig)
        before = set(rig.tree._nodes)
        evicted += rig.evict(1).num_tokens_evicted // rig.page_size
        gone = before - set(rig.tree._nodes)
        assert gone == (set() if expected is None else {expected})
        if expected is None:
            break


def least_by_scan(rig: Rig) -> NodeId | None:
    """The unlocked leaf that is worth least, without the queue's order."""

    def rank(node: Node) -> tuple[int, NodeId]:
        return rig.tree._queue.value_of(node), node.node_id

    nodes = rig.tree._nodes.values()
    leaves = [node for node in nodes if node.parent and not node.children and not node.lock_ref]
    return min(leaves, key=rank).node_id if leaves else None


@every_policy
@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("seed", range(3))
def test_standings_hold_however_inserts_are_cut(
    make_rig: MakeRig, policy: EvictionPolicy, window: int, seed: int
) -> None:
    tail_pages = 3 if policy is EvictionPolicy.TLRU else 0
    rig = make_rig(4, policy=policy, tail_pages=tail_pages, window=window)
    rng = random.Random(seed)
    for _ in range(100):
        pages = [rng.randrange(3) for _ in range(rng.randrange(1, 7))]
        if len(rig.free_pages) < len(pages):
            rig.evict(len(pages))
        rig.insert(*pages, priority=rng.randrange(-2, 3), prompt=4 * rng.randrange(7))
        check_invariants(rig.tree)


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("prompt", [0, 4])
def test_a_head_has_the_priority_of_what_is_cut_behind_it(
    make_rig: MakeRig, window: int, prompt: int
) -> None:
    rig = make_rig(4, policy=EvictionPolicy.PRIORITY, window=window)
    head = rig.insert(1, priority=1).last_device_node
    rig.insert(1, 3, 4, priority=3, prompt=prompt + 4)
    assert rig.tree._nodes[head].standing == 3


@every_policy
def test_reset_forgets_the_order(make: Callable[..., Rig], policy: EvictionPolicy) -> None:
    rig = make(policy)
    four_leaves(rig)
    rig.match(2)
    rig.apply(rig.tree.reset())
    four_leaves(rig)
    assert rig.evict(4).num_tokens_evicted == 4 * rig.page_size
