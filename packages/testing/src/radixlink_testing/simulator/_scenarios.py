"""The interleavings that a history must contain, each by its name and written out.

A scenario is a plan, and what its story must tell in this order, so that it is sure to have happened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from radixlink_linker import LinkerSettings
from radixlink_testing.simulator._faults import Fault
from radixlink_testing.simulator._plan import (
    Abort,
    Arrive,
    Attach,
    Detach,
    Evict,
    Pass,
    Plan,
    Point,
    Reset,
    Strike,
    Tick,
)
from radixlink_testing.simulator._rank import Shape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from radixlink_testing.simulator._plan import Event, Work


@attrs.frozen(kw_only=True)
class Scenario:
    """An interleaving.

    Attributes:
        plan: Has it.
        tells: What must be in its story, in this order.
    """

    plan: Plan
    tells: tuple[str, ...]


_SETTINGS: Final = LinkerSettings(
    frame_words=8,
    max_lookups=64,
    staged_percent=60,
    publish_lock_steps=20,
    miss_steps=4,
    write_off_steps=60,
    retry_after_uses=1,
    written_off_percent=100,
    step_timeout_s=20.0,
    lookup_timeout_s=2.0,
    transfer_timeout_s=8.0,
)
_SHAPE: Final = Shape(num_pages=24, settings=_SETTINGS)
_MUCH: Final = 40


def scenarios() -> tuple[Scenario, ...]:
    """All of them, by name."""
    return (
        _cancel_half_taken(),
        _layer_fails_during_forward(),
        _load_fails_beside_forward(),
        _loader_slower_than_a_batch_waits(),
        _insert_between_start_and_verdict(),
        _insert_while_a_forward_waits(),
        _late_writer(),
        _head_evicted_before_match(),
        _head_evicted_before_load(),
        _head_grown_before_load(),
        _head_tombstoned_before_load(),
        _state_at_its_boundary(),
        _state_that_comes_later(),
        _window_alone(),
        _window_that_another_brings(),
        _state_alone(),
        _layers_behind_lent_pages(),
        _abort_while_another_waits(),
        _refused_offload(),
        _touch_of_a_lost_window(),
        _store_given_up(),
        _given_up_while_an_offload_is_due(),
        _load_beside_what_hangs(),
        _reset_with_everything_in_flight(),
    )


def _cancel_half_taken() -> Scenario:
    """Rank 0's thread has begun with the load, rank 1's has not heard of it: it is no cancel."""
    return _scenario(
        "a cancel that one rank's thread has taken and another's has not",
        [
            *_stored("abcd"),
            *_asked(Arrive(name="r", pages="abcd")),
            _tick(work=_quanta(0, 3)),
            _tick([Abort("r")]),
            *_busy(4),
            *_asked(Arrive(name="s", pages="abcd")),
        ],
        tells=("r: LoadWaiting", "r is aborted while it is told to wait", "LANDED", "s matches 8"),
    )


def _layer_fails_during_forward() -> Scenario:
    """The forward reads layer after layer; one rank cannot read layer 20: it is run again."""
    return _scenario(
        "layer 20 of 30 failing on one rank while the forward runs",
        [
            *_stored("abcd"),
            _tick([Strike(1, Fault.LOAD_FAILS, 20)]),
            *_admitted(
                Arrive(name="r", pages="abcd", tail=1, layer_wise=True),
                work=_quanta(0, 30, Point.AFTER_LAUNCH) + _quanta(1, 30, Point.AFTER_LAUNCH),
            ),
            *_busy(4),
        ],
        tells=(
            "r: LoadAdmitted",
            "launches ['r']",
            "a forward reads layer 12",
            "FAILED",
            "failed ['r']",
            "r is run again",
            "MISS",
        ),
        shape=attrs.evolve(_SHAPE, num_layers=30, layer_wise=True),
    )


def _loader_slower_than_a_batch_waits() -> Scenario:
    """One rank's copy goes on behind the deadline: its slots come back when it has ended."""
    return _scenario(
        "a loader slower than a batch waits",
        [
            *_stored("abcd"),
            _tick([Strike(1, Fault.LOAD_SLOW)]),
            *_admitted(
                Arrive(name="r", pages="abcd", layer_wise=True),
                work=_quanta(0, _MUCH, Point.AFTER_LAUNCH) + _quanta(1, 3, Point.AFTER_LAUNCH),
            ),
            _tick([Arrive(name="greedy", pages="ddcc")], overlap=9),
            _tick(),
            *_busy(6),
        ],
        tells=("r: LoadAdmitted", "failed ['r']", "r is run again", "load", "FAILED"),
        shape=attrs.evolve(_SHAPE, num_pages=8, layer_wise=True),
    )


