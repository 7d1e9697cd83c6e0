"""`FirstTokens`: what follows a prompt with what the device has, beside the requests in flight.

The other arm of a comparison, and the control that shows that a stale page would be seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
import torch

from radixlink_contracts.errors import ContractError
from radixlink_transformers._forward import ends_of_chunks, most_likely
from radixlink_transformers._request import prompt_key
from radixlink_transformers._sequence import RunningSequence
from radixlink_transformers._values import FirstToken

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_transformers._admission import Admission
    from radixlink_transformers._device import Device, PrefixRows
    from radixlink_transformers._hugging_face import CausalModel
    from radixlink_transformers._stay import LockedPrefix, Stay
    from radixlink_transformers._timer import Timer


class FirstTokens:
    """Those of one engine.

    Inserts nothing, offloads nothing, and takes no slot but one for a state.

    Thread: the scheduler's, between two iterations.
    """

    def __init__(
        self,
        *,
        model: CausalModel,
        device: Device,
        admission: Admission,
        stay: Callable[[], Stay],
        wait_for_offloads: Callable[[Callable[[], int | None]], int | None],
        timer: Callable[[], Timer],
        chunk_tokens: int | None,
    ) -> None:
        """Take the parts.

        Args:
            model: Computes.
            device: Holds the pages.
            admission: Matches.
            stay: Makes one without a name.
            wait_for_offloads: What a function gives in the end, when offloads have let go; None
                where that is nothing.
            timer: Starts one.
            chunk_tokens: A forward runs at most so many; None for any number.
        """
        self._model: Final = model
        self._device: Final = device
        self._admission: Final = admission
        self._stay: Final = stay
        self._wait_for_offloads: Final = wait_for_offloads
        self._timer: Final = timer
        self._chunk_tokens: Final = chunk_tokens

    def without_store(self, tokens: tuple[int, ...]) -> FirstToken:
        """What follows a prompt; see `TransformersEngine.first_token_without_store`."""
        timer = self._timer()
        with self._stay() as stay:
            match = self._admission.on_device(prompt_key(tokens))
            timer.settled()
            prefix = stay.lock(match)
            rows = self._device.rows_of_prefix(prefix.slots)
            return self._run(tokens, rows, self._take_state(stay, prefix), timer)

    def with_pages_swapped(
        self, tokens: tuple[int, ...], *, page: int, other: int, num_prefix_tokens: int | None
    ) -> FirstToken:
        """A control; see `TransformersEngine.first_token_with_pages_swapped`."""
        timer = self._timer()
        key = prompt_key(tokens)
        if num_prefix_tokens is not None:
            key = attrs.evolve(key, token_ids=key.token_ids[:num_prefix_tokens])
        with self._stay() as stay:
            match = self._admission.on_device(key)
            timer.settled()
            prefix = stay.lock(match)
            of_prefix = self._device.rows_of_prefix(prefix.slots)
            rows = of_prefix.kv.clone()
            if page == other or not (0 <= page < len(rows) and 0 <= other < len(rows)):
                raise ContractError(
                    "first_token_with_pages_swapped: expected two different pages of the "
                    f"{len(rows)} that are used from the device, got {page} and {other}"
                )
            rows[page] = rows[other]
            state = self._take_state(stay, prefix)
            return self._run(tokens, attrs.evolve(of_prefix, kv=rows), state, timer)

    def _take_state(self, stay: Stay, prefix: LockedPrefix) -> int | None:
        """A slot for the states of a sequence; None for a model without."""
        if self._device.states is None:
            return None
        slot = self._wait_for_offloads(lambda: stay.try_take_state(prefix))
        if slot is None:
            raise stay.no_state()
        return slot

    def _run(
        self, tokens: tuple[int, ...], prefix: PrefixRows, state: int | None, timer: Timer
    ) -> FirstToken:
        sequence = RunningSequence(self._model, self._device, prefix, state=state)
        sequence.fill()
        logits = torch.empty(0)
        for end in ends_of_chunks(prefix.num_tokens, len(tokens), self._chunk_tokens):
            logits = sequence.run(tokens[sequence.num_tokens : end])
        token = most_likely(logits)
        timer.answered()
        return FirstToken(
            token=token,
            logits=logits,
            figures=timer.figures(len(tokens), device_tokens=prefix.num_tokens, restored_tokens=0),
        )
