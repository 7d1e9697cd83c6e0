from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from radixlink.demo._plan import REPLICAS, Transcript, longest_transcript, turns
from radixlink.demo.conversations import Conversation

if TYPE_CHECKING:
    from collections.abc import Sequence


class CharacterCodec:
    """A `TextCodec` with a token for each character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids)


CONVERSATION = Conversation(name="short", document="A text.", questions=("Why?", "When?"))


def test_each_conversation_moves_to_the_other_replica_with_every_turn() -> None:
    for conversation in range(2):
        held = [turn for turn in turns(2, 5) if turn.conversation == conversation]
        assert [turn.number for turn in held] == [1, 2, 3, 4, 5]
        for before, after in pairwise(held):
            assert {before.replica, after.replica} == set(range(len(REPLICAS)))


def test_conversations_alternate_on_one_replica() -> None:
    plan = turns(2, 3)
    for first, second in zip(plan[::2], plan[1::2], strict=True):
        assert (first.conversation, second.conversation) == (0, 1)
        assert first.replica == second.replica


def test_last_turns_are_held_by_the_first_replica() -> None:
    for num_turns in range(2, 9):
        last = [turn for turn in turns(2, num_turns) if turn.last]
        assert [turn.replica for turn in last] == [0, 0]
        assert {turn.number for turn in last} == {num_turns}


def test_each_prompt_extends_the_one_before_and_its_answer() -> None:
    transcript = Transcript(CONVERSATION, CharacterCodec())
    first = transcript.ask(1)
    answer = CharacterCodec().encode(" Because.")
    assert transcript.answer(answer) == " Because."
    second = transcript.ask(2)
    assert second[: len(first) + len(answer)] == (*first, *answer)
    assert CharacterCodec().decode(second).endswith("Question: When?\nAnswer:")


@pytest.mark.parametrize("num_turns", [2, 4, 5])
def test_longest_transcript_holds_every_prompt_and_answer(num_turns: int) -> None:
    codec = CharacterCodec()
    tokens_per_turn = 7
    longest = longest_transcript([CONVERSATION], codec, num_turns, tokens_per_turn)
    transcript = Transcript(CONVERSATION, codec)
    lengths = []
    for number in range(1, num_turns + 1):
        lengths.append(len(transcript.ask(number)) + tokens_per_turn)
        transcript.answer([1] * tokens_per_turn)
    assert longest == max(lengths)


def test_length_of_a_transcript_that_nobody_could_hold_is_known() -> None:
    codec = CharacterCodec()
    two_turns = longest_transcript([CONVERSATION], codec, 2, 0)
    document = len(codec.encode(CONVERSATION.document))
    many = longest_transcript([CONVERSATION], codec, 2 * 10**30, 10**20)
    assert many == document + 10**30 * (two_turns - document) + 2 * 10**30 * 10**20
