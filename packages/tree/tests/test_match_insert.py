"""Match and insert: what is shared, what is split, whose slots are kept."""

from __future__ import annotations

import tracemalloc
from array import array
from typing import TYPE_CHECKING

import pytest
import torch

from radixlink_contracts import (
    DEFAULT_NAMESPACE,
    ComponentType,
    ExternalMatch,
    InsertParams,
    MatchPrefixParams,
    Namespace,
    RadixKey,
)
from radixlink_contracts.actions import FreeDeviceKV
from radixlink_contracts.errors import ContractError
from radixlink_tree import UnifiedTreeCore

if TYPE_CHECKING:
    from .conftest import MakeRig
    from .rig import Rig

pytestmark = pytest.mark.usefixtures("in_place")

# The last two tell apart a framing that only joins.
NAMESPACES = [
    DEFAULT_NAMESPACE,
    Namespace(extra_key=""),
    Namespace(cache_salt=""),
    Namespace(extra_key="a"),
    Namespace(cache_salt="a"),
    Namespace(extra_key="\ud800"),
    Namespace(extra_key="b", cache_salt="ca"),
    Namespace(extra_key="bc", cache_salt="a"),
]


def test_second_insert_reports_what_was_there(rig: Rig) -> None:
    assert rig.insert(1, 2).prefix_len == 0
    longer = rig.insert(1, 2, 3)
    assert (longer.prefix_len, longer.total_len) == (2 * rig.page_size, 3 * rig.page_size)
    found = rig.match(1, 2, 3)
    assert found.device_prefix_len == 3 * rig.page_size
    assert found.last_device_node == longer.last_device_node
    assert rig.matched_pages(1, 2, 9) == 2
    assert rig.matched_pages(8, 9) == 0


def test_match_of_nothing_ends_at_the_root(rig: Rig) -> None:
    rig.insert(1, 2)
    for found in (rig.match(), rig.match(9), rig.match(tail=rig.page_size - 1)):
        assert found.device_prefix_len == 0
        assert found.last_device_node == rig.tree.root
    assert rig.path_pages(rig.tree.root) == []


def test_match_says_nothing_about_a_store(rig: Rig) -> None:
    rig.insert(1)
    found = rig.match(1, 2)
    assert found.external is ExternalMatch.NOT_ASKED
    assert found.host_hit_length == 0
    assert found.waiting_on is None


def test_branches_share_their_base(rig: Rig) -> None:
    base = rig.insert(1, 2)
    first = rig.insert(1, 2, 3, 4)
    second = rig.insert(1, 2, 5, 6)
    assert first.prefix_len == second.prefix_len == 2 * rig.page_size
    assert [rig.matched_pages(1, 2, *rest) for rest in ((3, 4), (5, 6), (9, 9))] == [4, 4, 2]
    shared = rig.path_pages(base.last_device_node)
    assert rig.path_pages(first.last_device_node)[:2] == shared
    assert rig.path_pages(second.last_device_node)[:2] == shared


def test_only_whole_pages_match(rig: Rig) -> None:
    rig.insert(1, 2, 3)
    assert rig.match(1, 2, tail=rig.page_size - 1).device_prefix_len == 2 * rig.page_size


def test_only_whole_pages_enter(rig: Rig) -> None:
    result = rig.insert(1, 2, tail=rig.page_size - 1)
    assert result.total_len == 2 * rig.page_size
    assert rig.sizes == (2, 0)
    if rig.page_size > 1:
        assert rig.insert(tail=rig.page_size - 1).last_device_node == rig.tree.root
        assert rig.sizes == (2, 0)


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("page", [0, 1, 2])
def test_page_with_one_other_token_does_not_match(rig: Rig, page: int, place: int) -> None:
    rig.insert(1, 2, 3)
    tokens = rig.key(1, 2, 3).token_ids
    changed = page * rig.page_size + place % rig.page_size
    tokens[changed] = 77
    found = rig.tree.match(MatchPrefixParams(key=RadixKey(tokens)))
    assert found.device_prefix_len == page * rig.page_size


def test_tokens_that_differ_in_their_high_bytes_do_not_match(rig: Rig) -> None:
    rig.insert(1, 1 + 2**32)
    assert rig.matched_pages(1, 1 + 2**32) == 2
    assert rig.matched_pages(1, 1) == 1
    assert rig.matched_pages(1 + 2**62) == 0


def test_split_leaves_the_id_with_the_lower_half(rig: Rig) -> None:
    end = rig.leaf(1, 2, 3, 4)
    pages = rig.path_pages(end)
    upper = rig.match(1, 9)
    assert upper.last_device_node != end
    assert rig.path_pages(upper.last_device_node) == pages[:1]
    assert rig.path_pages(end) == pages
    assert rig.match(1, 2, 3, 4).last_device_node == end
    assert rig.tree.node(end).num_tokens == 3 * rig.page_size


