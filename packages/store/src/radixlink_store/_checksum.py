"""Checksums that say whose bytes these are, not only that they are whole.

A layer range is hashed with a seed made of its page's key, the generation it was written as and its
own index. So bytes that are whole but of another page, another write or another range do not match
either. XXH3 runs near memory speed; it guards against accidents, not against an enemy: whoever can
write the segment can also write the checksum.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from typing_extensions import Buffer

_WRITE: Final = struct.Struct("<32sQQ")


def range_checksum(key: bytes, generation: int, layer_range: int, data: Buffer) -> int:
    """The checksum of one layer range of one write of a page.

    Cost: one pass over `data`.
    """
    seed = xxh3_64_intdigest(_WRITE.pack(key, generation, layer_range))
    return xxh3_64_intdigest(data, seed)


def header_checksum(slot: int, words: Buffer) -> int:
    """The checksum of a slot's header, without its own word."""
    return xxh3_64_intdigest(words, slot)
