"""`StatePool`: recurrent states of one rank; a slot holds those of all layers at one position.

A running request has a slot of its own, and a forward changes the states right there: the layers of
its cache are given views of the slot. So a checkpoint is one copy from slot to slot, and going on
from one is a copy too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

import attrs
import torch

from radixlink_contracts import PoolName
from radixlink_contracts.errors import ContractError
from radixlink_pools import DevicePoolEntry, byte_rows
from radixlink_transformers._hugging_face import setting, state_layer

if TYPE_CHECKING:
    from radixlink_transformers._hugging_face import CausalModel, DecoderConfig, KVCache
    from radixlink_transformers._kinds import ModelKind


@attrs.frozen(kw_only=True)
class StateShape:
    """One state of one layer.

    Attributes:
        layer: Index of the layer in the model.
        number: Which of the layer's states.
        conv: Of the convolution. Shape: (1, channels, kernel).
        conv_dtype: Of its elements.
        recurrent: Of the recurrence. Shape: (1, heads of this rank, ...).
        recurrent_dtype: Of its elements, which may be wider than the model's.
    """

    layer: int
    number: int
    conv: tuple[int, ...]
    conv_dtype: torch.dtype
    recurrent: tuple[int, ...]
    recurrent_dtype: torch.dtype


@attrs.frozen(kw_only=True)
class StateGeometry:
    """All states of a model on one rank.

    Attributes:
        states: In layer order.
        replicated: All ranks of a spread model have the same states, so that they are stored once:
            transformers' plans leave the recurrences of the families of today whole.
    """

    states: tuple[StateShape, ...]
    replicated: bool = False

    @classmethod
    def of_model(
        cls,
        model: CausalModel,
        kind: ModelKind,
        kept: KVCache,
        *,
        tensor_parallel_size: int = 1,
    ) -> Self:
        """The shapes of what a forward of one token leaves behind.

        Args:
            model: The model.
            kind: Of that model.
            kept: What it keeps of one token.
            tensor_parallel_size: Over how many ranks it is spread.

        Raises:
            ContractError: A layer of states kept none.
        """
        states: list[StateShape] = []
        for index in kind.state_layers:
            layer = state_layer(kept, index)
            for number in range(layer.number_of_states):
                conv, recurrent = layer.conv_states[number], layer.recurrent_states[number]
                if conv is None or recurrent is None:
                    raise ContractError(
                        f"StateGeometry: expected a convolution's and a recurrent state {number} "
                        f"in layer {index}, got {conv} and {recurrent}"
                    )
                states.append(
                    StateShape(
                        layer=index,
                        number=number,
                        conv=tuple(conv.shape),
                        conv_dtype=conv.dtype,
                        recurrent=tuple(recurrent.shape),
                        recurrent_dtype=recurrent.dtype,
                    )
                )
        heads = _num_heads(model.config.get_text_config(decoder=True))
        return cls(
            states=tuple(states),
            replicated=tensor_parallel_size > 1 and {one.recurrent[1] for one in states} == {heads},
        )

    @property
    def layout(self) -> str:
        """What a slot's bytes are, for a store that must never mix two layouts."""
        shapes = sorted(
            {
                f"{_shape(one.conv, one.conv_dtype)}|{_shape(one.recurrent, one.recurrent_dtype)}"
                for one in self.states
            }
        )
        return f";state={','.join(shapes)}"


class StatePool:
    """For each state one tensor of slots. A slot that nobody cleared is NaN.

    Thread: the scheduler's; a transfer touches other slots meanwhile.
    """

    def __init__(self, geometry: StateGeometry, num_slots: int, device: torch.device) -> None:
        """Allocate the slots, all NaN.

        Args:
            geometry: What a slot holds.
            num_slots: How many there are.
            device: Where.

        Raises:
            ContractError: No slot is asked for.
        """
        if num_slots < 1:
            raise ContractError(f"StatePool: expected at least 1 slot, got {num_slots}")
        self._geometry: Final = geometry
        self._conv: Final = [
            torch.full((num_slots, *one.conv), torch.nan, dtype=one.conv_dtype, device=device)
            for one in geometry.states
        ]
        self._recurrent: Final = [
            torch.full(
                (num_slots, *one.recurrent), torch.nan, dtype=one.recurrent_dtype, device=device
            )
            for one in geometry.states
        ]
        layers = [one.layer for one in geometry.states]
        self._device_pool: Final = DevicePoolEntry(
            name=PoolName.MAMBA,
            rows=[byte_rows(tensor) for tensor in self._tensors],
            page_size=1,
            layers=[*layers, *layers],
            replicated=geometry.replicated,
        )

    @property
    def num_slots(self) -> int:
        """How many slots there are."""
        return len(self._conv[0])

    @property
    def device_pool(self) -> DevicePoolEntry:
        """The same slots, as a transfer sees them."""
        return self._device_pool

    def lend(self, cache: KVCache, slot: int, *, empty: bool) -> None:
        """The state layers of a new cache live in this slot.

        Args:
            cache: New, of this model.
            slot: The request's own.
            empty: It stands for no token: it is cleared. Otherwise a forward goes on from it.
        """
        if empty:
            self._fill(slot, 0.0)
        for one, convs, recurrents in zip(
            self._geometry.states, self._conv, self._recurrent, strict=True
        ):
            layer, number = state_layer(cache, one.layer), one.number
            conv, recurrent = convs[slot], recurrents[slot]
            layer.device, layer.dtype = conv.device, conv.dtype
            layer.conv_states[number], layer.recurrent_states[number] = conv, recurrent
            layer.is_conv_states_initialized[number] = True
            layer.is_recurrent_states_initialized[number] = True
            layer.conv_kernel_size[number] = conv.shape[-1]
            layer.has_previous_state[number] = not empty

    def copy(self, source: int, target: int) -> None:
        """A slot holds what another holds."""
        self._device_pool.copy_pages(torch.tensor([source]), torch.tensor([target]))

    def poison(self, slot: int) -> None:
        """A slot is NaN again, as new: whoever reads it by mistake will see it."""
        self._fill(slot, torch.nan)

    def _fill(self, slot: int, value: float) -> None:
        for tensor in self._tensors:
            tensor[slot].fill_(value)

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return [*self._conv, *self._recurrent]


def _num_heads(config: DecoderConfig) -> object:
    """Heads of the recurrence on all ranks together; None where the family has another word."""
    gated = setting(config, "linear_num_value_heads")
    return setting(config, "mamba_n_heads") if gated is None else gated


def _shape(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{'x'.join(map(str, shape))}:{str(dtype).removeprefix('torch.')}"
