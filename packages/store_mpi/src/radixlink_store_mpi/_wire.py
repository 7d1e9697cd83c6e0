"""What nodes say to each other, as bytes. Version 1; numbers are little-endian.

```
request   4s  b"RLQ1"
          B   question: CONTAINS, TOUCH or FETCH
          3x
          I   count of keys
          Q   number: what the answer repeats
          Q   bytes of pages that whoever asks has room for
          32s fingerprint of the layout
          count * 32 bytes of keys

answer    4s  b"RLA1"
          B   question
          B   verdict
          2x
          I   count of keys asked for
          I   rows that follow
          Q   number
          ceil(count / 8) bytes: which pages are there
          ceil(rows / 8) bytes: which rows are right
          ranges * Q, where there are rows: one checksum for each column
          Q   checksum of all bytes before it
          zeros, up to a multiple of 64
          the columns: rows * range_bytes[r] bytes for each layer range r
```

The rows are the first `rows` of the pages that are there; a FETCH is answered with as many as there
is room for, so whoever asks sees what is left to ask for again. A row is not right that vanished or
was found damaged while the answer was made: its bytes mean nothing.

A column's checksum is seeded with the request's number and the layer range, so that bytes of
another answer or another range do not match either. One damaged column spoils the answer: what was
stored was verified when it was read, so only the way between the nodes can damage it.

This file knows neither MPI nor stores.
"""

from __future__ import annotations

import enum
import struct
from typing import TYPE_CHECKING, Final, TypeAlias

import attrs
from xxhash import xxh3_64_intdigest

from radixlink_contracts import PAGE_KEY_BYTES, PageBits, PageKeys

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

_REQUEST: Final = struct.Struct("<4sB3xIQQ32s")
_REQUEST_MAGIC: Final = b"RLQ1"
_ANSWER: Final = struct.Struct("<4sBB2xIIQ")
_ANSWER_MAGIC: Final = b"RLA1"
_SUM: Final = struct.Struct("<Q")
_ALIGNMENT: Final = 64
_RANGE_SHIFT: Final = 48


class Question(enum.IntEnum):
    """What a node may be asked. The numbers are part of the format."""

    #: Which pages are there?
    CONTAINS = 1
    #: The same; those that are become recent.
    TOUCH = 2
    #: The same; and the bytes of as many as there is room for.
    FETCH = 3


_QUESTIONS: Final = frozenset(Question)


class Verdict(enum.IntEnum):
    """Whether the node could say. The numbers are part of the format."""

    SERVED = 1
    #: It has no store of that layout open.
    UNKNOWN_LAYOUT = 2
    #: Its store failed.
    FAILED = 3
    #: The request was none.
    MALFORMED = 4


class Flaw(enum.Enum):
    """Why an answer is none."""

    #: Not an answer to that request.
    MALFORMED = enum.auto()
    #: It is, but its bytes are not those that were sent.
    CORRUPT = enum.auto()
    #: The node says that it cannot serve.
    REFUSED = enum.auto()


@attrs.frozen(kw_only=True)
class Request:
    """What one node asks another.

    Attributes:
        question: What about the pages.
        number: What the answer repeats.
        fingerprint: Of the layout.
        keys: The pages.
        room_bytes: How many bytes of pages the answer may have; at least one page is allowed.
    """

    question: Question
    number: int
    fingerprint: bytes
    keys: PageKeys
    room_bytes: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Answer:
    """What it said.

    Attributes:
        found: Which of the pages are there.
        right: Which rows of the columns are right. Row i is page i of those found.
        columns: The bytes of each layer range. Shape of column r: (rows * range_bytes[r],). None
            where there are no rows.
    """

    found: PageBits
    right: PageBits
    columns: tuple[memoryview, ...] = ()


AnswerOrFlaw: TypeAlias = Answer | Flaw


def encode_request(request: Request) -> bytes:
    """The bytes of a request."""
    head = _REQUEST.pack(
        _REQUEST_MAGIC,
        request.question,
        len(request.keys),
        request.number,
        request.room_bytes,
        request.fingerprint,
    )
    return head + request.keys.data


def decode_request(message: Buffer) -> Request | None:
    """The request that some bytes are; None if they are none."""
    data = memoryview(message)
    if len(data) < _REQUEST.size:
        return None
    magic, question, count, number, room_bytes, fingerprint = _REQUEST.unpack_from(data)
    keys = data[_REQUEST.size :]
    if magic != _REQUEST_MAGIC or len(keys) != count * PAGE_KEY_BYTES or question not in _QUESTIONS:
        return None
    return Request(
        question=Question(question),
        number=number,
        fingerprint=fingerprint,
        keys=PageKeys(bytes(keys)),
        room_bytes=room_bytes,
    )


