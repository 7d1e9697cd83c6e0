"""What a linker adds: offers, offloads that follow splits, keys and a digest; nothing without it."""

from __future__ import annotations

import copy
from array import array
from typing import TYPE_CHECKING

import attrs
import pytest

from radixlink_contracts import (
    HeldBack,
    InsertOrigin,
    InsertParams,
    Namespace,
    NodeId,
    OperationId,
    PageKeys,
    RadixKey,
)
from radixlink_contracts.actions import BackupKV
from radixlink_contracts.errors import ContractError, InvalidTransitionError, StaleHandleError
from radixlink_tree import _chain, hash_pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from .conftest import MakeRig
    from .rig import Rig

OPERATION = OperationId(7)


def linked(rig: Rig, threshold: int = 1) -> Rig:
    rig.tree.attach_linker(backup_threshold=threshold)
    return rig


def offers(rig: Rig) -> list[NodeId]:
    """What was offered since the last question."""
    offered = list(rig.offered)
    rig.offered.clear()
    return offered


def store(rig: Rig, *node_ids: NodeId) -> None:
    """Offload these nodes, with success."""
    for number, node_id in enumerate(node_ids):
        rig.tree.mark_offload_pending(node_id, OperationId(1000 + number))
    for number in range(len(node_ids)):
        rig.tree.finish_offload(OperationId(1000 + number), stored=True)


def state(rig: Rig, node_id: NodeId) -> tuple[bool, OperationId | None]:
    node = rig.tree.node(node_id)
    return node.stored, node.pending_operation


# -- offers ----------------------------------------------------------------------------------------


def test_threshold_of_one_offers_a_node_at_its_first_insert(rig: Rig) -> None:
    linked(rig)
    end = rig.leaf(1, 2)
    assert offers(rig) == [end]


def test_insert_names_what_to_offload_behind_what_to_free(rig: Rig) -> None:
    rig.insert(1)
    linked(rig)
    slots = rig.alloc(2)
    result = rig.tree.insert(InsertParams(key=rig.key(1, 2), value=slots))
    base = rig.match(1).last_device_node
    _, backup = result.cache_actions
    assert backup == BackupKV(node_ids=(base, result.last_device_node))
    rig.apply(result.cache_actions)


def test_path_is_offered_root_first(rig: Rig) -> None:
    first = rig.leaf(1)
    second = rig.leaf(1, 2)
    linked(rig)
    third = rig.leaf(1, 2, 3)
    assert offers(rig) == [first, second, third]


def test_insert_that_splits_offers_both_halves_it_used_and_not_the_rest(rig: Rig) -> None:
    rest = rig.leaf(1, 2, 3)
    linked(rig)
    end = rig.leaf(1, 2, 9)
    upper = rig.match(1, 2).last_device_node
    assert offers(rig) == [upper, end]
    assert rest not in (upper, end)


def test_node_is_offered_when_it_was_used_often_enough(rig: Rig) -> None:
    linked(rig, threshold=3)
    end = rig.leaf(1)
    rig.insert(1)
    assert offers(rig) == []
    rig.insert(1)
    assert offers(rig) == [end]


def test_match_is_no_use_that_counts(rig: Rig) -> None:
    linked(rig, threshold=2)
    rig.insert(1)
    for _ in range(5):
        rig.match(1)
    rig.insert(2)
    assert offers(rig) == []


def test_head_of_many_branches_is_offered_before_them(rig: Rig) -> None:
    linked(rig, threshold=2)
    rig.insert(1, 2)
    rig.insert(1, 3)
    head = rig.match(1).last_device_node
    assert offers(rig) == [head]


def test_halves_of_a_split_keep_the_count(rig: Rig) -> None:
    linked(rig, threshold=3)
    end = rig.leaf(1, 2)
    rig.insert(1, 2)
    head = rig.match(1).last_device_node
    rig.insert(1, 2)
    assert offers(rig) == [head, end]


def test_prefix_goes_with_what_is_due_below_it(rig: Rig) -> None:
    linked(rig, threshold=2)
    head = rig.leaf(1)
    end = rig.insert(1, 2, matched=1, inserted=1).last_device_node
    assert offers(rig) == []
    # Of this insert only the second page counts; the head has been used once.
    rig.insert(1, 2, matched=1, inserted=1)
    assert offers(rig) == [head, end]


