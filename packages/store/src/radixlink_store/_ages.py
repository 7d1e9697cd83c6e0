"""The age of a slot: one 64-bit number that says how soon its page may be evicted, lowest first.

```
bits 63..12  time of the last use, in units of 2**-20 seconds (about a microsecond)
bits 11..4   255 less the page's index in the call that used it, 0 from the 256th on
bits  3..0   the generation's low bits, when it was claimed
```

The pages of a call are a chain, and a page is of no use without those before it: so of pages of one
call the last ones go first. The shards of a page are used in one order by all ranks, each by its
own clock; as nothing but order counts, they live and die alike in their tables. Where even the
microsecond is equal, the slot that was claimed least often goes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from radixlink_store._places import Slots, Words

_UNITS_A_SECOND: Final = 1 << 20
_TIME_SHIFT: Final = 12
_ORDER_SHIFT: Final = 4
_LAST_INDEX: Final = 255
SECONDS_SHIFT: Final = _TIME_SHIFT + 20
"""Where the whole seconds of an age begin."""
GENERATION_MASK: Final = (1 << _ORDER_SHIFT) - 1
"""The bits of a generation that an age has."""


def age_of_call(now_s: float) -> int:
    """The age that a call at this time gives to its last pages; lower than that of all others."""
    return int(now_s * _UNITS_A_SECOND) << _TIME_SHIFT


def age_of_page(age: int, index: int) -> int:
    """The age that a call of this age gives to one of its pages."""
    return age | (_LAST_INDEX - index << _ORDER_SHIFT if index < _LAST_INDEX else 0)


def ages_of_pages(age: int, indices: Slots) -> Words:
    """The same for many. Shape: indices (num_pages,); the result (num_pages,)."""
    order = (_LAST_INDEX - np.minimum(indices, _LAST_INDEX)).astype(np.uint64)
    ages: Words = np.uint64(age) | order << np.uint64(_ORDER_SHIFT)
    return ages


def seconds_of(ages: Words) -> npt.NDArray[np.int64]:
    """The whole seconds of the last uses. Shape: both (num_pages,)."""
    return (ages >> np.uint64(SECONDS_SHIFT)).astype(np.int64)
