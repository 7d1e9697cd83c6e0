"""One of two ranks of SGLang over gloo: stores a prompt, forgets it, and asks again.

    python -m packages.sglang.tests.programs.rank RANK MEETING KIND WHAT STORE LOCATION

WHAT happens to rank 1 alone: nothing, its store lost a page, or its reads fail. Prints what this
rank saw, as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import attrs
import torch
from packages.sglang.tests import hooked_store
from packages.sglang.tests.sglang_engine import Kind, SglangEngine, linker_config
from packages.sglang.tests.sglang_import import page_hashes

from radixlink_testing.faults import Fault, FaultKind, StoreCall

PROMPT = list(range(100, 200))
LOST_PAGE = 5
_RANKS = 2


def main(
    rank: int, meeting: str, kind: Kind, what: str, store: str, location: str
) -> dict[str, object]:
    """Run, and return what there is to say."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=_RANKS,
        timeout=timedelta(seconds=60),
    )
    config = linker_config(store, location)
    with SglangEngine(config, kind=kind, group=torch.distributed.group.WORLD) as engine:
        engine.serve(PROMPT)
        engine.forget()
        if rank == 1 and what == "lost":
            lost = bytes.fromhex(page_hashes(PROMPT, None, 4)[LOST_PAGE])
            for opened in hooked_store.opened():
                opened.lost.add(lost)
        if rank == 1 and what == "failed":
            for opened in hooked_store.opened():
                opened.plan(Fault(StoreCall.READ, FaultKind.FAILS))
        (first,) = engine.serve([*PROMPT, 7])
        engine.forget()
        if rank == 1 and what == "failed":
            for opened in hooked_store.opened():
                opened.release()
        (second,) = engine.serve([*PROMPT, 7])
        engine.forget()
    torch.distributed.destroy_process_group()
    return {"first": attrs.asdict(first), "second": attrs.asdict(second)}


if __name__ == "__main__":
    number, meeting_place, kind_name, what_happens, store_name, where = sys.argv[1:]
    said = main(int(number), meeting_place, Kind(kind_name), what_happens, store_name, where)
    sys.stdout.write(f"{json.dumps(said)}\n")
