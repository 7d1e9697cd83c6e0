"""The figures of a demonstration: collected, judged, printed and written."""

from __future__ import annotations

import json
from contextlib import contextmanager
from math import isfinite, isnan
from statistics import median
from typing import TYPE_CHECKING, Final, TypeAlias

import attrs

from radixlink.errors import ReportError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from radixlink.demo._messages import TurnFigures

MAX_DLOGIT: Final = 1e-3
"""How far logits in fp32 may be from those of a run without a cache. A page swapped for another moves them more."""

MIN_SPEED_UP: Final = 4.0
"""So many times sooner the first token must come than with the store off: the median of the turns that restored.

Not judged for the tiny model, which computes its prompts in a fraction of a second.
"""

_UNTIMED_MODEL: Final = "tiny"

_HEADER: Final = (
    f"{'turn':>4} {'document':<11} {'on':<2} {'prompt':>6} {'device':>6} {'restored':>8} "
    f"{'computed':>8} {'first token':>11} {'store off':>9} {'times':>6}  restored from"
)


@attrs.frozen(kw_only=True)
class TurnReport:
    """One turn, with who held it.

    Attributes:
        number: From 1, for each conversation.
        conversation: Its name.
        replica: Its name.
        pid: The replica's process.
        answer: The text.
        figures: What it took.
    """

    number: int
    conversation: str
    replica: str
    pid: int
    answer: str
    figures: TurnFigures

    @property
    def speed_up(self) -> float:
        """How many times sooner the first token came than with the store off."""
        return self.figures.without_store_s / self.figures.first_token_s

    def row(self) -> str:
        """One line of the table."""
        figures = self.figures
        writers = ", ".join(
            f"{pages} pages of pid {pid}" for pid, pages in sorted(figures.pages_by_writer.items())
        )
        verdict = "" if figures.identical else "  WRONG TOKENS"
        return (
            f"{self.number:>4} {self.conversation:<11} {self.replica:<2} {figures.prompt_tokens:>6} "
            f"{figures.device_tokens:>6} {figures.restored_tokens:>8} {figures.computed_tokens:>8} "
            f"{figures.first_token_s * 1e3:>8.0f} ms {figures.without_store_s * 1e3:>6.0f} ms "
            f"{self.speed_up:>6.1f}  {writers or '-'}{verdict}"
        )


@attrs.frozen(kw_only=True)
class RanksReport:
    """The part with two tensor-parallel ranks.

    Attributes:
        restored_tokens: Of the turn whose pages were all there, for each rank.
        computed_tokens_after_loss: Of the turn for which one rank lost one page, for each rank.
        restored_tokens_after_loss: Likewise.
        identical: All tokens equal those of a run without a cache.
        max_dlogit: Over all turns, from that run.
    """

    restored_tokens: tuple[int, ...]
    computed_tokens_after_loss: tuple[int, ...]
    restored_tokens_after_loss: tuple[int, ...]
    identical: bool
    max_dlogit: float

    def faults(self) -> list[str]:
        """What is not as it should be."""
        faults = []
        if not self.identical:
            faults.append("two ranks: tokens differ from a run without a cache")
        if not _is_close(self.max_dlogit):
            faults.append(f"two ranks: logits are off by {self.max_dlogit:.2e}")
        if min(self.restored_tokens) == 0 or len(set(self.restored_tokens)) > 1:
            faults.append(f"two ranks: restored {self.restored_tokens} tokens")
        if len(set(self.computed_tokens_after_loss)) > 1 or any(self.restored_tokens_after_loss):
            faults.append(
                "two ranks: one lost page did not cost both the same recompute: restored "
                f"{self.restored_tokens_after_loss}, computed {self.computed_tokens_after_loss}"
            )
        return faults

    def summary(self) -> str:
        """What it came to."""
        return (
            f"each restored {self.restored_tokens[0]} tokens; after rank 1 lost one page both "
            f"computed {self.computed_tokens_after_loss[0]}"
        )


