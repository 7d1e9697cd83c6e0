"""The rules that a history is held against, and what a history that breaks one raises."""

from __future__ import annotations

import enum
from typing import Final

from typing_extensions import override


class Rule(enum.IntEnum):
    """What must always hold, under the numbers of radixlink-linker's RULES.md."""

    LANDED = 1
    ONE_LOAD = 2
    LOAD_BACK = 3
    FRAMES = 4
    MATCH = 5
    DEADLINES = 6
    GROUP = 7
    STORED = 8
    PAGES = 9
    RECEIPTS = 10
    ATTACH = 11


_TITLES: Final = {
    Rule.LANDED: "nothing leaves a request before it has landed",
    Rule.ONE_LOAD: "one load for a page at a time",
    Rule.LOAD_BACK: "a load locks, allocates, mints, and a refusal is a verdict",
    Rule.FRAMES: "ranks agree in frames, and each fact changes once",
    Rule.MATCH: "match does no I/O and no collective",
    Rule.DEADLINES: "every wait has a deadline",
    Rule.GROUP: "all ranks of the group take part",
    Rule.STORED: "stored is what every rank confirmed",
    Rule.PAGES: "a page is what its key says",
    Rule.RECEIPTS: "locks are receipts, and nothing is left behind",
    Rule.ATTACH: "attach and detach leave no trace",
}


class RuleBrokenError(Exception):
    """A rule does not hold in a history.

    Attributes:
        rule: Which.
        detail: What was seen, on which rank.
        tick: When.
    """

    def __init__(self, rule: Rule, detail: str, tick: int) -> None:
        """Name the rule."""
        super().__init__(f"rule {rule.value} ({_TITLES[rule]}), tick {tick}: {detail}")
        self.rule = rule
        self.detail = detail
        self.tick = tick

    @override
    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by what it was made of."""
        return RuleBrokenError, (self.rule, self.detail, self.tick)


class Referee:
    """Takes down what is broken, wherever it is seen, and who did what.

    What is seen inside a call of the code under test is not raised there, where it could be taken for
    a backend's exception: whoever drives the ranks asks `check` after each call.
    """

    def __init__(self, *, tell: bool = False) -> None:
        """Start with nothing broken.

        Args:
            tell: Write the story down, which costs as much as the history itself.
        """
        self.tick = 0
        self._tell = tell
        self._story: list[str] = []
        self._first: RuleBrokenError | None = None

    @property
    def story(self) -> tuple[str, ...]:
        """Who did what at each tick, oldest first; empty unless it was asked for."""
        return tuple(self._story)

    @property
    def telling(self) -> bool:
        """True when a story is written: what goes into it need be worked out."""
        return self._tell

    def note(self, who: str, what: str) -> None:
        """Go on with the story."""
        if self._tell:
            self._story.append(f"{self.tick:4}  {who:8} {what}")

    def breach(self, rule: Rule, detail: str) -> None:
        """A rule is broken. The first one counts: what follows from it is of no use."""
        if self._first is None:
            self._first = RuleBrokenError(rule, detail, self.tick)
            self.note("referee", str(self._first))

    def check(self) -> None:
        """Return while every rule holds.

        Raises:
            RuleBrokenError: One does not.
        """
        if self._first is not None:
            raise self._first
