"""A window or a state that comes later to a node, or is all that is lacking, moves for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.integration.linker.models import FULL_MAMBA, FULL_SWA, FULL_SWA_MAMBA

from radixlink_contracts import ComponentType, PoolName

if TYPE_CHECKING:
    from tests.integration.linker.conftest import MakeReplica
    from tests.integration.linker.models import Model
    from tests.integration.linker.replica import Replica

TOKENS = range(1, 13)
"""Six pages; a window is two."""

with_states = pytest.mark.parametrize("model", [FULL_MAMBA, FULL_SWA_MAMBA], ids=["mamba", "both"])
both_ranks = pytest.mark.parametrize("num_ranks", [1, 2])


def puts(replica: Replica, pool: PoolName) -> list[int]:
    """How often each rank put something into a pool's store."""
    return [rank.stores[pool].calls.count("put") for rank in replica.ranks]


@both_ranks
@with_states
def test_a_state_that_comes_to_a_stored_node_is_stored_for_itself(
    make_replica: MakeReplica, model: Model, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, model=model)
    replica.compute(TOKENS, state=False)
    replica.settle()
    stored = puts(replica, PoolName.KV)
    assert puts(replica, PoolName.MAMBA) == [0] * num_ranks
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_stored == 1
    assert puts(replica, PoolName.KV) == stored
    assert puts(replica, PoolName.MAMBA) == [1] * num_ranks
    replica.evict()
    assert replica.restore("a", TOKENS).landed == ("a",)
    assert replica.match("a", TOKENS).device_prefix_len == len(TOKENS)


@both_ranks
@with_states
@pytest.mark.parametrize("fails", [False, True])
def test_a_state_that_comes_while_its_node_is_being_stored_is_stored_after_that(
    make_replica: MakeReplica, model: Model, num_ranks: int, *, fails: bool
) -> None:
    """Nobody need ever pass there again for it."""
    replica = make_replica(num_ranks, model=model, by_hand=True)
    replica.compute(TOKENS, state=False)
    begun = replica.ranks[0].by_hand.started
    replica.compute(TOKENS)
    # One operation at a time for a node.
    assert replica.ranks[0].by_hand.started == begun
    if fails:
        replica.ranks[-1].store.raising.add("put")
    replica.transfer()
    replica.step()
    replica.ranks[-1].store.raising.clear()
    replica.settle()
    if fails:
        # What failed is tried again when somebody uses it.
        replica.compute(TOKENS)
        replica.settle()
    replica.evict()
    assert replica.restore("a", TOKENS).landed == ("a",)
    assert replica.match("a", TOKENS).device_prefix_len == len(TOKENS)


@both_ranks
@pytest.mark.parametrize("model", [FULL_SWA, FULL_SWA_MAMBA], ids=["swa", "both"])
def test_a_window_that_comes_back_to_a_stored_node_is_stored_for_itself(
    make_replica: MakeReplica, model: Model, num_ranks: int
) -> None:
    """The first request's window had moved on; the second still has all of its own."""
    replica = make_replica(num_ranks, model=model)
    replica.compute(TOKENS, slide=True)
    replica.settle()
    others = [pool for pool in model.pools if pool is not PoolName.SWA]
    stored = [puts(replica, pool) for pool in others]
    # So that the second does not go on from the first's end, which stays.
    for rank in replica.ranks:
        rank.lock(TOKENS, early=True)
    replica.evict_windows()
    assert replica.alike(lambda rank: rank.device_pages(TOKENS)) == 0
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_failed == 0
    # The state of the end went with its window; the store has it still.
    assert [puts(replica, pool) for pool in others] == stored
    for rank in replica.ranks:
        assert rank.stores[PoolName.SWA].contains(rank.page_keys(TOKENS)).complete
        rank.unlock()
    replica.evict()
    if not model.states:
        # Every boundary can be restored now, not just the end.
        assert replica.ask("a", TOKENS[:6]).host_hit_length == 6


@both_ranks
@with_states
def test_a_node_that_is_split_while_it_is_stored_keeps_each_part_where_it_is(
    make_replica: MakeReplica, model: Model, num_ranks: int
) -> None:
    """K4: the state is the lower half's; the upper half has none until somebody brings one."""
    replica = make_replica(num_ranks, model=model, by_hand=True)
    replica.compute(TOKENS)
    fork = [*TOKENS[:4], 91, 92]
    replica.compute(fork)
    replica.settle()
    for rank in replica.ranks:
        assert all(node.stored for node in rank.nodes())
        states = rank.stores[PoolName.MAMBA]
        assert list(states.contains(rank.page_keys(TOKENS))) == [5]
        assert list(states.contains(rank.page_keys(fork))) == [2]
    # A state of the place where they part is offered for itself, to a node that is stored.
    replica.compute(TOKENS[:4])
    assert replica.settle().num_offloads_stored == 1
    replica.evict()
    other = [*TOKENS[:4], 93, 94]
    assert replica.restore("a", other).landed == ("a",)
    assert replica.match("a", other).device_prefix_len == 4


@both_ranks
def test_a_load_marks_only_the_windows_stored_that_it_brought(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    """The store has the last window; what was computed meanwhile has them all."""
    replica = make_replica(num_ranks, model=FULL_SWA, by_hand=True)
    replica.compute(TOKENS, slide=True)
    replica.settle()
    replica.evict()
    replica.queue("a", TOKENS)
    replica.start()
    for rank in replica.ranks:
        rank.by_hand.refusing.add("offload")
    replica.compute(TOKENS)
    assert replica.step().num_offloads_failed > 0
    assert replica.settle().landed == ("a",)
    for rank in replica.ranks:
        assert [node.unstored for node in rank.nodes()] == [(ComponentType.SWA,), ()]
        rank.by_hand.refusing.clear()
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_stored == 1
    for rank in replica.ranks:
        assert all(node.stored for node in rank.nodes())


@both_ranks
@pytest.mark.parametrize("model", [FULL_SWA, FULL_MAMBA], ids=["swa", "mamba"])
def test_a_load_brings_the_window_or_the_state_alone_where_the_pages_stayed(
    make_replica: MakeReplica, model: Model, num_ranks: int
) -> None:
    """A forward behind it then finds the right bytes in all of its prefix."""
    replica = make_replica(num_ranks, model=model, by_hand=True)
    replica.compute(TOKENS)
    replica.compute([*TOKENS, 91, 92])
    replica.settle()
    if model.window:
        replica.evict_windows()
    else:
        replica.evict_states(1)
    replica.queue("a", TOKENS)
    expected = {PoolName.SWA: 4} if model.window else {PoolName.MAMBA: 1}
    for rank in replica.ranks:
        (load,) = rank.cache.holders().operations
        assert load.slots == expected
    replica.start()
    assert replica.settle().landed == ("a",)
    assert replica.match("a", TOKENS).device_prefix_len == len(TOKENS)
    assert replica.compute([*TOKENS, 93, 94])