def _load_fails_beside_forward() -> Scenario:
    """One rank cannot read layer 20; a batch of another request runs all the while."""
    return _scenario(
        "layer 20 of 30 failing on one rank while another's forward runs",
        [
            *_stored("abcd"),
            _tick([Strike(1, Fault.LOAD_FAILS, 20)]),
            *_asked(Arrive(name="r", pages="abcd"), Arrive(name="forward", pages="dd")),
            *(_tick(work=_quanta(0, 20) + _quanta(1, 20), overlap=9) for _ in range(6)),
            *_busy(4),
        ],
        tells=("r: LoadWaiting", "launches ['forward']", "FAILED", "failed ['r']", "MISS"),
        shape=attrs.evolve(_SHAPE, num_layers=30),
    )


def _insert_between_start_and_verdict() -> Scenario:
    """A forward that was launched before inserts the same pages while they are being loaded."""
    return _scenario(
        "another insert of the same pages between start and verdict",
        [
            *_stored("abcd"),
            _tick(
                [Strike(0, Fault.LOOKUP_RAISES), Arrive(name="twin", pages="abcd")],
                work=_everywhere(Point.AFTER_LAUNCH),
            ),
            _tick([Arrive(name="r", pages="abcd")], work=_everywhere(Point.AFTER_LAUNCH)),
            _tick(overlap=9),
            _tick(overlap=9),
            _tick(overlap=9),
            _tick(overlap=0),
            *_busy(4),
        ],
        tells=("launches ['twin']", "r: LoadWaiting", "LANDED", "landed ['r']", "r matches 8"),
    )


def _insert_while_a_forward_waits() -> Scenario:
    """The request runs on slots in whose place the tree has others by the verdict: it is told."""
    return _scenario(
        "another insert of the pages for whose layers a forward waits",
        [
            *_stored("abcd"),
            _tick(
                [Strike(0, Fault.LOOKUP_RAISES), Arrive(name="twin", pages="abcd")],
                work=_everywhere(Point.AFTER_LAUNCH),
            ),
            _tick(
                [Arrive(name="r", pages="abcd", tail=1, layer_wise=True)],
                work=_everywhere(Point.AFTER_LAUNCH),
            ),
            _tick(overlap=9),
            attrs.evolve(_tick(overlap=1), finish_later=True),
            _tick(work=_everywhere(Point.BEFORE_STEP), overlap=9),
            *_busy(4),
        ],
        tells=("launches ['twin']", "r: LoadAdmitted", "launches ['r']", "LANDED", "landed ['r']"),
        shape=attrs.evolve(_SHAPE, layer_wise=True),
    )


def _late_writer() -> Scenario:
    """A rank says failed and writes on; others want room at once, and get its slots later."""
    return _scenario(
        "a late writer after a failure, its slots re-allocated",
        [
            *_stored("abcd"),
            _tick([Strike(1, Fault.LATE_WRITER)]),
            *_asked(Arrive(name="r", pages="abcd")),
            _tick(work=_quanta(0, _MUCH) + _quanta(1, 4)),
            _tick([Arrive(name="greedy", pages="ddcc")], work=_quanta(0, _MUCH)),
            *(_tick(work=_quanta(0, _MUCH)) for _ in range(4)),
            *_busy(6),
        ],
        tells=("r: LoadWaiting", "still copying", "failed ['r']", "greedy", "FAILED"),
        shape=attrs.evolve(_SHAPE, num_pages=8),
    )


