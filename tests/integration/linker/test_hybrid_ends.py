"""A load with windows and states ends early: failed, aborted, written off, reset, detached."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.integration.linker.models import KINDS

from radixlink_contracts import ExternalMatch, Outcome, PoolName
from radixlink_linker import LinkerSettings

if TYPE_CHECKING:
    from tests.integration.linker.conftest import MakeReplica
    from tests.integration.linker.replica import Replica

TOKENS = range(1, 13)
"""Six pages; a window is two."""

HYBRIDS = ["full+swa", "full+mamba", "full+swa+mamba"]

hybrids = pytest.mark.parametrize("kind", HYBRIDS)
both_ranks = pytest.mark.parametrize("num_ranks", [1, 2])


def num_in_use(replica: Replica) -> list[int]:
    """Slots in use of all pools together, on each rank."""
    return [sum(rank.slots.sizes) - sum(rank.slots.available_sizes) for rank in replica.ranks]


@both_ranks
@pytest.mark.parametrize("pool", [PoolName.KV, PoolName.SWA, PoolName.MAMBA])
def test_a_part_that_one_rank_cannot_read_fails_all_parts_on_all(
    make_replica: MakeReplica, pool: PoolName, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, model=KINDS["full+swa+mamba"])
    replica.store(TOKENS)
    replica.ask("a", TOKENS)
    # It was there when it was looked for.
    replica.ranks[-1].lose(TOKENS, 5, pool=pool)
    replica.load_back("a", TOKENS)
    replica.launch()
    assert replica.settle().failed == ("a",)
    # A batch runs that may read them.
    assert [rank.slots.num_retired for rank in replica.ranks] == [12 + 4 + 1] * num_ranks
    replica.retire()
    assert num_in_use(replica) == [0] * num_ranks
    assert replica.match("a", TOKENS).external is ExternalMatch.MISS
    assert replica.compute(TOKENS)
    assert replica.settle().num_offloads_failed == 0


@both_ranks
@hybrids
@pytest.mark.parametrize("started", [False, True])
def test_an_abort_leaves_nothing(
    make_replica: MakeReplica, kind: str, num_ranks: int, *, started: bool
) -> None:
    """K6: before the start nothing moves; after it the load is decided for nobody."""
    replica = make_replica(num_ranks, model=KINDS[kind], by_hand=True)
    replica.store(TOKENS)
    replica.queue("a", TOKENS)
    if started:
        replica.start()
    replica.release("a")
    replica.settle()
    loads = [rank.cache.counters.loads_landed for rank in replica.ranks if rank.cache.counters]
    assert loads == [int(started)] * num_ranks
    replica.evict()
    assert num_in_use(replica) == [0] * num_ranks
    assert replica.restore("b", TOKENS).landed == ("b",)


@both_ranks
@hybrids
def test_slots_of_all_pools_that_one_rank_keeps_are_written_off_until_reset(
    make_replica: MakeReplica, kind: str, num_ranks: int
) -> None:
    model = KINDS[kind]
    settings = LinkerSettings(write_off_steps=5)
    replica = make_replica(num_ranks, model=model, by_hand=True, settings=settings)
    replica.store(TOKENS)
    operation = replica.queue("a", TOKENS).operation_id
    replica.start()
    replica.ranks[-1].by_hand.complete(operation, Outcome.FAILED, quiesced=False)
    for rank in replica.ranks[:-1]:
        rank.by_hand.run(operation)
    assert replica.step().failed == ("a",)
    for _ in range(5):
        replica.step()
    held = 12 + (4 if model.window else 0) + (1 if model.states else 0)
    for rank in replica.ranks:
        assert rank.cache.counters is not None
        assert rank.cache.counters.slots_written_off == held
    replica.evict()
    assert num_in_use(replica) == [held] * num_ranks
    replica.compute(TOKENS)
    replica.settle()
    replica.reset()
    assert num_in_use(replica) == [0] * num_ranks


@both_ranks
@hybrids
@pytest.mark.parametrize("how", ["reset", "detach"])
@pytest.mark.parametrize("by_hand", [True, False])
def test_reset_and_detach_with_everything_in_flight(
    make_replica: MakeReplica, kind: str, num_ranks: int, how: str, *, by_hand: bool
) -> None:
    """A load that was started, one that was not, an offload, what a batch may read, a forward."""
    replica = make_replica(
        num_ranks, model=KINDS[kind], by_hand=by_hand, settings=LinkerSettings(staged_percent=100)
    )
    second = range(101, 113)
    replica.store(TOKENS)
    replica.store(second)
    for rank in replica.ranks:
        rank.stores[PoolName.KV].hanging.add("read")
    replica.ask("b", second)
    replica.queue("a", TOKENS)
    replica.launch()
    replica.load_back("b", second)
    assert replica.compute(TOKENS[:6])
    assert replica.alike(lambda rank: rank.begin(range(201, 207)) is not None)
    replica.match("c", range(301, 307))
    if how == "reset":
        replica.reset()
        assert num_in_use(replica) == [0] * num_ranks
    else:
        replica.alike(lambda rank: rank.cache.detach())
        replica.check()
        assert replica.alike(lambda rank: rank.device_pages(TOKENS)) == 3
        replica.retire()
        replica.check()
    for rank in replica.ranks:
        rank.stores[PoolName.KV].hanging.clear()
        rank.stores[PoolName.KV].gate.set()
        rank.transfer()
        rank.stores[PoolName.KV].gate.clear()
    if how == "detach":
        for rank in replica.ranks:
            rank.end(rank.computing[0])
        replica.evict()
        replica.attach()
    assert num_in_use(replica) == [0] * num_ranks
    assert replica.restore("d", second).landed == ("d",)
    assert replica.match("d", second).device_prefix_len == len(second)
