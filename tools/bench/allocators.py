"""How long an allocator takes for one segment of tokens, by the size of its pool.

Half of each pool is in use, in segments freed and taken again in random order, so that the free
list is as mixed as after hours of service. `token` and `page` deal out one pool, `pair` a full pool
with window slots beside it. One thread; median and 90th percentile of each call.

    python tools/bench/allocators.py
"""

from __future__ import annotations

import random
import statistics
import time
from typing import TYPE_CHECKING, Final

import torch

from radixlink_pools import FullSwaAllocator, PagedAllocator

if TYPE_CHECKING:
    from radixlink_contracts import SlotAllocator

SEGMENT_TOKENS: Final = 512
NUM_SLOTS: Final = (64 << 10, 1 << 20)
PAGE_SIZES: Final = (1, 16)
ROUNDS: Final = 4000
#: Freed and taken in pieces of other sizes first, so that segments are no runs of slots any more.
CHURN_TOKENS: Final = (16, 48, 112, 512, 1040)


def churned(allocator: SlotAllocator, num_slots: int, rng: random.Random) -> None:
    """Leave an allocator half full and with a mixed free list."""
    pieces: list[torch.Tensor] = []
    for _ in range(2):
        while (piece := allocator.alloc(rng.choice(CHURN_TOKENS))) is not None:
            pieces.append(piece)
        rng.shuffle(pieces)
        while allocator.available_size < num_slots // 2:
            allocator.free(pieces.pop())


def measure(allocator: SlotAllocator, num_slots: int) -> tuple[list[float], list[float]]:
    """Return the microseconds of each alloc and of each free of one segment."""
    rng = random.Random(0)  # noqa: S311 -- repeatable, not secret
    churned(allocator, num_slots, rng)
    held: list[torch.Tensor] = []
    while len(held) < num_slots // 4 // SEGMENT_TOKENS:
        segment = allocator.alloc(SEGMENT_TOKENS)
        assert segment is not None, "half of the pool is free"
        held.append(segment)
    allocs, frees = [], []
    for _ in range(ROUNDS):
        place = rng.randrange(len(held))
        started = time.perf_counter_ns()
        allocator.free(held[place])
        freed = time.perf_counter_ns()
        segment = allocator.alloc(SEGMENT_TOKENS)
        ended = time.perf_counter_ns()
        assert segment is not None, "one segment was just freed"
        held[place] = segment
        frees.append((freed - started) / 1000)
        allocs.append((ended - freed) / 1000)
    return allocs, frees


def main() -> None:
    """Print one line for each pool."""
    torch.set_num_threads(1)
    print(
        f"{SEGMENT_TOKENS} tokens a call, median (90th percentile) in us, torch {torch.__version__}"
    )
    for num_slots in NUM_SLOTS:
        for page_size in PAGE_SIZES:
            num_pages = num_slots // page_size
            allocators: dict[str, SlotAllocator] = {
                "page" if page_size > 1 else "token": PagedAllocator(num_pages, page_size),
                "pair": FullSwaAllocator(num_pages, num_pages, page_size),
            }
            for name, allocator in allocators.items():
                cells = [
                    f"{statistics.median(times):6.2f} ({statistics.quantiles(times, n=10)[8]:6.2f})"
                    for times in measure(allocator, num_slots)
                ]
                print(
                    f"{num_slots:8} slots, page {page_size:2}, {name:5}: "
                    f"alloc {cells[0]}  free {cells[1]}"
                )


if __name__ == "__main__":
    main()
