"""What the tree costs: each operation by page size, and each by the size of the tree.

    python tools/bench/tree.py [--quick] [--json FILE]

Every column and every page size runs in a process of its own, one after the other. With `SGL_DIR`
(an unpacked wheel of sglang) and `TREES_BENCH` (a directory with the `impls.py` that knows how to
call it) SGLang's Rust core and a bare walk in Python stand beside; `SGL_PYTHON` is the interpreter
that has what SGLang needs, if it is not this one.

Times are medians. Only columns of one run may be compared, and on a shared machine differences under
15 % are noise.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from array import array
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PAGE_SIZES: Final = (1, 16, 64)
#: The most children a node of the curve's trees has: f + f**2 + f**3 nodes, all three deep.
FAN_OUTS: Final = (10, 21, 46, 100)
CURVE_PAGE: Final = 16
OURS: Final = ("tree_adapter:full", "tree_adapter:full_swa", "tree_adapter:full_mamba")
BESIDE: Final = (
    "floor",
    "unified_rust_full",
    "unified_rust_full_swa",
    "unified_rust_full_mamba",
)

#: A row's name, and its figure.
Figures: TypeAlias = dict[str, float]


class Tree(Protocol):
    """What `impls.py` asks of an implementation, as far as it is used here."""

    def insert(self, tokens: array[int], value: torch.Tensor, prev: int = 0) -> tuple[int, object]:
        """Insert; say how much was there, and where it ended."""
        ...

    def match(self, tokens: array[int]) -> tuple[int, object]:
        """How much is there, and where it ends."""
        ...

    def indices(self, node: object) -> torch.Tensor:
        """The slots from the root to the end of a node."""
        ...

    def evict(self, num_tokens: int) -> int:
        """Make room; say how much."""
        ...

    def lock(self, node: object) -> object:
        """Lock a path."""
        ...

    def unlock(self, receipt: object) -> None:
        """Release it."""
        ...


class Work:
    """Sequences that are the same for every implementation, and slots for them."""

    def __init__(self) -> None:
        self._rng = random.Random(0)  # noqa: S311 -- repeatable, not secret
        #: None of the trees looks at a slot, so they may all have the same.
        self._slots = torch.arange(1 << 16)

    def tokens(self, count: int) -> array[int]:
        """Random ones."""
        return array("q", self._rng.choices(range(150_000), k=count))

    def slots(self, count: int) -> torch.Tensor:
        """A slot for each token."""
        return self._slots[:count]

    def sample(self, of: list[array[int]], count: int) -> list[array[int]]:
        """Some of them, in random order."""
        return self._rng.sample(of, min(count, len(of)))


def median_us(calls: Iterable[Callable[[], object]]) -> float:
    """Median time of one call; the collector is off."""
    times: list[int] = []
    gc.collect()
    gc.disable()
    for call in calls:
        started = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started)
    gc.enable()
    return statistics.median(times) / 1000


def lock_and_unlock(tree: Tree, node: object) -> None:
    """Both, as one call."""
    tree.unlock(tree.lock(node))


def chain(tree: Tree, work: Work, tokens: array[int], step: int) -> None:
    """Insert a sequence as a conversation that grows."""
    for end in range(step, len(tokens) + 1, step):
        tree.insert(tokens[:end], work.slots(end), end - step)


def operations(make: Callable[[], Tree], rounds: int) -> Figures:
    """Each operation alone, in microseconds."""
    work, figures = Work(), Figures()
    prompt = work.tokens(32768)

    tree = make()
    tree.insert(prompt, work.slots(32768))
    other = work.tokens(1024)
    figures["match, miss at the root"] = median_us([partial(tree.match, other)] * rounds)
    for length in (1024, 8192, 32768):
        short, one = prompt[:length], make()
        one.insert(short, work.slots(length))
        name = f"match {length // 1024}k, 1 node"
        figures[name] = median_us([partial(one.match, short)] * rounds)
    full = work.slots(32768)
    figures["insert 32k, all there"] = median_us(
        [partial(tree.insert, prompt, full, 32768)] * rounds
    )
    longer = [prompt + work.tokens(8192) for _ in range(30)]
    more = work.slots(40960)
    figures["insert 8k on 32k"] = median_us(
        [partial(tree.insert, key, more, 32768) for key in longer]
    )

    tree = make()
    chain(tree, work, prompt, 512)
    end = tree.match(prompt)[1]
    figures["match 32k, 64 nodes"] = median_us([partial(tree.match, prompt)] * rounds)
    figures["gather 32k, 64 nodes"] = median_us([partial(tree.indices, end)] * rounds)
    figures["lock and unlock, 64 nodes"] = median_us([partial(lock_and_unlock, tree, end)] * rounds)
    grown = [prompt]
    for _ in range(40):
        grown.append(grown[-1] + work.tokens(64))
    figures["insert 64 on 32k"] = median_us(
        [partial(tree.insert, key, work.slots(len(key)), len(key) - 64) for key in grown[1:]]
    )

    tree = make()
    for head in [work.tokens(64) for _ in range(100)]:
        tree.insert(head, work.slots(64))
        for _ in range(20):
            tree.insert(head + work.tokens(64), work.slots(128), 64)
    figures["evict 1 node of 64"] = median_us([partial(tree.evict, 1)] * 2000)
    return figures


def memory(make: Callable[[], Tree], page_size: int) -> Figures:
    """Bytes that a node of one page, at least 64 tokens, takes beyond its tokens and slots."""
    work, length = Work(), max(64, page_size)
    heads = [work.tokens(length) for _ in range(200)]
    tails = [work.tokens(length) for _ in range(100)]
    tree, slots = make(), work.slots(2 * length)
    # What the first use of torch loads is not the nodes'.
    make().insert(heads[0], slots[:length])
    before = resident_bytes()
    for head in heads:
        tree.insert(head, slots[:length])
        for tail in tails:
            tree.insert(head + tail, slots, length)
    num_nodes = len(heads) * (1 + len(tails))
    beyond = (resident_bytes() - before) / num_nodes - 16 * length
    return {"bytes a node, beyond payload": beyond}


def resident_bytes() -> int:
    """Of this process, once what is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    statm = Path("/proc/self/statm").read_text(encoding="ascii")
    return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def curve(make: Callable[[], Tree], fan_outs: Iterable[int]) -> dict[str, Figures]:
    """What an operation costs among how many nodes, all of them paths of three nodes."""
    return {f"{f + f**2 + f**3:,}": among(make(), f) for f in fan_outs}


