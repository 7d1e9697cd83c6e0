"""`Plan`: a whole history as a value: what the engine does, what goes wrong, and which thread runs when.

A plan looks at nothing that happens, so any part of it may be left out and the rest still means
something: that is how `shrink` makes a failing one short.
"""

from __future__ import annotations

import enum
import random
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeAlias

import attrs

from radixlink_contracts import POOL_OF
from radixlink_linker import LinkerSettings
from radixlink_testing.simulator._faults import OF_TOUCHES, Divergence, Fault
from radixlink_testing.simulator._rank import Shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


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


#: How many histories are of ranks with the same bytes.
_ALIKE: Final = 0.25
_MIN_TICKS: Final = 150
_LETTERS: Final = "abcd"
#: How many faults of a kind come to one of another.
_FAULTS: Final = tuple(fault for fault in Fault if fault not in OF_TOUCHES)
_DIVERGENCES: Final = (*Divergence, Divergence.EXTRA_STEP, Divergence.EXTRA_STEP)
#: Quanta a tick and rank, in a phase of the history.
_SPEEDS: Final = ((2, 6), (4, 10), (1, 2), (0, 6))


def settings_of(rng: random.Random, *, faulty: bool) -> LinkerSettings:
    """Small numbers, so that every limit is met; without a fault nothing need be written off."""
    max_lookups = rng.choice((2, 5, 64))
    return LinkerSettings(
        frame_words=rng.choice((7, 8, 16)),
        max_operations=rng.choice((3, 8, 64)),
        max_lookups=max_lookups,
        staged_percent=rng.choice((20, 40, 70)),
        max_loads=rng.choice((1, 2, 3)),
        publish_lock_steps=rng.choice((2, 6, 20)),
        miss_steps=rng.choice((2, 8, 20)),
        heartbeat_steps=rng.choice((5, 16, 64)),
        write_off_steps=rng.choice((8, 8, 60) if faulty else (30, 60)),
        written_off_percent=rng.choice((100, 8, 0)),
        backup_threshold=rng.choice((1, 1, 1, 2)),
        step_timeout_s=20.0,
        lookup_timeout_s=2.0,
        transfer_timeout_s=8.0,
    )


def shape_of(rng: random.Random, num_ranks: int, *, faulty: bool) -> Shape:
    """A kind of model, with little room for each of its states."""
    page_size = rng.choice((1, 2, 4))
    windows, states = rng.choice(((False, False), (True, False), (False, True), (True, True)))
    return Shape(
        num_ranks=num_ranks,
        page_size=page_size,
        num_pages=rng.choice((16, 24, 40)),
        num_layers=rng.choice((1, 2, 3)),
        # One page, or two of which the first is in part.
        window=rng.choice((page_size, page_size + 1)) if windows else 0,
        num_window_pages=rng.choice((12, 20, 32)),
        num_states=rng.choice((6, 10, 16)) if states else 0,
        states_per_path=rng.choice((None, 1, 2)),
        layer_wise=rng.random() < 0.6,
        settings=settings_of(rng, faulty=faulty),
        prompt=rng.random() < 0.7,
    )


def _stored_by_one(rng: random.Random, settings: LinkerSettings, num_ranks: int) -> LinkerSettings:
    """Ranks have the same bytes in some pools, and one stores them for all."""
    pools = list(POOL_OF.values())
    return attrs.evolve(
        settings,
        storing_ranks=(rng.randrange(num_ranks),) * num_ranks,
        shared_pools=tuple(rng.choice((pools, pools[-1:], rng.sample(pools, 2)))),
    )


def plan_of(
    seed: int,
    *,
    num_ranks: int | None = None,
    faults: bool | None = None,
    alike: bool | None = None,
) -> Plan:
    """The history of a seed: at least 150 steps and 20 requests.

    Args:
        seed: Every other seed has faults.
        num_ranks: None: 2, sometimes 3 or 4.
        faults: None: as the seed says.
        alike: Ranks have the same bytes in some pools. None: as the seed says.
    """
    rng = random.Random(seed)  # noqa: S311 -- a history, not a secret
    # Of its own, so that a history without touches is as it is with them.
    touches = random.Random(f"touches of {seed}")  # noqa: S311 -- likewise
    ranks = num_ranks or rng.choice((2, 2, 2, 2, 2, 2, 3, 4))
    faulty = seed % 2 == 1 if faults is None else faults
    shape = shape_of(rng, ranks, faulty=faulty)
    settings = attrs.evolve(
        shape.settings,
        touch_after_uses=touches.choice((1, 4, 16, 1 << 20)),
        max_touches=touches.choice((1, 2, 8)),
        retry_after_uses=touches.choice((1, 2, 4, 16)),
    )
    # And one without ranks that have the same bytes as it is with them.
    storers = random.Random(f"storers of {seed}")  # noqa: S311 -- likewise
    if storers.random() < _ALIKE if alike is None else alike:
        settings = _stored_by_one(storers, settings, ranks)
    shape = attrs.evolve(shape, settings=settings)
    num_ticks = _MIN_TICKS + rng.randrange(20)
    events: list[list[Event]] = [[] for _ in range(num_ticks)]
    _add_requests(rng, events)
    _add_calls(rng, events)
    if faulty:
        _add_faults(rng, events, ranks)
        for _ in range(touches.randint(0, 6)):
            strike = Strike(touches.randrange(ranks), touches.choice(OF_TOUCHES))
            events[touches.randrange(num_ticks)].append(strike)
    ticks: list[Tick] = []
    speed = _SPEEDS[0]
    for tick in range(num_ticks):
        if tick % 20 == 0:
            speed = rng.choice(_SPEEDS)
        ticks.append(
            Tick(
                events=tuple(events[tick]),
                work=_work(rng, ranks, speed),
                first=rng.randrange(ranks),
                admit=rng.choice((1, 3, 8)),
                overlap=rng.choice((0, 1, 1, 2)),
                late=rng.random() < 0.3,
                held=rng.random() < 0.1,
                finish_later=rng.random() < 0.3,
            )
        )
    return Plan(name=f"seed {seed}", shape=shape, ticks=tuple(ticks))