def test_stored_part_of_a_prefix_does_not_go_with_what_is_due(rig: Rig) -> None:
    linked(rig)
    head, middle = rig.leaf(1), rig.leaf(1, 2)
    store(rig, middle)
    offers(rig)
    end = rig.leaf(1, 2, 3)
    assert offers(rig) == [head, end]


def test_pages_that_a_request_inserted_before_are_not_counted_again(rig: Rig) -> None:
    linked(rig, threshold=2)
    first = rig.leaf(1)
    second = rig.insert(1, 2, matched=1, inserted=1).last_device_node
    rig.insert(1, 2, 3, matched=2, inserted=2)
    assert offers(rig) == []
    rig.insert(1, 2)
    assert offers(rig) == [first, second]


def test_stored_node_is_not_offered(rig: Rig) -> None:
    linked(rig)
    end = rig.leaf(1)
    store(rig, end)
    offers(rig)
    longer = rig.leaf(1, 2)
    assert offers(rig) == [longer]


def test_pending_node_is_not_offered(rig: Rig) -> None:
    linked(rig)
    rig.tree.mark_offload_pending(rig.leaf(1), OPERATION)
    offers(rig)
    longer = rig.leaf(1, 2)
    assert offers(rig) == [longer]


def test_node_whose_offload_failed_is_offered_again(rig: Rig) -> None:
    linked(rig)
    end = rig.leaf(1)
    rig.tree.mark_offload_pending(end, OPERATION)
    rig.tree.finish_offload(OPERATION, stored=False)
    offers(rig)
    rig.insert(1)
    assert offers(rig) == [end]


# -- what failed waits -----------------------------------------------------------------------------


def fail(rig: Rig, *node_ids: NodeId) -> None:
    """Offload these nodes, in vain."""
    for node_id in node_ids:
        rig.tree.mark_offload_pending(node_id, OPERATION)
        rig.tree.finish_offload(OPERATION, stored=False)
    rig.offered.clear()


def uses_until_offered(rig: Rig, *pages: int) -> int:
    """How many inserts of these pages it takes until something is offered: each is one use."""
    for uses in range(1, 10_000):
        rig.insert(*pages)
        if rig.offered:
            return uses
    raise AssertionError("it was never offered again")


def test_what_failed_is_held_back_for_twice_as_long_each_time_up_to_64_times(rig: Rig) -> None:
    rig.tree.attach_linker(backup_threshold=1, retry_after=3)
    end = rig.leaf(1)
    waited: list[int] = []
    for _ in range(8):
        fail(rig, end)
        waited.append(uses_until_offered(rig, 1))
    assert waited == [3, 6, 12, 24, 48, 96, 192, 192]
    assert offers(rig) == [end]


def test_a_match_is_a_use_that_counts_for_what_is_held_back(rig: Rig) -> None:
    rig.tree.attach_linker(backup_threshold=1, retry_after=3)
    end = rig.leaf(1)
    fail(rig, end)
    rig.match(5)
    rig.match(5)
    rig.insert(1)
    assert offers(rig) == [end]


def test_a_look_at_what_is_held_is_no_use_and_what_it_finds_as_recent_as_the_last(rig: Rig) -> None:
    rig.tree.attach_linker(backup_threshold=1, retry_after=3)
    end = rig.leaf(1)
    rig.leaf(2)
    rig.leaf(3)
    fail(rig, end)
    for _ in range(3):
        assert rig.tree.holdings(rig.key(1)).last_node == end
    assert [held.uses_left for held in rig.tree.held_back(end)] == [3]
    rig.evict(1)
    assert [rig.matched_pages(page) for page in (1, 2, 3)] == [1, 0, 1]


def test_what_was_stored_begins_with_the_shortest_wait_when_it_is_lost_and_fails(rig: Rig) -> None:
    rig.tree.attach_linker(backup_threshold=1, touch_after=1, retry_after=3)
    end = rig.leaf(1)
    for _ in range(3):
        fail(rig, end)
        uses_until_offered(rig, 1)
    store(rig, end)
    rig.tree.mark_touch_pending(end, OPERATION)
    rig.tree.finish_touch(OPERATION, present=False)
    # Lost in the store is no failure of an offload: it is due at once.
    rig.offered.clear()
    assert uses_until_offered(rig, 1) == 1
    fail(rig, end)
    assert uses_until_offered(rig, 1) == 3


