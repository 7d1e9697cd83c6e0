"""The first bytes of a file of the log: whose pages it holds. Written once, before any record.

```
offset  bytes  what
0       8      magic "RDXLNKLG"
8       4      format version
12      4      byte order mark 0x01020304, as the machine that made it writes it
16      8      checksum (XXH3) of all that follows
24      8      the file's id: random, so that no two files have one
32      32     layout fingerprint
64      4      length of the JSON
68      ...    the layout in JSON, as in a segment's superblock; zeros up to a multiple of 64
```
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Final, Self

import attrs
from xxhash import xxh3_64_intdigest

from radixlink_contracts.errors import ContractError, IdentityError, IntegrityError, LinkError
from radixlink_store._layout import round_up
from radixlink_store._superblock import fields_of_layout, layout_of_fields

if TYPE_CHECKING:
    from radixlink_contracts import PoolLayout

LOG_VERSION: Final = 1
"""Counts up whenever bytes move or change their meaning; files of other versions are left alone."""

MAX_HEAD_BYTES: Final = 1 << 16
"""Room for a list of some thousand layer ranges."""

_MAGIC: Final = b"RDXLNKLG"
_BYTE_ORDER_MARK: Final = 0x01020304
_START: Final = struct.Struct("=8sIIQ")
_BODY: Final = struct.Struct("=Q32sI")
_ALIGNMENT: Final = 64


@attrs.frozen(kw_only=True)
class LogHead:
    """What the first bytes of a file say.

    Attributes:
        layout: Whose pages it holds.
        file_id: 64 random bits.
    """

    layout: PoolLayout
    file_id: int

    def pack(self) -> bytes:
        """Its bytes; their number follows from the layout.

        Raises:
            ContractError: The layout's JSON is too long for it.
        """
        text = json.dumps(fields_of_layout(self.layout), separators=(",", ":")).encode()
        body = _BODY.pack(self.file_id, self.layout.fingerprint, len(text)) + text
        body = body.ljust(round_up(_START.size + len(body), _ALIGNMENT) - _START.size, b"\0")
        if _START.size + len(body) > MAX_HEAD_BYTES:
            raise ContractError(
                f"log: expected a layout of at most {MAX_HEAD_BYTES} bytes in JSON, got "
                f"{len(text)}: {text[:80]!r}..."
            )
        return _START.pack(_MAGIC, LOG_VERSION, _BYTE_ORDER_MARK, xxh3_64_intdigest(body)) + body

    @classmethod
    def read(cls, data: bytes, where: str) -> Self:
        """What a file's first bytes say.

        Args:
            data: Its first `MAX_HEAD_BYTES` bytes, or all of them.
            where: Names it in messages.

        Raises:
            IdentityError: This is no file of a log, or one of another version or byte order.
            IntegrityError: It is a damaged one, or was never finished.
        """
        if data[: len(_MAGIC)] != _MAGIC:
            raise IdentityError(
                f"{where}: expected a file of pages, got one of something else (it starts with "
                f"{data[:8]!r}); choose another directory or remove the file"
            )
        if len(data) < _START.size + _BODY.size:
            raise IntegrityError(f"{where}: expected a head, got {len(data)} bytes")
        _, version, mark, checksum = _START.unpack_from(data)
        if mark != _BYTE_ORDER_MARK:
            raise IdentityError(
                f"{where}: expected a file made on a machine of this byte order, got byte order "
                f"mark {mark:#010x}; choose another directory or remove the file"
            )
        if version != LOG_VERSION:
            raise IdentityError(
                f"{where}: expected log format version {LOG_VERSION}, got {version}; remove the "
                f"file to give up its pages"
            )
        file_id, fingerprint, length = _BODY.unpack_from(data, _START.size)
        start = _START.size + _BODY.size
        stop = round_up(start + length, _ALIGNMENT)
        if len(data) < stop or checksum != xxh3_64_intdigest(data[_START.size : stop]):
            raise IntegrityError(
                f"{where}: expected a head that matches its checksum, got {checksum:#018x}; it is "
                f"damaged, or its maker died; remove the file"
            )
        try:
            layout = layout_of_fields(json.loads(data[start : start + length]))
        except (ValueError, KeyError, TypeError, LinkError) as error:
            raise IntegrityError(
                f"{where}: expected a layout in the head, got one that this version cannot read "
                f"({error}); remove the file"
            ) from error
        if layout.fingerprint != fingerprint:
            raise IntegrityError(
                f"{where}: expected a layout that agrees with its fingerprint, got "
                f"{layout.fingerprint.hex()} for {fingerprint.hex()}; remove the file"
            )
        return cls(layout=layout, file_id=file_id)
