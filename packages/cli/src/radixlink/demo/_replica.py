"""A replica: one engine in a process of its own, which answers what the command asks.

Started as ``python -m radixlink.demo._replica SOCKET INDEX``; with INDEX "mpi" it is a rank of an MPI job, and its rank
is its index.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import closing
from pathlib import Path
from time import monotonic as _now
from typing import TYPE_CHECKING, Final, assert_never, cast

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
    Stopped,
    TurnFigures,
)
from radixlink.demo._plan import REPLICAS
from radixlink.demo._pulse import Pulse
from radixlink.errors import CommandError, ReplicaError, StoreError
from radixlink.models import ModelNotFoundError
from radixlink_comm import SingleRank
from radixlink_contracts import RequestId, StoreConfig
from radixlink_contracts.errors import CapacityError, LinkError, StorageError
from radixlink_transformers import (
    LoadStarted,
    LookupStarted,
    PrefillStarted,
    TokenGenerated,
    build_engine,
    generate_without_cache,
    load_model,
)
from radixlink_transformers.errors import ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    from radixlink_contracts import StoreFactory
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
    config = StoreConfig(location=spec.store_dir, capacity_bytes=spec.store_bytes)
    # Made first: it refuses a wrong location before anybody waits for a model.
    with closing(store_factory(spec.store, config)) as stores:
        channel.send(Note(text="loading the model"))
        model = _load_model(spec)
        pulse = Pulse(lambda text: channel.send(Note(text=text)), _now)
        # Every model of transformers is a module; the Protocol is only what the engine uses of it.
        cast("torch.nn.Module", model).register_forward_pre_hook(pulse.forward)
        channel.send(Note(text="opening the store"))
        with _open_engine(model, stores, spec) as engine:
            # The first forward of a process sets torch up, which would count against one side of the comparison.
            engine.first_token_without_store(range(_WARM_UP_TOKENS))
            channel.send(Ready())
            while isinstance(message := channel.receive(), Ask):
                channel.send(_answer(pulse, engine, model, message))
    if not isinstance(message, Stop):
        msg = f"replica {index}: expected a question or the end, got {type(message).__name__}"
        raise ReplicaError(msg)
    channel.send(Stopped())


def _load_model(spec: ReplicaSpec) -> CausalModel:
    """The model of a replica.

    Raises:
        ModelNotFoundError: Its files are damaged, or it is of a kind that the engine does not run.
    """
    try:
        return load_model(spec.model_dir)
    except (ModelLoadError, UnsupportedModelError) as error:
        raise ModelNotFoundError(f"model {spec.model_name!r}: {error}") from error


def _open_engine(model: CausalModel, stores: StoreFactory, spec: ReplicaSpec) -> TransformersEngine:
    """The engine of a replica, its store open.

    Raises:
        StoreError: There is no room for the store.
        StorageError: It cannot be opened.
    """
    try:
        return build_engine(
            model,
            identity_name=spec.model_name,
            revision=spec.model_digest,
            page_size=spec.page_size,
            num_pages=spec.num_pages,
            stores=stores,
            group=SingleRank(),
        )
    except CapacityError as error:
        raise StoreError(f"--store {spec.store}: {error}") from error


def _answer(pulse: Pulse, engine: TransformersEngine, model: CausalModel, ask: Ask) -> TurnFigures:
    """Answer with the store off, then on, then check against a run without a cache and against a wrong page.

    Where the device has nothing of the prompt, the run with the store off is the run without a cache, held once.
    """
    without_s = None
    if engine.num_tokens_on_device(ask.prompt):
        pulse.begin("store off, for comparison")
        without = engine.first_token_without_store(ask.prompt)
        without_s = without.figures.time_to_first_token_s
    before = engine.pages_by_writer
    generation = engine.generate(
        ask.prompt,
        RequestId(ask.request_id),
        ask.num_tokens,
        on_progress=lambda progress: _tell(pulse, progress),
    )
    after = engine.pages_by_writer
    if not engine.settle(_SETTLE_TIMEOUT_S):
        msg = f"the store did not take the pages of this turn within {_SETTLE_TIMEOUT_S:g} s"
        raise ReplicaError(msg)
    pulse.begin("checking against a run without a cache")
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


def _tell(pulse: Pulse, progress: Progress) -> None:
    """Pass progress on, for people."""
    match progress:
        case LookupStarted(num_device_tokens=tokens):
            pulse.begin(f"{tokens} tokens on the device; asking the store")
        case LoadStarted(num_tokens=tokens):
            pulse.begin(f"restoring {tokens} tokens")
        case PrefillStarted(num_tokens=tokens):
            pulse.begin(f"computing {tokens} tokens")
        case TokenGenerated():
            pass  # The pulse counts them.
        case _:
            assert_never(progress)


def main(arguments: list[str]) -> int:
    """Run as a process; failures are told to the command before it ends."""
    path, who = arguments
    index = _mpi_rank() if who == "mpi" else int(who)
    channel = Channel.connect(Path(path), _CONNECT_TIMEOUT_S)
    try:
        serve(channel, index)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # The command is gone, and nobody listens; if it is not, it finds the reason in what was printed.
        traceback.print_exc()
        return 1
    except StorageError as error:
        channel.send(Failed(message=str(error), exit_code=StoreError.exit_code))
        return StoreError.exit_code
    except CommandError as error:
        channel.send(Failed(message=str(error), exit_code=error.exit_code))
        return error.exit_code
    except LinkError as error:
        channel.send(Failed(message=str(error), exit_code=ReplicaError.exit_code))
        return ReplicaError.exit_code
    except Exception:  # noqa: BLE001 -- whatever it is, nobody else would tell
        message = f"replica {REPLICAS[index]} failed:\n{traceback.format_exc().strip()}"
        channel.send(Failed(message=message, exit_code=ReplicaError.exit_code))
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
