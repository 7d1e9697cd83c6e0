"""Touches: what stays hot on the device is used in the store too, and what is gone there is stored again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.integration.linker.models import KINDS

from radixlink_contracts import OperationKind, Outcome, PoolName
from radixlink_linker import LinkerSettings

if TYPE_CHECKING:
    from tests.integration.linker.conftest import MakeReplica
    from tests.integration.linker.rank import Rank
    from tests.integration.linker.replica import Replica

    from radixlink_contracts import OperationId

TOKENS = range(1, 9)
"""Four pages."""
SETTINGS = LinkerSettings(step_timeout_s=20.0, touch_after_uses=6)
"""Three computations are six uses."""

both = pytest.mark.parametrize("num_ranks", [1, 2])


def use(replica: Replica, times: int = 3) -> None:
    """Use the tree, for something else that is stored."""
    for _ in range(times):
        replica.compute([99, 99])
        replica.settle()


def stored(rank: Rank) -> list[bool]:
    return [node.stored for node in rank.nodes()]


def touches(replica: Replica) -> list[tuple[int, int]]:
    """Touches that landed and that failed, on each rank."""
    found = []
    for rank in replica.ranks:
        assert rank.cache.counters is not None
        found.append((rank.cache.counters.touches_landed, rank.cache.counters.touches_failed))
    return found


def begin_touch(replica: Replica) -> OperationId:
    """Store a sequence and use it long after; the touch that this begins, in a replica by hand."""
    replica.compute(TOKENS)
    replica.settle()
    use(replica)
    replica.compute(TOKENS)
    (operation,) = replica.ranks[0].by_hand.started
    (status,) = replica.ranks[0].cache.holders().operations
    assert (status.op, status.kind, status.slots) == (operation, OperationKind.TOUCH, {})
    assert replica.ranks[0].cache.num_outstanding == 1
    return operation


@both
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_used_long_after_it_was_stored_is_touched(
    make_replica: MakeReplica, num_ranks: int, kind: str
) -> None:
    replica = make_replica(num_ranks, model=KINDS[kind], settings=SETTINGS, num_pages=64)
    replica.compute(TOKENS)
    replica.settle()
    use(replica)
    before = touches(replica)
    asked = [rank.store.calls.count("contains") for rank in replica.ranks]
    replica.compute(TOKENS)
    replica.settle()
    assert [landed for landed, _ in touches(replica)] > [landed for landed, _ in before]
    assert all(failed == 0 for _, failed in touches(replica))
    for rank, count in zip(replica.ranks, asked, strict=True):
        assert count < rank.store.calls.count("contains") <= count + len(rank.nodes())
        assert all(stored(rank))
    # Used again at once, it is hot no more.
    replica.compute(TOKENS)
    assert replica.ranks[0].cache.num_outstanding == 0


@both
def test_a_page_lost_on_one_rank_is_stored_again_by_all(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, settings=SETTINGS)
    replica.compute(TOKENS)
    replica.settle()
    use(replica)
    loser = replica.ranks[-1]
    loser.lose(TOKENS, 2)
    replica.compute(TOKENS)
    replica.settle()
    assert touches(replica) == [(0, 1)] * num_ranks
    for rank in replica.ranks:
        assert False in stored(rank)
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_stored == 1
    for rank in replica.ranks:
        assert all(stored(rank))
        assert rank.stored_pages(TOKENS) == 4
    replica.evict()
    assert replica.ask("a", TOKENS).host_hit_length == 8


@both
@pytest.mark.parametrize("pool", [PoolName.SWA, PoolName.MAMBA])
def test_a_window_or_state_lost_on_one_rank_is_stored_again(
    make_replica: MakeReplica, num_ranks: int, pool: PoolName
) -> None:
    kind = "full+swa" if pool is PoolName.SWA else "full+mamba"
    replica = make_replica(num_ranks, model=KINDS[kind], settings=SETTINGS, num_pages=64)
    replica.compute(TOKENS)
    replica.settle()
    use(replica)
    replica.ranks[-1].lose(TOKENS, 3, pool=pool)
    replica.compute(TOKENS)
    replica.settle()
    assert [failed for _, failed in touches(replica)] == [1] * num_ranks
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_stored == 1
    replica.evict()
    assert replica.ask("a", TOKENS).host_hit_length == 8


@both
@pytest.mark.parametrize("fault", ["refusing", "raising"])
def test_a_touch_that_one_rank_refuses_fails_on_all(
    make_replica: MakeReplica, num_ranks: int, fault: str
) -> None:
    replica = make_replica(num_ranks, by_hand=True, settings=SETTINGS)
    replica.compute(TOKENS)
    replica.settle()
    use(replica)
    getattr(replica.ranks[-1].by_hand, fault).add("touch")
    replica.compute(TOKENS)
    replica.settle()
    assert touches(replica) == [(0, 1)] * num_ranks
    getattr(replica.ranks[-1].by_hand, fault).clear()
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_stored == 1


@both
@pytest.mark.parametrize("success", [False, True])
def test_a_split_in_between_is_followed(
    make_replica: MakeReplica, num_ranks: int, *, success: bool
) -> None:
    replica = make_replica(num_ranks, by_hand=True, settings=SETTINGS)
    operation = begin_touch(replica)
    assert replica.match("a", [*TOKENS[:4], 77, 77]).device_prefix_len == 4
    replica.release("a")
    for rank in replica.ranks:
        if success:
            rank.by_hand.run(operation)
        else:
            rank.by_hand.complete(operation, Outcome.FAILED)
    replica.settle()
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_stored == (0 if success else 2)


@both
def test_a_node_that_is_evicted_in_between_is_nothing_more(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, by_hand=True, settings=SETTINGS)
    operation = begin_touch(replica)
    # A touch holds no lock.
    assert replica.evict() == 10
    for rank in replica.ranks:
        rank.by_hand.complete(operation, Outcome.FAILED)
    replica.settle()
    assert touches(replica) == [(0, 1)] * num_ranks
    assert replica.ask("a", TOKENS).host_hit_length == 8


@both
@pytest.mark.parametrize("how", ["reset", "detach"])
def test_reset_and_detach_drop_touches(make_replica: MakeReplica, num_ranks: int, how: str) -> None:
    replica = make_replica(num_ranks, by_hand=True, settings=SETTINGS)
    begin_touch(replica)
    if how == "reset":
        replica.reset()
    else:
        replica.alike(lambda rank: rank.cache.detach())
        replica.attach()
    assert replica.ranks[0].cache.num_outstanding == 0
    replica.compute(TOKENS)
    assert replica.settle().num_offloads_stored == 1


@both
def test_there_are_no_more_touches_than_the_cap(make_replica: MakeReplica, num_ranks: int) -> None:
    settings = LinkerSettings(step_timeout_s=20.0, touch_after_uses=6, max_touches=2)
    replica = make_replica(num_ranks, by_hand=True, settings=settings)
    for end in (2, 4, 6, 8):
        replica.compute(TOKENS[:end])
    replica.settle()
    use(replica)
    replica.compute(TOKENS)
    assert replica.ranks[0].cache.num_outstanding == 2
    # What is over the cap waits for nothing: it is named again.
    replica.settle()
    assert touches(replica) == [(2, 0)] * num_ranks
    replica.compute(TOKENS)
    replica.settle()
    assert touches(replica) == [(4, 0)] * num_ranks


@both
def test_a_late_touch_has_failed(make_replica: MakeReplica, num_ranks: int) -> None:
    replica = make_replica(num_ranks, by_hand=True, settings=SETTINGS)
    begin_touch(replica)
    replica.clock.advance(SETTINGS.transfer_timeout_s)
    replica.step()
    assert replica.ranks[0].cache.num_outstanding == 0
    assert touches(replica) == [(0, 1)] * num_ranks
