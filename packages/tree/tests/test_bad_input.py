"""What a caller may get wrong: each is refused by an error that names it, and changes nothing."""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING

import attrs
import pytest
import torch

from radixlink_contracts import (
    ComponentType,
    EvictParams,
    IncLockRefParams,
    InsertParams,
    MatchPrefixParams,
    NodeId,
    OperationId,
    RadixKey,
)
from radixlink_contracts.errors import ContractError, InvalidTransitionError, StaleHandleError
from radixlink_tree import StateRules

from .dump import dump

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import IncLockRefResult

    from .conftest import MakeRig
    from .rig import Rig

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA


def grown(rig: Rig) -> Rig:
    """Branches, a lock, and a linker with an offload on its way."""
    rig.tree.attach_linker(backup_threshold=1)
    rig.insert(1, 2)
    rig.insert(1, 2, 3, matched=2)
    rig.lock(rig.leaf(1, 5))
    rig.tree.mark_offload_pending(rig.match(1, 2).last_device_node, OperationId(1))
    return rig


def refused(
    rig: Rig,
    call: Callable[[], object],
    message: str,
    *,
    error: type[ContractError] = ContractError,
    walks: bool = False,
) -> None:
    """The call fails so, and the tree is as it was, but for recency where the call walked."""
    before = dump(rig.tree, recency=not walks)
    with pytest.raises(error, match=message):
        call()
    assert dump(rig.tree, recency=not walks) == before


def insert(rig: Rig, params: InsertParams) -> Callable[[], object]:
    return lambda: rig.tree.insert(params)


@pytest.fixture
def four(make_rig: MakeRig) -> Rig:
    """Pages of 4 tokens, everything in the nodes."""
    return grown(make_rig(4, window=8, states=StateRules()))


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("token", [-1, -(2**63)])
def test_negative_token_is_named_with_its_place(one_rig: Rig, token: int, place: int) -> None:
    rig = grown(one_rig)
    key = rig.key(1, 2, 8, 9)
    at = 2 * rig.page_size + place * (2 * rig.page_size - 1)
    key.token_ids[at] = token
    params = InsertParams(key=key, value=rig.alloc(4))
    refused(rig, insert(rig, params), f"got {token} at {at}$", walks=True)
    rig.free(params.value)


def test_key_whose_token_was_refused_can_still_grow(four: Rig) -> None:
    key = four.key(7)
    key.token_ids[2] = -5
    value = four.alloc(1)
    with pytest.raises(ContractError, match="got -5 at 2") as caught:
        four.tree.insert(InsertParams(key=key, value=value))
    key.token_ids.append(1)
    assert len(key) == 5
    assert caught.value.__traceback__ is not None
    four.free(value)


def test_negative_token_in_a_tail_that_does_not_enter_is_no_matter(four: Rig) -> None:
    key = four.key(7, tail=1)
    key.token_ids[4] = -1
    value = four.alloc(2)
    assert four.tree.insert(InsertParams(key=key, value=value[:5])).total_len == 4
    four.free(value[4:])


def test_match_of_a_negative_token_finds_nothing(one_rig: Rig) -> None:
    rig = grown(one_rig)
    tokens = rig.key(1).token_ids
    tokens[0] = -1
    assert rig.tree.match(MatchPrefixParams(key=RadixKey(tokens))).full_kv_hit_length == 0


def test_largest_token_enters_and_larger_ones_are_no_tokens(one_rig: Rig) -> None:
    rig = one_rig
    rig.insert(2**63 - 1)
    assert rig.matched_pages(2**63 - 1) == 1
    with pytest.raises(OverflowError):
        rig.key(2**63)


def test_tokens_of_another_width_are_refused() -> None:
    with pytest.raises(ContractError, match=r"expected array\('q'\), got array\('i'\)"):
        RadixKey(array("i", [1, 2]))


# -- slots -----------------------------------------------------------------------------------------