def test_behind_pages_that_are_held_back_nothing_is_offered_and_before_them_all_is(
    rig: Rig,
) -> None:
    rig.tree.attach_linker(backup_threshold=1, retry_after=4)
    head, middle = rig.leaf(1), rig.leaf(1, 2)
    fail(rig, middle)
    end = rig.leaf(1, 2, 3)
    assert offers(rig) == [head]
    assert rig.tree.backup_path(end) == (head,)
    store(rig, head)
    other = rig.leaf(1, 4)
    assert offers(rig) == [other]
    # With what holds it back it goes, and not before.
    rig.match(5)
    rig.insert(1, 2, 3)
    assert offers(rig) == [middle, end]
    assert rig.tree.backup_path(end) == (middle, end)


def test_both_halves_of_what_failed_wait(rig: Rig) -> None:
    rig.tree.attach_linker(backup_threshold=1, retry_after=4)
    lower = rig.leaf(1, 2)
    fail(rig, lower)
    upper = rig.match(1).last_device_node
    assert [(held.node_id, held.failures) for held in rig.tree.held_back(lower)] == [
        (upper, 1),
        (lower, 1),
    ]
    assert uses_until_offered(rig, 1, 2) == 3
    assert offers(rig) == [upper, lower]


def test_what_is_held_back_is_told_until_it_is_due(rig: Rig) -> None:
    rig.tree.attach_linker(backup_threshold=1, retry_after=2)
    head, end = rig.leaf(1), rig.leaf(1, 2, 3)
    assert rig.tree.held_back(end) == ()
    fail(rig, end)
    told = HeldBack(node_id=end, num_pages=2, failures=1, uses_left=2)
    assert rig.tree.held_back(end) == (told,)
    assert rig.tree.held_back(head) == ()
    rig.match(5)
    assert rig.tree.held_back(end) == (attrs.evolve(told, uses_left=1),)
    rig.match(5)
    assert rig.tree.held_back(end) == ()


def test_reset_and_detach_forget_what_failed(rig: Rig) -> None:
    rig.tree.attach_linker(backup_threshold=1, retry_after=100)
    fail(rig, rig.leaf(1))
    rig.apply(rig.tree.reset())
    end = rig.leaf(1)
    assert offers(rig) == [end]
    fail(rig, end)
    rig.tree.detach_linker()
    rig.tree.attach_linker(backup_threshold=1, retry_after=100)
    rig.insert(1)
    assert offers(rig) == [end]


def test_node_that_was_stored_and_evicted_is_offered_when_it_is_back(rig: Rig) -> None:
    linked(rig)
    store(rig, rig.leaf(1))
    rig.evict(1)
    offers(rig)
    end = rig.leaf(1)
    assert offers(rig) == [end]


# -- offloads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [True, False])
def test_offload_ends_in_what_every_rank_said(rig: Rig, stored: bool) -> None:  # noqa: FBT001
    end = linked(rig).leaf(1)
    assert state(rig, end) == (False, None)
    rig.tree.mark_offload_pending(end, OPERATION)
    assert state(rig, end) == (False, OPERATION)
    rig.tree.finish_offload(OPERATION, stored=stored)
    assert state(rig, end) == (stored, None)


@pytest.mark.parametrize("stored", [True, False])
def test_offload_speaks_of_all_parts_that_its_node_was_split_into(
    rig: Rig,
    stored: bool,  # noqa: FBT001
) -> None:
    end = linked(rig).leaf(1, 2, 3, 4)
    rig.tree.mark_offload_pending(end, OPERATION)
    parts = [rig.match(*range(1, length + 1)).last_device_node for length in (3, 1, 2, 4)]
    assert [state(rig, part) for part in parts] == [(False, OPERATION)] * 4
    other = rig.leaf(1, 2, 9)
    rig.tree.finish_offload(OPERATION, stored=stored)
    assert [state(rig, part) for part in parts] == [(stored, None)] * 4
    assert state(rig, other) == (False, None)


