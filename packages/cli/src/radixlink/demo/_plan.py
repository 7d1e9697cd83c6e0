"""Who answers what, in which order: a pure decision.

The conversations take turns on one replica, so that each evicts the other there; then both move to the other replica.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink.demo.conversations import Conversation
    from radixlink.models import TextCodec

REPLICAS: Final = ("A", "B")
"""The replicas' names, in the order of their ranks."""


@attrs.frozen(kw_only=True)
class Turn:
    """One question.

    Attributes:
        number: From 1, for each conversation.
        conversation: Its index.
        replica: Index of the one that answers.
        last: No turn of this conversation follows.
    """

    number: int
    conversation: int
    replica: int
    last: bool


def turns(num_conversations: int, num_turns: int) -> tuple[Turn, ...]:
    """Every turn, in the order in which they are held. The first replica holds the last turns.

    >>> [(t.number, t.conversation, t.replica) for t in turns(2, 2)]
    [(1, 0, 1), (1, 1, 1), (2, 0, 0), (2, 1, 0)]
    """
    return tuple(
        Turn(
            number=number,
            conversation=conversation,
            replica=(num_turns - number) % len(REPLICAS),
            last=number == num_turns,
        )
        for number in range(1, num_turns + 1)
        for conversation in range(num_conversations)
    )


class Transcript:
    """The tokens of one conversation so far. Answers are kept as tokens, so that their pages keep their names."""

    def __init__(self, conversation: Conversation, codec: TextCodec) -> None:
        """Begin with the document."""
        self._codec = codec
        self._questions = conversation.questions
        self._tokens = codec.encode(conversation.document)

    def ask(self, number: int) -> tuple[int, ...]:
        """Append question `number` (from 1; they repeat when they run out).

        Returns:
            The whole prompt.
        """
        question = self._questions[(number - 1) % len(self._questions)]
        self._tokens += self._codec.encode(_asked(question))
        return tuple(self._tokens)

    def answer(self, tokens: Sequence[int]) -> str:
        """Append an answer.

        Returns:
            Its text.
        """
        self._tokens += tokens
        return self._codec.decode(tokens)


def longest_transcript(
    conversations: Sequence[Conversation], codec: TextCodec, num_turns: int, tokens_per_turn: int
) -> int:
    """Tokens of the longest conversation at its end: what a device pool must hold of one.

    Cost: O(questions), however many turns and tokens: nothing is held that long.
    """
    return max(_length(text, codec, num_turns, tokens_per_turn) for text in conversations)


def _length(
    conversation: Conversation, codec: TextCodec, num_turns: int, tokens_per_turn: int
) -> int:
    """Tokens of a `Transcript` after its last answer."""
    questions = [len(codec.encode(_asked(question))) for question in conversation.questions]
    rounds, rest = divmod(num_turns, len(questions))
    asked = rounds * sum(questions) + sum(questions[:rest])
    return len(codec.encode(conversation.document)) + asked + num_turns * tokens_per_turn


def _asked(question: str) -> str:
    """A question as it stands in a conversation."""
    return f"\n\nQuestion: {question}\nAnswer:"
