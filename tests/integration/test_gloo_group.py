"""What a rank group over gloo keeps for ever and what it lets go, and a rank that can have no thread."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

# Documented there, but not among the module's explicit exports.
from torch.distributed import HashStore  # type: ignore[attr-defined]

from radixlink_comm._health import LATE, CollectiveError
from radixlink_comm.torch import TorchGroup
from radixlink_contracts.errors import AgreementError
from radixlink_testing.rank_groups import check_group_works

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_a_collective_that_gloo_cannot_begin_leaves_nothing_behind() -> None:
    group = TorchGroup.create(HashStore(), rank=0, size=1, timeout_s=30.0)
    group.all_and(bytearray(8), 30.0)
    gloo = weakref.ref(group._gloo)
    # Memory that gloo cannot send.
    group._words = torch.empty(1, dtype=torch.int64, device="meta")
    with pytest.raises(AgreementError, match="gloo failed"):
        group.all_and(bytearray(8), 30.0)
    gc.collect()
    assert gloo() is None
    with pytest.raises(AgreementError):
        group.all_and(bytearray(8), 30.0)
    group.close()


@pytest.fixture
def alone() -> Iterator[TorchGroup]:
    group = TorchGroup.create(HashStore(), rank=0, size=1, timeout_s=30.0)
    yield group
    group.close()


def no_thread(thread: threading.Thread) -> None:
    message = "can't start new thread"
    raise RuntimeError(message)


def test_a_rank_without_threads_is_not_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(AgreementError, match="create: no thread can be had on this rank") as caught:
        TorchGroup.create(HashStore(), rank=0, size=2, timeout_s=30.0)
    assert caught.value.by_rank == {0: "in create", 1: "no answer"}


def test_a_roll_call_without_threads_has_this_ranks_mark(
    alone: TorchGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert alone.roll_call("here", 30.0) == {0: "here"}


def test_a_renewal_without_threads_fails_and_may_be_tried_again(
    alone: TorchGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(AgreementError, match=r"renew .*: no thread can be had on this rank"):
            alone.renew(30.0)
    renewed = alone.renew(30.0)
    check_group_works(renewed)
    renewed.close()


def test_a_rank_that_could_not_begin_to_renew_leaves_no_mark_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others would connect to it, and wait for it in gloo."""
    store = HashStore()
    group = TorchGroup.create(store, rank=0, size=1, timeout_s=30.0)
    # As one of two, of which the other is not here; epoch 0 has a mark of this one.
    group._size = 2
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(AgreementError) as caught:
            group.renew(30.0)
    assert caught.value.by_rank[1] == "no answer"
    assert not store.check(["radixlink/1/epoch-1/renewing/0"])
    group.close()


def test_a_collective_that_fails_without_threads_is_an_agreement_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(*_: object) -> None:
        raise CollectiveError(LATE)

    group = TorchGroup.create(HashStore(), rank=0, size=1, timeout_s=30.0)
    # As one of two, so that the other is asked for.
    group._size = 2
    with monkeypatch.context() as patched:
        patched.setattr(group, "_and", late)
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(AgreementError, match="not all ranks took part in time") as caught:
            group.all_and(bytearray(8), 30.0)
    assert caught.value.by_rank[1] == "no answer"
    group.close()


def test_a_look_out_without_threads_says_nothing(
    alone: TorchGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        alone._look_out()
    # It is not taken for one that was asked.
    assert alone._asked is None
