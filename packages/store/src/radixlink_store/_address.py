"""Where memory begins."""

from __future__ import annotations

from ctypes import addressof, c_char
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mmap


def address_of(memory: mmap.mmap | memoryview) -> int:
    """Where a mapping, or a part of one, begins. Cost: half a microsecond, a third of numpy's way.

    Raises:
        TypeError: It cannot be written.
        ValueError: It has no bytes.
    """
    return addressof(c_char.from_buffer(memory))