def test_both_halves_of_a_stored_node_are_stored(rig: Rig) -> None:
    end = linked(rig).leaf(1, 2)
    store(rig, end)
    head = rig.match(1).last_device_node
    assert [state(rig, half) for half in (head, end)] == [(True, None)] * 2


def test_offloads_end_in_any_order(rig: Rig) -> None:
    first, second = linked(rig).leaf(1), rig.leaf(2)
    rig.tree.mark_offload_pending(first, OperationId(1))
    rig.tree.mark_offload_pending(second, OperationId(2))
    rig.tree.finish_offload(OperationId(2), stored=True)
    assert [state(rig, node) for node in (first, second)] == [(False, 1), (True, None)]
    rig.tree.finish_offload(OperationId(1), stored=False)
    assert state(rig, first) == (False, None)


def test_node_has_one_offload_at_a_time(rig: Rig) -> None:
    end = linked(rig).leaf(1)
    rig.tree.mark_offload_pending(end, OPERATION)
    with pytest.raises(InvalidTransitionError, match=f"offloaded by {OPERATION}") as caught:
        rig.tree.mark_offload_pending(end, OperationId(8))
    assert caught.value.operation == OperationId(8)
    assert state(rig, end) == (False, OPERATION)
    with pytest.raises(InvalidTransitionError):
        rig.tree.finish_offload(OperationId(8), stored=True)
    rig.tree.finish_offload(OPERATION, stored=True)


def test_stored_node_is_not_offloaded(rig: Rig) -> None:
    end = linked(rig).leaf(1)
    store(rig, end)
    with pytest.raises(InvalidTransitionError, match="got it stored"):
        rig.tree.mark_offload_pending(end, OPERATION)
    assert state(rig, end) == (True, None)


def test_offload_ends_once(rig: Rig) -> None:
    end = linked(rig).leaf(1)
    rig.tree.mark_offload_pending(end, OPERATION)
    rig.tree.finish_offload(OPERATION, stored=True)
    with pytest.raises(InvalidTransitionError, match=f"got operation {OPERATION}"):
        rig.tree.finish_offload(OPERATION, stored=False)
    assert state(rig, end) == (True, None)


def test_locked_offload_keeps_both_halves_from_eviction(rig: Rig) -> None:
    end = linked(rig).leaf(1, 2, 3)
    pages = rig.path_pages(end)
    receipt = rig.lock(end)
    rig.tree.mark_offload_pending(end, OPERATION)
    rig.match(1)
    assert rig.evict(100).num_tokens_evicted == 0
    assert rig.path_pages(end) == pages
    rig.tree.finish_offload(OPERATION, stored=True)
    rig.unlock(receipt)
    assert rig.evict(100).num_tokens_evicted == 3 * rig.page_size


def test_offload_that_is_copied_out_does_not_hinder_eviction(rig: Rig) -> None:
    end = linked(rig).leaf(1, 2)
    receipt = rig.lock(end)
    rig.tree.mark_offload_pending(end, OPERATION)
    head = rig.match(1).last_device_node
    rig.unlock(receipt)
    assert rig.evict(1).num_tokens_evicted == rig.page_size
    again = rig.leaf(1, 2)
    rig.tree.finish_offload(OPERATION, stored=True)
    assert [state(rig, node) for node in (head, again)] == [(True, None), (False, None)]


def test_offload_whose_node_is_gone_still_ends(rig: Rig) -> None:
    rig.tree.mark_offload_pending(linked(rig).leaf(1), OPERATION)
    rig.evict(1)
    rig.tree.finish_offload(OPERATION, stored=True)
    with pytest.raises(InvalidTransitionError):
        rig.tree.finish_offload(OPERATION, stored=True)


def test_reset_forgets_offloads_and_keeps_the_linker(rig: Rig) -> None:
    rig.tree.mark_offload_pending(linked(rig).leaf(1), OPERATION)
    rig.apply(rig.tree.reset())
    offers(rig)
    with pytest.raises(InvalidTransitionError):
        rig.tree.finish_offload(OPERATION, stored=True)
    end = rig.leaf(1)
    assert state(rig, end) == (False, None)
    assert offers(rig) == [end]


