"""Reset, close, detach, and what is left after any fault: nothing, and the tree as it was."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

import attrs
from tests.integration.linker.cases.job import SETTINGS
from tests.integration.linker.cases.registry import LAYERS, case

from radixlink_contracts import ExternalMatch, Outcome, StepReport
from radixlink_testing.linkers import SyncLinker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.integration.linker.cases.job import Engine, Job
    from tests.integration.linker.models import Model

    from radixlink_contracts import DecLockRefParams, PoolName

TOKENS = range(1, 9)
"""Four pages."""
OTHER = range(101, 109)


def have_a_load_and_an_offload(engine: Engine) -> int:
    """A load that was started and the offloads of another sequence; how many they are."""
    engine.store_all(TOKENS)
    engine.queue("a", TOKENS)
    engine.start()
    engine.compute(OTHER)
    operations = engine.locks_of_operations()
    assert len(operations) >= 2
    engine.match("b", range(201, 209))
    return len(operations)


@contextmanager
def unlocks_among_calls(engine: Engine) -> Iterator[list[str]]:
    """What the linker is called for, and each lock that is released, in their order."""
    release, calls = engine.tree.dec_lock_ref, engine.by_hand.calls

    def watched(params: DecLockRefParams) -> None:
        calls.append("unlock")
        release(params)

    calls.clear()
    with patch.object(engine.tree, "dec_lock_ref", watched):
        yield calls


@case("E1")
def reset_ends_transfers_then_gives_locks_back(job: Job, model: Model) -> None:
    engine = job.engine(model)
    num_operations = have_a_load_and_an_offload(engine)
    with unlocks_among_calls(engine) as calls:
        engine.reset()
        assert calls == ["reset", *["unlock"] * num_operations]
        engine.reset()
        assert calls.count("unlock") == num_operations
    assert engine.in_use == (0,) * len(engine.slots.sizes)
    assert engine.cache.holders().operations == ()
    assert engine.restore("c", TOKENS).landed == ("c",)


@case("E2")
def close_ends_transfers_then_gives_locks_back(job: Job, model: Model) -> None:
    engine = job.engine(model)
    num_operations = have_a_load_and_an_offload(engine)
    with unlocks_among_calls(engine) as calls:
        engine.cache.release_host_resources()
        # The linker's own close resets it again.
        assert calls == ["reset", *["unlock"] * num_operations, "close", "reset"]
        engine.cache.release_host_resources()
        assert calls.count("unlock") == num_operations
    for node in engine.nodes():
        assert (node.stored, node.pending_operation) == (False, None)
    assert engine.cache.holders().locks == ()
    assert engine.cache.num_outstanding == 0


@case("E1", "rule 11")
def detach_keeps_the_tree_and_no_more_of_the_store(job: Job, model: Model) -> None:
    engine = job.engine(model)
    have_a_load_and_an_offload(engine)
    engine.cache.detach()
    engine.cache.detach()
    assert engine.cache.holders().locks == ()
    assert engine.device_pages(OTHER) == 4
    frames = engine.num_frames
    for _ in range(65):
        assert engine.step() == StepReport()
    assert engine.num_frames == frames
    assert engine.match("c", TOKENS).external is ExternalMatch.NOT_ASKED
    engine.attach()
    engine.drop()
    assert engine.restore("d", TOKENS).landed == ("d",)


# -- after any fault -------------------------------------------------------------------------------


def refuse(engine: Engine) -> None:
    engine.by_hand.refusing.add("load")


def raise_in_load(engine: Engine) -> None:
    engine.by_hand.raising.add("load")


def raise_in_start(engine: Engine) -> None:
    engine.by_hand.raising.add("start_layer_wise_loading")


def faults_of_stores(engine: Engine) -> dict[str, Callable[[Engine], None]]:
    """What the store of each pool may do, when the load comes to it."""

    def loses(pool: PoolName) -> Callable[[Engine], None]:
        return lambda one: one.lose(TOKENS, 3, pool=pool)

    def raises(pool: PoolName, call: str) -> Callable[[Engine], None]:
        return lambda one: one.stores[pool].raising.add(call)

    faults: dict[str, Callable[[Engine], None]] = {}
    for pool in engine.model.pools:
        faults[f"{pool} loses"] = loses(pool)
        for call in ("open", "read"):
            faults[f"{pool} {call} raises"] = raises(pool, call)
    return faults


def mend(engine: Engine) -> None:
    """No fault is left."""
    if isinstance(engine.linker, SyncLinker):
        engine.linker.refusing.clear()
        engine.linker.raising.clear()
    for store in engine.stores.values():
        store.raising.clear()
        store.lost.clear()


@case("rule 3", "rule 10")
def after_any_failed_staged_load_all_is_as_before(job: Job, model: Model) -> None:
    engine = job.engine(model, settings=attrs.evolve(SETTINGS, miss_steps=0))
    engine.store_all(TOKENS)
    faults = {
        "refused": refuse,
        "load raises": raise_in_load,
        "start raises": raise_in_start,
        **faults_of_stores(engine),
    }
    for name, fault in faults.items():
        assert engine.ask(name, TOKENS).external is ExternalMatch.HIT, name
        before = engine.standing()
        if job.is_last:
            fault(engine)
        engine.load_back(name, TOKENS)
        engine.start()
        if job.is_last:
            engine.transfer()
        # In the next frame, whatever the others do.
        assert engine.step().failed == (name,), name
        engine.settle()
        assert engine.standing() == before, name
        mend(engine)
        engine.release(name)
        engine.step()
    assert engine.restore("at last", TOKENS).landed == ("at last",)


@case("rule 3", "rule 6")
def after_a_load_that_was_late_or_given_up_all_is_as_before(job: Job, model: Model) -> None:
    engine = job.engine(model, settings=attrs.evolve(SETTINGS, miss_steps=0))
    engine.store_all(TOKENS)
    for name in ("never started", "late", "failed before it let go"):
        engine.ask(name, TOKENS)
        before = engine.standing()
        operation = engine.queue(name, TOKENS)
        if name == "never started":
            engine.clock.advance(30.0)
        else:
            engine.start()
            if not job.is_last:
                engine.by_hand.run(operation)
            elif name == "late":
                engine.clock.advance(30.0)
            else:
                engine.by_hand.complete(operation, Outcome.FAILED, quiesced=False)
        assert engine.step().failed == (name,)
        if name != "never started":
            # A deadline says failed, never quiesced.
            assert engine.step() == StepReport()
            assert engine.locks_of_operations() == [operation]
            if job.is_last:
                assert engine.by_hand.run(operation) is Outcome.FAILED
        engine.settle()
        assert engine.standing() == before, name
        engine.start()
        engine.release(name)
    assert engine.restore("at last", TOKENS).landed == ("at last",)


@case("rule 1", "rule 3", kinds=LAYERS)
def after_any_failed_layer_wise_load_all_is_as_before(job: Job, model: Model) -> None:
    engine = job.engine(model, by_hand=False, settings=attrs.evolve(SETTINGS, miss_steps=0))
    engine.store_all(TOKENS)
    for name, fault in faults_of_stores(engine).items():
        assert engine.ask(name, TOKENS).external is ExternalMatch.HIT, name
        before = engine.standing()
        if job.is_last:
            fault(engine)
        running = engine.admit(name, TOKENS)
        batch = engine.launch()
        assert engine.finish_loads(batch).failed == (name,), name
        # A forward runs on the slots still.
        assert engine.standing().available < before.available
        engine.settle()
        engine.retire()
        assert engine.standing() == before, name
        # The request was told where its KV would lie, and of nothing else.
        assert len(running.told) == 1
        mend(engine)
        engine.release(name)
        engine.step()
    running = engine.admit("at last", TOKENS)
    assert engine.finish_loads(engine.launch()).landed == ("at last",)
    running.check_bytes(engine)
    engine.retire()
