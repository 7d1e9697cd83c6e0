"""What raises in the middle of a call: no slot, lock, room or operation is left behind.

A beginning takes back what it had at once; everything else `reset` brings back, or `detach`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import pytest
from tests.integration.linker.layer_wise import RunningRequest
from tests.integration.linker.models import FULL_SWA, FULL_SWA_MAMBA
from tests.integration.linker.sequences import key_of
from typing_extensions import override

from radixlink_contracts import ExternalMatch, LoadMode, RequestId, StepReport
from radixlink_contracts.errors import AgreementError, ContractError
from radixlink_linker import LinkerSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from tests.integration.linker.conftest import MakeReplica
    from tests.integration.linker.models import Model
    from tests.integration.linker.rank import Rank

    Break: TypeAlias = Callable[[pytest.MonkeyPatch, Rank], None]

TOKENS = range(1, 9)
"""Four pages."""


class LeftError(Exception):
    """What a test lets a part raise."""


def leave(*_: object) -> NoReturn:
    raise LeftError


class LeavingRequest(RunningRequest):
    """A request whose engine cannot be told where its KV lies."""

    @override
    def repoint(self, start: int, indices: torch.Tensor) -> None:
        raise LeftError


def break_state_pool(patched: pytest.MonkeyPatch, rank: Rank) -> None:
    """The last component's pool, when the others have their slots."""
    assert rank.device.states is not None
    patched.setattr(rank.device.states, "alloc", leave)


def break_clock(patched: pytest.MonkeyPatch, rank: Rank) -> None:
    """The clock, which an operation's deadline is taken from."""
    patched.setattr(rank.clock, "now", leave)


def break_pairing(patched: pytest.MonkeyPatch, rank: Rank) -> None:
    """The pairing of windows, when the linker has the load."""
    assert rank.device.pair is not None
    patched.setattr(rank.device.pair, "map_full_to_swa", leave)


def break_store(patched: pytest.MonkeyPatch, rank: Rank) -> None:
    """A linker that lets no `Exception` out of its store, and has queued the load."""
    load = rank.linker.load

    def cancelled(*args: object) -> NoReturn:
        load(*args)  # type: ignore[arg-type]
        raise asyncio.CancelledError

    patched.setattr(rank.linker, "load", cancelled)


def break_engine(patched: pytest.MonkeyPatch, rank: Rank) -> None:
    """Nothing here: the request is it."""


def holdings(rank: Rank) -> object:
    """Slots, locks, operations and room."""
    held = rank.cache.holders()
    return rank.slots.available_sizes, held.locks, held.operations, held.staged, held.num_retired


@pytest.mark.parametrize(
    ("broken", "model", "mode", "error"),
    [
        (break_state_pool, FULL_SWA_MAMBA, LoadMode.STAGED, LeftError),
        (break_clock, FULL_SWA_MAMBA, LoadMode.STAGED, LeftError),
        (break_store, FULL_SWA_MAMBA, LoadMode.STAGED, asyncio.CancelledError),
        (break_pairing, FULL_SWA_MAMBA, LoadMode.STAGED, LeftError),
        (break_engine, FULL_SWA, LoadMode.LAYER_WISE, LeftError),
    ],
)
def test_a_load_that_raises_in_its_beginning_leaves_nothing(
    make_replica: MakeReplica,
    broken: Break,
    model: Model,
    mode: LoadMode,
    error: type[BaseException],
) -> None:
    replica = make_replica(model=model)
    replica.store(TOKENS)
    (rank,) = replica.ranks
    assert replica.ask("a", TOKENS).external is ExternalMatch.HIT
    before = holdings(rank)
    request = LeavingRequest(request_id=RequestId("a"), key=key_of(TOKENS))
    with pytest.MonkeyPatch.context() as patched:
        broken(patched, rank)
        with pytest.raises(error):
            rank.cache.init_load_back(request, mode)
    assert holdings(rank) == before
    replica.check()
    # Others may have gone through with it, so nothing goes on before all have reset.
    with pytest.raises(AgreementError):
        rank.cache.step()
    replica.reset()
    assert replica.restore("b", TOKENS).landed == ("b",)


def break_insert(patched: pytest.MonkeyPatch, rank: Rank) -> None:
    """The tree has not taken the slots."""
    patched.setattr(rank.tree, "insert", leave)


def break_lock(patched: pytest.MonkeyPatch, rank: Rank) -> None:
    """The tree has taken them, and the lock is still on the old end."""
    patched.setattr(rank.tree, "inc_lock_ref", leave)


