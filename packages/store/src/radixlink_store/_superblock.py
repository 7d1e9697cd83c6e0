"""The first bytes of a segment: whose pages it holds and where everything is.

Written once, READY last.

```
offset  bytes  what
0       8      magic "RDXLNKSG"
8       4      format version
12      4      byte order mark 0x01020304, as the machine that made it writes it
16      8      READY: 1 once everything else is there
24      40     boot id of the node, ASCII, when the stamps were last started; may be written again
64      8      checksum (XXH3) of bytes 72..16,383
72      32     layout fingerprint
104     8      buckets
112     8      ways
120     8      total bytes of the segment
128     4      1 if layer ranges have checksums, else 0
132     4      length of the JSON
136     ...    the layout in JSON: for people, for messages, and to know whose segment a stranger is
```

Numbers are in the byte order of the machine; the mark tells. Stamps are seconds of a clock that
starts anew with each boot of the node, so whoever opens a segment under another boot id starts them
over.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Final, Self

import attrs
from xxhash import xxh3_64_intdigest

from radixlink_contracts import CacheIdentity, PoolLayout, PoolName, Shard
from radixlink_contracts.errors import ContractError, IdentityError, IntegrityError, LinkError
from radixlink_store._layout import FORMAT_VERSION, SUPERBLOCK_BYTES, Geometry

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAGIC: Final = b"RDXLNKSG"
_BYTE_ORDER_MARK: Final = 0x01020304
_HEAD: Final = struct.Struct("=8sII")
_READY: Final = struct.Struct("=Q")
_READY_OFFSET: Final = 16
_BOOT: Final = slice(24, 64)
_CHECKSUM: Final = struct.Struct("=Q")
_CHECKSUM_OFFSET: Final = 64
_BODY_OFFSET: Final = 72
_BODY: Final = struct.Struct("=32sQQQII")


@attrs.frozen(kw_only=True)
class Superblock:
    """What the first bytes of a segment say.

    Attributes:
        layout: Whose pages it holds.
        geometry: Where everything is.
        boot_id: The boot of the node that the stamps belong to.
        checksums: Whether layer ranges have checksums: all who use the segment must agree.
    """

    layout: PoolLayout
    geometry: Geometry
    boot_id: str
    checksums: bool = True

    def write(self, buffer: memoryview) -> None:
        """Write it into a segment that nobody else has open yet; READY last.

        Raises:
            ContractError: The layout's JSON is too long for it.
        """
        text = json.dumps(fields_of_layout(self.layout), separators=(",", ":")).encode()
        body = _BODY.pack(
            self.layout.fingerprint,
            self.geometry.num_buckets,
            self.geometry.ways,
            self.geometry.total_bytes,
            self.checksums,
            len(text),
        )
        room = SUPERBLOCK_BYTES - _BODY_OFFSET - len(body)
        if len(text) > room:
            raise ContractError(
                f"store: expected a layout of at most {room} bytes in JSON, got {len(text)}: "
                f"{text[:80]!r}..."
            )
        body += text.ljust(room, b"\0")
        _READY.pack_into(buffer, _READY_OFFSET, 0)
        _HEAD.pack_into(buffer, 0, _MAGIC, FORMAT_VERSION, _BYTE_ORDER_MARK)
        _CHECKSUM.pack_into(buffer, _CHECKSUM_OFFSET, xxh3_64_intdigest(body))
        buffer[_BODY_OFFSET:SUPERBLOCK_BYTES] = body
        write_boot_id(buffer, self.boot_id)
        _READY.pack_into(buffer, _READY_OFFSET, 1)

    @classmethod
    def read(cls, head: bytes, where: str) -> Self:
        """What a segment's first bytes say; `where` names it in messages.

        Raises:
            IdentityError: This is no segment, or one of another version or byte order.
            IntegrityError: It is a damaged one, or was never finished.
        """
        if head[: len(_MAGIC)] != _MAGIC:
            raise IdentityError(
                f"{where}: expected a page segment, got a file of something else (it starts with "
                f"{head[:8]!r}); choose another location or remove the file"
            )
        if len(head) < SUPERBLOCK_BYTES:
            raise IntegrityError(
                f"{where}: expected a superblock of {SUPERBLOCK_BYTES} bytes, got {len(head)}: the "
                f"file was truncated; remove it"
            )
        _, version, mark = _HEAD.unpack_from(head)
        if mark != _BYTE_ORDER_MARK:
            raise IdentityError(
                f"{where}: expected a segment made on a machine of this byte order, got byte order "
                f"mark {mark:#010x}; choose another location or remove the file"
            )
        if version != FORMAT_VERSION:
            raise IdentityError(
                f"{where}: expected segment format version {FORMAT_VERSION}, got {version}; choose "
                f"another location, or remove the file to give up its pages"
            )
        body = head[_BODY_OFFSET:SUPERBLOCK_BYTES]
        (ready,) = _READY.unpack_from(head, _READY_OFFSET)
        (checksum,) = _CHECKSUM.unpack_from(head, _CHECKSUM_OFFSET)
        if ready != 1 or checksum != xxh3_64_intdigest(body):
            raise IntegrityError(
                f"{where}: expected a finished superblock, got ready={ready} and checksum "
                f"{checksum:#018x}; it is damaged, or its maker died; remove the file"
            )
        return cls._of_body(body, head[_BOOT].rstrip(b"\0").decode("ascii", "replace"), where)

    @classmethod
    def _of_body(cls, body: bytes, boot_id: str, where: str) -> Self:
        """What a superblock whose checksum matched says."""
        fingerprint, num_buckets, ways, total_bytes, checksums, length = _BODY.unpack_from(body)
        try:
            layout = layout_of_fields(json.loads(body[_BODY.size : _BODY.size + length]))
            geometry = Geometry(num_buckets=num_buckets, ways=ways, range_bytes=layout.range_bytes)
        except (ValueError, KeyError, TypeError, LinkError) as error:
            raise IntegrityError(
                f"{where}: expected a layout in the superblock, got one that this version cannot "
                f"read ({error}); remove the file"
            ) from error
        if fingerprint != layout.fingerprint or total_bytes != geometry.total_bytes:
            raise IntegrityError(
                f"{where}: expected a layout and a geometry that agree with their fingerprint and "
                f"size, got {total_bytes} bytes for {geometry.total_bytes}; remove the file"
            )
        return cls(layout=layout, geometry=geometry, boot_id=boot_id, checksums=bool(checksums))


def write_boot_id(buffer: memoryview, boot_id: str) -> None:
    """Say to which boot of the node the stamps belong."""
    room = _BOOT.stop - _BOOT.start
    buffer[_BOOT] = boot_id.encode("ascii", "replace")[:room].ljust(room, b"\0")


def differences(found: PoolLayout, wanted: PoolLayout) -> str:
    """The fields in which two layouts differ, for a message; only the identities' if these do."""
    there, here = fields_of_layout(found), fields_of_layout(wanted)
    names = attrs.fields_dict(CacheIdentity) if found.identity != wanted.identity else there
    return ", ".join(
        f"{name} is {there[name]!r} there and {here[name]!r} here"
        for name in names
        if there[name] != here[name]
    )


