"""Stores that fail, hang, lie or hold damaged bytes: no wrong token, no hang, no slot lost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch
from packages.sglang.tests import hooked_store
from packages.sglang.tests.sglang_engine import (
    STATE_GRID,
    Answer,
    Core,
    Kind,
    SglangEngine,
    attention_rows,
    linker_config,
    state_value,
)
from packages.sglang.tests.sglang_import import part

from radixlink_contracts import OperationId
from radixlink_contracts.errors import (
    InvalidTransitionError,
    StaleHandleError,
    TransferTimeoutError,
)
from radixlink_sglang._operations import Ticket
from radixlink_testing.faults import Fault, FaultKind, StoreCall
from radixlink_testing.pages import page_keys

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PROMPT = list(range(100, 200))
LONGER = [*PROMPT, 7]
RESTORABLE = {Kind.STATES: STATE_GRID}
"""How much of the prompt comes back where it is not all of it."""
COMPUTED = Answer(on_device=0, restored=0, wrong_rows=0, aborted=False)


def hooked(place: Path, **more: object) -> Mapping[str, object]:
    return linker_config(hooked_store.NAME, str(place / "store"), **more)


def flip_a_bit(segment: Path, payload: bytes) -> None:
    """Damage one stored page, which is found by its bytes."""
    data = bytearray(segment.read_bytes())
    place = data.index(payload)
    assert data.find(payload, place + 1) < 0
    with segment.open("r+b") as file:
        file.seek(place + len(payload) // 2)
        byte = data[place + len(payload) // 2]
        file.write(bytes([byte ^ 1]))


def rows_of(page: int, layer: int, width: tuple[int, ...]) -> bytes:
    """What layer's keys of one page of the prompt are stored as."""
    return bytes_of(attention_rows(PROMPT, layer, 0, width, 0)[page * 4 : page * 4 + 4])


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize(
    ("kind", "segment", "page", "layer", "width"),
    [
        (Kind.FULL, "kv", 5, 2, (2, 8)),
        (Kind.LATENT, "kv", 5, 3, (1, 12)),
        (Kind.WINDOWS, "kv", 5, 0, (2, 8)),
        (Kind.WINDOWS, "swa", 24, 3, (2, 8)),
        (Kind.STATES, "kv", 5, 2, (2, 8)),
    ],
)
def test_a_flipped_bit_never_becomes_an_answer(
    tmp_path: Path, kind: Kind, segment: str, page: int, layer: int, width: tuple[int, ...]
) -> None:
    config = linker_config("file", str(tmp_path / "store"))
    with SglangEngine(config, kind=kind) as engine:
        engine.serve(PROMPT)
        engine.forget()
        flip_a_bit(tmp_path / "store" / f"{segment}.0-of-1.segment", rows_of(page, layer, width))
        assert [answer.aborted for answer in engine.serve(LONGER)] == [True]
        engine.forget()
        assert engine.serve(LONGER) == [COMPUTED]
        engine.forget()
    with SglangEngine(config, kind=kind) as engine:
        # The one that was asked again stored the page anew.
        (answer,) = engine.serve([*LONGER, 8])
        assert answer.restored >= RESTORABLE.get(kind, 100)
        assert answer.wrong_rows == 0
        assert not answer.aborted


def test_a_flipped_bit_of_a_state_never_becomes_an_answer(tmp_path: Path) -> None:
    config = linker_config("file", str(tmp_path / "store"))
    with SglangEngine(config, kind=Kind.STATES) as engine:
        engine.serve(PROMPT)
        engine.forget()
        *_, layer = Kind.STATES.layers[2]
        temporal = engine.requests.mamba_pool.mamba_cache.temporal[-1, 0]
        stored = torch.full_like(temporal, state_value(PROMPT[:STATE_GRID], layer, 0, 0))
        flip_a_bit(tmp_path / "store" / "mamba.0-of-1.segment", bytes_of(stored))
        assert [answer.aborted for answer in engine.serve(LONGER)] == [True]
        engine.forget()
        assert engine.serve(LONGER) == [COMPUTED]
        engine.forget()


