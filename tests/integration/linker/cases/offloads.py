"""Offloads: a node is stored when every rank says so, whatever became of it meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.integration.linker.cases.registry import case

from radixlink_contracts import Completion, OperationId, Outcome, PoolName, StepReport

if TYPE_CHECKING:
    from tests.integration.linker.cases.job import Engine, Job
    from tests.integration.linker.models import Model

    from radixlink_contracts import TreeNodeView

TOKENS = range(1, 9)
"""Four pages."""


def end_offloads(engine: Engine, *, stored: bool) -> None:
    """This rank says how everything that it holds ended."""
    for op in engine.by_hand.started:
        if stored:
            engine.by_hand.run(op)
        else:
            engine.by_hand.complete(op, Outcome.FAILED)


def nodes_of(engine: Engine, operations: set[OperationId]) -> list[TreeNodeView]:
    return [node for node in engine.nodes() if node.pending_operation in operations]


@case("D1")
def an_offload_holds_one_lock_and_claims_nothing_before_all_confirmed(
    job: Job, model: Model
) -> None:
    for stored in (False, True):
        engine = job.engine(model)
        engine.compute(TOKENS)
        operations = engine.by_hand.started
        before = engine.cache.holders().locks
        assert tuple(lock.op for lock in before) == operations
        assert [node.pending_operation for node in engine.nodes()] == list(operations)
        assert not any(node.stored for node in engine.nodes())
        assert engine.step() == StepReport()
        assert engine.cache.holders().locks == before
        end_offloads(engine, stored=stored)
        count = len(operations)
        assert engine.step() == (
            StepReport(num_offloads_stored=count)
            if stored
            else StepReport(num_offloads_failed=count)
        )
        assert engine.cache.holders().locks == ()
        for node in engine.nodes():
            assert (node.stored, node.pending_operation) == (stored, None)


@case("D2", "K1")
def what_is_stored_is_neither_locked_nor_offered_again(job: Job, model: Model) -> None:
    engine = job.engine(model)
    engine.compute(TOKENS)
    engine.settle()
    calls = list(engine.by_hand.calls)
    engine.compute(TOKENS)
    assert engine.cache.num_outstanding == 0
    assert engine.cache.holders().locks == ()
    # What was restored is stored, too.
    engine.drop()
    engine.restore("a", TOKENS)
    engine.compute(TOKENS)
    assert engine.cache.num_outstanding == 0
    assert engine.by_hand.calls.count("offload") == calls.count("offload")


@case("D3", "D4", "D5", "K4")
def a_split_in_flight_is_followed_by_lock_and_claim(job: Job, model: Model) -> None:
    for stored in (False, True):
        engine = job.engine(model)
        engine.compute(TOKENS)
        operations = set(engine.by_hand.started)
        whole = len(nodes_of(engine, operations))
        # A fork parts the first node; its own part is another offload.
        engine.compute([*TOKENS[:2], 21, 22])
        assert len(nodes_of(engine, operations)) == whole + 1
        others = set(engine.by_hand.started) - operations
        assert set(engine.locks_of_operations()) == operations | others
        parts = [node.node_id for node in nodes_of(engine, operations)]
        end_offloads(engine, stored=stored)
        engine.step()
        for part in parts:
            node = engine.tree.node(part)
            assert (node.stored, node.pending_operation) == (stored, None)
        assert engine.cache.holders().locks == ()
        offered = engine.by_hand.calls.count("offload")
        engine.compute(TOKENS)
        assert engine.settle().num_offloads_failed == 0
        if stored:
            assert engine.by_hand.calls.count("offload") == offered
        assert all(engine.tree.node(part).stored for part in parts)
        engine.drop()
        assert engine.restore("a", TOKENS).landed == ("a",)


@case("D7")
def an_offload_moves_all_of_a_node_under_its_own_keys(job: Job, model: Model) -> None:
    engine = job.engine(model)
    engine.compute(TOKENS)
    keys = list(engine.page_keys(TOKENS))
    pair = engine.device.pair
    at = 0
    for node in engine.nodes():
        assert node.pending_operation is not None
        transfers = {
            transfer.name: transfer for transfer in engine.transfers_of(node.pending_operation)
        }
        num_pages = node.num_tokens // model.page_size
        full = transfers.pop(PoolName.KV)
        assert list(full.keys.resolve()) == keys[at : at + num_pages]
        assert full.device_indices is not None
        assert full.device_indices.tolist() == node.device_indices.tolist()
        if pair is not None:
            window = transfers.pop(PoolName.SWA)
            assert list(window.keys.resolve()) == keys[at : at + num_pages]
            assert window.device_indices is not None
            partners = pair.swa_indices(node.device_indices)
            assert window.device_indices.tolist() == partners.tolist()
        at += num_pages
        if node.mamba_slot is not None:
            state = transfers.pop(PoolName.MAMBA)
            assert list(state.keys.resolve()) == keys[at - 1 : at]
            assert state.device_indices is not None
            assert state.device_indices.tolist() == [node.mamba_slot]
        assert not transfers
    assert at == len(keys)


@case("D11")
def an_offload_that_one_rank_does_not_take_leaves_its_node_eligible(job: Job, model: Model) -> None:
    for fault in ("refusing", "raising"):
        engine = job.engine(model)
        faults = getattr(engine.by_hand, fault)
        if job.is_last:
            faults.add("offload")
        engine.compute(TOKENS)
        minted = engine.alike(len(engine.locks_of_operations()))
        assert engine.settle() == StepReport(num_offloads_failed=minted)
        for node in engine.nodes():
            assert (node.stored, node.pending_operation) == (False, None)
        assert engine.cache.holders().locks == ()
        faults.clear()
        engine.compute(TOKENS)
        assert engine.settle() == StepReport(num_offloads_stored=minted)


@case("D13")
def completions_of_nothing_say_nothing(job: Job, model: Model) -> None:
    engine = job.engine(model)
    engine.compute(TOKENS)
    before = engine.standing()
    last = engine.by_hand.started[-1]
    if job.is_last:
        late = OperationId(last + 1000)
        for completions in (engine.by_hand._completed_loads, engine.by_hand._completed_offloads):
            completions.append(Completion(op=late, outcome=Outcome.LANDED, quiesced=True))
    assert engine.step() == StepReport()
    assert engine.standing() == before
    assert engine.cache.counters is not None
    assert engine.cache.counters.late_completions == (2 if job.is_last else 0)
    assert engine.settle().num_offloads_failed == 0


@case("D17")
def a_path_is_offloaded_from_the_root_down(job: Job, model: Model) -> None:
    engine = job.engine(model, attach=False)
    for end in (2, 4, 6):
        engine.compute(TOKENS[:end])
    engine.attach()
    engine.compute(TOKENS[:6])
    assert [len(engine.transfers_of(op)[0].keys) for op in engine.by_hand.started] == [1, 1, 1]
    starts = [engine.transfers_of(op)[0].keys.resolve() for op in engine.by_hand.started]
    assert [list(keys) for keys in starts] == [[key] for key in engine.page_keys(TOKENS[:6])]


@case("D18")
def what_is_stored_or_on_its_way_does_not_go_again_with_a_leaf(job: Job, model: Model) -> None:
    engine = job.engine(model)
    engine.compute(TOKENS[:2])
    engine.settle()
    engine.compute(TOKENS[:4])
    (middle,) = engine.by_hand.started
    engine.compute(TOKENS[:6])
    assert engine.by_hand.started[0] == middle
    (leaf,) = engine.by_hand.started[1:]
    (key,) = engine.transfers_of(leaf)[0].keys.resolve()
    assert key == list(engine.page_keys(TOKENS[:6]))[-1]


@case("E4")
def an_operation_is_decided_by_no_rank_before_all_have_ended_it(job: Job, model: Model) -> None:
    engine = job.engine(model)
    engine.compute(TOKENS)
    operations = engine.by_hand.started
    before = engine.standing()
    for rank in range(job.size):
        assert engine.standing() == before
        frames = engine.num_frames
        if job.rank == rank:
            end_offloads(engine, stored=True)
        report = engine.step()
        assert report.num_offloads_stored == (len(operations) if rank == job.last else 0)
        assert engine.num_frames == frames + job.frame


@case("rule 4", least_ranks=2)
def a_rank_that_failed_is_agreed_in_the_next_frame_whatever_the_others_do(
    job: Job, model: Model
) -> None:
    for others in ("are pending", "have ended", "let go of nothing"):
        engine = job.engine(model)
        engine.compute(TOKENS)
        operations = engine.by_hand.started
        for op in operations:
            if job.is_last:
                engine.by_hand.complete(op, Outcome.FAILED)
            elif others == "have ended":
                engine.by_hand.run(op)
            elif others == "let go of nothing":
                engine.by_hand.complete(op, Outcome.LANDED, quiesced=False)
        assert engine.step() == StepReport(num_offloads_failed=len(operations))
        # Slots and locks wait for those that touch them still.
        left = [] if others == "have ended" else list(operations)
        assert engine.locks_of_operations() == left
        assert not any(node.stored for node in engine.nodes())
        engine.settle()
        assert engine.locks_of_operations() == []