def fields_of_layout(layout: PoolLayout) -> dict[str, str | int | list[int]]:
    """A layout as what JSON has."""
    identity = layout.identity
    return {
        "model": identity.model,
        "revision": identity.revision,
        "dtype": identity.dtype,
        "page_size": identity.page_size,
        "num_layers": identity.num_layers,
        "layout": identity.layout,
        "pool": layout.pool.value,
        "shard": [layout.shard.index, layout.shard.count],
        "range_bytes": list(layout.range_bytes),
    }


def layout_of_fields(fields: Mapping[str, object]) -> PoolLayout:
    """The layout of these fields.

    Raises:
        KeyError: One is missing.
        TypeError: One is of another type.
        ValueError: There is no such pool.
    """
    index, count = _numbers(fields["shard"])
    return PoolLayout(
        identity=CacheIdentity(
            model=_text(fields["model"]),
            revision=_text(fields["revision"]),
            dtype=_text(fields["dtype"]),
            page_size=_number(fields["page_size"]),
            num_layers=_number(fields["num_layers"]),
            layout=_text(fields["layout"]),
        ),
        pool=PoolName(_text(fields["pool"])),
        shard=Shard(index=index, count=count),
        range_bytes=tuple(_numbers(fields["range_bytes"])),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    return value


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"expected a number, got {value!r}")
    return value


def _numbers(value: object) -> list[int]:
    if not isinstance(value, list):
        raise TypeError(f"expected numbers, got {value!r}")
    return [_number(item) for item in value]