@pytest.mark.parametrize("core", Core)
@pytest.mark.parametrize("call", [StoreCall.OPEN, StoreCall.READ])
def test_a_load_that_fails_ends_its_request_and_loses_no_slot(
    tmp_path: Path, core: Core, call: StoreCall
) -> None:
    with SglangEngine(hooked(tmp_path), core=core) as engine:
        engine.serve(PROMPT)
        engine.forget()
        (store,) = hooked_store.opened()
        store.plan(Fault(call, FaultKind.FAILS))
        fresh = [3] * 30
        failed, beside = engine.serve(LONGER, fresh)
        assert failed.aborted
        assert beside == COMPUTED
        store.release()
        engine.forget()
        # Not tried again at once, although the store is well and has it all.
        assert engine.serve(LONGER) == [COMPUTED]
        engine.forget()
        assert engine.serve([*fresh, 7])[0].restored == 28


def test_one_load_that_fails_ends_every_load_of_its_batch(tmp_path: Path) -> None:
    other = list(range(1000, 1040))
    with SglangEngine(hooked(tmp_path)) as engine:
        engine.serve(PROMPT, other)
        engine.forget()
        (store,) = hooked_store.opened()
        store.plan(Fault(StoreCall.OPEN, FaultKind.FAILS, first=1))
        assert [one.aborted for one in engine.serve(LONGER, [*other, 7])] == [True, True]
        store.release()
        engine.forget()
        # Only the pages that failed count as missing.
        first, second = engine.serve(LONGER, [*other, 7])
        assert (first.restored, second.restored) == (100, 0)


def test_a_lookup_that_fails_is_a_miss(tmp_path: Path) -> None:
    with SglangEngine(hooked(tmp_path)) as engine:
        engine.serve(PROMPT)
        engine.forget()
        (store,) = hooked_store.opened()
        store.plan(Fault(StoreCall.CONTAINS, FaultKind.FAILS, count=1))
        assert engine.serve(LONGER) == [COMPUTED]
        engine.forget()
        assert engine.serve(LONGER)[0].restored == 100


def test_a_lookup_that_hangs_is_a_miss_and_so_are_those_after_it(tmp_path: Path) -> None:
    with SglangEngine(hooked(tmp_path, lookup_timeout_s=1.0)) as engine:
        engine.serve(PROMPT)
        engine.forget()
        (store,) = hooked_store.opened()
        store.plan(Fault(StoreCall.CONTAINS, FaultKind.HANGS, count=1))
        asked = len(store.calls)
        assert engine.serve(LONGER) == [COMPUTED]
        engine.forget()
        assert engine.serve(LONGER) == [COMPUTED]
        assert store.calls[asked:].count("contains") == 1
        store.release()


def test_a_store_that_says_it_has_what_it_has_not_ends_the_request(tmp_path: Path) -> None:
    with SglangEngine(hooked(tmp_path)) as engine:
        (store,) = hooked_store.opened()
        store.plan(Fault(StoreCall.CONTAINS, FaultKind.LIES))
        assert [one.aborted for one in engine.serve(LONGER)] == [True]
        engine.forget()
        assert engine.serve(LONGER) == [COMPUTED]


def test_a_put_that_fails_leaves_the_node_to_be_offered_again(tmp_path: Path) -> None:
    with SglangEngine(hooked(tmp_path)) as engine:
        (store,) = hooked_store.opened()
        store.plan(Fault(StoreCall.PUT, FaultKind.FAILS))
        engine.serve(PROMPT)
        engine.forget()
        assert engine.serve(PROMPT) == [COMPUTED]
        engine.settle()
        store.release()
        # Still on the device, and used once more: now it is stored.
        engine.serve(LONGER)
        engine.forget()
        assert engine.serve(LONGER)[0].restored == 100


def test_a_put_that_hangs_gives_its_slots_back(tmp_path: Path) -> None:
    with SglangEngine(hooked(tmp_path, offload_timeout_s=0.1)) as engine:
        (store,) = hooked_store.opened()
        store.plan(Fault(StoreCall.PUT, FaultKind.HANGS))
        engine.serve(PROMPT)
        assert store.waiting.wait(10)
        engine.forget()
        store.release()
        assert engine.serve(LONGER) == [COMPUTED]


def test_a_read_that_hangs_ends_its_request_and_writes_nothing_later(tmp_path: Path) -> None:
    with SglangEngine(hooked(tmp_path, load_timeout_s=1.0)) as engine:
        engine.serve(PROMPT)
        engine.forget()
        (store,) = hooked_store.opened()
        store.plan(Fault(StoreCall.READ, FaultKind.LATE, first=2))
        assert [one.aborted for one in engine.serve(LONGER)] == [True]
        assert store.waiting.is_set()
        engine.forget()
        store.release()
        # The thread is done with the late read when it answers the next transfer.
        assert engine.serve([9] * 40) == [COMPUTED]
        engine.settle()
        free = list(engine.tensors())
        written = sum(int((tensor != -7).flatten(1).any(1).sum()) for tensor in free)
        # Those of the request that was computed since, in each tensor, and nothing else.
        assert written == 40 * len(free)