def _head_evicted_before_match() -> Scenario:
    """The device loses the pages behind which the store was asked."""
    return _scenario(
        "a head evicted between lookup and match",
        [
            *_stored("abcd"),
            *_on_device("ab"),
            _tick([Arrive(name="r", pages="abcd")], work=_everywhere(Point.AFTER_LAUNCH)),
            _tick(),
            _tick([Evict(1000)]),
            *_busy(4),
        ],
        tells=("r matches 4 tokens, UNKNOWN", "ready ['r']", "r matches 0 tokens, MISS"),
        shape=attrs.evolve(_SHAPE, settings=attrs.evolve(_SETTINGS, publish_lock_steps=0)),
    )


def _head_evicted_before_load() -> Scenario:
    """A request that is admitted before takes the room of the pages behind which the hit begins."""
    return _scenario(
        "a head evicted between lookup and load",
        [
            *_stored("abcd"),
            *_on_device("ab"),
            *_asked(Arrive(name="greedy", pages="ddccbbaa"), Arrive(name="r", pages="abcd")),
            *_busy(6),
        ],
        tells=("r matches 4 tokens, HIT 4", "the device prefix became shorter"),
        shape=attrs.evolve(
            _SHAPE, num_pages=8, settings=attrs.evolve(_SETTINGS, publish_lock_steps=0)
        ),
    )


def _head_grown_before_load() -> Scenario:
    """A forward inserts more of the sequence between a request's match and its load."""
    return _scenario(
        "a head grown between lookup and load",
        [
            *_stored("abcd"),
            *_on_device("ab"),
            _tick(
                [Strike(0, Fault.LOOKUP_RAISES), Arrive(name="twin", pages="abc")],
                work=_everywhere(Point.AFTER_LAUNCH),
            ),
            _tick([Arrive(name="r", pages="abcd")], work=_everywhere(Point.AFTER_LAUNCH)),
            _tick(overlap=9),
            _tick(overlap=0, late=True),
            *_busy(4),
        ],
        tells=("launches ['twin']", "r matches 4 tokens, HIT 4", "r: LoadWaiting", "r matches 8"),
        shape=attrs.evolve(_SHAPE, settings=attrs.evolve(_SETTINGS, publish_lock_steps=0)),
    )


def _head_tombstoned_before_load() -> Scenario:
    """The window behind which the store was asked goes; the full pages stay, for somebody reads them."""
    return _scenario(
        "a head tombstoned between lookup and load",
        [
            *_stored("abcd"),
            *_on_device("abdd"),
            _tick(
                [Strike(0, Fault.LOOKUP_RAISES), Arrive(name="holder", pages="abddb")],
                work=_everywhere(Point.AFTER_LAUNCH),
            ),
            _tick(overlap=9),
            _tick(
                [Arrive(name="r", pages="abcd")],
                work=_everywhere(Point.AFTER_LAUNCH),
                overlap=9,
            ),
            _tick(overlap=9),
            _tick([Evict(0, num_windows=1000)], overlap=9),
            _tick(overlap=9),
            *_busy(4),
        ],
        tells=("r matches 4 tokens, UNKNOWN", "launches ['holder']", "r matches 0 tokens, MISS"),
        shape=attrs.evolve(
            _SHAPE, window=2, settings=attrs.evolve(_SETTINGS, publish_lock_steps=0)
        ),
    )


def _state_at_its_boundary() -> Scenario:
    """Checkpoints of two boundaries are stored; who parts between them gets that of the first."""
    return _scenario(
        "the bytes of a published state equal to the state at its boundary",
        [
            _tick([Arrive(name="writer", pages="abcd", chunk=1)]),
            *_busy(8),
            _tick([Evict(1000)]),
            *_asked(Arrive(name="r", pages="abcd"), Arrive(name="s", pages="abdd")),
            *_busy(8),
        ],
        tells=("LoadWaiting", "landed ['r']", "r matches 8", "s matches 4"),
        shape=attrs.evolve(_SHAPE, num_states=12),
    )


