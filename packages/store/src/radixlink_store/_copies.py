"""Copies of bytes: quick for small ones, and without the GIL for large ones."""

from __future__ import annotations

from typing import Final

import numpy as np

_RELEASE_FROM: Final = 1 << 17
"""Bytes. numpy releases the GIL for its copies, a memoryview keeps it. Whoever releases it may wait
for a thread that computes (5 ms of Python's switch interval), so that is worth it only for copies
that would keep others waiting themselves: 128 KiB take some 10 us. xxhash's own limit is 100 kB."""


_LINE: Final = 64
"""A copy of some 100 kB to a place that is not aligned to it takes up to twice as long (Zen 4, glibc
2.36), and a bytearray never is; so its first bytes are copied by themselves."""


def copy(out: memoryview, source: memoryview) -> None:
    """Copy bytes. Shape: both of one dimension, format "B" and equal length."""
    if len(out) < _RELEASE_FROM:
        out[:] = source
        return
    to, origin = np.frombuffer(out, np.uint8), np.frombuffer(source, np.uint8)
    head = -int(to.__array_interface__["data"][0]) % _LINE
    if head:
        to[:head] = origin[:head]
    np.copyto(to[head:], origin[head:])
