"""`load_model`: a saved model, or a clear word on why not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from radixlink_transformers._hugging_face import read_config, read_model
from radixlink_transformers._kinds import ModelKind
from radixlink_transformers.errors import ModelLoadError

if TYPE_CHECKING:
    from radixlink_transformers._hugging_face import CausalModel

#: What transformers starts a process group by.
_LAUNCH_VARIABLES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def load_model(
    directory: str | Path,
    dtype: torch.dtype = torch.float32,
    *,
    tensor_parallel: bool = False,
) -> CausalModel:
    """The model of a directory, ready to run. No network.

    Args:
        directory: As `save_pretrained` writes it: `config.json` and safetensors.
        dtype: Of its parameters, and so of its KV.
        tensor_parallel: Spread its heads over the ranks of the launch, by transformers' own plan
            for this kind of model. It starts torch's process group by itself.

    Raises:
        ModelLoadError: There is no model, it cannot be read, or there is no launch to spread over.
        UnsupportedModelError: It is of a kind that this engine cannot run.

    Ranks: all, where it is spread.
    Cost: about 1.5 s for the first import of transformers; 0.7 s for SmolLM2-135M, cached.
    """
    path = Path(directory)
    if not path.is_dir():
        raise ModelLoadError(
            f"expected a directory with config.json and safetensors, got {path}, "
            f"which {'is no directory' if path.exists() else 'does not exist'}"
        )
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"expected a model in {path}, got a directory without config.json")
    if tensor_parallel:
        _require_launch()
    try:
        config = read_config(path)
    except Exception as exc:
        raise ModelLoadError(
            f"expected a model that transformers knows in {path}, got: {exc}"
        ) from exc
    ModelKind.of_config(config)
    try:
        return read_model(path, dtype, tensor_parallel=tensor_parallel)
    except Exception as exc:
        raise ModelLoadError(
            f"expected the weights of a causal model in {path}, got: {exc}"
        ) from exc


def _require_launch() -> None:
    missing = [name for name in _LAUNCH_VARIABLES if name not in os.environ]
    if missing:
        raise ModelLoadError(
            f"tensor_parallel: expected a launch that sets {', '.join(_LAUNCH_VARIABLES)}, "
            f"got none of {', '.join(missing)}; start the ranks by torchrun, or by mpiexec with "
            "these set from the rank's own variables"
        )