def _state_that_comes_later() -> Scenario:
    """A node is stored without a state; one that comes to it is stored for itself."""
    return _scenario(
        "a state that comes to a stored node",
        [
            _tick([Arrive(name="writer", pages="abcd", chunk=2, keep=False)]),
            *_busy(8),
            _tick([Arrive(name="later", pages="ab")]),
            *_busy(8),
            _tick([Evict(1000)]),
            *_asked(Arrive(name="r", pages="abdd")),
            *_busy(4),
        ],
        tells=(
            "launches ['later']",
            "offload",
            "LANDED",
            "r matches 0 tokens, HIT 4",
            "landed ['r']",
        ),
        shape=attrs.evolve(_SHAPE, num_states=12),
    )


def _part_alone(name: str, evicted: Evict, shape: Shape) -> Scenario:
    """The full pages stayed, something beside them went: the load brings that and nothing else."""
    return _scenario(
        name,
        [
            *_on_device("abcd"),
            *_on_device("abcdab"),
            _tick([evicted]),
            *_asked(Arrive(name="r", pages="abcd")),
            *_busy(4),
        ],
        tells=("r matches 0 tokens, HIT 8", "r: LoadWaiting", "landed ['r']", "r matches 8"),
        shape=shape,
    )


def _window_alone() -> Scenario:
    """The load brings two window pages."""
    return _part_alone(
        "windows evicted alone come back to the pages that stayed",
        Evict(0, num_windows=1000),
        attrs.evolve(_SHAPE, window=4),
    )


def _window_that_another_brings() -> Scenario:
    """While windows are loaded alone, another request has computed those tokens, windows and all."""
    return _scenario(
        "windows that another request brings while they are loaded",
        [
            *_on_device("abcd"),
            *_on_device("abcdab"),
            _tick([Evict(0, num_windows=1000)]),
            _tick(
                [Strike(0, Fault.LOOKUP_RAISES), Arrive(name="twin", pages="abcd")],
                work=_everywhere(Point.AFTER_LAUNCH),
            ),
            _tick([Arrive(name="r", pages="abcd")], work=_everywhere(Point.AFTER_LAUNCH)),
            _tick(overlap=9),
            _tick(overlap=9),
            _tick(overlap=9),
            _tick(overlap=0),
            *_busy(4),
        ],
        tells=("launches ['twin']", "r: LoadWaiting", "landed ['r']", "r matches 8"),
        shape=attrs.evolve(_SHAPE, window=4),
    )


def _state_alone() -> Scenario:
    """The load brings the state at the end of the pages."""
    return _part_alone(
        "a state evicted alone comes back to the node that stayed",
        Evict(0, num_states=1),
        attrs.evolve(_SHAPE, num_states=12),
    )


def _layers_behind_lent_pages() -> Scenario:
    """A forward waits for layers behind full pages that are the tree's; the load fails, and they go."""
    return _scenario(
        "pages that a forward reads under the lock of a load that fails",
        [
            *_stored("abcd"),
            *_on_device("ab"),
            *_on_device("abd"),
            _tick([Evict(0, num_windows=1000)]),
            _tick([Strike(1, Fault.LOAD_FAILS, 0)]),
            *_admitted(
                Arrive(name="r", pages="abcd", tail=1, layer_wise=True),
                work=_quanta(0, 30, Point.AFTER_LAUNCH) + _quanta(1, 30, Point.AFTER_LAUNCH),
            ),
            # Room is made before the verdict, and behind it while the batch still runs.
            _tick([Evict(1000)], overlap=9),
            _tick([Evict(1000)], overlap=9),
            *_busy(4),
        ],
        tells=("r matches 0 tokens, HIT 8", "r: LoadAdmitted", "failed ['r']", "r is run again"),
        shape=attrs.evolve(_SHAPE, window=2, layer_wise=True),
    )