def break_unlock(patched: pytest.MonkeyPatch, rank: Rank) -> None:
    """The lock is on both ends."""
    patched.setattr(rank.tree, "dec_lock_ref", leave)


def break_end(patched: pytest.MonkeyPatch, rank: Rank) -> None:
    """The load is published and still holds its lock."""
    wrapper = rank.cache._wrapper
    assert wrapper is not None
    patched.setattr(wrapper._loads, "tell_waiters", leave)


def in_use(rank: Rank) -> list[int]:
    """Slots of each pool that somebody holds."""
    sizes, available = rank.slots.sizes, rank.slots.available_sizes
    return [size - left for size, left in zip(sizes, available, strict=True)]


@pytest.mark.parametrize("model", [FULL_SWA, FULL_SWA_MAMBA])
@pytest.mark.parametrize("broken", [break_insert, break_lock, break_unlock, break_end])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_commit_that_raises_is_brought_back_by_a_reset(
    make_replica: MakeReplica, broken: Break, model: Model, num_ranks: int
) -> None:
    replica = make_replica(num_ranks, model=model, by_hand=True)
    replica.store(TOKENS)
    waiting = replica.queue("a", TOKENS)
    replica.start()
    for rank in replica.ranks:
        rank.by_hand.run(waiting.operation_id)
    # The others go through with it.
    with pytest.MonkeyPatch.context() as patched:
        broken(patched, replica.ranks[0])
        first, *others = replica.outcomes(lambda rank: rank.cache.step())
    assert isinstance(first, LeftError)
    assert [isinstance(other, StepReport) for other in others] == [True] * (num_ranks - 1)
    replica.reset()
    for rank in replica.ranks:
        rank.check_idle()
        assert in_use(rank) == [0] * len(rank.slots.sizes)
    replica.queue("b", TOKENS)
    replica.start()
    assert replica.settle().landed == ("b",)


@pytest.mark.parametrize("broken", [break_insert, break_lock, break_unlock, break_end])
def test_a_commit_that_raises_leaves_nothing_behind_a_detach(
    make_replica: MakeReplica, broken: Break
) -> None:
    replica = make_replica(model=FULL_SWA_MAMBA, by_hand=True)
    replica.store(TOKENS)
    waiting = replica.queue("a", TOKENS)
    replica.start()
    (rank,) = replica.ranks
    rank.by_hand.run(waiting.operation_id)
    with pytest.MonkeyPatch.context() as patched:
        broken(patched, rank)
        with pytest.raises(LeftError):
            rank.cache.step()
    rank.cache.detach()
    rank.check_idle()
    assert rank.cache.holders().locks == ()
    replica.evict()
    assert in_use(rank) == [0, 0, 0]


@pytest.mark.parametrize("at", ["the clock", "the tree"])
def test_an_offload_that_raises_in_its_beginning_leaves_nothing(
    make_replica: MakeReplica, at: str
) -> None:
    replica = make_replica()
    (rank,) = replica.ranks
    computation = rank.begin(TOKENS)
    assert computation is not None
    with pytest.MonkeyPatch.context() as patched:
        if at == "the clock":
            break_clock(patched, rank)
        else:
            patched.setattr(rank.tree, "mark_offload_pending", leave)
        with pytest.raises(LeftError):
            rank.end(computation)
    # The tree has its slots already.
    rank.computing.remove(computation)
    rank.cache.dec_lock_ref(computation.receipt.to_dec_params())
    held = rank.cache.holders()
    assert (held.locks, held.operations) == ((), ())
    replica.reset()
    replica.store(TOKENS)
    assert replica.restore("a", TOKENS).landed == ("a",)


def test_a_touch_that_raises_in_its_beginning_leaves_nothing(make_replica: MakeReplica) -> None:
    replica = make_replica(settings=LinkerSettings(step_timeout_s=20.0, touch_after_uses=1))
    (rank,) = replica.ranks
    replica.compute(TOKENS)
    replica.settle()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rank.tree, "mark_touch_pending", leave)
        computation = rank.begin(TOKENS)
        assert computation is not None
        with pytest.raises(LeftError):
            rank.end(computation)
    rank.computing.remove(computation)
    rank.cache.dec_lock_ref(computation.receipt.to_dec_params())
    assert rank.cache.holders().operations == ()
    replica.reset()
    replica.store(TOKENS)
    assert replica.restore("a", TOKENS).landed == ("a",)


