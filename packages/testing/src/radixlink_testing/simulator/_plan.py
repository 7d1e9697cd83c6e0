"""`Plan`: a whole history as a value: what the engine does, what goes wrong, and which thread runs when.

A plan looks at nothing that happens, so any part of it may be left out and the rest still means
something: that is how `shrink` makes a failing one short. `_draw.py` draws one from a seed.
"""

from __future__ import annotations

import enum
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from radixlink_testing.simulator._faults import Divergence, Fault
    from radixlink_testing.simulator._rank import Shape


@attrs.frozen(kw_only=True)
class Arrive:
    """A request comes.

    Attributes:
        name: What it is called.
        pages: Its pages, a letter each: what begins alike is shared.
        tail: Tokens behind its last whole page.
        turns: What comes behind it in later turns of the conversation.
        chunk: Pages that one forward computes; 0 for all.
        tenant: Its cache salt; empty for none.
        slide: It gives its window up where it has moved on.
        keep: It leaves a state behind at the end of each chunk, not only of the last.
        layer_wise: It would rather run at once than wait for a load.
    """

    name: str
    pages: str
    tail: int = 0
    turns: tuple[str, ...] = ()
    chunk: int = 0
    tenant: str = ""
    slide: bool = False
    keep: bool = True
    layer_wise: bool = False


@attrs.frozen
class Abort:
    """The engine's ranks agreed to end a request."""

    name: str


@attrs.frozen
class Poke:
    """The engine matches a request that waits, without having been told to."""

    name: str


@attrs.frozen
class Evict:
    """The engine makes room: full attention, windows beside full pages that stay, states."""

    num_pages: int
    num_windows: int = 0
    num_states: int = 0


@attrs.frozen
class Pass:
    """Time passes."""

    seconds: float


@attrs.frozen
class Strike:
    """Something goes wrong on a rank.

    Attributes:
        rank: Where.
        fault: What.
        which: Of which page, or in which layer.
    """

    rank: int
    fault: Fault
    which: int = 0


@attrs.frozen
class Recover:
    """What hung or was dead goes on."""

    rank: int


@attrs.frozen
class Diverge:
    """A rank does what the others do not."""

    rank: int
    how: Divergence


@attrs.frozen
class Reset:
    """All ranks reset, with whatever is on its way."""


@attrs.frozen
class Detach:
    """All ranks take the linker off."""


@attrs.frozen
class Attach:
    """All ranks attach it again."""


@attrs.frozen
class Kill:
    """A rank ends, and never comes back."""

    rank: int


Event: TypeAlias = (
    Arrive
    | Abort
    | Poke
    | Evict
    | Pass
    | Strike
    | Recover
    | Diverge
    | Reset
    | Detach
    | Attach
    | Kill
)
"""What happens at the beginning of a tick."""


class Point(enum.IntEnum):
    """When, within a tick, a backend's threads may run."""

    BEFORE_STEP = 0
    #: After the frame, before any other rank's call has ended.
    AFTER_STEP = 1
    AFTER_SCHEDULING = 2
    AFTER_LAUNCH = 3


Work: TypeAlias = tuple[Point, int, int]
"""A quantum of work: when, on which rank, and which of what is to be done there."""


@attrs.frozen(kw_only=True)
class Tick:
    """One iteration of the scheduler.

    Attributes:
        events: What happens before it.
        work: What backends do within it.
        first: Which rank comes to the frame first.
        admit: How many requests are looked at.
        overlap: How many batches may run when it is over.
        late: Batches are processed between the matches of requests and their admission.
        held: Nothing is launched, so that what was queued stays queued.
        finish_later: The frame after the launch comes behind the next step.
    """

    events: tuple[Event, ...] = ()
    work: tuple[Work, ...] = ()
    first: int = 0
    admit: int = 4
    overlap: int = 1
    late: bool = False
    held: bool = False
    finish_later: bool = False

    @cached_property
    def quanta(self) -> Mapping[tuple[Point, int], list[int]]:
        """`work`, by when and on which rank."""
        quanta: dict[tuple[Point, int], list[int]] = {}
        for point, rank, which in self.work:
            quanta.setdefault((point, rank), []).append(which)
        return quanta


@attrs.frozen(kw_only=True)
class Plan:
    """A history.

    Attributes:
        name: What to call it, for people.
        shape: What the ranks are like.
        ticks: One for each scheduler step.
    """

    name: str
    shape: Shape
    ticks: tuple[Tick, ...]

    @property
    def num_steps(self) -> int:
        """Scheduler steps."""
        return len(self.ticks)

    @property
    def num_requests(self) -> int:
        """Requests that come."""
        return sum(isinstance(event, Arrive) for event in self.events())

    @property
    def faulty(self) -> bool:
        """True when something goes wrong."""
        return any(isinstance(event, Strike | Diverge | Kill) for event in self.events())

    def events(self) -> Iterator[Event]:
        """All events, in their order."""
        for tick in self.ticks:
            yield from tick.events
