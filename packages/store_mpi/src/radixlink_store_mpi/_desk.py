"""`Desk`: what a node answers to the requests of others, from its own stores. No MPI, no threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never

from radixlink_contracts import PageBits
from radixlink_contracts.errors import LinkError
from radixlink_store_mpi._buffers import Buffers
from radixlink_store_mpi._pages import keys_of
from radixlink_store_mpi._wire import (
    AnswerFrame,
    Question,
    Request,
    Verdict,
    decode_request,
    encode_refusal,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from radixlink_contracts import PoolLayout
    from radixlink_store.segments import SegmentPageStore
    from radixlink_store_mpi.counters import NodeTally


class Desk:
    """Answers from the stores of one node.

    Thread: one at a time for `answer`; `serve` from any.
    """

    def __init__(self, max_answer_bytes: int, tally: NodeTally) -> None:
        """Serve nothing yet.

        Args:
            max_answer_bytes: Bytes of pages in one answer, though at least one page.
            tally: Takes what was served.
        """
        self._max_answer_bytes: Final = max_answer_bytes
        self._tally: Final = tally
        self._buffers: Final = Buffers()
        #: By the layout's fingerprint.
        self._stores: Final[dict[bytes, SegmentPageStore]] = {}

    def serves(self, layout: PoolLayout) -> bool:
        """Whether there is a store of a layout."""
        return layout.fingerprint in self._stores

    def serve(self, store: SegmentPageStore) -> None:
        """Answer from a store from now on. Owns: the desk closes it."""
        self._stores[store.layout.fingerprint] = store

    def answer(self, message: Buffer, number: int) -> memoryview:
        """The answer to a request, whatever its bytes are.

        Args:
            message: The request.
            number: What whoever asks knows the request by, also where the message is none.

        Cost: a copy, a checksum to verify and one to send, for each page that is fetched.
        """
        request = decode_request(message)
        if request is None or request.number != number:
            return encode_refusal(number, Verdict.MALFORMED)
        store = self._stores.get(request.fingerprint)
        if store is None:
            return encode_refusal(number, Verdict.UNKNOWN_LAYOUT)
        try:
            answer = self._answer(store, request)
        except (LinkError, MemoryError):
            return encode_refusal(number, Verdict.FAILED)
        self._tally.add(served=1)
        return answer

    def close(self) -> None:
        """Close what it serves from."""
        for store in self._stores.values():
            store.close()

    def _answer(self, store: SegmentPageStore, request: Request) -> memoryview:
        keys = request.keys
        nothing = PageBits.none(0)
        match request.question:
            case Question.CONTAINS:
                return AnswerFrame(request, self._buffers.take).seal(store.contains(keys), nothing)
            case Question.TOUCH:
                return AnswerFrame(request, self._buffers.take).seal(store.touch(keys), nothing)
            case Question.FETCH:
                return self._pages(store, request)
            case _:
                assert_never(request.question)

    def _pages(self, store: SegmentPageStore, request: Request) -> memoryview:
        """An answer with as many pages as there is room for."""
        found = store.contains(request.keys)
        room = min(request.room_bytes, self._max_answer_bytes) // store.layout.page_bytes
        rows = min(found.total, max(1, room))
        frame = AnswerFrame(request, self._buffers.take, rows, store.layout.range_bytes)
        handles = store.open(keys_of(request.keys, found).span(0, rows), 0.0)
        right = handles.found
        for layer_range, column in enumerate(frame.columns):
            right &= store.read(handles, layer_range, column)
        self._tally.add(sent=right.total)
        return frame.seal(found, right)