def _add_requests(rng: random.Random, events: list[list[Event]]) -> None:
    """Requests over most of the history, many of which begin alike."""
    trunks = ["".join(rng.choices(_LETTERS, k=rng.randint(2, 6))) for _ in range(4)]
    last = len(events) * 4 // 5
    for number in range(rng.randint(20, 30)):
        trunk = rng.choice(trunks)
        pages = trunk[: rng.randint(1, len(trunk))] + "".join(
            rng.choices(_LETTERS, k=rng.choice((0, 0, 1, 2, 3)))
        )
        turns = tuple(
            "".join(rng.choices(_LETTERS, k=rng.randint(1, 2)))
            for _ in range(rng.choice((0, 0, 1, 2)))
        )
        arrival = Arrive(
            name=f"r{number}",
            pages=pages,
            tail=rng.choice((0, 1)),
            turns=turns,
            chunk=rng.choice((0, 0, 1, 2)),
            tenant=rng.choice(("", "", "", "t")),
            slide=rng.random() < 0.5,
            keep=rng.random() < 0.6,
            layer_wise=rng.random() < 0.7,
        )
        tick = rng.randrange(last)
        events[tick].append(arrival)
        if rng.random() < 0.2:
            end = min(len(events) - 1, tick + rng.randrange(12))
            events[end].append(Abort(arrival.name))
        if rng.random() < 0.2:
            again = min(len(events) - 1, tick + rng.randrange(6))
            events[again].append(Poke(arrival.name))


def _add_calls(rng: random.Random, events: list[list[Event]]) -> None:
    """What the engine does beside its requests."""
    for tick, happening in enumerate(events):
        if rng.random() < 0.12:
            happening.append(_eviction(rng))
        if rng.random() < 0.04:
            happening.append(Pass(rng.choice((0.5, 1.0, 3.0))))
        if rng.random() < 0.004:
            happening.append(Reset())
        if rng.random() < 0.003:
            happening.append(Detach())
            back = min(len(events) - 1, tick + rng.randrange(6))
            events[back].append(Attach())


def _eviction(rng: random.Random) -> Evict:
    """Room for full attention, or for windows or states alone."""
    number = rng.choice((1, 4, 100))
    return rng.choice(
        (Evict(number), Evict(number), Evict(0, num_windows=number), Evict(0, num_states=number))
    )


def _add_faults(rng: random.Random, events: list[list[Event]], num_ranks: int) -> None:
    """What goes wrong, in most of the history."""
    for _ in range(rng.randint(6, 24)):
        tick = rng.randrange(len(events))
        rank = rng.randrange(num_ranks)
        fault = rng.choice(_FAULTS)
        events[tick].append(Strike(rank, fault, rng.randrange(64)))
        if fault in {
            Fault.LOADER_DEAD,
            Fault.LOAD_HANGS,
            Fault.OFFLOAD_HANGS,
            Fault.LOOKUP_LATE,
        }:
            end = tick + rng.choice((2, 6, 30))
            if end < len(events):
                events[end].append(Recover(rank))
            if rng.random() < 0.5:
                events[min(len(events) - 1, tick + 2)].append(Pass(9.0))
    if rng.random() < 0.4:
        for _ in range(rng.randint(1, 3)):
            tick = rng.randrange(len(events))
            events[tick].append(Diverge(rng.randrange(num_ranks), rng.choice(_DIVERGENCES)))
    if rng.random() < 0.1:
        events[-1].append(Kill(rng.randrange(num_ranks)))


def _work(rng: random.Random, num_ranks: int, speed: tuple[int, int]) -> tuple[Work, ...]:
    """The quanta of one tick."""
    return tuple(
        (_POINTS[rng.randrange(len(_POINTS))], rank, rng.randrange(64))
        for rank in range(num_ranks)
        for _ in range(rng.randint(*speed))
    )


_POINTS: Final = tuple(Point)
