"""The state word of a slot: one 64-bit number that says who may use the slot's bytes.

```
bits 63..48  fingerprint  16 bits of the page's key: most lookups of other keys end here
bits 47..2   generation   how often the slot was claimed; only grows
bits  1..0   state        EMPTY, WRITING or READY
```

Only the holder of the slot's lock changes the word, and by one store:

| from    | event                         | to                              |
|---------|-------------------------------|---------------------------------|
| any     | claim, generation not used up | WRITING, generation + 1         |
| WRITING | publish, by who claimed       | READY, same generation          |
| any     | damage seen, or cleared       | EMPTY, same generation          |

A WRITING slot that nobody has locked belongs to a writer that died; the next claim takes it. So
does a slot whose state bits mean nothing (a flipped bit). At a million claims a second of one slot
a generation lasts two years; a slot that has used all of them is never claimed again, so that no
handle can mean two writes.
"""

from __future__ import annotations

import enum
from typing import Final

STATE_BITS: Final = 2
_GENERATION_BITS: Final = 46
FINGERPRINT_SHIFT: Final = STATE_BITS + _GENERATION_BITS

STATE_MASK: Final = (1 << STATE_BITS) - 1
_NO_STATE: Final = ~STATE_MASK
LAST_GENERATION: Final = (1 << _GENERATION_BITS) - 1
"""The generation that no claim goes beyond."""

MATCH_MASK: Final = ~(LAST_GENERATION << STATE_BITS) & (1 << 64) - 1
"""The bits of a word that tell a published page of some fingerprint, whatever its generation."""


class SlotState(enum.IntEnum):
    """What a slot's bytes are. The numbers are part of the format."""

    #: Nothing: never written, or emptied.
    EMPTY = 0
    #: Being written, or left by a writer that died.
    WRITING = 1
    #: A whole page.
    READY = 2


# Members of an enum are slow to come by (Python 3.11), and these are asked for with every page.
_READY: Final = int(SlotState.READY)
_READY_TO_WRITING: Final = SlotState.READY ^ SlotState.WRITING


def pack(fingerprint: int, generation: int, state: SlotState) -> int:
    """The word of these three."""
    return fingerprint << FINGERPRINT_SHIFT | generation << STATE_BITS | state


def generation_of(word: int) -> int:
    """How often the slot was claimed."""
    return word >> STATE_BITS & LAST_GENERATION


def claimed(word: int, match: int) -> int | None:
    """The word after a claim for the page of that `match_of`.

    Returns:
        None for a slot that has used its generations up.
    """
    generation = word >> STATE_BITS & LAST_GENERATION
    if generation == LAST_GENERATION:
        return None
    return match ^ _READY_TO_WRITING | generation + 1 << STATE_BITS


def published(word: int) -> int:
    """The word of a claimed slot whose page is whole."""
    return word & _NO_STATE | _READY


def emptied(word: int) -> int:
    """The word of a slot that no longer holds its page; the generation stays."""
    return pack(0, generation_of(word), SlotState.EMPTY)


def match_of(fingerprint: int) -> int:
    """What a word's `MATCH_MASK` bits are when a page of that fingerprint is published."""
    return fingerprint << FINGERPRINT_SHIFT | _READY
