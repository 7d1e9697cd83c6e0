"""`Asking`: what other nodes say of the pages of one layout. Requests and answers as values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from radixlink_store_mpi._wire import (
    Answer,
    Flaw,
    Question,
    Request,
    decode_answer,
    encode_request,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Buffer

    from radixlink_contracts import PageBits, PageKeys, PoolLayout
    from radixlink_store_mpi.counters import NodeTally


class Carrier(Protocol):
    """Takes messages to other nodes; `_courier` does it by MPI."""

    @property
    def rank(self) -> int:
        """Who asks."""
        ...

    @property
    def nodes(self) -> tuple[int, ...]:
        """The other nodes, each by its leader's rank."""
        ...

    def number(self) -> int:
        """A number for the next request."""
        ...

    def ask(self, messages: Mapping[int, tuple[int, Buffer]]) -> dict[int, memoryview]:
        """Send a numbered message to each node; return what was answered in time."""
        ...


class Asking:
    """Asks other nodes for pages of one layout. What is no answer is none, and counted.

    Thread: any.
    """

    def __init__(
        self, carrier: Carrier, layout: PoolLayout, room_bytes: int, tally: NodeTally
    ) -> None:
        """Ask nothing yet.

        Args:
            carrier: Takes the messages.
            layout: What the pages are.
            room_bytes: Bytes of pages in one answer, though at least one page.
            tally: Takes what became of the answers.
        """
        self.rank: Final = carrier.rank
        self.nodes: Final = carrier.nodes
        self._carrier: Final = carrier
        self._range_bytes: Final = layout.range_bytes
        self._fingerprint: Final = layout.fingerprint
        self._room_bytes: Final = room_bytes
        self._tally: Final = tally

    def holders(self, question: Question, keys: PageKeys) -> dict[int, PageBits]:
        """Which pages each other node has, of those that answered.

        Cost: one message to each, and one round trip of the slowest.
        """
        answers = self._ask(question, dict.fromkeys(self.nodes, keys))
        return {node: answer.found for node, answer in answers.items()}

    def fetch(self, wanted: Mapping[int, PageKeys]) -> dict[int, Answer]:
        """Pages of some nodes, of those that answered.

        Cost: one message to each, and one round trip of the slowest.
        """
        return self._ask(Question.FETCH, wanted)

    def _ask(self, question: Question, wanted: Mapping[int, PageKeys]) -> dict[int, Answer]:
        requests = {
            node: Request(
                question=question,
                number=self._carrier.number(),
                fingerprint=self._fingerprint,
                keys=keys,
                room_bytes=self._room_bytes,
            )
            for node, keys in wanted.items()
        }
        messages = {
            node: (request.number, encode_request(request)) for node, request in requests.items()
        }
        answers: dict[int, Answer] = {}
        for node, message in self._carrier.ask(messages).items():
            match decode_answer(message, requests[node], self._range_bytes):
                case Answer() as answer:
                    answers[node] = answer
                case Flaw() as flaw:
                    self._tally.add(**{_COUNTER_OF[flaw]: 1})
        self._tally.add(answered=len(answers))
        return answers


_COUNTER_OF: Final = {
    Flaw.MALFORMED: "malformed",
    Flaw.CORRUPT: "corrupt",
    Flaw.REFUSED: "refused",
}