def _store_given_up() -> Scenario:
    """A rank never lets go of more slots than may be written off: all ranks go on without a store."""
    return _scenario(
        "a store that is given up on all ranks in one step",
        [
            *_stored("abcd"),
            *_stored("ddcc"),
            _tick([Strike(1, Fault.LOAD_HANGS)]),
            *_asked(Arrive(name="r", pages="abcd")),
            _tick([Pass(9.0)], work=_quanta(0, _MUCH) + _quanta(1, 4)),
            *_busy(3),
            _tick([Arrive(name="asks", pages="ddcc")]),
            *_busy(8),
            _tick([Arrive(name="late", pages="ddcc")]),
            *_busy(3),
            _tick([Detach(), Attach()]),
            *_busy(3),
        ],
        tells=("failed ['r']", "the store is given up", "late matches", "NOT_ASKED"),
        shape=attrs.evolve(
            _SHAPE,
            settings=attrs.evolve(_SETTINGS, write_off_steps=6, written_off_percent=10),
        ),
    )


def _given_up_while_an_offload_is_due() -> Scenario:
    """What is written off leaves room for an offload that is due: it does not begin any more."""
    return _scenario(
        "a store that is given up while an offload waits for its turn",
        [
            *_stored("abcd"),
            _tick([Strike(1, Fault.OFFLOAD_HANGS), Arrive(name="w", pages="ddcc")]),
            *_busy(4),
            _tick([Pass(9.0)]),
            *_asked(Arrive(name="r", pages="abcd"), Arrive(name="x", pages="bbbb")),
            *[_tick()] * 4,
            *_busy(4),
        ],
        tells=(
            "the next offload hangs",
            "r: LoadWaiting",
            "launches ['x']",
            "the store is given up",
            "failed ['r']",
            "launches ['r']",
        ),
        shape=attrs.evolve(
            _SHAPE,
            settings=attrs.evolve(
                _SETTINGS, max_operations=2, write_off_steps=6, written_off_percent=0
            ),
        ),
    )


def _load_beside_what_hangs() -> Scenario:
    """A frame has room for one operation, and one that is decided never lets go: both have turns."""
    return _scenario(
        "a load beside an operation that hangs and takes all of a frame",
        [
            *_stored("abcd"),
            _tick([Strike(1, Fault.OFFLOAD_HANGS), Arrive(name="w", pages="ddcc")]),
            *_busy(4),
            _tick([Pass(9.0)]),
            *_asked(Arrive(name="r", pages="abcd")),
            *_busy(8),
        ],
        tells=("the next offload hangs", "r: LoadWaiting", "LANDED", "landed ['r']"),
        shape=attrs.evolve(_SHAPE, settings=attrs.evolve(_SETTINGS, max_operations=1)),
    )


def _abort_while_another_waits() -> Scenario:
    """Whose load it is goes, who waits for it gets the pages."""
    return _scenario(
        "an abort while another waits",
        [
            *_stored("abcd"),
            *_asked(Arrive(name="r", pages="abcd")),
            _tick([Arrive(name="w", pages="abcd")]),
            _tick([Abort("r")]),
            *_busy(4),
        ],
        tells=(
            "w matches 0 tokens, UNKNOWN",
            "r is aborted",
            "LANDED",
            "ready ['w']",
            "w matches 8",
        ),
    )


def _refused_offload() -> Scenario:
    """One rank's store does not take a node: it is stored on none, and offered again."""
    return _scenario(
        "a refused offload on one rank",
        [
            _tick([Strike(1, Fault.OFFLOAD_REFUSED), Arrive(name="w", pages="abcd")]),
            *_busy(6),
            _tick([Arrive(name="again", pages="abcd")]),
            *_busy(6),
            _tick([Evict(1000)]),
            *_asked(Arrive(name="r", pages="abcd")),
            *_busy(3),
        ],
        tells=(
            "the next offload is refused",
            "again matches 8",
            "rank 1   offload",
            "landed ['r']",
        ),
    )


