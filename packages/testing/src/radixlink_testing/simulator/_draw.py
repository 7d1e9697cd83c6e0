"""`plan_of`: the history of a seed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import attrs

from radixlink_contracts import POOL_OF
from radixlink_linker import LinkerSettings
from radixlink_testing.simulator._faults import OF_TOUCHES, Divergence, Fault
from radixlink_testing.simulator._plan import (
    Abort,
    Arrive,
    Attach,
    Detach,
    Diverge,
    Evict,
    Kill,
    Pass,
    Plan,
    Point,
    Poke,
    Recover,
    Reset,
    Strike,
    Tick,
)
from radixlink_testing.simulator._rank import Shape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from radixlink_testing.simulator._plan import Event, Work

#: What is said behind the seeds of histories of edges.
AT_EDGES: Final = ", settings at their edges"

#: How many histories are of ranks with the same bytes.
_ALIKE: Final = 0.25
#: How many numbers of a history of edges are at an end of what the linker takes, or close to it.
_AT_AN_EDGE: Final = 0.5
_MOST: Final = 1 << 30
_EDGES: Final[Mapping[str, tuple[int, ...]]] = {
    "max_operations": (1, 64),
    "max_lookups": (1, 4096),
    "staged_percent": (1, 100),
    "max_loads": (1, _MOST),
    # Longer than the history: its end waits for them.
    "publish_lock_steps": (0, 1, 200),
    "miss_steps": (0, 1, 200),
    # None is rarer: a divergence is heard with the next frame.
    "heartbeat_steps": (1, 2, 64),
    "written_off_percent": (0, 100),
    "backup_threshold": (1, 5),
    "retry_after_uses": (1, _MOST),
    "touch_after_uses": (1, _MOST),
    "max_touches": (0, 1, 64),
}
#: Where nothing goes wrong, nothing may be written off: a backend needs some steps.
_WRITE_OFF_EDGES: Final = {True: (1, 2, 3), False: (30, _MOST)}
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


def _at_edges(rng: random.Random, settings: LinkerSettings, *, faulty: bool) -> LinkerSettings:
    """Some of the numbers at their ends; a frame as small as it can be, or as large as it is."""
    numbers = attrs.asdict(settings, recurse=False)
    for name, ends in {**_EDGES, "write_off_steps": _WRITE_OFF_EDGES[faulty]}.items():
        if rng.random() < _AT_AN_EDGE:
            numbers[name] = rng.choice(ends)
    least = LinkerSettings.least_frame_words(numbers["max_lookups"])
    numbers["frame_words"] = rng.choice((least, 480))
    return LinkerSettings(**numbers)


def plan_of(
    seed: int,
    *,
    num_ranks: int | None = None,
    faults: bool | None = None,
    alike: bool | None = None,
    edges: bool = False,
) -> Plan:
    """The history of a seed: at least 150 steps and 20 requests.

    Args:
        seed: Every other seed has faults.
        num_ranks: None: 2, sometimes 3 or 4.
        faults: None: as the seed says.
        alike: Ranks have the same bytes in some pools. None: as the seed says.
        edges: Half of the linker's settings are the least or the most that it takes; all else is as
            without.
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
    if edges:
        settings = _at_edges(random.Random(f"edges of {seed}"), settings, faulty=faulty)  # noqa: S311
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
    return Plan(name=f"seed {seed}{AT_EDGES * edges}", shape=shape, ticks=tuple(ticks))


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
