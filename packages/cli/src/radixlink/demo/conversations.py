"""The conversations of the demonstration: questions about two documents of our own writing.

The documents lie as plain text in `documents/` and differ from their first words on, so that no two
of them share a page of tokens. Each is longer than 1,500 tokens of SmolLM2, shorter than 2,000.
"""

from importlib.resources import files
from typing import Final

import attrs

__all__ = ["Conversation", "load_conversations"]


@attrs.frozen(kw_only=True)
class Conversation:
    """Questions that are asked one after the other about one document.

    Every turn sends the document and all earlier turns again: the prefix that a cache can restore.
    """

    #: Unique among the conversations; the document's file name without its ending.
    name: str
    #: The whole text of the document.
    document: str
    #: In the order in which they are asked; each can be answered from the document.
    questions: tuple[str, ...]


_QUESTIONS: Final[dict[str, tuple[str, ...]]] = {
    "lighthouse": (
        "Who built the tower, and in which years?",
        "How many flashes does the light show, and how often?",
        "What are the names of the two diesel engines?",
        "On which channel is the weather reported to Marrow Head?",
        "How is the keeper to clean the prisms?",
        "What was the longest time without relief, and what did the crew eat?",
        "What should a keeper do who is alone and cannot show the light?",
    ),
    "greenhouse": (
        "Who gave the glasshouse to the town of Asterby?",
        "In which order do visitors walk through the rooms?",
        "Which temperatures does the Orchid Room need?",
        "What does Berta do when two sensors of one room differ too much?",
        "Why is black grease not used on the pump of the lily pool?",
        "Who are Salt and Pepper?",
        "What is rescued first if the emergency generator does not start?",
    ),
}


def load_conversations() -> tuple[Conversation, ...]:
    """All conversations of the demonstration are read, in an order that never changes.

    Returns:
        One conversation for each document, each with seven questions.
    """
    documents = files(__package__).joinpath("documents")
    return tuple(
        Conversation(
            name=name,
            document=documents.joinpath(f"{name}.txt").read_text(encoding="utf-8"),
            questions=questions,
        )
        for name, questions in _QUESTIONS.items()
    )