VALUES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "short": (lambda slots: slots[:-1], "slots for .* tokens, got"),
    "empty": (lambda slots: slots[:0], "slots for .* tokens, got 0"),
    "int32": (lambda slots: slots.to(torch.int32), r"got \(.*\) torch.int32"),
    "float": (lambda slots: slots.to(torch.float64), r"got \(.*\) torch.float64"),
    "column": (lambda slots: slots[:, None], r"got \(\d+, 1\) torch.int64"),
    "scalar": (lambda slots: slots[0], r"got \(\) torch.int64"),
}


@pytest.mark.parametrize(("change", "message"), VALUES.values(), ids=VALUES)
def test_slots_of_wrong_length_type_or_shape_are_refused(
    one_rig: Rig, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    rig = grown(one_rig)
    slots = rig.alloc(3)
    params = InsertParams(key=rig.key(1, 2, 9), value=change(slots))
    refused(rig, insert(rig, params), f"^insert: expected slots .*{message.removeprefix('slots ')}")
    rig.free(slots)


# -- lengths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [-4, -1, 3, 5])
def test_matched_length_that_is_no_number_of_pages_is_refused(four: Rig, length: int) -> None:
    params = InsertParams(key=four.key(1, 2), value=four.alloc(2), prev_prefix_len=length)
    refused(four, insert(four, params), rf"prev_prefix_len in whole pages .*got {length}$")
    four.free(params.value)


@pytest.mark.parametrize("length", [12, 16, 400])
def test_matched_length_beyond_what_is_there_is_refused(four: Rig, length: int) -> None:
    params = InsertParams(key=four.key(1, 2, 7), value=four.alloc(3), prev_prefix_len=length)
    refused(four, insert(four, params), f"prev_prefix_len={length} .*got 8", walks=True)
    four.free(params.value)


@pytest.mark.parametrize("name", ["prompt_len", "inserted_len"])
def test_negative_length_is_refused(one_rig: Rig, name: str) -> None:
    rig = grown(one_rig)
    good = InsertParams(key=rig.key(1, 9), value=rig.alloc(2))
    params = {
        "prompt_len": attrs.evolve(good, prompt_len=-1),
        "inserted_len": attrs.evolve(good, inserted_len=-1),
    }[name]
    refused(rig, insert(rig, params), rf"{name}.* of at least 0, got .*-1")
    rig.free(params.value)


def test_prompt_longer_than_the_key_makes_no_cut(four: Rig) -> None:
    assert four.picture(four.insert(7, 8, prompt=100).last_device_node) == "2*"


def test_negative_state_slot_is_refused(mamba_rig: Rig) -> None:
    rig = grown(mamba_rig)
    params = InsertParams(key=rig.key(1, 9), value=rig.alloc(2), mamba_value=-7)
    refused(rig, insert(rig, params), "state slot of at least 0, got -7")
    rig.free(params.value)


@pytest.mark.parametrize("floor", [-4, 2, 7])
def test_floor_that_is_no_number_of_pages_is_refused(four: Rig, floor: int) -> None:
    params = InsertParams(
        key=four.key(1, 9), value=four.alloc(2), component_evicted_seqlens={SWA: floor}
    )
    refused(four, insert(four, params), rf"floor of SWA in whole pages of 4 tokens, got {floor}$")
    four.free(params.value)


# -- what a tree has not ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FULL, MAMBA])
def test_floor_of_what_has_none_is_refused(one_rig: Rig, kind: ComponentType) -> None:
    rig = grown(one_rig)
    params = InsertParams(
        key=rig.key(1, 9), value=rig.alloc(2), component_evicted_seqlens={kind: 0}
    )
    refused(rig, insert(rig, params), f"floor of SWA .*got one of {kind.name}$")
    rig.free(params.value)


def test_window_of_a_tree_without_windows_is_refused(make_rig: MakeRig) -> None:
    for states in (None, StateRules()):
        rig = grown(make_rig(4, states=states))
        params = InsertParams(
            key=rig.key(1, 9), value=rig.alloc(2), component_evicted_seqlens={SWA: 4}
        )
        refused(rig, insert(rig, params), "in a tree with windows, got one of SWA")
        rig.free(params.value)
        refused(
            rig,
            partial(rig.tree.evict, EvictParams(num_tokens=4, swa_num_tokens=4)),
            "got swa_num_tokens=4, mamba_num=0",
        )


def test_state_of_a_tree_without_states_is_refused(make_rig: MakeRig) -> None:
    for window in (0, 8):
        rig = grown(make_rig(4, window=window))
        params = InsertParams(key=rig.key(1, 9), value=rig.alloc(2), mamba_value=3)
        refused(rig, insert(rig, params), "no state in a tree without states, got slot 3")
        rig.free(params.value)
        refused(
            rig,
            partial(rig.tree.evict, EvictParams(num_tokens=4, mamba_num=1)),
            "got swa_num_tokens=0, mamba_num=1",
        )


@pytest.mark.parametrize("num_tokens", [1, 3, 5, 11])
def test_state_behind_a_key_of_no_whole_pages_is_refused(four: Rig, num_tokens: int) -> None:
    key = RadixKey(array("q", range(num_tokens)))
    value = four.alloc(3)
    params = InsertParams(key=key, value=value[:num_tokens], mamba_value=3)
    message = f"whole pages of 4 tokens before a state, got {num_tokens} tokens before slot 3"
    refused(four, insert(four, params), message)
    four.free(value)


def test_window_and_state_of_a_tree_without_are_nothing(rig: Rig) -> None:
    rig.insert(1)
    receipt = rig.lock(rig.leaf(2), SWA, MAMBA)
    assert [rig.sizes_of(kind) for kind in (SWA, MAMBA)] == [(0, 0)] * 2
    assert (receipt.swa_locked_len, receipt.mamba_locked) == (0, False)
    rig.unlock(rig.move_on(receipt))
    assert rig.tree.sliding_window == 0


# -- handles ---------------------------------------------------------------------------------------


def test_id_that_is_no_node_is_refused_by_every_call(one_rig: Rig) -> None:
    rig = grown(one_rig)
    gone = rig.leaf(8)
    rig.evict(100)
    tree = rig.tree
    assert gone not in tree._nodes
    for node_id in (gone, NodeId(4711), NodeId(-1)):
        calls: list[Callable[[NodeId], object]] = [
            tree.node,
            tree.path_indices,
            lambda node_id: tree.inc_lock_ref(IncLockRefParams(node_id=node_id)),
            lambda node_id: tree.mark_offload_pending(node_id, OperationId(9)),
            lambda node_id: tree.key_source(node_id, rig.key(1, 2), rig.page_size),
        ]
        for call in calls:
            refused(
                rig,
                partial(call, node_id),
                f"got {node_id}, which was evicted or reset",
                error=StaleHandleError,
            )


def test_full_attention_is_not_skipped(one_rig: Rig) -> None:
    rig = grown(one_rig)
    end = rig.match(1, 2).last_device_node
    for skipped in ((FULL,), (SWA, FULL), tuple(ComponentType)):
        refused(
            rig,
            partial(rig.lock, end, *skipped),
            f"expected FULL to be locked at node {end}, got",
        )


def releases(rig: Rig) -> list[Callable[[IncLockRefResult], object]]:
    return [rig.unlock, rig.move_on]


def test_receipt_is_good_once_for_either_release(one_rig: Rig) -> None:
    rig = grown(one_rig)
    end = rig.match(1, 2).last_device_node
    for first in releases(rig):
        for second in releases(rig):
            receipt, other = rig.lock(end), rig.lock(end)
            narrowed = first(receipt)
            refused(
                rig,
                partial(second, receipt),
                f"got {receipt.receipt_id} of node {end}, which was released before",
                error=StaleHandleError,
            )
            rig.unlock(other)
            if narrowed is not None:
                rig.unlock(narrowed)  # type: ignore[arg-type]


def test_receipt_of_another_tree_is_refused_by_either_release(make_rig: MakeRig) -> None:
    mine, other = (make_rig(4, window=8, states=StateRules()) for _ in range(2))
    receipt, foreign = mine.lock(mine.leaf(1)), other.lock(other.leaf(1))
    assert foreign == receipt, "the two trees count alike, so only identity tells them apart"
    for release in releases(mine):
        refused(
            mine,
            partial(release, foreign),
            "or is not this tree's",
            error=StaleHandleError,
        )
    mine.unlock(receipt)
    other.unlock(foreign)


def test_receipt_that_was_changed_is_refused(four: Rig) -> None:
    receipt = four.lock(four.match(1, 2).last_device_node)
    for changed in (
        attrs.evolve(receipt, swa_locked_len=4),
        attrs.evolve(receipt, mamba_locked=False),
        attrs.evolve(receipt, node_id=four.tree.root),
    ):
        for release in releases(four):
            refused(
                four,
                partial(release, changed),
                f"got {receipt.receipt_id} of node",
                error=StaleHandleError,
            )
    four.unlock(receipt)


def test_receipts_are_void_after_reset(one_rig: Rig) -> None:
    rig = grown(one_rig)
    end = rig.match(1, 2).last_device_node
    receipts = [rig.lock(end), rig.move_on(rig.lock(end))]
    rig.apply(rig.tree.reset())
    rig.insert(1, 2)
    for receipt in receipts:
        for release in releases(rig):
            refused(
                rig,
                partial(release, receipt),
                f"got {receipt.receipt_id} ",
                error=StaleHandleError,
            )


# -- the linker's calls ----------------------------------------------------------------------------


@pytest.mark.parametrize("start", [-4, 3, 12, 16])
def test_keys_start_where_a_node_ends_within_the_key(four: Rig, start: int) -> None:
    end = four.match(1, 2).last_device_node
    key = four.key(1, 2, tail=1)
    refused(four, lambda: four.tree.key_source(end, key, start), f"got token {start}$")


def test_keys_behind_a_node_do_not_start_at_the_first_token(four: Rig) -> None:
    end = four.match(1, 2).last_device_node
    refused(four, lambda: four.tree.key_source(end, four.key(1, 2), 0), "got token 0$")
    root = four.tree.root
    refused(four, lambda: four.tree.key_source(root, four.key(1, 2), 4), "got token 4$")


def test_root_has_nothing_to_offload(one_rig: Rig) -> None:
    rig = grown(one_rig)
    view = rig.tree.node(rig.tree.root)
    assert (view.unstored, view.stored, view.has_swa, view.mamba_slot) == ((), True, False, None)
    refused(
        rig,
        lambda: rig.tree.mark_offload_pending(rig.tree.root, OperationId(9)),
        f"node {rig.tree.root} unstored and idle, got it stored",
        error=InvalidTransitionError,
    )


def test_nothing_is_offloaded_without_a_linker(one_rig: Rig) -> None:
    rig = one_rig
    end = rig.leaf(1)
    for linked_before in (False, True):
        if linked_before:
            rig.tree.attach_linker(backup_threshold=1)
            rig.tree.detach_linker()
        refused(
            rig,
            lambda: rig.tree.mark_offload_pending(end, OperationId(9)),
            f"expected a linker, got operation 9 on node {end}",
            error=InvalidTransitionError,
        )


def test_verdict_of_no_offload_is_refused(four: Rig) -> None:
    refused(
        four,
        lambda: four.tree.finish_offload(OperationId(9), stored=True),
        "got operation 9",
        error=InvalidTransitionError,
    )


def test_linker_that_is_there_is_not_replaced(four: Rig) -> None:
    refused(
        four,
        lambda: four.tree.attach_linker(backup_threshold=2),
        "expected no linker, got a second one",
        error=InvalidTransitionError,
    )
