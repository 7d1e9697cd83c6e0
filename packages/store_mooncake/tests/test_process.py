"""Which forked children are refused; no Mooncake is needed."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from radixlink_store_mooncake import _process
from radixlink_store_mooncake._process import about_to_connect, require_no_fork

from .forked import told_in_child

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def _as_if_never_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may have connected this process."""
    monkeypatch.setattr(_process, "_CONNECTED", set[tuple[int, int]]())


def _connect() -> None:
    with about_to_connect():
        pass


def _fail() -> None:
    with pytest.raises(KeyError), about_to_connect():
        raise KeyError


def _in_a_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def _child_is_refused() -> bool:
    """Also that this process itself is not."""
    require_no_fork()
    (told,) = told_in_child(require_no_fork)
    return f"forked from {os.getpid()} after that" in told


def test_child_of_a_process_that_did_not_connect_is_not_refused() -> None:
    assert not _child_is_refused()


def test_child_forked_while_its_parent_connects_is_refused() -> None:
    with about_to_connect():
        assert _child_is_refused()
    assert _child_is_refused()


def test_child_forked_after_its_parent_could_not_connect_is_not_refused() -> None:
    _fail()
    assert not _child_is_refused()


@pytest.mark.parametrize("orders", ["same thread", "another thread"])
def test_failure_takes_no_other_connection_back(orders: str) -> None:
    _connect()
    if orders == "same thread":
        _fail()
    else:
        _in_a_thread(_fail)
    assert _child_is_refused()


def test_connection_of_a_thread_that_ended_counts() -> None:
    _in_a_thread(_connect)
    assert _child_is_refused()