class AnswerFrame:
    """An answer in the making: its columns are filled where they will be sent from, then sealed.

    Attributes:
        columns: To be filled. Shape of column r: (rows * range_bytes[r],).
    """

    def __init__(
        self,
        request: Request,
        take: Callable[[int], memoryview],
        rows: int = 0,
        range_bytes: tuple[int, ...] = (),
    ) -> None:
        """Lay an answer out.

        Args:
            request: What it answers.
            take: Gives so many bytes of memory, with anything in it.
            rows: How many pages it has.
            range_bytes: Of the layout; does not matter where there are no rows.
        """
        self._request: Final = request
        self._rows: Final = rows
        sizes = [rows * size for size in range_bytes] if rows else []
        start = _columns_offset(len(request.keys), rows, len(sizes))
        self._buffer: Final = take(start + sum(sizes))
        self.columns: Final = _split(self._buffer[start:], sizes)

    def seal(self, found: PageBits, right: PageBits) -> memoryview:
        """The bytes to send; the columns may not be changed any more."""
        request = self._request
        head = _ANSWER.pack(
            _ANSWER_MAGIC,
            request.question,
            Verdict.SERVED,
            found.count,
            self._rows,
            request.number,
        )
        sums = [
            _column_sum(request.number, layer_range, column)
            for layer_range, column in enumerate(self.columns)
        ]
        body = _masks(found, right) + struct.pack(f"<{len(sums)}Q", *sums)
        _seal(self._buffer, head + body)
        return self._buffer


def encode_refusal(number: int, verdict: Verdict) -> memoryview:
    """The bytes of an answer that says why there is none."""
    buffer = memoryview(bytearray(_columns_offset(0, 0, 0)))
    _seal(buffer, _ANSWER.pack(_ANSWER_MAGIC, 0, verdict, 0, 0, number))
    return buffer


def decode_answer(
    message: memoryview, request: Request, range_bytes: tuple[int, ...]
) -> AnswerOrFlaw:
    """What some bytes answer to a request.

    Cost: a checksum of all of them.
    """
    if len(message) < _ANSWER.size:
        return Flaw.MALFORMED
    magic, question, verdict, count, rows, number = _ANSWER.unpack_from(message)
    if magic != _ANSWER_MAGIC or number != request.number:
        return Flaw.MALFORMED
    sums = len(range_bytes) if rows else 0
    sealed = _sealed_bytes(count, rows, sums)
    if len(message) < sealed + _SUM.size:
        return Flaw.MALFORMED
    if _SUM.unpack_from(message, sealed)[0] != xxh3_64_intdigest(message[:sealed]):
        return Flaw.CORRUPT
    if verdict != Verdict.SERVED:
        return Flaw.REFUSED
    start = _columns_offset(count, rows, sums)
    sizes = [rows * size for size in range_bytes] if rows else []
    if (
        question != request.question
        or count != len(request.keys)
        or len(message) != start + sum(sizes)
    ):
        return Flaw.MALFORMED
    found, right = _unmask(message[_ANSWER.size :], count, rows)
    if found is None or right is None or rows > found.total:
        return Flaw.MALFORMED
    if question == Question.FETCH and found.mask and not rows:
        # Whoever asks again for what was not sent would do so for ever.
        return Flaw.MALFORMED
    columns = _split(message[start:], sizes)
    expected = struct.unpack_from(f"<{sums}Q", message, sealed - sums * _SUM.size)
    for layer_range, column in enumerate(columns):
        if expected[layer_range] != _column_sum(number, layer_range, column):
            return Flaw.CORRUPT
    return Answer(found=found, right=right, columns=columns)


def _column_sum(number: int, layer_range: int, column: memoryview) -> int:
    return xxh3_64_intdigest(column, number ^ layer_range << _RANGE_SHIFT)


def _mask_bytes(count: int) -> int:
    return (count + 7) // 8


def _sealed_bytes(count: int, rows: int, sums: int) -> int:
    """Bytes before the checksum of the head."""
    return _ANSWER.size + _mask_bytes(count) + _mask_bytes(rows) + sums * _SUM.size


def _columns_offset(count: int, rows: int, sums: int) -> int:
    """Where the columns start."""
    end = _sealed_bytes(count, rows, sums) + _SUM.size
    return -(-end // _ALIGNMENT) * _ALIGNMENT


def _seal(buffer: memoryview, head: bytes) -> None:
    """Write a head with its checksum, and zeros up to the columns."""
    buffer[: len(head)] = head
    _SUM.pack_into(buffer, len(head), xxh3_64_intdigest(head))
    end = len(head) + _SUM.size
    stop = -(-end // _ALIGNMENT) * _ALIGNMENT
    buffer[end:stop] = bytes(stop - end)


def _masks(found: PageBits, right: PageBits) -> bytes:
    return b"".join(
        bits.mask.to_bytes(_mask_bytes(bits.count), "little") for bits in (found, right)
    )


def _unmask(data: memoryview, count: int, rows: int) -> tuple[PageBits | None, PageBits | None]:
    """Both masks; None for one with bits that belong to nothing."""
    middle = _mask_bytes(count)
    end = middle + _mask_bytes(rows)
    return _bits(data[:middle], count), _bits(data[middle:end], rows)


def _bits(data: memoryview, count: int) -> PageBits | None:
    mask = int.from_bytes(data, "little")
    return None if mask >> count else PageBits(mask, count)


def _split(data: memoryview, sizes: list[int]) -> tuple[memoryview, ...]:
    """Pieces of some bytes, one after the other."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(data[start : start + size])
        start += size
    return tuple(pieces)