# -- restored pages --------------------------------------------------------------------------------


def test_restored_pages_are_born_stored_and_not_offered(rig: Rig) -> None:
    linked(rig)
    end = rig.insert(1, 2, origin=InsertOrigin.RESTORED).last_device_node
    assert state(rig, end) == (True, None)
    assert offers(rig) == []
    rig.insert(1, 2)
    assert offers(rig) == []


def test_restored_insert_says_nothing_of_what_was_matched(rig: Rig) -> None:
    linked(rig, threshold=2)
    matched = rig.leaf(1)
    end = rig.insert(1, 2, matched=1, origin=InsertOrigin.RESTORED).last_device_node
    assert state(rig, matched) == (False, None)
    assert state(rig, end) == (True, None)
    assert offers(rig) == []
    # The matched node was used by one insert so far: the restored one is no use that counts.
    rig.insert(1)
    assert offers(rig) == [matched]


def test_pages_that_somebody_computed_meanwhile_are_stored_by_a_restore(rig: Rig) -> None:
    linked(rig, threshold=2)
    matched = rig.leaf(1)
    meanwhile = rig.leaf(1, 2)
    offers(rig)
    end = rig.insert(1, 2, 3, matched=1, origin=InsertOrigin.RESTORED).last_device_node
    assert [state(rig, node)[0] for node in (matched, meanwhile, end)] == [False, True, True]


def test_restore_leaves_a_pending_offload_to_its_end(rig: Rig) -> None:
    linked(rig)
    end = rig.leaf(1)
    rig.tree.mark_offload_pending(end, OPERATION)
    rig.insert(1, origin=InsertOrigin.RESTORED)
    assert state(rig, end) == (False, OPERATION)
    rig.tree.finish_offload(OPERATION, stored=True)
    assert state(rig, end) == (True, None)


def test_state_that_appears_below_restored_pages_is_offered_for_itself(rig: Rig) -> None:
    linked(rig)
    rig.insert(1, 2, origin=InsertOrigin.RESTORED)
    end = rig.leaf(1, 2, 3)
    assert offers(rig) == [end]


# -- keys ------------------------------------------------------------------------------------------


def test_node_keys_follow_a_split(rig: Rig) -> None:
    end = linked(rig).leaf(1, 2, 3, 4)
    whole = rig.tree.node(end).page_keys.resolve()
    head = rig.match(1).last_device_node
    assert rig.tree.node(head).page_keys.resolve() == whole.span(0, 1)
    assert rig.tree.node(end).page_keys.resolve() == whole.span(1, 4)


def test_root_has_no_keys(rig: Rig) -> None:
    assert rig.tree.node(rig.tree.root).page_keys.resolve() == PageKeys()


def test_keys_of_nodes_older_than_the_linker_continue_the_sequence(rig: Rig) -> None:
    first, second = rig.leaf(1), rig.leaf(1, 2)
    linked(rig)
    third = rig.leaf(1, 2, 3)
    expected = PageKeys(hash_pages(None, rig.key(1, 2, 3).token_ids.tobytes(), rig.page_size))
    digests = [rig.tree.node(node).page_keys.resolve() for node in (third, first, second)]
    assert digests == [expected.span(2, 3), expected.span(0, 1), expected.span(1, 2)]


def test_lookup_keys_outlive_the_eviction_of_what_they_continue(rig: Rig) -> None:
    end = linked(rig).leaf(1, 2)
    keys = rig.tree.key_source(end, rig.key(1, 2, 3), 2 * rig.page_size)
    rig.evict(100)
    expected = hash_pages(None, rig.key(1, 2, 3).token_ids.tobytes(), rig.page_size)
    assert keys.resolve() == PageKeys(expected).span(2, 3)


def test_lookup_keys_do_not_change_with_the_key_they_were_made_of(rig: Rig) -> None:
    key = rig.key(1, 2)
    keys = rig.tree.key_source(rig.tree.root, key, 0)
    key.token_ids.extend([5] * rig.page_size)
    key.token_ids[0] = 77
    expected = hash_pages(None, rig.key(1, 2).token_ids.tobytes(), rig.page_size)
    assert keys.resolve() == PageKeys(expected)


