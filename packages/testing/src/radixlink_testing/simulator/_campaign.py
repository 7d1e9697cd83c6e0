"""Many histories, in several processes, and what is said of the one that breaks a rule."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING, Final

import attrs
import torch

from radixlink_testing.simulator._draw import plan_of
from radixlink_testing.simulator._history import run
from radixlink_testing.simulator._result import Tally
from radixlink_testing.simulator._shrink import shrink

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radixlink_testing.simulator._plan import Plan
    from radixlink_testing.simulator._result import Result
    from radixlink_testing.simulator._rules import RuleBrokenError

#: Histories that a process does at a time.
_CHUNK: Final = 25


@attrs.frozen(kw_only=True)
class Report:
    """How a campaign went.

    Attributes:
        first_seed: Of the first history; those behind it follow one by one.
        histories: How many were run.
        edges: Their settings were at the ends of what the linker takes.
        faulty: How many of them had faults.
        tally: What happened in all of them.
        seconds: How long it took.
        broken: The seeds of those that broke a rule, and what they said.
    """

    first_seed: int
    histories: int
    edges: bool
    faulty: int
    tally: Tally
    seconds: float
    broken: tuple[tuple[int, RuleBrokenError], ...]


@attrs.frozen(kw_only=True)
class _Part:
    """What one process has to say of its seeds."""

    histories: int
    faulty: int
    tally: Tally
    broken: tuple[tuple[int, RuleBrokenError], ...]


def campaign(first_seed: int, histories: int, *, processes: int = 1, edges: bool = False) -> Report:
    """Run the histories of seeds one after the other.

    Args:
        first_seed: Where to begin.
        histories: How many.
        processes: How many processes share them; 1 runs them here.
        edges: With settings at the ends of what the linker takes.
    """
    began = time.monotonic()
    parts = list(_parts(first_seed, first_seed + histories, processes, edges=edges))
    broken = sorted(
        (one for part in parts for one in part.broken), key=lambda seed_and_error: seed_and_error[0]
    )
    tally = Tally()
    for part in parts:
        tally += part.tally
    return Report(
        first_seed=first_seed,
        edges=edges,
        histories=sum(part.histories for part in parts),
        faulty=sum(part.faulty for part in parts),
        tally=tally,
        seconds=time.monotonic() - began,
        broken=tuple(broken),
    )


def _parts(first: int, stop: int, processes: int, *, edges: bool) -> Iterator[_Part]:
    """All seeds, in chunks."""
    chunks = [(start, min(start + _CHUNK, stop)) for start in range(first, stop, _CHUNK)]
    if processes == 1:
        with _for_histories():
            for chunk in chunks:
                yield _run_seeds(*chunk, edges=edges)
        return
    # Spawned: torch has threads, which a fork would lose.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, initializer=_prepare) as pool:
        for future in as_completed(
            [pool.submit(_run_seeds, *chunk, edges=edges) for chunk in chunks]
        ):
            yield future.result()


def _prepare() -> None:
    """Have a process do nothing but histories.

    Their garbage is collected between chunks: within one it is a few MiB, and torch's million objects
    are none.
    """
    # Tensors of a few numbers: more threads only wait for each other.
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.disable()


@contextlib.contextmanager
def _for_histories() -> Iterator[None]:
    """`_prepare` for a while."""
    collects, num_threads = gc.isenabled(), torch.get_num_threads()
    _prepare()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(num_threads)
        if collects:
            gc.enable()


def _run_seeds(first: int, stop: int, *, edges: bool) -> _Part:
    """Some seeds, in this process."""
    tally = Tally()
    faulty = 0
    broken: list[tuple[int, RuleBrokenError]] = []
    for seed in range(first, stop):
        plan = plan_of(seed, edges=edges)
        result = run(plan)
        tally += result.tally
        faulty += plan.faulty
        if result.broken is not None:
            broken.append((seed, result.broken))
    # Ranks and their parts refer to each other.
    gc.collect()
    return _Part(histories=stop - first, faulty=faulty, tally=tally, broken=tuple(broken))


def explain(plan: Plan, *, shorten: bool = True) -> str:
    """The story of a plan that breaks a rule, as short as it gets."""
    result = run(plan)
    if result.broken is None:
        return f"{plan.name}: every rule holds"
    if shorten:
        plan = shrink(plan, result.broken.rule)
    return story_of(run(plan, tell=True))


def story_of(result: Result) -> str:
    """A history as text: what it was, who did what, and which rule broke."""
    shape = result.plan.shape
    what = (
        f"{result.plan.name}: {shape.kind}, {shape.num_ranks} ranks, {shape.num_pages} pages of "
        f"{shape.page_size} tokens, {shape.num_layers} layer ranges, {shape}"
    )
    end = [] if result.broken is None else [f"broken: {result.broken}"]
    return "\n".join([what, *result.story, *end])
