"""Windows and states come back with the full pages, each at the boundaries where it can."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
from tests.integration.linker.models import FULL_MAMBA, FULL_SWA, FULL_SWA_MAMBA, KINDS

from radixlink_contracts import (
    ExternalMatch,
    IncLockRefParams,
    LoadMiss,
    LoadWaiting,
    PoolName,
)
from radixlink_contracts.errors import ContractError, StaleHandleError
from radixlink_linker import LinkerSettings

if TYPE_CHECKING:
    from tests.integration.linker.conftest import MakeReplica
    from tests.integration.linker.models import Model
    from tests.integration.linker.replica import Replica


both_ranks = pytest.mark.parametrize("num_ranks", [1, 2])


def pages(model: Model, num_pages: int) -> range:
    """The first pages of the only sequence."""
    return range(1, 1 + num_pages * model.page_size)


def in_use(replica: Replica) -> list[tuple[int, ...]]:
    """Slots in use of each pool, on each rank."""
    return [
        tuple(
            size - available
            for size, available in zip(rank.slots.sizes, rank.slots.available_sizes, strict=True)
        )
        for rank in replica.ranks
    ]


@both_ranks
@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_all_that_a_sequence_needs_comes_back_with_its_bytes(
    make_replica: MakeReplica, kind: str, page_size: int, num_ranks: int
) -> None:
    """K1, with the linker's own thread: `compute` reads what it hits, and copies the state."""
    window = page_size + 1 if KINDS[kind].window else 0
    model = attrs.evolve(KINDS[kind], page_size=page_size, window=window)
    replica = make_replica(num_ranks, model=model, settings=LinkerSettings(staged_percent=100))
    tokens = pages(model, 6)
    replica.store(tokens)
    assert in_use(replica) == [(0,) * len(model.pools)] * num_ranks
    # A page that is not whole changes nothing.
    asked = [*tokens, *range(900, 899 + page_size)]
    hit = replica.ask("a", asked)
    assert (hit.device_prefix_len, hit.host_hit_length) == (0, len(tokens))
    assert isinstance(replica.load_back("a", asked), LoadWaiting)
    replica.start()
    assert replica.settle().landed == ("a",)
    device = replica.match("a", asked)
    assert (device.external, device.device_prefix_len) == (ExternalMatch.NOT_ASKED, len(tokens))
    # Full pages, a window of two pages, one state.
    expected = {
        PoolName.KV: len(tokens),
        PoolName.SWA: 2 * page_size,
        PoolName.MAMBA: 1,
    }
    assert in_use(replica) == [tuple(expected[pool] for pool in model.pools)] * num_ranks
    assert replica.compute(pages(model, 8))
    assert replica.settle().num_offloads_failed == 0


# -- boundaries ------------------------------------------------------------------------------------


@both_ranks
@pytest.mark.parametrize("model", [FULL_MAMBA, FULL_SWA_MAMBA], ids=["mamba", "both"])
def test_a_prompt_is_restored_to_its_last_state(
    make_replica: MakeReplica, model: Model, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, model=model)
    for boundary in (2, 5):
        replica.compute(pages(model, boundary))
    replica.settle()
    replica.evict()
    for asked, restored in ((1, 0), (2, 2), (4, 2), (5, 5), (6, 5)):
        name = f"of {asked}"
        hit = replica.ask(name, pages(model, asked))
        assert hit.host_hit_length == restored * model.page_size
        if restored:
            assert replica.restore(f"again {asked}", pages(model, asked)).landed
            assert replica.match(name, pages(model, asked)).device_prefix_len == (
                restored * model.page_size
            )
            replica.release(f"again {asked}")
        replica.release(name)
        replica.evict()


