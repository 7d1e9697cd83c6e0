"""One page as it is in a file of the log.

```
offset  bytes          what
0       8              magic "RDXLPAGE"
8       32             the page's key
40      8              the id of the file
48      8              the record's number in the file, from 0
56      8              bytes of the page
64      8 * ranges     one checksum for each layer range
...     8              checksum of all before it
...     page_bytes     the layer ranges, one after the other
...                    zeros up to a multiple of 64
```

All records of a file have one length, as a file holds pages of one layout: record n is at n times
that length behind the file's head. So a record that is torn or flipped hides no other.

A layer range is hashed as in the segment, with the record's number for the generation; the header
with the file's id and the number. So what is left on a disk of an older file, or was moved, does
not match.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import attrs

from radixlink_contracts import PAGE_KEY_BYTES
from radixlink_store._checksum import header_checksum, range_checksum
from radixlink_store._layout import WORD_BYTES, round_up
from radixlink_store._places import seed_and_match

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAGIC: Final = b"RDXLPAGE"
_ALIGNMENT: Final = 64
_CHECKSUM: Final = struct.Struct("=Q")


@attrs.frozen(kw_only=True)
class RecordHead:
    """What a sound header says.

    Attributes:
        key: The page.
        number: Which record of its file.
        checksums: One for each layer range.
    """

    key: bytes
    number: int
    checksums: tuple[int, ...]

    def damaged_range(self, ranges: Sequence[memoryview]) -> int | None:
        """The first layer range whose bytes do not match; None if all do."""
        seed, _ = seed_and_match(self.key)
        for layer_range, (checksum, data) in enumerate(zip(self.checksums, ranges, strict=True)):
            if checksum != range_checksum(seed, self.number, layer_range, data):
                return layer_range
        return None


class RecordFormat:
    """Where everything is in the records of one layout.

    Thread: any.
    """

    def __init__(self, range_bytes: tuple[int, ...]) -> None:
        """Records of pages of these layer ranges."""
        self._fields: Final = struct.Struct(f"=8s{PAGE_KEY_BYTES}sQQQ{len(range_bytes)}Q")
        self.range_bytes: Final = range_bytes
        self.page_bytes: Final = sum(range_bytes)
        #: Bytes of a header; the page follows.
        self.head_bytes: Final = self._fields.size + WORD_BYTES
        #: Bytes from one record to the next.
        self.record_bytes: Final = round_up(self.head_bytes + self.page_bytes, _ALIGNMENT)
        #: What fills a record up.
        self.padding: Final = bytes(self.record_bytes - self.head_bytes - self.page_bytes)

    def pack_head(
        self, file_id: int, number: int, key: bytes, ranges: Sequence[memoryview]
    ) -> bytes:
        """The header of a page.

        Cost: one pass over the page.
        """
        seed, _ = seed_and_match(key)
        checksums = [
            range_checksum(seed, number, layer_range, data)
            for layer_range, data in enumerate(ranges)
        ]
        fields = self._fields.pack(_MAGIC, key, file_id, number, self.page_bytes, *checksums)
        return fields + _CHECKSUM.pack(header_checksum(file_id ^ number, fields))

    def read_head(self, file_id: int, number: int, head: bytes) -> RecordHead | None:
        """What a header says; None if it is not the whole header of that record.

        Args:
            file_id: The file it is in.
            number: The record's place there.
            head: `head_bytes` bytes, or less where the file ends.
        """
        if len(head) != self.head_bytes or not head.startswith(_MAGIC):
            return None
        fields, (checksum,) = head[:-WORD_BYTES], _CHECKSUM.unpack(head[-WORD_BYTES:])
        if checksum != header_checksum(file_id ^ number, fields):
            return None
        _, key, file, number_there, page_bytes, *checksums = self._fields.unpack(fields)
        if (file, number_there, page_bytes) != (file_id, number, self.page_bytes):
            return None
        return RecordHead(key=key, number=number, checksums=tuple(checksums))
