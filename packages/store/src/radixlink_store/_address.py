"""Where memory is."""

from __future__ import annotations

from ctypes import addressof, c_char
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mmap


def address_of(memory: mmap.mmap | memoryview) -> int:
    """The address of the first byte.

    Raises:
        TypeError: The memory cannot be written, or is not contiguous.
        ValueError: It has no bytes.

    Cost: 0.7 microseconds; by way of numpy it were 1.7.
    """
    return addressof(c_char.from_buffer(memory))
