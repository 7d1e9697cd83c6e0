"""Checksums that say whose bytes these are, not only that they are whole.

A layer range is hashed with a seed made of its page's key, the generation it was written as and its
own index. So bytes that are whole but of another page, another write or another range do not match
either. XXH3 runs near memory speed; it guards against accidents, not against an enemy: whoever can
write the segment can also write the checksum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from typing_extensions import Buffer

_RANGE_BITS: Final = 16


def range_checksum(seed: int, generation: int, layer_range: int, data: Buffer) -> int:
    """The checksum of one layer range of one write of a page.

    Args:
        seed: The page's, see `_places`.
        generation: Which write of the slot: 46 bits.
        layer_range: Which range. No two writes and ranges of a page have one seed.
        data: The bytes.

    Thread: releases the GIL from about 100 kB up.
    Cost: one pass over `data`.
    """
    return xxh3_64_intdigest(data, seed ^ (generation << _RANGE_BITS | layer_range))


def header_checksum(slot: int, words: Buffer) -> int:
    """The checksum of a slot's header, without its own word."""
    return xxh3_64_intdigest(words, slot)