@both_ranks
def test_a_state_that_one_rank_lost_ends_the_prefix_before_it_on_all(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    """K2, for a state: only the intersection of what the ranks have is safe."""
    model = FULL_SWA_MAMBA
    replica = make_replica(num_ranks, model=model)
    for boundary in (2, 4, 6):
        replica.compute(pages(model, boundary))
    replica.settle()
    replica.evict()
    tokens = pages(model, 6)
    replica.ranks[-1].lose(tokens, 5, pool=PoolName.MAMBA)
    replica.ranks[0].lose(tokens, 3, pool=PoolName.MAMBA)
    assert replica.restore("a", tokens).landed == ("a",)
    assert replica.match("a", tokens).device_prefix_len == 2 * model.page_size
    # The rest is computed, and its states are in the store again.
    assert replica.compute(tokens)
    replica.settle()
    for rank in replica.ranks:
        assert 5 in rank.stores[PoolName.MAMBA].contains(rank.page_keys(tokens))


@both_ranks
def test_a_lost_page_of_a_window_ends_the_prefix_before_it(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    model = FULL_SWA
    replica = make_replica(num_ranks, model=model)
    replica.store(pages(model, 6))
    tokens = pages(model, 6)
    # A window is two pages: behind the third page there is one again at the fifth.
    replica.ranks[-1].lose(tokens, 2, pool=PoolName.SWA)
    lengths = [
        replica.ask(str(asked), pages(model, asked)).host_hit_length // model.page_size
        for asked in range(1, 7)
    ]
    assert lengths == [1, 2, 2, 2, 5, 6]
    assert replica.restore("a", pages(model, 4)).landed == ("a",)
    assert replica.match("a", pages(model, 4)).device_prefix_len == 2 * model.page_size


@both_ranks
@pytest.mark.parametrize("model", [FULL_SWA, FULL_SWA_MAMBA], ids=["swa", "both"])
def test_a_tail_shorter_than_a_window_leans_on_the_device(
    make_replica: MakeReplica, model: Model, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, model=model)
    for boundary in (5, 6):
        replica.compute(pages(model, boundary))
    replica.settle()
    replica.evict(model.page_size)
    tokens = pages(model, 6)
    assert replica.alike(lambda rank: rank.device_pages(tokens)) == 5
    replica.queue("a", tokens)
    # One page of each, though a window is two: the other is on the device, and locked.
    assert in_use(replica) == [(12, 12, 2)[: len(model.pools)]] * num_ranks
    replica.evict_windows()
    replica.start()
    assert replica.settle().landed == ("a",)
    assert replica.match("a", tokens).device_prefix_len == len(tokens)
    assert replica.compute(pages(model, 7))


# -- what is on the device already -----------------------------------------------------------------


@both_ranks
@pytest.mark.parametrize("model", [FULL_SWA, FULL_SWA_MAMBA], ids=["swa", "both"])
def test_an_evicted_window_comes_back_below_full_pages_that_stayed(
    make_replica: MakeReplica, model: Model, num_ranks: int
) -> None:
    """Nobody reads the tombstones, so they take the new full slots, and their own go back."""
    replica = make_replica(num_ranks, model=model)
    tokens = pages(model, 6)
    replica.compute(tokens)
    replica.settle()
    # So that the pages are inner ones: a leaf would go whole.
    replica.compute(pages(model, 7))
    replica.settle()
    replica.evict_windows(6 * model.page_size)
    found = replica.ask("a", tokens)
    assert (found.device_prefix_len, found.full_kv_hit_length) == (0, len(tokens))
    assert replica.restore("a", tokens).landed == ("a",)
    assert replica.match("a", tokens).device_prefix_len == len(tokens)
    assert replica.compute(pages(model, 8))


@both_ranks
@pytest.mark.parametrize("model", [FULL_SWA, FULL_SWA_MAMBA], ids=["swa", "both"])
def test_an_evicted_window_moves_to_the_full_slots_that_somebody_reads(
    make_replica: MakeReplica, model: Model, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, model=model, by_hand=True)
    tokens = pages(model, 6)
    replica.compute(tokens)
    replica.settle()
    # A request that has moved on past its window still reads the full pages.
    full = []
    for rank in replica.ranks:
        receipt = rank.lock(tokens, early=True)
        full.append(rank.tree.path_indices(receipt.node_id).tolist())
    replica.evict_windows()
    assert replica.ask("a", tokens).device_prefix_len == 0
    replica.queue("a", tokens)
    replica.launch()
    assert replica.settle().landed == ("a",)
    assert replica.match("a", tokens).device_prefix_len == len(tokens)
    for rank, slots in zip(replica.ranks, full, strict=True):
        assert rank.tree.path_indices(rank.lock(tokens).node_id).tolist() == slots
    # No full page was loaded for it, which would have to go now.
    assert [rank.slots.num_retired for rank in replica.ranks] == [0] * num_ranks
    replica.retire()
    assert [used[0] for used in in_use(replica)] == [len(tokens)] * num_ranks


@both_ranks
@pytest.mark.parametrize("model", [FULL_MAMBA, FULL_SWA_MAMBA], ids=["mamba", "both"])
def test_an_evicted_state_comes_back_to_a_node_that_stayed(
    make_replica: MakeReplica, model: Model, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, model=model)
    tokens = pages(model, 6)
    replica.compute(tokens)
    # So that the states are inner ones.
    replica.compute(pages(model, 7))
    replica.settle()
    assert replica.evict_states(1) == 1
    assert replica.ask("a", tokens).device_prefix_len == 0
    assert replica.restore("a", tokens).landed == ("a",)
    assert replica.match("a", tokens).device_prefix_len == len(tokens)
    assert [used[0] for used in in_use(replica)] == [7 * model.page_size] * num_ranks


# -- the same pages meanwhile ----------------------------------------------------------------------


@both_ranks
@pytest.mark.parametrize("kind", ["full+swa", "full+mamba", "full+swa+mamba"])
def test_what_was_computed_meanwhile_is_kept_and_the_load_goes_back_once(
    make_replica: MakeReplica, kind: str, num_ranks: int
) -> None:
    model = KINDS[kind]
    replica = make_replica(num_ranks, model=model, by_hand=True)
    tokens = pages(model, 6)
    replica.store(tokens)
    replica.queue("a", tokens)
    replica.launch()
    replica.compute(tokens)
    computed = in_use(replica)
    # What the load has been given is beside that.
    held = {PoolName.KV: 12, PoolName.SWA: 4, PoolName.MAMBA: 1}
    assert (
        computed
        == [
            tuple(
                {PoolName.KV: 12, PoolName.SWA: 12, PoolName.MAMBA: 1}[pool] + held[pool]
                for pool in model.pools
            )
        ]
        * num_ranks
    )
    assert replica.settle().landed == ("a",)
    # A batch runs that may read them.
    expected = sum(held[pool] for pool in model.pools if pool is not PoolName.SWA)
    assert [rank.slots.num_retired for rank in replica.ranks] == [expected] * num_ranks
    replica.retire()
    assert (
        in_use(replica)
        == [
            tuple(
                {PoolName.KV: 12, PoolName.SWA: 12, PoolName.MAMBA: 1}[pool] for pool in model.pools
            )
        ]
        * num_ranks
    )
    assert replica.match("a", tokens).device_prefix_len == len(tokens)


# -- no room ---------------------------------------------------------------------------------------


@both_ranks
def test_a_load_without_a_state_to_be_had_gives_all_it_took_back(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    """C5: full and window slots were taken by then."""
    model = attrs.evolve(FULL_SWA_MAMBA, num_states=2)
    replica = make_replica(num_ranks, model=model)
    tokens = pages(model, 4)
    replica.store(tokens)
    assert replica.ask("a", tokens).external is ExternalMatch.HIT
    # Forwards hold every state.
    for other in (range(101, 105), range(201, 205)):
        assert replica.alike(lambda rank, other=other: rank.begin(other) is not None)  # type: ignore[misc]
    before = in_use(replica)
    answer = replica.load_back("a", tokens)
    assert isinstance(answer, LoadMiss)
    assert "no room" in answer.reason
    assert in_use(replica) == before
    assert replica.ranks[0].cache.num_outstanding == 0
    for rank in replica.ranks:
        rank.end(rank.computing[0])
    # There is a state to evict now.
    replica.settle()
    assert isinstance(replica.load_back("a", tokens), LoadWaiting)


@both_ranks
def test_a_load_without_a_window_to_be_had_gives_all_it_took_back(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    model = attrs.evolve(FULL_SWA, num_swa_pages=4)
    replica = make_replica(num_ranks, model=model)
    tokens = pages(model, 4)
    replica.store(tokens)
    assert replica.ask("a", tokens).external is ExternalMatch.HIT
    assert replica.alike(lambda rank: rank.begin(range(101, 107)) is not None)
    before = in_use(replica)
    assert isinstance(replica.load_back("a", tokens), LoadMiss)
    assert in_use(replica) == before


@both_ranks
def test_a_miss_for_lack_of_windows_leaves_the_one_that_the_match_ended_at(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, model=attrs.evolve(FULL_SWA, num_swa_pages=8))
    tokens = range(1, 13)
    replica.compute(tokens[:2])
    replica.compute(tokens)
    replica.settle()
    replica.together(lambda rank: rank.lock(tokens[:2]))
    replica.evict_windows()
    replica.together(lambda rank: rank.unlock())
    # Somebody computes with all windows but that one.
    pair = replica.ranks[0].device.pair
    assert pair is not None
    free = pair.swa.available_size
    others = replica.together(lambda rank: rank.begin(range(100, 100 + free)))
    assert replica.ask("a", tokens).device_prefix_len == 2
    assert isinstance(replica.load_back("a", tokens), LoadMiss)
    # The request computes behind what it matched.
    assert replica.alike(lambda rank: rank.device_pages(tokens)) == 1
    for rank, other in zip(replica.ranks, others, strict=True):
        assert other is not None
        rank.end(other, insert=False)


@both_ranks
@pytest.mark.parametrize(
    "model",
    [attrs.evolve(FULL_SWA, num_swa_pages=16), attrs.evolve(FULL_MAMBA, num_states=7)],
    ids=["windows", "states"],
)
def test_loads_wait_for_the_room_that_windows_and_states_may_take(
    make_replica: MakeReplica, model: Model, num_ranks: int
) -> None:
    """A quarter of a pool: two windows of two pages; of seven states, one."""
    replica = make_replica(num_ranks, model=model, num_pages=64)
    prompts = {name: range(at, at + 6) for name, at in (("a", 1), ("b", 101), ("c", 201))}
    for tokens in prompts.values():
        replica.store(tokens)
    for name, tokens in prompts.items():
        assert replica.ask(name, tokens).external is ExternalMatch.HIT
    at_once = 2 if model.window else 1
    waiting = [replica.load_back(name, tokens) for name, tokens in prompts.items()]
    assert all(isinstance(answer, LoadWaiting) for answer in waiting)
    operations = {answer.operation_id for answer in waiting if isinstance(answer, LoadWaiting)}
    assert len(operations) == at_once
    replica.start()
    report = replica.settle()
    landed = tuple(prompts)[:at_once]
    assert report.landed == landed
    assert set(report.ready) == prompts.keys() - set(landed)
    for name in prompts.keys() - set(landed):
        assert replica.restore(name, prompts[name]).landed == (name,)


# -- a copy of a state -----------------------------------------------------------------------------


@both_ranks
def test_a_fork_is_a_copy_and_the_checkpoint_stays(
    make_replica: MakeReplica, num_ranks: int
) -> None:
    """J4, at admission: `begin` compares both, and then writes to the copy alone."""
    model = FULL_SWA_MAMBA
    replica = make_replica(num_ranks, model=model)
    tokens = pages(model, 4)
    replica.store(tokens)
    assert replica.restore("a", tokens).landed == ("a",)
    states = [used[-1] for used in in_use(replica)]
    for turn in range(1, 4):
        longer = [*tokens, *range(100 * turn, 100 * turn + 2)]
        assert replica.alike(lambda rank, longer=longer: rank.begin(longer) is not None)  # type: ignore[misc]
        replica.check()
    assert [used[-1] for used in in_use(replica)] == [count + 3 for count in states]


def test_there_is_no_fork_of_no_state(make_replica: MakeReplica) -> None:
    replica = make_replica(model=FULL_MAMBA)
    (rank,) = replica.ranks
    rank.compute(pages(FULL_MAMBA, 4))
    root = rank.cache.inc_lock_ref(IncLockRefParams(node_id=rank.tree.root))
    with pytest.raises(ContractError, match="protects none"):
        rank.cache.fork_state(root)
    rank.cache.dec_lock_ref(root.to_dec_params())
    receipt = rank.lock(pages(FULL_MAMBA, 4))
    rank.unlock()
    with pytest.raises(StaleHandleError):
        rank.cache.fork_state(receipt)
    assert in_use(replica)[0][1] == 1


def test_without_states_there_is_no_fork(make_replica: MakeReplica) -> None:
    replica = make_replica(model=FULL_SWA)
    (rank,) = replica.ranks
    rank.compute(pages(FULL_SWA, 4))
    receipt = rank.lock(pages(FULL_SWA, 4))
    with pytest.raises(ContractError, match="protects none"):
        rank.cache.fork_state(receipt)


def test_a_fork_without_room_is_none_and_the_checkpoint_is_not_evicted_for_it(
    make_replica: MakeReplica,
) -> None:
    model = attrs.evolve(FULL_MAMBA, num_states=2)
    replica = make_replica(model=model)
    (rank,) = replica.ranks
    rank.compute(pages(model, 2))
    assert rank.begin(range(101, 105)) is not None
    assert rank.begin(pages(model, 4)) is None
    replica.check()
    assert rank.device_pages(pages(model, 2)) == 2
