"""How a page lies in a Mooncake object, and how its bytes prove what they are.

::

    object   header | tag 0 | range 0 | tag 1 | range 1 | ...
    header   magic, generation, writer, bytes of the object, checksum of these   (64 bytes)
    tag      generation, checksum of the range                                   (64 bytes)

Everything starts at a line of the cache: a copy to where none starts takes half as long again. A tag
lies before its range so that both are one read. The generation is drawn at random for each write,
so that no two writes of a page have the same; it is in the header to be learnt when a page is
opened, and in each tag to be checked when a range is read alone. Checksums are seeded by the layout,
the key, the generation and the range's index: bytes that are whole but of another page, write, range
or layout do not match. XXH3 guards against accidents, not against an enemy.
"""

from __future__ import annotations

import itertools
import struct
from typing import TYPE_CHECKING, Final

import attrs
from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from radixlink_contracts import PoolLayout

FORMAT_VERSION: Final = 2
"""Part of the names of objects: processes of two versions do not take each other's for damage."""

_MAGIC: Final = b"RLPAGE%02d" % FORMAT_VERSION
_FIELDS: Final = struct.Struct("<8sQQQ")
_HEADER: Final = struct.Struct("<8sQQQQ")
_TAG: Final = struct.Struct("<QQ48x")
_SEED: Final = struct.Struct("<32s32sQQ")
_ALIGNMENT: Final = 64
_HEADER_RANGE: Final = (1 << 64) - 1

HEADER_BYTES: Final = 64
"""Bytes before the first tag."""

TAG_BYTES: Final = _TAG.size
"""Bytes before each range."""


@attrs.frozen
class Header:
    """What the header of an object says.

    Attributes:
        generation: Which write of the page.
        writer: The process that wrote it.
    """

    generation: int
    writer: int


@attrs.frozen(kw_only=True)
class PageFormat:
    """The objects of one layout.

    Attributes:
        fingerprint: Of the layout.
        range_bytes: Bytes of each layer range.
        tag_offsets: Where each range's tag is; the range follows it.
        object_bytes: Of a whole object.
    """

    fingerprint: bytes
    range_bytes: tuple[int, ...]
    tag_offsets: tuple[int, ...]
    object_bytes: int

    @classmethod
    def of(cls, layout: PoolLayout) -> PageFormat:
        """The format of a layout's objects."""
        sizes = [_aligned(TAG_BYTES + size) for size in layout.range_bytes]
        *tag_offsets, object_bytes = itertools.accumulate(sizes, initial=HEADER_BYTES)
        return cls(
            fingerprint=layout.fingerprint,
            range_bytes=layout.range_bytes,
            tag_offsets=tuple(tag_offsets),
            object_bytes=object_bytes,
        )

    def write_header(self, key: bytes, header: Header, into: memoryview) -> None:
        """Write the first `HEADER_BYTES` of a page's object."""
        fields = _FIELDS.pack(_MAGIC, header.generation, header.writer, self.object_bytes)
        checksum = xxh3_64_intdigest(fields, self._seed(key, header.generation, _HEADER_RANGE))
        into[: _HEADER.size] = fields + checksum.to_bytes(8, "little")
        into[_HEADER.size : HEADER_BYTES] = bytes(HEADER_BYTES - _HEADER.size)

    def seal(self, key: bytes, header: Header, frame: memoryview) -> None:
        """Write header and tags of a page whose ranges lie in their places already.

        Args:
            key: The page.
            header: Of this write.
            frame: At least `object_bytes`.

        Cost: one pass over the ranges.
        """
        self.write_header(key, header, frame)
        for layer_range, size in enumerate(self.range_bytes):
            start = self.tag_offsets[layer_range]
            data = start + TAG_BYTES
            tag = self.tag(key, header.generation, layer_range, frame[data : data + size])
            frame[start:data] = tag

    def read_header(self, key: bytes, data: memoryview) -> Header | None:
        """The header of a page's object; None where that is no such header."""
        magic, generation, writer, object_bytes, checksum = _HEADER.unpack_from(data)
        seed = self._seed(key, generation, _HEADER_RANGE)
        if (
            magic != _MAGIC
            or object_bytes != self.object_bytes
            or checksum != xxh3_64_intdigest(data[: _FIELDS.size], seed)
        ):
            return None
        return Header(generation, writer)

    def tag(self, key: bytes, generation: int, layer_range: int, data: Buffer) -> bytes:
        """The tag of one range of one write of a page.

        Cost: one pass over `data`.
        """
        seed = self._seed(key, generation, layer_range)
        return _TAG.pack(generation, xxh3_64_intdigest(data, seed))

    def is_right(
        self, key: bytes, generation: int, layer_range: int, tag: memoryview, data: Buffer
    ) -> bool:
        """Tag and bytes are that range of that write of that page.

        Cost: one pass over `data`.
        """
        return bool(tag == self.tag(key, generation, layer_range, data))

    def is_renewed(
        self, key: bytes, generation: int, layer_range: int, tag: memoryview, data: Buffer
    ) -> bool:
        """Tag and bytes are that range of that page, but of another write.

        Cost: one pass over `data`, none where the tag names that write.
        """
        other: int = _TAG.unpack_from(tag)[0]
        return other != generation and self.is_right(key, other, layer_range, tag, data)

    def _seed(self, key: bytes, generation: int, layer_range: int) -> int:
        return xxh3_64_intdigest(_SEED.pack(self.fingerprint, key, generation, layer_range))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