def test_a_request_that_is_aborted_before_the_start_loads_nothing(tmp_path: Path) -> None:
    with SglangEngine(hooked(tmp_path)) as engine:
        engine.serve(PROMPT)
        engine.forget()
        params = part("sglang.srt.mem_cache.base_prefix_cache")
        request = engine.new_request(LONGER)
        request.init_next_round_input(engine.cache)
        queued, _ = engine.cache.init_load_back(
            params.InitLoadBackParams(
                best_match_node=request.best_match_node,
                host_hit_length=request.host_hit_length,
                req=request,
            )
        )
        assert queued == 100
        slots = engine.cache.linker.private_load_indices[request.rid]
        engine.cache.release_aborted_request(request)
        assert engine.cache.ready_to_load_host_cache() == -1
        engine.slots.free(slots)
        assert engine.free() == engine.room
        assert engine.counters.pages_loaded == 0


def test_a_request_that_is_aborted_after_its_match_is_forgotten(tmp_path: Path) -> None:
    with SglangEngine(hooked(tmp_path)) as engine:
        engine.serve(PROMPT)
        engine.forget()
        request = engine.new_request(LONGER)
        request.init_next_round_input(engine.cache)
        assert request.host_hit_length == 100
        engine.cache.release_aborted_request(request)
        assert not engine.cache.linker.has_hit(request.rid)
        assert engine.serve(LONGER)[0].restored == 100


def test_more_offloads_than_allowed_fail_and_lock_nothing(tmp_path: Path) -> None:
    with SglangEngine(hooked(tmp_path, max_offloads=1)) as engine:
        (store,) = hooked_store.opened()
        store.plan(Fault(StoreCall.PUT, FaultKind.LATE))
        engine.serve([1] * 20, [2] * 20, [3] * 20)
        assert store.waiting.wait(10)
        store.release()
        engine.forget()
        answers = engine.serve([1] * 21, [2] * 21, [3] * 21)
        assert [answer.restored for answer in answers] == [20, 0, 0]


@pytest.mark.parametrize("kind", Kind)
def test_a_reset_with_everything_in_flight_leaves_everything_free(
    tmp_path: Path, kind: Kind
) -> None:
    with SglangEngine(hooked(tmp_path), kind=kind) as engine:
        stores = hooked_store.opened()
        for store in stores:
            store.plan(Fault(StoreCall.PUT, FaultKind.LATE))
        engine.serve(PROMPT)
        deadline = time.monotonic() + 10
        while not any(store.waiting.is_set() for store in stores):
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        assert engine.cache.linker.pending_offloads
        engine.cache.reset()
        assert not engine.cache.linker.pending_offloads
        for store in stores:
            store.release()


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    engine = SglangEngine(hooked(tmp_path))
    engine.serve(PROMPT)
    engine.close()
    engine.close()


def test_a_load_that_cannot_be_queued_is_a_verdict_not_another_branch(tmp_path: Path) -> None:
    with SglangEngine(hooked(tmp_path)) as engine:
        engine.serve(PROMPT)
        engine.forget()
        engine.linker._linker.close()
        assert [one.aborted for one in engine.serve(LONGER)] == [True]
        engine.forget()


def test_a_linker_whose_copy_does_not_end_releases_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reset() -> None:
        raise TransferTimeoutError("reset: the copy still runs", direction="load", pages=1)

    with SglangEngine(hooked(tmp_path)) as engine:
        (store,) = hooked_store.opened()
        with monkeypatch.context() as patched:
            patched.setattr(engine.linker._linker, "reset", reset)
            with pytest.raises(TransferTimeoutError, match="the copy still runs"):
                engine.linker.close()
        with pytest.raises(StaleHandleError):
            store.contains(page_keys([1]))
        with pytest.raises(InvalidTransitionError, match="got a task after close"):
            engine.linker._executor.submit(list)
        assert not engine.linker._linker.offload(Ticket(OperationId(1)), ())
        # The copy has ended: it is closed like any other.
        engine.linker.close()
