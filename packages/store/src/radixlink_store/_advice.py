"""`madvise` with advice that `mmap.madvise` has no name for, without Python's lock."""

from __future__ import annotations

import ctypes
import enum
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class Advice(enum.IntEnum):
    """What to do with a part of a mapping; the kernel's numbers."""

    #: Fill the page tables for reading (Linux 5.14).
    POPULATE_READ = 22
    #: Fill the page tables for writing (Linux 5.14).
    POPULATE_WRITE = 23
    #: Put its pages into huge ones (Linux 6.1).
    COLLAPSE = 25


def advise(address: int, num_bytes: int, advice: Advice) -> int:
    """Give the kernel advice on a part of a mapping.

    Args:
        address: Where it begins: at a page.
        num_bytes: How long it is.
        advice: What to do.

    Returns:
        0, or the number of the error: `errno.EINVAL` of a kernel that does not know the advice.
    """
    refused = _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice)
    return ctypes.get_errno() if refused else 0
