"""`LayerGate`: a forward whose layers each wait for their own bytes, while later ones still load.

Hooks on the decoder's layers, there only while a forward runs behind the gate. Masks and positions
are made before the first layer runs: the lengths of the prefix must be in the cache by then, its
bytes need not.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from radixlink_contracts.errors import ContractError
from radixlink_transformers._hugging_face import decoder_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from radixlink_contracts import BatchIndex, LayerCounter
    from radixlink_transformers._hugging_face import CausalModel
    from radixlink_transformers._kinds import ModelKind


class LayerGate:
    """Lets the layers of one model wait.

    Thread: the scheduler's. A forward of the same model on another thread is not stopped.
    """

    def __init__(self, model: CausalModel, kind: ModelKind, counter: LayerCounter) -> None:
        """Find the layers.

        Args:
            model: Whose.
            kind: Of that model.
            counter: Knows which layers have landed.

        Raises:
            UnsupportedModelError: The model's decoder has no list of layers.
            ContractError: It has other layers than its configuration says.
        """
        self._layers: Final = tuple(decoder_layers(model))
        self._counter: Final = counter
        if len(self._layers) != kind.num_layers:
            raise ContractError(
                f"LayerGate: expected a decoder of {kind.num_layers} layers, "
                f"got {len(self._layers)}"
            )

    @contextmanager
    def before_each_layer(
        self, batch: BatchIndex | None, fill: Callable[[int], None]
    ) -> Iterator[None]:
        """Forwards of this thread stop before each layer, until it is decided.

        What is decided may be that it never comes: the caller asks in the end, and drops what was
        computed.

        Args:
            batch: Whose layers to wait for; None for none.
            fill: Is told each layer that is decided, by its index, before it runs.
        """
        thread = threading.get_ident()
        with ExitStack() as hooks:
            self._counter.set_consumer(batch)
            hooks.callback(self._counter.set_consumer, None)
            for index, layer in enumerate(self._layers):
                hook = layer.register_forward_pre_hook(partial(self._stop, thread, index, fill))
                hooks.callback(hook.remove)
            yield

    def _stop(
        self,
        thread: int,
        index: int,
        fill: Callable[[int], None],
        module: torch.nn.Module,
        args: object,
    ) -> None:
        del module, args
        if threading.get_ident() == thread:
            self._counter.wait_until(index)
            fill(index)
