"""Copies of bytes: quick for small ones, and without the GIL for large ones."""

from __future__ import annotations

from typing import Final

import numpy as np

from radixlink_store._address import address_of

_RELEASE_FROM: Final = 1 << 17
"""Bytes. numpy releases the GIL for its copies, a memoryview keeps it. Whoever releases it may wait
for a thread that computes (5 ms of Python's switch interval), so that is worth it only for copies
that would keep others waiting themselves: 128 KiB take some 10 us. xxhash's own limit is 100 kB."""


_LINE: Final = 64
"""A copy of some 100 kB to a place that is not aligned to it takes up to twice as long (Zen 4, glibc
2.36), and a bytearray never is; so its first bytes are copied by themselves."""


def past_line(memory: memoryview) -> int:
    """How many bytes memory starts past the start of a line of the cache.

    Raises: as `address_of` says.
    """
    return address_of(memory) % _LINE


def copy(out: memoryview, source: memoryview, past: int) -> None:
    """Copy bytes.

    Args:
        out: Where to.
        source: Where from. Shape: both of one dimension, format "B" and equal length.
        past: How many bytes `out` starts past the start of any line of the cache.
    """
    if len(out) < _RELEASE_FROM:
        out[:] = source
        return
    to, origin = np.frombuffer(out, np.uint8), np.frombuffer(source, np.uint8)
    head = -past % _LINE
    if head:
        to[:head] = origin[:head]
        to, origin = to[head:], origin[head:]
    to[:] = origin