def among(tree: Tree, fan_out: int) -> Figures:
    """One point of the curve. Random paths: in a large tree, what they meet is not in a cache."""
    work, page = Work(), CURVE_PAGE
    paths: list[array[int]] = []
    gc.disable()
    for head in [work.tokens(page) for _ in range(fan_out)]:
        for body in [head + work.tokens(page) for _ in range(fan_out)]:
            tree.insert(body, work.slots(2 * page), page if tree.match(head)[0] else 0)
            for _ in range(fan_out):
                paths.append(body + work.tokens(page))
                tree.insert(paths[-1], work.slots(3 * page), 2 * page)
    gc.freeze()
    # Copies: an engine's key was just made, while these lie between the nodes made with them.
    some = [array("q", path) for path in work.sample(paths, 1000)]
    del paths
    new = [path[: 2 * page] + work.tokens(page) for path in some]
    ends = [tree.match(path)[1] for path in some]
    figures = {
        "match": median_us([partial(tree.match, key) for key in some * 3]),
        "match, hot": median_us([partial(tree.match, some[0])] * 3000),
        "gather": median_us([partial(tree.indices, end) for end in ends]),
        "lock and unlock": median_us([partial(lock_and_unlock, tree, end) for end in ends]),
        "insert": median_us(
            [partial(tree.insert, key, work.slots(3 * page), 2 * page) for key in new]
        ),
        "evict": median_us([partial(tree.evict, 1)] * 500),
    }
    gc.unfreeze()
    return figures


def child(name: str, page_size: int, *, quick: bool) -> dict[str, Figures]:
    """The figures of one implementation at one page size, in this process."""
    torch.set_num_threads(1)
    if name in BESIDE:
        sys.path.insert(0, os.environ["TREES_BENCH"])
        factory = importlib.import_module("impls").resolve(name)
    else:
        module, function = name.split(":")
        factory = getattr(importlib.import_module(module), function)

    def make() -> Tree:
        # Room enough: an allocator that runs out is not what is measured.
        return cast("Tree", factory(page_size, 1 << 23))

    figures = {"operations": memory(make, page_size) | operations(make, 50 if quick else 300)}
    if page_size == CURVE_PAGE:
        figures |= curve(make, FAN_OUTS[:2] if quick else FAN_OUTS)
    return figures


def in_process_of_its_own(name: str, page_size: int, *, quick: bool) -> dict[str, Figures]:
    """The same, by a child."""
    python = os.environ.get("SGL_PYTHON", sys.executable) if name in BESIDE else sys.executable
    command = [python, __file__, "--child", name, "--page-size", str(page_size)]
    done = subprocess.run(
        command + ["--quick"] * quick, stdout=subprocess.PIPE, text=True, check=True
    )
    figures: dict[str, Figures] = json.loads(done.stdout.splitlines()[-1])
    return figures


def table(title: str, columns: dict[str, Figures]) -> str:
    """A Markdown table with a column for each of these."""
    rows = list(next(iter(columns.values())))
    lines = [f"| {title} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [
        f"| {row} | {' | '.join(f'{figures[row]:,.2f}' for figures in columns.values())} |"
        for row in rows
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, print the tables, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke: few rounds, small trees")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--page-size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child, options.page_size, quick=options.quick)))
        return
    beside = {"SGL_DIR", "TREES_BENCH"} <= set(os.environ)
    names = [*OURS, *(BESIDE if beside else ())]
    kept: dict[str, dict[str, dict[str, Figures]]] = {}
    for page_size in PAGE_SIZES:
        columns = {
            name: in_process_of_its_own(name, page_size, quick=options.quick) for name in names
        }
        kept[f"page {page_size}"] = columns
        operations_of = {name: figures.pop("operations") for name, figures in columns.items()}
        print(table(f"page {page_size}, us", operations_of))
        for name, points in columns.items():
            if points:
                print(table(f"{name}, us among n nodes", points))
            points["operations"] = operations_of[name]
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
