"""`Tally`: what `PagedAllocator` counts a call's pages with, made once for each length of call.

Calls of equal length come in rows, and making three small tensors costs as much as counting.
"""

from __future__ import annotations

import sys
from typing import Final

import torch

#: The most pages that one tally may count at once: a count of 16 bits that starts at 0 or 1 then
#: never comes round to 1 again, however often a page is named.
MAX_PAGES: Final = (1 << 16) - 1

#: Lengths that are remembered; far more than a service uses at a time.
_MAX_LENGTHS: Final = 32


class Tally:
    """Ones to add for a number of pages, and room to read the sums back.

    The room is a `bytearray` that torch sees as a tensor: comparing two byte strings costs a tenth
    of a microsecond, `torch.equal` seven times as much.

    Attributes:
        ones: Shape: (num_pages,) int16.
        minus_ones: Shape: (num_pages,) int16.
        seen: Room for as many counts. Shape: (num_pages,) int16.
    """

    __slots__ = ("_expected", "_seen_bytes", "minus_ones", "ones", "seen")

    def __init__(self, num_pages: int) -> None:
        """Make them for that many pages, 1..MAX_PAGES."""
        self._expected: Final = num_pages * (1).to_bytes(2, sys.byteorder)
        self._seen_bytes: Final = bytearray(2 * num_pages)
        # Made in inference mode, they could not be written outside it.
        with torch.inference_mode(mode=False):
            self.ones: Final = torch.ones(num_pages, dtype=torch.int16, device="cpu")
            self.minus_ones: Final = -self.ones
            self.seen: Final = torch.frombuffer(self._seen_bytes, dtype=torch.int16)

    def all_ones(self) -> bool:
        """True when each count in `seen` is just 1."""
        return self._seen_bytes == self._expected


class Tallies(dict[int, Tally]):
    """The tallies of the lengths that were asked for of late, by number of pages.

    A dict that makes what it lacks, so that what it has costs no call.
    """

    def __missing__(self, num_pages: int) -> Tally:
        """Make the tally for 1..MAX_PAGES pages."""
        if len(self) == _MAX_LENGTHS:
            self.clear()
        tally = self[num_pages] = Tally(num_pages)
        return tally