def test_match_changes_nothing_that_can_be_seen(rig: Rig) -> None:
    rig.insert(1, 2, 3)
    rig.insert(1, 5)
    first = rig.match(1, 2, 9)
    free, sizes, nodes = list(rig.free_pages), rig.sizes, len(rig.tree._nodes)
    for _ in range(100):
        assert rig.match(1, 2, 9) == first
    assert (list(rig.free_pages), rig.sizes, len(rig.tree._nodes)) == (free, sizes, nodes)


def test_duplicates_come_back_and_the_tree_keeps_its_own(rig: Rig) -> None:
    canonical = rig.path_pages(rig.leaf(1, 2, 3))
    key = rig.key(1, 2, 3, 4)
    fresh = rig.alloc(4)
    result = rig.tree.insert(InsertParams(key=key, value=fresh))
    (free,) = result.cache_actions
    assert isinstance(free, FreeDeviceKV)
    assert free.indices.tolist() == fresh[: 3 * rig.page_size].tolist()
    rig.apply(result.cache_actions)
    assert rig.path_pages(result.last_device_node) == [*canonical, fresh[-1] // rig.page_size]


def test_matched_prefix_never_comes_back(rig: Rig) -> None:
    rig.insert(1, 2)
    rig.insert(1, 2, 3, 4)
    # A request that matched two pages meets four.
    key, fresh = rig.key(1, 2, 3, 4, 5), rig.alloc(3)
    prefix = rig.tree.path_indices(rig.match(1, 2).last_device_node)
    result = rig.tree.insert(
        InsertParams(key=key, value=torch.cat([prefix, fresh]), prev_prefix_len=2 * rig.page_size)
    )
    (free,) = result.cache_actions
    assert isinstance(free, FreeDeviceKV)
    assert free.indices.tolist() == fresh[: 2 * rig.page_size].tolist()
    assert result.prefix_len == 4 * rig.page_size
    rig.apply(result.cache_actions)


def test_insert_of_what_is_there_returns_no_action_but_the_free(rig: Rig) -> None:
    rig.insert(1, 2, 3)
    assert rig.insert(1, 2, 3, matched=3).cache_actions == ()
    assert rig.insert(1, 2, matched=2).cache_actions == ()


def test_adopted_range_is_what_was_new(rig: Rig) -> None:
    rig.insert(1, 2)
    result = rig.insert(1, 2, 3, 4, track=True)
    assert result.adopted_ranges is not None
    assert result.adopted_ranges.ranges(ComponentType.FULL) == (
        (2 * rig.page_size, 4 * rig.page_size),
    )
    assert result.adopted_ranges.ranges(ComponentType.SWA) == ()


def test_adopted_ranges_are_empty_where_nothing_was_new_and_none_where_nobody_asked(
    rig: Rig,
) -> None:
    rig.insert(1, 2)
    nothing = rig.insert(1, track=True)
    assert nothing.adopted_ranges is not None
    assert nothing.adopted_ranges.ranges(ComponentType.FULL) == ()
    assert rig.insert(1, 2, 3).adopted_ranges is None


def test_finished_prompt_and_output_are_two_nodes(rig: Rig) -> None:
    prompt = rig.leaf(1, 2, 3)
    output = rig.leaf(1, 2, 3, 4)
    assert rig.tree.node(prompt).num_tokens == 3 * rig.page_size
    assert rig.tree.node(output).num_tokens == rig.page_size
    rig.evict(1)
    assert rig.matched_pages(1, 2, 3, 4) == 3


def test_equal_tokens_of_other_namespaces_share_nothing(rig: Rig) -> None:
    ends = {rig.insert(1, 2, namespace=each).last_device_node for each in NAMESPACES}
    assert len(ends) == len(NAMESPACES)
    assert rig.sizes == (2 * len(NAMESPACES), 0)
    pages = [page for end in ends for page in rig.path_pages(end)]
    assert len(set(pages)) == 2 * len(NAMESPACES)
    for each in NAMESPACES:
        assert rig.matched_pages(1, 2, namespace=each) == 2
    assert rig.matched_pages(1, 2, namespace=Namespace(extra_key="other")) == 0


def test_equal_namespaces_are_one(rig: Rig) -> None:
    rig.insert(1, namespace=Namespace(extra_key="a"))
    rig.insert(2)
    assert rig.matched_pages(1, namespace=Namespace(extra_key="a")) == 1
    assert rig.matched_pages(2, namespace=Namespace()) == 1


def test_tokens_that_spell_a_namespace_do_not_enter_it(make_rig: MakeRig) -> None:
    rig = make_rig(1)
    # The frame of this namespace is 16 bytes: two tokens of the default namespace could spell it.
    namespace = Namespace(extra_key="abcdef")
    frame = array("q", b"\x01" + (6).to_bytes(8, "little") + b"abcdef" + b"\x00")
    rig.insert(*frame, 5)
    assert rig.matched_pages(5, namespace=namespace) == 0
    rig.insert(5, namespace=namespace)
    assert rig.matched_pages(*frame, 5) == 3


def test_key_may_grow_after_its_insert(rig: Rig) -> None:
    key = rig.key(1, 2)
    rig.tree.insert(InsertParams(key=key, value=rig.alloc(2)))
    key.token_ids.extend(rig.key(3).token_ids)
    result = rig.tree.insert(
        InsertParams(
            key=key,
            value=torch.cat(
                [rig.tree.path_indices(rig.match(1, 2).last_device_node), rig.alloc(1)]
            ),
            prev_prefix_len=2 * rig.page_size,
        )
    )
    assert result.prefix_len == 2 * rig.page_size
    assert rig.matched_pages(1, 2, 3) == 3


def test_node_keeps_no_larger_tensor_alive(rig: Rig) -> None:
    base = rig.leaf(1, 2)
    leaf = rig.leaf(1, 2, 3)
    upper = rig.match(1).last_device_node
    for node_id in (upper, base, leaf):
        node = rig.tree.node(node_id)
        assert node.num_tokens == rig.page_size
        assert node.device_indices.untyped_storage().nbytes() == 8 * rig.page_size


def test_changing_path_indices_does_not_change_the_tree(rig: Rig) -> None:
    end = rig.leaf(1, 2)
    pages = rig.path_pages(end)
    rig.tree.path_indices(end).zero_()
    assert rig.path_pages(end) == pages


def test_value_that_does_not_cover_the_pages_is_refused(rig: Rig) -> None:
    rig.insert(1)
    slots = rig.alloc(2)
    with pytest.raises(ContractError, match=f"slots for {2 * rig.page_size} tokens, got"):
        rig.tree.insert(InsertParams(key=rig.key(1, 2), value=slots[:-1]))
    assert rig.matched_pages(1, 2) == 1
    rig.free(slots)


def test_matched_prefix_that_is_gone_is_refused(rig: Rig) -> None:
    rig.insert(1)
    slots = rig.alloc(3)
    with pytest.raises(ContractError, match="the matched prefix was not locked"):
        rig.tree.insert(
            InsertParams(key=rig.key(1, 2, 3), value=slots, prev_prefix_len=2 * rig.page_size)
        )
    assert rig.matched_pages(1, 2, 3) == 1
    rig.free(slots)


@pytest.mark.parametrize("prev_prefix_len", [-4, 3])
def test_matched_prefix_is_whole_pages(make_rig: MakeRig, prev_prefix_len: int) -> None:
    rig = make_rig(4)
    rig.insert(1, 2)
    slots = rig.alloc(2)
    with pytest.raises(ContractError, match=f"got {prev_prefix_len}$"):
        rig.tree.insert(
            InsertParams(key=rig.key(1, 2), value=slots, prev_prefix_len=prev_prefix_len)
        )
    rig.free(slots)


def test_page_of_no_token_is_refused() -> None:
    with pytest.raises(ContractError, match=r"got 0$"):
        UnifiedTreeCore(page_size=0)


def test_path_of_1200_nodes_needs_no_recursion(make_rig: MakeRig) -> None:
    rig = make_rig(1, num_pages=1200)
    rig.tree.attach_linker(backup_threshold=1)
    slots = rig.alloc(1200)
    tokens = array("q", range(1200))
    end = rig.tree.root
    for length in range(1, 1201):
        end = rig.tree.insert(
            InsertParams(
                key=RadixKey(tokens[:length]), value=slots[:length], prev_prefix_len=length - 1
            )
        ).last_device_node
        if length % 400 == 0:
            assert rig.tree.path_indices(end).tolist() == slots[:length].tolist()
    rig.unlock(rig.lock(end))
    assert len(rig.tree.node(end).page_keys.resolve()) == 1
    assert rig.evict(1200).num_tokens_evicted == 1200
    assert rig.sizes == (0, 0)


def long_rig() -> tuple[UnifiedTreeCore, array[int]]:
    """A tree with one long run behind a short one, and its key."""
    tree = UnifiedTreeCore(page_size=16)
    tokens = array("q", range(100_000))
    for end in (160, len(tokens)):
        key = RadixKey(tokens[:end])
        tree.insert(InsertParams(key=key, value=torch.arange(end)))
    return tree, tokens


@pytest.mark.parametrize("differs_at", [None, 160, 50_000, 99_999])
def test_long_key_is_not_copied_for_a_match(differs_at: int | None) -> None:
    tree, tokens = long_rig()
    if differs_at is not None:
        tokens[differs_at] += 1
    key = RadixKey(tokens)
    # The first one splits the run in which it ends.
    tree.match(MatchPrefixParams(key=key))
    tracemalloc.start()
    try:
        found = tree.match(MatchPrefixParams(key=key))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.device_prefix_len == (differs_at or len(tokens)) // 16 * 16
    assert peak < len(tokens) * tokens.itemsize // 2


def test_a_key_may_be_appended_to_behind_a_match_that_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    tree, tokens = long_rig()
    tokens[50_000] += 1
    with monkeypatch.context() as patched:
        patched.setattr(tree, "_split", no_memory)
        with pytest.raises(MemoryError) as kept:
            tree.match(MatchPrefixParams(key=RadixKey(tokens)))
    tokens.append(1)
    assert kept.value.__traceback__ is not None
    assert tree.match(MatchPrefixParams(key=RadixKey(tokens))).device_prefix_len == 50_000
