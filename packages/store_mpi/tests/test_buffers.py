"""Memory for messages is used again when nobody has a view of it, and not before."""

from __future__ import annotations

import numpy as np

from radixlink_store_mpi._buffers import Buffers

LARGE = 1 << 20


def address_of(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).ctypes.data
    return address


def test_memory_is_of_the_size_asked_for() -> None:
    buffers = Buffers()
    for num_bytes in (0, 1, 1 << 16, (1 << 16) + 1, LARGE + 1, LARGE - 1):
        view = buffers.take(num_bytes)
        assert view.nbytes == len(view) == num_bytes
        assert not view.readonly


def test_memory_is_lent_again_when_its_last_view_is_gone() -> None:
    buffers = Buffers()
    view = buffers.take(LARGE)
    address = address_of(view)
    part = view[10:20]
    del view
    assert address_of(buffers.take(LARGE)) != address
    part[:] = bytes(10)
    del part
    addresses = {address_of(buffers.take(LARGE)) for _ in range(3)}
    assert address in addresses


def test_two_at_once_have_memory_of_their_own() -> None:
    buffers = Buffers()
    del_later = [buffers.take(LARGE) for _ in range(4)]
    assert len({address_of(view) for view in del_later}) == 4


def test_memory_that_is_too_small_is_given_up() -> None:
    buffers = Buffers(max_idle=1)
    buffers.take(LARGE)
    assert len(buffers._idle) == 1
    large = buffers.take(4 * LARGE)
    large[-1] = 1
    assert len(buffers._idle) == 0
    del large
    assert [memory.nbytes for memory in buffers._idle] == [4 * LARGE]
