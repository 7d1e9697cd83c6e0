"""Loads: what they hold, what can be seen of them, what COMMIT keeps, and what a refusal costs."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import attrs
from tests.integration.linker.cases.registry import HYBRIDS, LAYERS, WINDOWS, case

from radixlink_contracts import (
    POOL_OF,
    ComponentType,
    ExternalLinkerLoadPhase,
    ExternalMatch,
    IncLockRefParams,
    LoadMiss,
    PoolName,
    RequestId,
    StepReport,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.linker.cases.job import Engine, Job
    from tests.integration.linker.models import Model

    from radixlink_contracts import LinkerComponent, NodeId

TOKENS = range(1, 9)
"""Four pages."""


@case("B1")
def a_load_holds_one_lock_until_all_have_landed_it(job: Job, model: Model) -> None:
    engine = job.engine(model)
    engine.store_all(TOKENS)
    engine.compute(TOKENS[:4])
    engine.settle()
    operation = engine.queue("a", TOKENS)
    (lock,) = engine.cache.holders().locks
    assert lock.op == operation
    assert engine.tree.path_indices(lock.node_id).numel() == 4
    engine.start()
    # The ranks end one after the other; the last of them lets it go.
    for rank in range(job.size):
        assert engine.cache.holders().locks == (lock,)
        if job.rank == rank:
            engine.by_hand.run(operation)
        assert engine.step().landed == (("a",) if rank == job.last else ())
    (kept,) = engine.cache.holders().locks
    assert (kept.op, kept.request_id) == (None, "a")
    assert kept.receipt_id != lock.receipt_id
    assert engine.tree.path_indices(kept.node_id).numel() == 8
    engine.release("a")
    assert engine.cache.holders().locks == ()


@case("B2", "C9", "K6")
def a_queued_load_whose_request_goes_is_taken_back(job: Job, model: Model) -> None:
    engine = job.engine(model)
    engine.store_all(TOKENS)
    engine.ask("a", TOKENS)
    before = engine.standing()
    operation = engine.queue("a", TOKENS)
    assert list(engine.by_hand.queued) == [operation]
    engine.release("a")
    assert list(engine.by_hand.queued) == []
    # Slots and lock go back when every rank says that it touches them no more.
    assert engine.locks_of_operations() == [operation]
    assert engine.step() == StepReport()
    assert engine.standing() == before
    assert engine.cache.explain(RequestId("a")) is None
    engine.start()
    assert engine.by_hand.started == ()
    # It poisoned nothing.
    assert engine.restore("b", TOKENS).landed == ("b",)


@case("C9", "K6")
def a_started_load_whose_request_goes_is_decided_for_nobody(job: Job, model: Model) -> None:
    engine = job.engine(model)
    engine.store_all(TOKENS)
    operation = engine.queue("a", TOKENS)
    engine.start()
    engine.release("a")
    assert "cancel_queued_load" not in engine.by_hand.calls
    assert engine.by_hand.started == (operation,)
    assert engine.settle() == StepReport()
    assert engine.device_pages(TOKENS) == 4
    assert engine.cache.holders().locks == ()


@case("K6", kinds=LAYERS)
def an_admitted_load_whose_request_goes_before_the_start_moves_nothing(
    job: Job, model: Model
) -> None:
    engine = job.engine(model, by_hand=False)
    engine.store_all(TOKENS)
    engine.ask("a", TOKENS)
    before = engine.standing()
    engine.admit("a", TOKENS)
    calls = list(engine.store.calls)
    engine.release("a")
    batch = engine.launch()
    assert batch is None
    assert engine.finish_loads(batch) == StepReport()
    engine.step()
    engine.retire()
    assert engine.standing() == before
    assert engine.store.calls == calls
    running = engine.admit("b", TOKENS)
    assert engine.finish_loads(engine.launch()).landed == ("b",)
    running.check_bytes(engine)
    engine.retire()


@case("B3", kinds=("full+swa",))
def commit_keeps_what_the_tree_took_of_each_component(job: Job, model: Model) -> None:
    """Of four loaded pages somebody computes the first and third meanwhile, window and all.

    The tree takes the second and fourth: of both components, or the windows alone where somebody
    reads its own full pages. All its windows are beside its full slots then.
    """
    for is_read in (False, True):
        engine = job.engine(attrs.evolve(model, window=8))
        pair = engine.device.pair
        assert pair is not None
        prefix, whole = range(1, 9), range(1, 17)
        engine.store_all(whole)
        engine.compute(prefix)
        engine.settle()
        operation = engine.queue("a", whole)
        full, window = engine.transfers_of(operation)
        assert (full.name, window.name) == (PoolName.KV, PoolName.SWA)
        loaded, loaded_window = full.device_indices, window.device_indices
        assert loaded is not None
        assert loaded_window is not None
        assert len(loaded) == len(loaded_window) == 8
        engine.start()
        for end, floor in ((10, 0), (12, 12), (14, 12), (16, 16)):
            compute_above(engine, whole[:end], floor)
        while engine.cache.num_outstanding > 1:
            for other in engine.by_hand.started:
                if other != operation:
                    engine.by_hand.run(other)
            engine.step()
        before = [node.device_indices.tolist() for node in engine.nodes()[-4:]]
        assert [node.has_swa for node in engine.nodes()[-4:]] == [True, False, True, False]
        if is_read:
            lock_full(engine, engine.nodes()[-1].node_id)
        engine.by_hand.run(operation)
        assert engine.step().landed == ("a",)
        pages = [node.device_indices for node in engine.nodes()[-4:]]
        taken = loaded.tolist()
        assert [page.tolist() for page in pages] == (
            before if is_read else [before[0], taken[2:4], before[2], taken[6:8]]
        )
        assert pair.swa_indices(pages[1]).tolist() == loaded_window[2:4].tolist()
        assert pair.swa_indices(pages[3]).tolist() == loaded_window[6:8].tolist()
        assert engine.match("a", whole).device_prefix_len == 16
        engine.settle()
        assert engine.in_use == (16, 16)


def lock_full(engine: Engine, node_id: NodeId) -> None:
    """Somebody reads the full pages of a path."""
    receipt = engine.cache.inc_lock_ref(IncLockRefParams(node_id=node_id))
    engine.locks.append(engine.tree.dec_swa_lock_only(receipt.to_dec_params()))


def compute_above(engine: Engine, tokens: range, floor: int) -> None:
    """A forward whose own window is gone below a token by the time that it inserts."""
    computation = engine.begin(tokens)
    assert computation is not None
    pair = engine.device.pair
    assert pair is not None
    if floor > computation.prefix_len:
        pair.free_swa(computation.slots[: floor - computation.prefix_len])
    engine.computing[-1] = attrs.evolve(computation, floor=floor)
    engine.end(engine.computing[-1])


@case("C1")
def nothing_of_a_staged_load_can_be_seen_before_its_verdict(job: Job, model: Model) -> None:
    engine = job.engine(model)
    engine.store_all(TOKENS)
    engine.ask("a", TOKENS)
    before = engine.standing()
    operation = engine.queue("a", TOKENS)
    engine.start()
    engine.transfer()
    # All bytes are there, on this rank.
    assert engine.standing().nodes == before.nodes
    assert engine.device_pages(TOKENS) == 0
    other = engine.match("b", TOKENS)
    assert (other.device_prefix_len, other.last_device_node) == (0, 0)
    assert (other.external, other.waiting_on) == (ExternalMatch.UNKNOWN, operation)
    report = engine.step()
    assert (report.landed, report.ready) == (("a",), ("b",))
    assert engine.match("b", TOKENS).device_prefix_len == 8


@case("C1", kinds=LAYERS)
def nothing_of_a_layer_wise_load_can_be_seen_before_its_verdict(job: Job, model: Model) -> None:
    engine = job.engine(model, by_hand=False)
    engine.store_all(TOKENS)
    engine.ask("a", TOKENS)
    before = engine.standing()
    running = engine.admit("a", TOKENS)
    # Its request knows its slots, and nobody else does.
    assert len(running.slots) == 8
    batch = engine.launch()
    engine.transfer()
    assert engine.standing().nodes == before.nodes
    assert engine.device_pages(TOKENS) == 0
    assert engine.match("b", TOKENS).waiting_on is not None
    report = engine.finish_loads(batch)
    assert (report.landed, report.ready) == (("a",), ("b",))
    running.check_bytes(engine)
    assert len(running.told) == 1
    engine.retire()
    assert engine.match("b", TOKENS).device_prefix_len == 8


@case("C5", kinds=HYBRIDS)
def without_room_for_its_last_part_a_load_gives_the_others_back(job: Job, model: Model) -> None:
    engine = job.engine(attrs.evolve(model, num_states=2, num_swa_pages=8))
    engine.store_all(TOKENS)
    assert engine.ask("a", TOKENS).external is ExternalMatch.HIT
    # Forwards hold every state, or all windows but one page.
    for tokens in (range(101, 103), range(201, 203)) if model.states else (range(101, 115),):
        assert engine.begin(tokens) is not None
    before = engine.standing()
    given_back: list[ComponentType] = []
    with ExitStack() as watches:
        for component in engine.components:
            watches.enter_context(watch_aborts(component, given_back))
        answer = engine.load_back("a", TOKENS)
    assert isinstance(answer, LoadMiss)
    assert engine.standing() == before
    # In reverse; the last part had taken nothing.
    assert given_back == list(engine.tree.components[-2::-1])
    assert "load" not in engine.by_hand.calls
    assert engine.cache.num_outstanding == 0


@contextmanager
def watch_aborts(component: LinkerComponent, seen: list[ComponentType]) -> Iterator[None]:
    """Note which component is told to give up a load."""
    update = component.update_external_linker_load

    def watched(phase: ExternalLinkerLoadPhase, **others: Any) -> None:  # noqa: ANN401 -- handed on
        if phase is ExternalLinkerLoadPhase.ABORT:
            seen.append(component.component_type)
        update(phase, **others)

    with patch.object(component, "update_external_linker_load", watched):
        yield


@case("C7")
def to_finish_nothing_costs_nothing(job: Job, model: Model) -> None:
    engine = job.engine(model)
    engine.store_all(TOKENS)
    engine.queue("a", TOKENS)
    before, frames = list(engine.by_hand.calls), engine.num_frames
    assert engine.finish_loads(None) == StepReport()
    assert engine.by_hand.calls == before
    assert engine.num_frames == frames


@case("rule 3", kinds=WINDOWS)
def what_the_device_lost_since_the_lookup_is_a_miss_until_it_is_asked_for(
    job: Job, model: Model
) -> None:
    for kind in (ComponentType.SWA, ComponentType.MAMBA)[: len(model.pools) - 1]:
        engine = job.engine(model)
        engine.compute(TOKENS[:6])
        engine.compute(TOKENS)
        # What is behind them makes these nodes inner ones: a leaf would go whole.
        engine.compute(range(1, 11))
        assert engine.settle().num_offloads_failed == 0
        # A window of two pages: the first of it is gone, the last and the state stay.
        assert engine.alike(engine.evict(0, swa_num_tokens=6).swa_num_tokens_evicted) == 6
        store = engine.stores[POOL_OF[kind]]
        if job.is_last:
            # No store is asked for what the device has.
            engine.lose(TOKENS, 3, pool=POOL_OF[kind])
        hit = engine.ask("a", TOKENS)
        assert (hit.device_prefix_len, hit.host_hit_length, hit.full_kv_hit_length) == (0, 8, 8)
        if kind is ComponentType.SWA:
            assert engine.alike(engine.evict(0, swa_num_tokens=2).swa_num_tokens_evicted) == 2
        else:
            assert engine.alike(engine.evict(0, mamba_num=2).mamba_num_evicted) == 2
        before = engine.standing()
        answer = engine.load_back("a", TOKENS)
        assert answer == LoadMiss(reason=f"the device lost {kind.name} that it had at the lookup")
        assert engine.standing() == before
        assert "load" not in engine.by_hand.calls
        engine.release("a")
        # What the last rank lacks is asked for by now, and ends the prefix before it.
        assert engine.ask("b", TOKENS).host_hit_length == 6
        engine.release("b")
        store.lost.clear()
        assert engine.restore("c", TOKENS).landed == ("c",)
        assert engine.match("c", TOKENS).device_prefix_len == 8


@case("D11", "C3", "C4")
def a_load_that_one_rank_does_not_take_is_its_verdict_and_no_other_branch(
    job: Job, model: Model
) -> None:
    for fault in ("refusing", "raising"):
        for started in (False, True):
            engine = job.engine(model)
            engine.store_all(TOKENS)
            engine.ask("a", TOKENS)
            before = engine.standing()
            faults = getattr(engine.by_hand, fault)
            if job.is_last:
                faults.add("load")
            engine.queue("a", TOKENS)
            if started:
                engine.start()
            # What the others do does not count.
            assert engine.step().failed == ("a",)
            engine.settle()
            assert engine.standing() == before
            faults.clear()
            assert engine.match("a", TOKENS).external is ExternalMatch.MISS