def _touch_of_a_lost_window() -> Scenario:
    """One rank's store has lost a page of a hot node's window: the node is offered again by all."""
    return _scenario(
        "a touch of a node whose window one rank's store has lost",
        [
            _tick([Arrive(name="w", pages="abcd")]),
            *_busy(6),
            # Windows are stored before the pages beside them, so the oldest is of one.
            _tick([Strike(1, Fault.PAGE_LOST, 0)]),
            _tick([Arrive(name="again", pages="abcd")]),
            *_busy(6),
            _tick([Arrive(name="third", pages="abcd")]),
            *_busy(6),
            _tick([Evict(1000)]),
            *_asked(Arrive(name="r", pages="abcd")),
            *_busy(3),
        ],
        tells=(
            "rank 1   fault: a page is gone",
            "launches ['again']",
            "rank 0   touch 3: LANDED",
            "rank 1   touch 3: FAILED",
            "launches ['third']",
            "rank 0   offload 5: LANDED",
            "rank 1   offload 5: LANDED",
            "r matches 0 tokens, HIT 8",
            "landed ['r']",
        ),
        shape=attrs.evolve(_SHAPE, window=2, settings=attrs.evolve(_SETTINGS, touch_after_uses=1)),
    )


def _reset_with_everything_in_flight() -> Scenario:
    """A load and a lookup are on their way, an offload is copied; then one of them completes."""
    return _scenario(
        "reset with everything in flight and a late completion of the old epoch",
        [
            *_stored("abcd"),
            _tick([Arrive(name="w", pages="dcba")], work=_everywhere(Point.AFTER_LAUNCH)),
            *_asked(Arrive(name="r", pages="abcd")),
            _tick([Arrive(name="asks", pages="cccc")], work=_quanta(0, 3) + _quanta(1, 1)),
            _tick([Reset()]),
            _tick(),
            _tick([Strike(0, Fault.OLD_COMPLETION), Strike(1, Fault.OLD_COMPLETION)]),
            _tick([Strike(0, Fault.OLD_COMPLETION)]),
            *_busy(4),
        ],
        tells=("r: LoadWaiting", "asks matches 0", "resets", "completes again", "landed"),
    )


# -- ways to write them ----------------------------------------------------------------------------


def _scenario(
    name: str, ticks: Iterable[Tick], *, tells: tuple[str, ...], shape: Shape = _SHAPE
) -> Scenario:
    return Scenario(plan=Plan(name=name, shape=shape, ticks=tuple(ticks)), tells=tells)


def _tick(
    events: Iterable[Event] = (),
    *,
    work: tuple[Work, ...] = (),
    overlap: int = 0,
    late: bool = False,
) -> Tick:
    """A tick in which backends do only what is said."""
    return Tick(events=tuple(events), work=work, admit=8, overlap=overlap, late=late)


def _quanta(rank: int, count: int, point: Point = Point.BEFORE_STEP) -> tuple[Work, ...]:
    """A rank's backend works on what is oldest."""
    return ((point, rank, 0),) * count


def _everywhere(point: Point) -> tuple[Work, ...]:
    """Both ranks' backends end what they have."""
    return _quanta(0, _MUCH, point) + _quanta(1, _MUCH, point)


def _busy(count: int) -> list[Tick]:
    """Ticks in which backends end what they have."""
    return [_tick(work=_everywhere(Point.BEFORE_STEP))] * count


def _stored(pages: str) -> list[Tick]:
    """A sequence is in the store, and not on the device."""
    return [_tick([Arrive(name="writer", pages=pages)]), *_busy(6), _tick([Evict(1000)])]


def _on_device(pages: str) -> list[Tick]:
    """A prefix is on the device too."""
    return [_tick([Arrive(name=f"head {pages}", pages=pages)]), *_busy(6)]


def _admitted(*arrivals: Arrive, work: tuple[Work, ...]) -> list[Tick]:
    """Requests come, and run by the third step; the frame after their launch comes a step later."""
    *before, last = _asked(*arrivals)
    return [*before, attrs.evolve(last, work=work, finish_later=True)]


def _asked(*arrivals: Arrive) -> list[Tick]:
    """Requests come, and are answered by the third step; what they then load has not moved."""
    return [
        _tick(arrivals, work=_everywhere(Point.AFTER_LAUNCH)),
        _tick(),
        _tick(overlap=9),
    ]
