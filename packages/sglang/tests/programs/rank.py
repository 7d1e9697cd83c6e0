"""One of two ranks of SGLang over gloo: stores a prompt, forgets it, and asks again; for each kind.

    python -m packages.sglang.tests.programs.rank RANK MEETING LOCATION

Something happens to rank 1 alone: nothing, its store lost a page, or its reads fail. Prints what
this rank saw, by kind and by what happened, as one line of JSON: a process costs seconds to start.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import attrs
import torch
from packages.sglang.tests import hooked_store
from packages.sglang.tests.sglang_engine import Kind, SglangEngine, linker_config
from packages.sglang.tests.sglang_import import page_hashes

from radixlink_testing.faults import Fault, FaultKind, StoreCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from packages.sglang.tests.hooked_store import HookedStore

PROMPT = list(range(100, 200))
LOST_PAGE = 5
HAPPENINGS = ("nothing", "lost", "failed")
_RANKS = 2


def serve_twice(
    engine: SglangEngine, stores: Sequence[HookedStore], what: str
) -> dict[str, dict[str, object]]:
    """Store a prompt and ask for it twice; it happens before the first time, and is over after it."""
    engine.serve(PROMPT)
    engine.forget()
    for store in stores:
        if what == "lost":
            store.lost.add(bytes.fromhex(page_hashes(PROMPT, None, engine.page_size)[LOST_PAGE]))
        if what == "failed":
            store.plan(Fault(StoreCall.READ, FaultKind.FAILS))
    (first,) = engine.serve([*PROMPT, 7])
    engine.forget()
    for store in stores:
        store.release()
    (second,) = engine.serve([*PROMPT, 7])
    engine.forget()
    return {"first": attrs.asdict(first), "second": attrs.asdict(second)}


def main(rank: int, meeting: str, location: str) -> dict[str, dict[str, object]]:
    """Run, and return what there is to say."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=_RANKS,
        timeout=timedelta(seconds=60),
    )
    said: dict[str, dict[str, object]] = {kind.value: {} for kind in Kind}
    for kind in Kind:
        for what in HAPPENINGS:
            config = linker_config(hooked_store.NAME, f"{location}/{kind.value}-{what}")
            with SglangEngine(config, kind=kind, group=torch.distributed.group.WORLD) as engine:
                hit = hooked_store.opened() if rank == 1 else []
                said[kind.value][what] = serve_twice(engine, hit, what)
    torch.distributed.destroy_process_group()
    return said


if __name__ == "__main__":
    number, meeting_place, where = sys.argv[1:]
    sys.stdout.write(f"{json.dumps(main(int(number), meeting_place, where))}\n")
