"""A replica: one engine in a process of its own, which answers what the command asks.

Started as ``python -m radixlink.demo._replica SOCKET INDEX``; with INDEX "mpi" it is a rank of an MPI job, and its rank
is its index.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final, assert_never

import torch

from radixlink._stores import store_factory
from radixlink.demo._messages import (
    Ask,
    Channel,
    Failed,
    Hello,
    Note,
    Ready,
    ReplicaSpec,
    Stop,
    TurnFigures,
)
from radixlink.errors import CommandError, ReplicaError, StoreError
from radixlink_comm import SingleRank
from radixlink_contracts import RequestId, StoreConfig
from radixlink_contracts.errors import LinkError, StorageError
from radixlink_transformers import (
    LoadStarted,
    LookupStarted,
    PrefillStarted,
    TokenGenerated,
    build_engine,
    generate_without_cache,
    load_model,
)

if TYPE_CHECKING:
    from radixlink_transformers import CausalModel, Progress, TransformersEngine

_CONNECT_TIMEOUT_S: Final = 10.0
_SETTLE_TIMEOUT_S: Final = 60.0
_WARM_UP_TOKENS: Final = 64


def serve(channel: Channel, index: int) -> None:
    """Be a replica until told to stop, or until the command is gone."""
    channel.send(Hello(index=index, pid=os.getpid()))
    spec = channel.receive()
    if not isinstance(spec, ReplicaSpec):
        msg = f"replica {index}: expected a spec first, got {type(spec).__name__}"
        raise ReplicaError(msg)
    torch.set_num_threads(spec.num_threads)
    channel.send(Note(text="loading the model"))
    model = load_model(spec.model_dir)
    channel.send(Note(text="opening the store"))
    config = StoreConfig(location=spec.store_dir, capacity_bytes=spec.store_bytes)
    stores = store_factory(spec.store, config)
    engine = build_engine(
        model,
        identity_name=spec.model_name,
        revision=spec.model_digest,
        page_size=spec.page_size,
        num_pages=spec.num_pages,
        stores=stores,
        group=SingleRank(),
    )
    try:
        # The first forward of a process sets torch up, which would count against one side of the comparison.
        engine.first_token_without_store(range(_WARM_UP_TOKENS))
        channel.send(Ready())
        while isinstance(message := channel.receive(), Ask):
            channel.send(_answer(channel, engine, model, message))
        if not isinstance(message, Stop):
            msg = f"replica {index}: expected a question or the end, got {type(message).__name__}"
            raise ReplicaError(msg)
    finally:
        engine.close()
        stores.close()


def _answer(
    channel: Channel, engine: TransformersEngine, model: CausalModel, ask: Ask
) -> TurnFigures:
    """Answer with the store off, then on, then check against a run without a cache and against a wrong page.

    Where the device has nothing of the prompt, the run with the store off is the run without a cache, held once.
    """
    without_s = None
    if engine.num_tokens_on_device(ask.prompt):
        channel.send(Note(text="store off, for comparison"))
        without = engine.first_token_without_store(ask.prompt)
        without_s = without.figures.time_to_first_token_s
    before = engine.pages_by_writer
    generation = engine.generate(
        ask.prompt,
        RequestId(ask.request_id),
        ask.num_tokens,
        on_progress=lambda progress: _tell(channel, progress),
    )
    after = engine.pages_by_writer
    if not engine.settle(_SETTLE_TIMEOUT_S):
        msg = f"the store did not take the pages of this turn within {_SETTLE_TIMEOUT_S:g} s"
        raise ReplicaError(msg)
    channel.send(Note(text="checking against a run without a cache"))
    reference = generate_without_cache(model, ask.prompt, ask.num_tokens)
    if without_s is None:
        without_s = reference.time_to_first_token_s
    figures = generation.figures
    cached = figures.device_tokens + figures.restored_tokens
    control = None
    if figures.restored_tokens and cached >= 2 * engine.page_size:
        swapped = engine.first_token_with_pages_swapped(
            ask.prompt,
            page=cached // engine.page_size - 1,
            other=0,
            num_prefix_tokens=cached,
        )
        control = _distance(swapped.logits, reference.first_logits)
    return TurnFigures(
        prompt_tokens=figures.prompt_tokens,
        device_tokens=figures.device_tokens,
        restored_tokens=figures.restored_tokens,
        computed_tokens=figures.computed_tokens,
        first_token_s=figures.time_to_first_token_s,
        load_s=figures.load_s,
        without_store_s=without_s,
        tokens=generation.tokens,
        identical=generation.tokens == reference.tokens,
        dlogit=_distance(generation.first_logits, reference.first_logits),
        control_dlogit=control,
        pages_by_writer={
            writer: pages - before.get(writer, 0)
            for writer, pages in after.items()
            if pages > before.get(writer, 0)
        },
    )


def _distance(logits: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference. Shape of both: (vocabulary,)."""
    return float((logits - other).abs().max())


def _tell(channel: Channel, progress: Progress) -> None:
    """Pass progress on, for people."""
    match progress:
        case LookupStarted(num_device_tokens=tokens):
            channel.send(Note(text=f"{tokens} tokens on the device; asking the store"))
        case LoadStarted(num_tokens=tokens):
            channel.send(Note(text=f"restoring {tokens} tokens"))
        case PrefillStarted(num_tokens=tokens):
            channel.send(Note(text=f"computing {tokens} tokens"))
        case TokenGenerated():
            pass
        case _:
            assert_never(progress)


def main(arguments: list[str]) -> int:
    """Run as a process; failures are told to the command before it ends."""
    path, who = arguments
    index = _mpi_rank() if who == "mpi" else int(who)
    channel = Channel.connect(path, _CONNECT_TIMEOUT_S)
    try:
        serve(channel, index)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 1  # The command is gone, and nobody listens.
    except StorageError as error:
        channel.send(Failed(message=str(error), exit_code=StoreError.exit_code))
        return StoreError.exit_code
    except CommandError as error:
        channel.send(Failed(message=str(error), exit_code=error.exit_code))
        return error.exit_code
    except LinkError as error:
        channel.send(Failed(message=str(error), exit_code=ReplicaError.exit_code))
        return ReplicaError.exit_code
    finally:
        channel.close()
    return 0


def _mpi_rank() -> int:
    """This process's rank; only a replica under mpirun asks."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_rank()


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    if sys.argv[2] == "mpi":
        # After a rank was killed, MPI_Finalize sometimes waits for it without an end.
        os._exit(exit_code)
    sys.exit(exit_code)
