"""The conversations of the demonstration are complete and differ from each other."""

from radixlink.demo.conversations import load_conversations


def test_there_are_two_conversations_of_seven_questions() -> None:
    conversations = load_conversations()
    assert [conversation.name for conversation in conversations] == ["lighthouse", "greenhouse"]
    assert all(len(conversation.questions) == 7 for conversation in conversations)


def test_questions_are_short_and_never_repeat() -> None:
    questions = [
        question for conversation in load_conversations() for question in conversation.questions
    ]
    assert len(set(questions)) == len(questions)
    assert all(question.endswith("?") and len(question) < 80 for question in questions)


def test_documents_are_long_enough_to_fill_many_pages() -> None:
    for conversation in load_conversations():
        # SmolLM2 makes 1,767 and 1,802 tokens of them: 3.8 letters a token.
        assert 6_500 < len(conversation.document) < 7_000


def test_documents_are_plain_ascii_without_repeated_lines() -> None:
    for conversation in load_conversations():
        lines = [line for line in conversation.document.splitlines() if line]
        assert conversation.document.isascii()
        assert len(set(lines)) == len(lines)


def test_documents_share_no_first_page() -> None:
    first, second = load_conversations()
    assert first.document[:8] != second.document[:8]


def test_loading_twice_gives_equal_values() -> None:
    assert load_conversations() == load_conversations()
