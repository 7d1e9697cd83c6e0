"""Ranks that hold the same bytes store them once, and each reads them from the one shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
from tests.integration.linker.models import FULL_MAMBA, KINDS

from radixlink_contracts import PoolName
from radixlink_contracts.errors import AgreementError, ContractError
from radixlink_linker import LinkerSettings

if TYPE_CHECKING:
    from tests.integration.linker.conftest import MakeReplica

TOKENS = range(1, 9)
"""Four pages."""
SETTINGS = LinkerSettings(
    step_timeout_s=20.0, storing_ranks=(0, 0), touch_after_uses=6, retry_after_uses=1
)
STORER_IS_LAST = LinkerSettings(step_timeout_s=20.0, storing_ranks=(1, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [SETTINGS, STORER_IS_LAST], ids=["first", "last"])
def test_each_page_is_stored_once_and_read_by_every_rank(
    make_replica: MakeReplica, kind: str, settings: LinkerSettings
) -> None:
    replica = make_replica(2, model=KINDS[kind], settings=settings, one_shard=True, num_pages=64)
    storer = settings.storing_ranks[0]
    replica.store(TOKENS)
    for rank in replica.ranks:
        puts = [store.calls.count("put") for store in rank.stores.values()]
        assert all(puts) if rank.rank == storer else not any(puts)
    assert replica.restore("a", TOKENS).landed == ("a",)
    for rank in replica.ranks:
        assert rank.store.calls.count("read") > 0
    # Each node of the tree holds its own bytes: `check` looked.
    assert replica.alike(lambda rank: rank.device_pages(TOKENS)) == 4


@pytest.mark.parametrize("kind", ["full+mamba", "full+swa+mamba"])
def test_a_pool_that_is_not_shared_is_stored_by_every_rank(
    make_replica: MakeReplica, kind: str
) -> None:
    """Heads are spread and states are alike: one that comes late, alone, is for one rank to store."""
    settings = attrs.evolve(SETTINGS, shared_pools=(PoolName.MAMBA,))
    replica = make_replica(2, model=KINDS[kind], settings=settings, one_shard=True, num_pages=64)
    replica.compute(TOKENS, state=False)
    replica.settle()
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_stored == 1
    replica.evict()
    first, second = replica.ranks
    for pool, store in first.stores.items():
        puts = store.calls.count("put")
        assert puts > 0
        assert second.stores[pool].calls.count("put") == (0 if pool is PoolName.MAMBA else puts)
    assert replica.restore("a", TOKENS).landed == ("a",)
    # A forward that goes on from it compares the bytes, which are each rank's own but for the state.
    assert replica.compute([*TOKENS, 11, 12])


@pytest.mark.parametrize(
    ("storer", "pool"), [(0, PoolName.KV), (1, PoolName.KV), (0, PoolName.MAMBA)]
)
def test_a_failure_of_whoever_stores_a_part_is_that_of_all(
    make_replica: MakeReplica, storer: int, pool: PoolName
) -> None:
    settings = attrs.evolve(SETTINGS, shared_pools=(PoolName.MAMBA,))
    replica = make_replica(2, model=FULL_MAMBA, settings=settings, one_shard=True)
    replica.ranks[storer].stores[pool].raising.add("put")
    # Nobody would notice that of the rank that does not store this.
    replica.ranks[1].stores[PoolName.MAMBA].raising.add("put")
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_failed == 1
    for rank in replica.ranks:
        assert [node.stored for node in rank.nodes()] == [False]
    replica.ranks[storer].stores[pool].raising.clear()
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_stored == 1


@pytest.mark.parametrize(
    ("loser", "pool", "failed"),
    [(0, PoolName.KV, 1), (1, PoolName.KV, 1), (0, PoolName.MAMBA, 1), (1, PoolName.MAMBA, 0)],
)
def test_a_touch_asks_each_rank_for_what_it_stores(
    make_replica: MakeReplica, loser: int, pool: PoolName, failed: int
) -> None:
    settings = attrs.evolve(SETTINGS, shared_pools=(PoolName.MAMBA,))
    replica = make_replica(2, model=FULL_MAMBA, settings=settings, one_shard=True)
    replica.compute(TOKENS)
    replica.settle()
    for _ in range(3):
        replica.compute([99, 99])
        replica.settle()
    replica.ranks[loser].lose(TOKENS, 3, pool=pool)
    replica.compute(TOKENS)
    replica.settle()
    for rank in replica.ranks:
        assert rank.cache.counters is not None
        assert rank.cache.counters.touches_failed == failed


def test_a_failure_of_the_rank_that_stores_is_agreed(make_replica: MakeReplica) -> None:
    replica = make_replica(2, settings=SETTINGS, one_shard=True)
    replica.ranks[0].store.raising.add("put")
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_failed == 1
    for rank in replica.ranks:
        assert [node.stored for node in rank.nodes()] == [False]
    replica.ranks[0].store.raising.clear()
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_stored == 1


def test_a_node_stays_locked_until_the_rank_that_stores_has_read_it(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(2, settings=SETTINGS, one_shard=True, by_hand=True)
    replica.compute(TOKENS)
    assert replica.ranks[1].by_hand.started == ()
    assert replica.step().num_offloads_stored == 0
    assert replica.evict() == 0
    (operation,) = replica.ranks[0].by_hand.started
    replica.ranks[0].by_hand.run(operation)
    assert replica.step().num_offloads_stored == 1
    assert replica.evict() == 8


def test_the_rank_that_stores_touches(make_replica: MakeReplica) -> None:
    replica = make_replica(2, settings=SETTINGS, one_shard=True, by_hand=True)
    replica.compute(TOKENS)
    replica.settle()
    for _ in range(3):
        replica.compute([99, 99])
        replica.settle()
    replica.ranks[0].lose(TOKENS, 1)
    replica.compute(TOKENS)
    replica.settle()
    assert "touch" not in replica.ranks[1].by_hand.calls
    for rank in replica.ranks:
        assert rank.cache.counters is not None
        assert rank.cache.counters.touches_failed == 1


def test_a_load_that_fails_on_the_rank_that_does_not_store_fails_on_both(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica(2, settings=SETTINGS, one_shard=True)
    replica.store(TOKENS)
    replica.queue("a", TOKENS)
    replica.ranks[1].store.raising.add("read")
    replica.start()
    assert replica.settle().failed == ("a",)


@pytest.mark.parametrize("by", [(0,), (0, 0, 0), (1, 0), (0, 2), (-1, -1)])
def test_a_layout_that_is_none_of_these_ranks_is_refused_on_all(
    make_replica: MakeReplica, by: tuple[int, ...]
) -> None:
    settings = LinkerSettings(step_timeout_s=20.0, storing_ranks=by)
    replica = make_replica(2, settings=settings, attach=False)
    for found in replica.outcomes(lambda rank: rank.cache.init_cache_linker(rank.linker)):
        assert isinstance(found, ContractError)
        assert "for each of 2 ranks, one that stores for itself" in str(found)


def test_ranks_with_different_layouts_do_not_attach(make_replica: MakeReplica) -> None:
    replica = make_replica(2, settings=SETTINGS, attach=False)
    replica.ranks[1].cache._settings = STORER_IS_LAST
    for found in replica.outcomes(lambda rank: rank.cache.init_cache_linker(rank.linker)):
        assert isinstance(found, AgreementError)
