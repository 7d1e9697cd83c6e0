"""The messages between nodes: what comes back is what was sent, and anything else is none."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlink_contracts import PageBits, PageKeys
from radixlink_store_mpi._wire import (
    Answer,
    AnswerFrame,
    Flaw,
    Question,
    Request,
    Verdict,
    decode_answer,
    decode_request,
    encode_refusal,
    encode_request,
)
from radixlink_testing.pages import page_keys

RANGES = (96, 33, 160)
FINGERPRINT = bytes(range(32))


def request_for(keys: PageKeys, question: Question = Question.FETCH) -> Request:
    return Request(
        question=question, number=7, fingerprint=FINGERPRINT, keys=keys, room_bytes=1 << 20
    )


def new(num_bytes: int) -> memoryview:
    """Memory that is not zero."""
    return memoryview(bytearray(b"\xee" * num_bytes))


def rows_of(rows: int) -> list[bytes]:
    """A column for each layer range."""
    return [
        bytes((row + size) % 256 for row in range(rows) for _ in range(size)) for size in RANGES
    ]


def sealed(request: Request, found: PageBits, right: PageBits) -> memoryview:
    frame = AnswerFrame(request, new, right.count, RANGES)
    for column, data in zip(frame.columns, rows_of(right.count), strict=False):
        column[:] = data
    return frame.seal(found, right)


@given(
    question=st.sampled_from(Question),
    number=st.integers(1, (1 << 30) - 1),
    pages=st.integers(0, 70),
    room_bytes=st.integers(0, (1 << 64) - 1),
)
def test_request_comes_back(question: Question, number: int, pages: int, room_bytes: int) -> None:
    request = Request(
        question=question,
        number=number,
        fingerprint=FINGERPRINT,
        keys=page_keys(range(pages)),
        room_bytes=room_bytes,
    )
    assert decode_request(encode_request(request)) == request


@pytest.mark.parametrize("cut", [1, 32, 56 + 96])
def test_request_that_is_cut_short_is_none(cut: int) -> None:
    assert decode_request(encode_request(request_for(page_keys(range(3))))[:-cut]) is None


def test_request_of_another_version_or_question_is_none() -> None:
    message = encode_request(request_for(page_keys(range(3))))
    assert decode_request(b"RLQ2" + message[4:]) is None
    assert decode_request(message[:4] + b"\x09" + message[5:]) is None
    assert decode_request(message + b"\0") is None


@given(found=st.lists(st.booleans(), min_size=1, max_size=70), data=st.data())
def test_answer_with_pages_comes_back(found: list[bool], data: st.DataObject) -> None:
    there = PageBits.of((page for page, is_there in enumerate(found) if is_there), len(found))
    rows = data.draw(st.integers(min(1, there.total), there.total))
    right = PageBits(data.draw(st.integers(0, (1 << rows) - 1)), rows)
    request = request_for(page_keys(range(len(found))))
    answer = decode_answer(sealed(request, there, right), request, RANGES)
    assert isinstance(answer, Answer)
    assert answer.found == there
    assert answer.right == right
    assert [bytes(column) for column in answer.columns] == (rows_of(rows) if rows else [])


def test_answer_without_pages_comes_back() -> None:
    request = request_for(page_keys(range(9)), Question.CONTAINS)
    found = PageBits.of([0, 8], 9)
    answer = decode_answer(AnswerFrame(request, new).seal(found, PageBits.none(0)), request, RANGES)
    assert isinstance(answer, Answer)
    assert answer.found == found
    assert answer.columns == ()


@pytest.mark.parametrize("verdict", [Verdict.UNKNOWN_LAYOUT, Verdict.FAILED, Verdict.MALFORMED])
def test_refusal_is_told_from_damage(verdict: Verdict) -> None:
    request = request_for(page_keys(range(9)))
    assert decode_answer(encode_refusal(7, verdict), request, RANGES) is Flaw.REFUSED
    assert decode_answer(encode_refusal(8, verdict), request, RANGES) is Flaw.MALFORMED


def test_every_flipped_bit_is_noticed() -> None:
    request = request_for(page_keys(range(9)))
    message = sealed(request, PageBits.of([0, 3, 8], 9), PageBits.of([0, 1], 2))
    intact = bytes(message)
    # The zeros between the head and the columns are nobody's.
    padding = range(59, 64)
    assert not any(intact[59:64])
    for byte in set(range(len(intact))) - set(padding):
        for bit in range(8):
            damaged = bytearray(intact)
            damaged[byte] ^= 1 << bit
            assert isinstance(decode_answer(memoryview(damaged), request, RANGES), Flaw), byte


def test_answer_to_another_request_is_none() -> None:
    request = request_for(page_keys(range(9)))
    message = sealed(request, PageBits.of([0, 3, 8], 9), PageBits.of([0, 1], 2))
    others = [
        attrs.evolve(request, number=8),
        attrs.evolve(request, question=Question.TOUCH),
        attrs.evolve(request, keys=page_keys(range(8))),
    ]
    for other in others:
        assert decode_answer(message, other, RANGES) is Flaw.MALFORMED
    assert decode_answer(message, request, (96, 33, 161)) is Flaw.MALFORMED
    assert decode_answer(message[:-1], request, RANGES) is Flaw.MALFORMED
    assert decode_answer(message[:20], request, RANGES) is Flaw.MALFORMED


def test_fetch_that_is_answered_without_a_row_is_none() -> None:
    # It would be asked again for ever.
    request = request_for(page_keys(range(3)))
    message = AnswerFrame(request, new).seal(PageBits.of([1], 3), PageBits.none(0))
    assert decode_answer(message, request, RANGES) is Flaw.MALFORMED


@given(st.binary(max_size=300))
def test_garbage_is_none(garbage: bytes) -> None:
    request = request_for(page_keys(range(3)))
    assert decode_request(garbage) is None
    assert isinstance(decode_answer(memoryview(garbage), request, RANGES), Flaw)
