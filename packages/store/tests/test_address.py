"""Where memory is."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from radixlink_store._address import address_of


def test_address_is_that_of_the_first_byte() -> None:
    array = np.zeros(64, np.uint8)
    assert address_of(array.data) == array.ctypes.data
    assert address_of(array.data[5:]) == array.ctypes.data + 5


def test_mapping_can_be_closed_right_after() -> None:
    mapping = mmap.mmap(-1, mmap.PAGESIZE)
    assert address_of(mapping) % mmap.PAGESIZE == 0
    mapping.close()
    assert mapping.closed


@pytest.mark.parametrize(
    ("memory", "error"),
    [
        (memoryview(b"read only"), TypeError),
        (memoryview(bytearray(8))[::2], TypeError),
        (memoryview(bytearray()), ValueError),
    ],
)
def test_memory_without_a_first_byte_to_write_is_refused(
    memory: memoryview, error: type[Exception]
) -> None:
    with pytest.raises(error):
        address_of(memory)
