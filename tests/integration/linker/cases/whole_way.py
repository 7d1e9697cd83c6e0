"""The whole way: compute, store, evict, ask, load, and read the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.integration.linker.cases.registry import LAYERS, case

from radixlink_contracts import ExternalMatch

if TYPE_CHECKING:
    from tests.integration.linker.cases.job import Job
    from tests.integration.linker.models import Model

TOKENS = range(1, 9)
"""Four pages."""


@case("K1")
def what_was_stored_comes_back_with_its_bytes(job: Job, model: Model) -> None:
    engine = job.engine(model, by_hand=False)
    engine.compute(TOKENS)
    assert engine.settle().num_offloads_failed == 0
    assert all(node.stored for node in engine.nodes())
    engine.drop()
    assert engine.device_pages(TOKENS) == 0
    for turn in ("first", "second"):
        hit = engine.ask(turn, TOKENS)
        assert (hit.external, hit.device_prefix_len, hit.host_hit_length) == (
            ExternalMatch.HIT,
            0,
            8,
        )
        assert engine.restore(turn, TOKENS).landed == (turn,)
        device = engine.match(turn, TOKENS)
        assert (device.external, device.device_prefix_len) == (ExternalMatch.NOT_ASKED, 8)
        # A forward reads what it goes on from: full pages, window, and a copy of the state.
        engine.compute([*TOKENS, 9, 10])
        assert engine.settle().num_offloads_failed == 0
        engine.release(turn)
        engine.drop()
        assert engine.in_use == (0,) * len(engine.slots.sizes)


@case("K1", kinds=LAYERS)
def what_was_stored_comes_back_layer_by_layer(job: Job, model: Model) -> None:
    engine = job.engine(model, by_hand=False)
    engine.store_all(TOKENS)
    running = engine.admit("a", TOKENS)
    batch = engine.launch()
    assert engine.finish_loads(batch).landed == ("a",)
    running.check_bytes(engine)
    engine.retire()
    assert engine.match("a", TOKENS).device_prefix_len == 8
    engine.compute([*TOKENS, 9, 10])
    assert engine.settle().num_offloads_failed == 0


@case("K1", "rule 3")
def a_tail_is_loaded_behind_what_the_device_has(job: Job, model: Model) -> None:
    engine = job.engine(model, by_hand=False)
    engine.store_all(TOKENS[:4], TOKENS)
    engine.compute(TOKENS[:4])
    engine.settle()
    hit = engine.ask("a", TOKENS)
    assert (hit.device_prefix_len, hit.host_hit_length) == (4, 4)
    opened = engine.store.calls.count("open")
    assert engine.restore("a", TOKENS).landed == ("a",)
    assert engine.store.calls.count("open") == opened + 1
    assert engine.match("a", TOKENS).device_prefix_len == 8
    assert engine.in_use[0] == 8


@case("K1", "rule 2")
def who_needs_a_page_that_is_being_loaded_waits_for_it(job: Job, model: Model) -> None:
    engine = job.engine(model)
    engine.store_all(TOKENS)
    operation = engine.queue("a", TOKENS)
    used = engine.in_use
    longer = [*TOKENS, 9, 10]
    for _ in range(2):
        match = engine.match("b", longer)
        assert (match.external, match.waiting_on) == (ExternalMatch.UNKNOWN, operation)
    assert engine.in_use == used
    engine.start()
    report = engine.settle()
    assert (report.landed, report.ready) == (("a",), ("b",))
    assert engine.match("b", longer).device_prefix_len == 8
    assert engine.by_hand.calls.count("load") == 1


@case("K1", "rule 10")
def a_request_that_grows_and_is_restored_again_keeps_one_lock(job: Job, model: Model) -> None:
    engine = job.engine(model)
    engine.store_all(TOKENS[:4], TOKENS)
    for end in (4, 8):
        assert engine.restore("a", TOKENS[:end]).landed == ("a",)
        (kept,) = engine.cache.holders().locks
        assert kept.request_id == "a"
        assert engine.tree.path_indices(kept.node_id).numel() == end
    engine.release("a")
    assert engine.cache.holders().locks == ()
