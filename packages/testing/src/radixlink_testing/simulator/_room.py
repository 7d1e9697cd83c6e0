"""`Room`: what a forward needs of each rank's pools, and what it reads of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from radixlink_contracts import EvictParams, PoolName
from radixlink_testing.simulator._device import pages_of
from radixlink_testing.simulator._requests import Part
from radixlink_testing.simulator._rules import Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import IncLockRefResult
    from radixlink_testing.simulator._rank import Shape, SimulatedRank
    from radixlink_testing.simulator._requests import Read, Request


@attrs.frozen(kw_only=True)
class Plot:
    """Which pages of a request one forward is about.

    Attributes:
        on_device: Page behind the device prefix.
        start: Page where the request's own begin: behind a load, where there is one.
        end: Page behind the last whole one that it computes.
        num_tokens: Slots of its own.
    """

    on_device: int
    start: int
    end: int
    num_tokens: int


def plot_of(request: Request, on_device: int, start: int) -> Plot:
    """What the next forward of a request computes behind its first `start` pages."""
    size, whole = request.page_size, len(request.marks)
    tail = len(request.tokens) > whole * size
    end = min(whole, start + request.chunk) if request.chunk else whole
    pages = end - start + (tail and end == whole)
    return Plot(on_device=on_device, start=start, end=end, num_tokens=pages * size)


def part_of(
    rank: SimulatedRank, shape: Shape, request: Request, plot: Plot, receipt: IncLockRefResult
) -> Part | None:
    """Slots of a forward on one rank, behind a locked prefix; None for no room, and none is taken."""
    size, device = shape.page_size, rank.device
    own = _alloc(rank, plot.num_tokens)
    if own is None:
        return None
    state: int | None = None
    if rank.states is not None:
        state = request.states[rank.rank] if request.states else _state(rank, plot, receipt)
        if state is None:
            if len(own):
                rank.allocator.free(own)
            return None
        if not request.states:
            device.pools[PoolName.MAMBA].taken((state,))
    own_pages = pages_of(own, size)
    windows = device.windows_of(own_pages)
    device.full.taken(own_pages)
    if windows:
        device.pools[PoolName.SWA].taken(windows)
    prefix = rank.tree.path_indices(receipt.node_id)[: plot.on_device * size]
    if request.handed_in:
        prefix = torch.cat([prefix, request.handed_in[rank.rank].told[-1][1]])
    part = Part(receipt=receipt, prefix=prefix, own=own, own_pages=own_pages, state=state)
    _find_reads(rank, shape, request.marks, plot, part)
    part.busy = {PoolName.KV: pages_of(prefix, size) + own_pages}
    if shape.window:
        read = [page for pool, page, _ in part.reads + part.awaited if pool.pool is PoolName.SWA]
        part.busy[PoolName.SWA] = read + windows
    if state is not None:
        part.busy[PoolName.MAMBA] = [state]
    return part


def _alloc(rank: SimulatedRank, num_tokens: int) -> torch.Tensor | None:
    """Slots of full attention, and of windows beside them."""
    if not num_tokens:
        return torch.empty(0, dtype=torch.int64)
    full = num_tokens - rank.full.available_size
    swa = 0 if rank.pair is None else num_tokens - rank.pair.swa.available_size
    if full > 0 or swa > 0:
        rank.cache.evict(EvictParams(num_tokens=max(0, full), swa_num_tokens=max(0, swa)))
    return rank.allocator.alloc(num_tokens)


def _state(rank: SimulatedRank, plot: Plot, receipt: IncLockRefResult) -> int | None:
    """A state to go on from: a copy of the checkpoint at the end of the prefix, or a new one."""
    assert rank.states is not None
    if plot.start:
        return rank.cache.fork_state(receipt)
    if not rank.states.available_size:
        rank.cache.evict(EvictParams(mamba_num=1))
    return rank.states.alloc()


def _find_reads(
    rank: SimulatedRank, shape: Shape, marks: Sequence[bytes], plot: Plot, part: Part
) -> None:
    """What the forward reads: the prefix, the last window of it, and the state at its end."""
    device = rank.device
    pages = pages_of(part.prefix, shape.page_size)
    reads: list[Read] = [(device.full, *one) for one in zip(pages, marks, strict=False)]
    part.reads, part.awaited = reads[: plot.on_device], reads[plot.on_device :]
    for place in range(max(0, plot.start - shape.window_pages), plot.start):
        beside = device.windows_of((pages[place],))
        if not beside:
            rank.watch.breach(
                Rule.PAGES, f"page {place} of a prefix of {plot.start} pages has no window"
            )
        awaited = part.awaited if place >= plot.on_device else part.reads
        awaited += [(device.pools[PoolName.SWA], window, marks[place]) for window in beside]
    if part.state is not None and plot.start:
        part.reads.append((device.pools[PoolName.MAMBA], part.state, marks[plot.start - 1]))