def break_tree(patched: pytest.MonkeyPatch, rank: Rank) -> None:
    """The tree, before it has decided anything."""
    for name in ("match", "insert", "evict"):
        patched.setattr(rank.tree, name, leave)


def break_free(patched: pytest.MonkeyPatch, rank: Rank) -> None:
    """The allocators, when the tree has decided."""
    assert rank.device.states is not None
    patched.setattr(rank.allocator, "free", leave)
    patched.setattr(rank.device.full, "free", leave)
    patched.setattr(rank.device.states, "free", leave)


@pytest.mark.parametrize("broken", [break_tree, break_free])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("call", ["insert", "evict"])
def test_an_insert_or_evict_that_raises_is_the_last_before_a_reset(
    make_replica: MakeReplica, call: str, num_ranks: int, broken: Break
) -> None:
    replica = make_replica(num_ranks, model=FULL_SWA_MAMBA)
    # The second brings what the first has put into the tree by then.
    for rank in replica.ranks:
        computations = [rank.begin(TOKENS), rank.begin(TOKENS)]
        assert computations[0] is not None
        rank.end(computations[0])
    replica.settle()
    first, *others = replica.ranks
    for rank in others:
        rank.end(rank.computing[0]) if call == "insert" else rank.evict()
    with pytest.MonkeyPatch.context() as patched:
        broken(patched, first)
        with pytest.raises(LeftError):
            first.end(first.computing[0]) if call == "insert" else first.evict()
    with pytest.raises(AgreementError, match=call):
        first.cache.step()
    if call == "insert":
        (left,) = first.computing
        first.computing.remove(left)
        first.cache.dec_lock_ref(left.receipt.to_dec_params())
        if broken is break_tree:
            # It was not even asked: they are the engine's.
            first._give_back(left.slots, left.state)
        else:
            assert left.state is not None
            first._give_back(left.slots[:0], left.state)
    replica.reset()
    for rank in replica.ranks:
        assert in_use(rank) == [0, 0, 0]
    replica.store(TOKENS)
    assert replica.restore("a", TOKENS).landed == ("a",)


def test_a_match_that_raises_in_the_tree_is_the_last_before_a_reset(
    make_replica: MakeReplica,
) -> None:
    replica = make_replica()
    (rank,) = replica.ranks
    with pytest.MonkeyPatch.context() as patched:
        break_tree(patched, rank)
        with pytest.raises(LeftError):
            rank.match("a", TOKENS)
    with pytest.raises(AgreementError, match="match_prefix"):
        rank.cache.step()
    replica.reset()
    replica.store(TOKENS)
    assert replica.restore("a", TOKENS).landed == ("a",)


def test_a_fork_that_raises_is_the_last_before_a_reset(make_replica: MakeReplica) -> None:
    replica = make_replica(model=FULL_SWA_MAMBA)
    replica.compute(TOKENS)
    replica.settle()
    (rank,) = replica.ranks
    receipt = rank.lock(TOKENS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rank.slots, "_copy_state", leave)
        with pytest.raises(LeftError):
            rank.cache.fork_state(receipt)
    with pytest.raises(AgreementError, match="fork_state"):
        rank.cache.step()
    rank.unlock()
    replica.reset()
    assert in_use(rank) == [0, 0, 0]


def test_slots_whose_retirement_raises_are_free_after_a_reset(make_replica: MakeReplica) -> None:
    replica = make_replica()
    (rank,) = replica.ranks
    computations = [rank.begin(TOKENS), rank.begin(TOKENS)]
    replica.launch()
    for computation in computations:
        assert computation is not None
        rank.end(computation)
    assert rank.slots.num_retired == len(TOKENS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rank.allocator._inner, "free", leave)
        with pytest.raises(LeftError):
            rank.cache.batch_retired(1)
    with pytest.raises(AgreementError, match="batch_retired"):
        rank.cache.step()
    replica.reset()
    assert in_use(rank) == [0]


def test_what_is_refused_is_no_end(make_replica: MakeReplica) -> None:
    replica = make_replica()
    (rank,) = replica.ranks
    with pytest.raises(ContractError, match="expected at most 0 batches"):
        rank.cache.batch_retired(1)
    with pytest.raises(ContractError):
        rank.evict(swa_num_tokens=2)
    replica.store(TOKENS)
    assert replica.restore("a", TOKENS).landed == ("a",)