@attrs.frozen(kw_only=True)
class RanksLeftOut:
    """The part with two tensor-parallel ranks was not held.

    Attributes:
        why_left_out: Why not.
    """

    why_left_out: str

    def faults(self) -> list[str]:
        """None: it was not asked for, or cannot be held here."""
        return []

    def summary(self) -> str:
        """Why it was not held."""
        return f"left out: {self.why_left_out}"


@attrs.frozen(kw_only=True)
class RanksFailed:
    """The part with two tensor-parallel ranks was begun, and came to no figures.

    Attributes:
        failure: Why.
    """

    failure: str

    def faults(self) -> list[str]:
        """That it failed."""
        return [f"two ranks: {self.failure}"]

    def summary(self) -> str:
        """Less than the fault tells."""
        return "FAILED"


Ranks: TypeAlias = RanksReport | RanksLeftOut | RanksFailed
"""What became of the part with two tensor-parallel ranks."""


@attrs.frozen(kw_only=True)
class DemoReport:
    """All of it.

    Attributes:
        model: Its name.
        model_digest: Of its weights.
        store: Name of the store.
        turns: In the order in which they were held.
        ended_pid: The replica that was killed before the last turns.
        survivor_end: Why the other one did not end well when it was told to end; None where it did.
        ranks: The part with two ranks.
        seconds: The whole run.
    """

    model: str
    model_digest: str
    store: str
    turns: tuple[TurnReport, ...]
    ended_pid: int
    survivor_end: str | None
    ranks: Ranks
    seconds: float

    @property
    def identical(self) -> bool:
        """Every token equals that of a run without a cache."""
        return all(turn.figures.identical for turn in self.turns) and (
            not isinstance(self.ranks, RanksReport) or self.ranks.identical
        )

    @property
    def max_dlogit(self) -> float:
        """The largest difference of logits from a run without a cache, two ranks included."""
        ranks = [self.ranks.max_dlogit] if isinstance(self.ranks, RanksReport) else []
        return largest([*(turn.figures.dlogit for turn in self.turns), *ranks])

    @property
    def control_dlogit(self) -> float | None:
        """The smallest difference that one swapped page made, NaN before all; None where nothing was restored."""
        controls = [
            turn.figures.control_dlogit
            for turn in self.turns
            if turn.figures.control_dlogit is not None
        ]
        return min(controls, key=lambda control: (not isnan(control), control), default=None)

    @property
    def median_speed_up(self) -> float:
        """Over the turns that restored something; 0 without any."""
        return median([t.speed_up for t in self.turns if t.figures.restored_tokens] or [0.0])

    def faults(self) -> list[str]:
        """What is not as it should be; empty for a demonstration that succeeded."""
        faults = []
        for turn in self.turns:
            where = f"turn {turn.number} of {turn.conversation}"
            if not turn.figures.identical:
                faults.append(f"{where}: tokens differ from a run without a cache")
            if turn.number > 1 and turn.figures.restored_tokens == 0:
                faults.append(f"{where}: nothing was restored")
            if not _is_close(turn.figures.dlogit):
                faults.append(
                    f"{where}: logits are off by {turn.figures.dlogit:.2e}, more than {MAX_DLOGIT:.0e}"
                )
            faults += _faults_of_control(turn.figures, where)
        if self.model != _UNTIMED_MODEL and not self.median_speed_up >= MIN_SPEED_UP:
            faults.append(
                f"first token only {self.median_speed_up:.1f} times sooner than with the store off, "
                f"expected {MIN_SPEED_UP:g} (median of the turns that restored)"
            )
        if self.survivor_end is not None:
            faults.append(f"the replica that was told to end did not end well: {self.survivor_end}")
        return faults + self.ranks.faults()

    def summary(self) -> list[str]:
        """The end of what is printed."""
        restored = sum(turn.figures.restored_tokens for turn in self.turns)
        computed = sum(turn.figures.computed_tokens for turn in self.turns)
        control = self.control_dlogit
        return [
            (
                f"restored {restored} tokens, computed {computed}; first token "
                f"{self.median_speed_up:.1f} times sooner than with the store off "
                "(median of the turns that restored)"
            ),
            f"tokens identical to runs without a cache: {'yes' if self.identical else 'NO'}; "
            f"logits differ by at most {self.max_dlogit:.1e}"
            + ("" if control is None else f", with one page swapped by at least {control:.1e}"),
            self._survival(),
            f"two tensor-parallel ranks: {self.ranks.summary()}",
        ]

    def _survival(self) -> str:
        """What the last turns had of the replica that was killed before them."""
        last = [turn for turn in self.turns if turn.number == self.turns[-1].number]
        by_writer = [turn.figures.pages_by_writer for turn in last]
        restored = sum(sum(pages.values()) for pages in by_writer)
        of_killed = sum(pages.get(self.ended_pid, 0) for pages in by_writer)
        return (
            f"replica pid {self.ended_pid} was killed before the last turns: {of_killed} of the "
            f"{restored} pages that they restored are ones that it had stored"
        )

    def write(self, path: Path) -> None:
        """Write everything as JSON, the derived figures first.

        JSON has no number for what is none: such a figure is one of the strings "nan", "inf" and "-inf".

        Raises:
            ReportError: The path cannot be written.
        """
        content = {
            "identical": self.identical,
            "max_dlogit": self.max_dlogit,
            "control_dlogit": self.control_dlogit,
            "median_speed_up": self.median_speed_up,
            "faults": self.faults(),
            **attrs.asdict(self),
        }
        with _reporting(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(_in_json(content), indent=2, allow_nan=False) + "\n")


