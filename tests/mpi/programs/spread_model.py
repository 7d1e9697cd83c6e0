"""A model spread over ranks by transformers' own plan: requests in flight, restored by each rank.

    spread_model.py mpi|gloo sharded|whole MODEL_DIR STORE_DIR TOKEN...

Whole: the plan spreads no attention, so that each rank has all of it. Each rank prints one line of
JSON. Gloo ranks meet at GROUP_PORT.
"""

# Imports inside functions: a gloo rank must not initialise MPI.
# ruff: noqa: PLC0415

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

import attrs
import torch

from radixlink_contracts import LoadMode, RequestId, Shard, StoreConfig
from radixlink_store import FileStoreFactory
from radixlink_transformers import (
    EngineSettings,
    TransformersEngine,
    build_engine,
    generate_without_cache,
    load_model,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import (
        PageBits,
        PageHandles,
        PageKeys,
        PageStore,
        PoolLayout,
        RankGroup,
        StoreFactory,
    )

NUM_NEW = 8
TIMEOUT_S = 60.0


@attrs.frozen
class CountingStore:
    """Another store, which counts the pages that this rank puts, by pool."""

    store: PageStore
    puts: Counter[str]

    @property
    def layout(self) -> PoolLayout:
        return self.store.layout

    def contains(self, keys: PageKeys) -> PageBits:
        return self.store.contains(keys)

    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        return self.store.open(keys, ttl_s)

    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        return self.store.read(handles, layer_range, out)

    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        self.puts[self.layout.pool] += len(keys)
        return self.store.put(keys, parts)

    def close(self) -> None:
        self.store.close()


@attrs.frozen
class CountingStores:
    """Opens such stores."""

    stores: StoreFactory
    puts: Counter[str] = attrs.field(factory=Counter)

    def open(self, layout: PoolLayout) -> PageStore:
        return CountingStore(self.stores.open(layout), self.puts)

    def close(self) -> None:
        self.stores.close()


def mpi_group() -> RankGroup:
    """The ranks of this job."""
    from mpi4py import MPI

    from radixlink_comm.mpi import MpiGroup

    # transformers' tensor parallelism starts torch's process group from torch's own names.
    for torch_name, name in (
        ("RANK", "RANK"),
        ("WORLD_SIZE", "SIZE"),
        ("LOCAL_RANK", "LOCAL_RANK"),
    ):
        os.environ[torch_name] = os.environ[f"OMPI_COMM_WORLD_{name}"]
    return MpiGroup.create(MPI.COMM_WORLD, TIMEOUT_S)


def gloo_group() -> RankGroup:
    """The ranks that share a TCP store."""
    # TCPStore is documented there, but not among the module's explicit exports.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from radixlink_comm.torch import TorchGroup

    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["GROUP_PORT"])
    meeting = TCPStore(address, port, None, rank == 0, timedelta(seconds=TIMEOUT_S))
    return TorchGroup.create(meeting, rank=rank, size=size, timeout_s=TIMEOUT_S)


def answer_all(
    engine: TransformersEngine, prompts: Sequence[tuple[int, ...]]
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Answer prompts side by side, one more of them aborted on the way."""
    pending = [
        engine.submit(prompt, RequestId(f"{number}"), NUM_NEW)
        for number, prompt in enumerate(prompts)
    ]
    gone = RequestId("gone")
    engine.submit((*prompts[0], 1, 2), gone, NUM_NEW)
    iteration = 0
    while engine.num_in_flight:
        engine.iterate()
        iteration += 1
        if iteration == 3:
            engine.abort(gone)
    assert engine.settle(TIMEOUT_S)
    found = [one.result() for one in pending]
    return [one.tokens for one in found], [one.figures.restored_tokens for one in found]


def main() -> None:
    """Compute and store, then restore in both ways, in engines with nothing on their devices."""
    torch.set_num_threads(1)
    kind, part, directory, location, *numbers = sys.argv[1:]
    group = {"mpi": mpi_group, "gloo": gloo_group}[kind]()
    document = tuple(map(int, numbers))
    prompts = [(*document, *range(first, first + 20)) for first in (10, 40)] + [document[:100]]
    model = load_model(directory, tensor_parallel=True)
    stores = CountingStores(
        FileStoreFactory(StoreConfig(location=location, capacity_bytes=1 << 24))
    )

    def run(load_mode: LoadMode) -> tuple[list[tuple[int, ...]], list[int]]:
        with build_engine(
            model,
            identity_name="tiny",
            revision="1",
            page_size=16,
            num_pages=64,
            # Enough for all requests at once, however far the one that goes has come.
            num_states=16,
            stores=stores,
            group=group,
            shard=Shard(index=group.rank, count=group.size) if part == "sharded" else None,
            settings=EngineSettings(load_mode=load_mode, poison_freed_pages=True),
        ) as engine:
            return answer_all(engine, prompts)

    computed, _ = run(LoadMode.STAGED)
    staged, restored_staged = run(LoadMode.STAGED)
    layer_wise, restored_layer_wise = run(LoadMode.LAYER_WISE)
    reference = [generate_without_cache(model, prompt, NUM_NEW).tokens for prompt in prompts]
    answer = {
        "rank": group.rank,
        "reference": reference,
        "equal": [computed == reference, staged == reference, layer_wise == reference],
        "restored": [restored_staged, restored_layer_wise],
        "puts": stores.puts,
    }
    group.close()
    stores.close()
    torch.distributed.destroy_process_group()
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