def test_keys_cannot_start_in_the_middle_of_a_sequence(rig: Rig) -> None:
    with pytest.raises(ContractError, match=f"got token {rig.page_size}$"):
        rig.tree.key_source(rig.tree.root, rig.key(1, 2), rig.page_size)


def test_keys_cannot_start_inside_a_page(make_rig: MakeRig) -> None:
    rig = make_rig(4)
    end = rig.leaf(1)
    with pytest.raises(ContractError, match=r"got token 5$"):
        rig.tree.key_source(end, rig.key(1, 2, 3), 5)


def test_evicted_node_has_no_keys_to_ask_for(rig: Rig) -> None:
    end = linked(rig).leaf(1)
    rig.evict(1)
    with pytest.raises(StaleHandleError):
        rig.tree.key_source(end, rig.key(1, 2), rig.page_size)


# -- attach and detach -----------------------------------------------------------------------------


def test_second_linker_is_refused(rig: Rig) -> None:
    linked(rig, threshold=2)
    with pytest.raises(InvalidTransitionError):
        rig.tree.attach_linker(backup_threshold=1)
    rig.insert(1)
    assert offers(rig) == [], "the first linker's threshold stands"


def test_numbers_out_of_range_are_refused(rig: Rig) -> None:
    with pytest.raises(ContractError, match=r"got 0$"):
        rig.tree.attach_linker(backup_threshold=0)
    with pytest.raises(ContractError, match=r"retry_after of at least 1, got 0$"):
        rig.tree.attach_linker(backup_threshold=1, retry_after=0)
    linked(rig)


def test_without_a_linker_nothing_is_offered_counted_keyed_or_digested(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_chain, "hash_pages", lambda *_: pytest.fail("hashed"))
    for _ in range(3):
        rig.insert(1, 2, 3)
        rig.insert(1, 2, 9, origin=InsertOrigin.RESTORED)
    rig.evict(1)
    assert offers(rig) == []
    assert rig.tree.mutation_digest == 0
    for node in rig.tree._nodes.values():
        assert node.marks is None


def test_inserting_and_matching_with_a_linker_hashes_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_chain, "hash_pages", lambda *_: pytest.fail("hashed"))
    end = linked(rig).leaf(1, 2, 3)
    rig.match(1, 9)
    keys = rig.tree.key_source(end, rig.key(1, 2, 3, 4), 3 * rig.page_size)
    assert [len(keys), len(rig.tree.node(end).page_keys)] == [1, 2]


def test_detached_tree_is_as_if_there_never_was_a_linker(make_rig: MakeRig) -> None:
    plain, detached = make_rig(4), make_rig(4)
    for rig in (plain, detached):
        if rig is detached:
            linked(rig)
        rig.insert(1, 2, 3)
        rig.insert(1, 9)
        rig.match(1, 2)
        if rig is detached:
            first, second, *_ = offers(rig)
            rig.tree.mark_offload_pending(first, OPERATION)
            store(rig, second)
            rig.tree.node(first).page_keys.resolve()
            rig.tree.detach_linker()
            rig.tree.detach_linker()
        rig.insert(1, 2, 4)
    assert picture(detached) == picture(plain)
    with pytest.raises(InvalidTransitionError):
        detached.tree.finish_offload(OPERATION, stored=True)


def picture(rig: Rig) -> object:
    """Everything that a tree is made of but its constant parts."""
    nodes = [
        (
            *(node.node_id, node.parent and node.parent.node_id, node.tokens),
            *(node.device_indices.tolist(), node.lock_ref, node.last_access),
            node.marks,
        )
        for node in rig.tree._nodes.values()
    ]
    tree = rig.tree
    return nodes, rig.offered, rig.sizes, tree.mutation_digest, tree._offloads.threshold


def test_linker_can_come_back_and_starts_from_nothing(rig: Rig) -> None:
    linked(rig, threshold=2)
    end = rig.leaf(1)
    rig.tree.detach_linker()
    linked(rig, threshold=2)
    rig.insert(1)
    assert offers(rig) == [], "the use under the first linker does not count"
    rig.insert(1)
    assert offers(rig) == [end]


