"""Two replicas on two nodes: what the first computed the second restores, and says the same.

The argument is a directory for the model. Says `ok` for each rank that saw all that it must.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import attrs

from radixlink.models import prepare_model
from radixlink_comm import SingleRank
from radixlink_contracts import RequestId, StoreConfig
from radixlink_store_mpi import MpiStoreFactory, NodeSettings
from radixlink_store_mpi._mpi import MPI
from radixlink_transformers import build_engine, load_model

WORLD: Final = MPI.COMM_WORLD
PROMPT: Final = [7, 3, 5] * 100
PAGE_SIZE: Final = 16


def main() -> None:
    """Be a replica."""
    place = Path(sys.argv[1])
    if WORLD.rank == 0:
        prepare_model("tiny", place, lambda _: None)
    WORLD.Barrier()
    model = load_model(prepare_model("tiny", place, lambda _: None).directory)
    factory = MpiStoreFactory(
        StoreConfig(capacity_bytes=8 << 20),
        nodes=attrs.evolve(NodeSettings.from_environment(), answer_timeout_s=20),
    )
    engine = build_engine(
        model,
        stores=factory,
        group=SingleRank(),
        identity_name="tiny",
        revision="1",
        page_size=PAGE_SIZE,
        num_pages=32,
    )
    said: list[tuple[int, ...]] = []
    for replica in range(2):
        tokens: tuple[int, ...] = ()
        if WORLD.rank == replica:
            answer = engine.generate(PROMPT, RequestId(f"of {replica}"), max_new_tokens=4)
            assert engine.settle(timeout_s=20)
            # The second: all whole pages, but at least one token is computed.
            expected = (len(PROMPT) - 1) // PAGE_SIZE * PAGE_SIZE if replica else 0
            assert answer.figures.restored_tokens == expected
            tokens = answer.tokens
        said.append(WORLD.bcast(tokens, replica))
    assert said[0] == said[1]
    engine.close()
    factory.close()


main()
sys.stdout.write(f"ok {WORLD.rank}\n")
sys.stdout.flush()