def require_writable(path: Path) -> None:
    """A report can be written there; its directory is made, what is there stays as it is.

    Raises:
        ReportError: It cannot.
    """
    with _reporting(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    """What the system refuses about a report's path is a `ReportError`."""
    try:
        yield
    except OSError as error:
        raise ReportError(f"--report {path}: cannot be written: {error}") from error


def _in_json(value: object) -> object:
    """The same with figures that JSON can write."""
    match value:
        case dict():
            return {key: _in_json(held) for key, held in value.items()}
        case list() | tuple():
            return [_in_json(held) for held in value]
        case float() if not isfinite(value):
            return str(value)
        case _:
            return value


def largest(distances: Iterable[float]) -> float:
    """The largest distance; NaN where there is one, since nothing is known then.

    >>> largest([0.0, float("nan"), 1.0])
    nan
    """
    return max(distances, key=lambda distance: (isnan(distance), distance))


def _is_close(dlogit: float) -> bool:
    """True when logits are as near as they should be; NaN is not."""
    return dlogit <= MAX_DLOGIT


def _faults_of_control(figures: TurnFigures, where: str) -> list[str]:
    """What is wrong with a turn's control: whether the check sees a swapped page."""
    control = figures.control_dlogit
    if control is None:
        return [f"{where}: restored without a control"] if figures.restored_tokens else []
    if control > MAX_DLOGIT:
        return []
    return [f"{where}: the check does not see a swapped page: it moves logits by {control:.2e}"]


def header() -> str:
    """The table's first line."""
    return _HEADER


def ranks_report(told: Sequence[Mapping[str, object]]) -> RanksReport:
    """The report of what each rank told, by rank."""

    def numbers(field: str) -> tuple[int, ...]:
        return tuple(int(str(rank[field])) for rank in told)

    return RanksReport(
        restored_tokens=numbers("restored_tokens"),
        computed_tokens_after_loss=numbers("computed_tokens_after_loss"),
        restored_tokens_after_loss=numbers("restored_tokens_after_loss"),
        identical=all(bool(rank["identical"]) for rank in told),
        max_dlogit=largest(float(str(rank["max_dlogit"])) for rank in told),
    )