def test_detach_leaves_locks_and_pages_alone(rig: Rig) -> None:
    receipt = rig.lock(linked(rig).leaf(1, 2))
    rig.tree.detach_linker()
    assert rig.sizes == (0, 2)
    assert rig.matched_pages(1, 2) == 2
    rig.unlock(receipt)


# -- the digest ------------------------------------------------------------------------------------


def replicas(make_rig: MakeRig) -> tuple[Rig, Rig]:
    """Two trees that made the same calls."""
    rigs = linked(make_rig(4)), linked(make_rig(4))
    for rig in rigs:
        rig.insert(1, 2, 3)
        rig.insert(4, namespace=Namespace(cache_salt="tenant"))
        rig.insert(1, 2, 5)
        rig.insert(2, 3, 4)
        rig.match(1)
        rig.lock(rig.leaf(6))
        rig.evict(1)
    assert rigs[0].tree.mutation_digest == rigs[1].tree.mutation_digest
    return rigs


MUTATIONS: dict[str, Callable[[Rig], object]] = {
    "leaf": lambda rig: rig.insert(7),
    "other leaf": lambda rig: rig.insert(8),
    "longer leaf": lambda rig: rig.insert(7, 8),
    "leaf in a namespace": lambda rig: rig.insert(7, namespace=Namespace(extra_key="a")),
    "split": lambda rig: rig.match(2),
    "split elsewhere": lambda rig: rig.match(2, 3),
    "evict": lambda rig: rig.evict(1),
    "evict more": lambda rig: rig.evict(2),
    "reset": lambda rig: rig.apply(rig.tree.reset()),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_digest_moves_with_a_mutation_and_alike_on_replicas(
    make_rig: MakeRig, mutation: Callable[[Rig], object]
) -> None:
    first, second = replicas(make_rig)
    before = first.tree.mutation_digest
    mutation(first)
    assert first.tree.mutation_digest != before
    mutation(second)
    assert first.tree.mutation_digest == second.tree.mutation_digest
    assert 0 <= first.tree.mutation_digest < 2**64


def test_any_two_mutations_make_different_digests(make_rig: MakeRig) -> None:
    digests = set()
    for mutation in MUTATIONS.values():
        rig, _ = replicas(make_rig)
        mutation(rig)
        digests.add(rig.tree.mutation_digest)
    assert len(digests) == len(MUTATIONS)


def test_digest_does_not_forget_a_divergence(make_rig: MakeRig) -> None:
    first, second = replicas(make_rig)
    first.insert(7)
    second.insert(8)
    for rig in (first, second):
        rig.insert(1, 2, 3, 4)
        rig.insert(1)
    assert first.tree.mutation_digest != second.tree.mutation_digest


def test_reset_makes_replicas_that_diverged_equal_again(make_rig: MakeRig) -> None:
    first, second = replicas(make_rig)
    first.insert(7)
    first.insert(7, 8)
    second.insert(8)
    for rig in (first, second):
        rig.apply(rig.tree.reset())
        rig.insert(1)
    assert first.tree.mutation_digest == second.tree.mutation_digest


def test_digest_is_the_same_for_equal_calls_whatever_slots_they_use(make_rig: MakeRig) -> None:
    first, second = replicas(make_rig)
    second.free_pages.rotate(3)
    for rig in (first, second):
        rig.insert(1, 2, 3, 4)
    assert first.tree.mutation_digest == second.tree.mutation_digest


def test_digest_shows_a_token_that_only_one_rank_has(make_rig: MakeRig) -> None:
    first, second = replicas(make_rig)
    tokens = first.key(*range(10, 20)).token_ids
    other = copy.copy(tokens)
    other[17] += 1
    for rig, sequence in ((first, tokens), (second, other)):
        key = RadixKey(array("q", sequence))
        rig.tree.insert(InsertParams(key=key, value=rig.alloc(10)))
    assert first.tree.mutation_digest != second.tree.mutation_digest


def test_calls_that_change_no_node_leave_the_digest(make_rig: MakeRig) -> None:
    rig, _ = replicas(make_rig)
    before = rig.tree.mutation_digest
    rig.unlock(rig.lock(rig.match(1).last_device_node))
    rig.match(1, 2)
    rig.insert(1, 2)
    assert rig.tree.mutation_digest == before
