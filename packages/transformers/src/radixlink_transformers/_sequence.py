"""`RunningSequence`: one sequence in the cache object of the model, between the pages of the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from radixlink_transformers._bridge import announce_prefix, fill_layer, save_pages
from radixlink_transformers._forward import run_tokens
from radixlink_transformers._hugging_face import new_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from radixlink_transformers._device import Device, PrefixRows
    from radixlink_transformers._hugging_face import CausalModel
    from radixlink_transformers._pool import PagedKVPool


class RunningSequence:
    """A prefix from the device, and what forwards appended to it.

    The prefix is announced; `fill`, or `fill_layer` for each layer before that layer runs, must
    come before the first forward's layers do. The pages of the prefix are read then and not again.

    Thread: the scheduler's.
    """

    def __init__(
        self,
        model: CausalModel,
        device: Device,
        prefix: PrefixRows,
        *,
        state: int | None = None,
        on_run: Callable[[int], None] | None = None,
    ) -> None:
        """Announce a prefix.

        Args:
            model: Runs.
            device: Of this model.
            prefix: Locked there for as long as it is not filled.
            state: For a model with recurrent states a slot of the sequence's own: with the states
                at the end of the prefix, where there is one. Forwards change them there.
            on_run: Is told after each forward how many tokens the sequence has.
        """
        self._model: Final = model
        self._device: Final = device
        self._prefix: Final = prefix
        self._cache: Final = new_cache(model.config)
        #: The pool of each layer of keys and values, and where the prefix lies in it.
        self._places: dict[int, tuple[PagedKVPool, torch.Tensor]] = {}
        self._num_tokens = prefix.num_tokens
        self._on_run: Final = on_run
        rows = (prefix.kv, prefix.windows)
        for pool, pool_rows in zip(device.kv_pools, rows, strict=False):
            announce_prefix(self._cache, pool, prefix.num_tokens)
            num_seen = pool.geometry.pages_of(prefix.num_tokens)
            seen = pool_rows[len(pool_rows) - num_seen :]
            self._places |= dict.fromkeys(pool.geometry.layers, (pool, seen))
        if device.states is not None:
            assert state is not None, "a sequence of a model with states has a slot"
            device.states.pool.lend(self._cache, state, empty=not prefix.num_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache stands for."""
        return self._num_tokens

    def fill(self) -> None:
        """All layers hold the bytes of the prefix. Cost: a strided copy for each."""
        for layer in self._places:
            self.fill_layer(layer)

    def fill_layer(self, layer: int) -> None:
        """One layer does; nothing to do for one without keys and values."""
        if layer in self._places:
            pool, rows = self._places[layer]
            fill_layer(self._cache, pool, layer, rows, self._prefix.num_tokens)

    def run(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append tokens.

        Args:
            tokens: At least one.

        Returns:
            The logits behind the last. Shape: (vocabulary,).
        """
        logits = run_tokens(self._model, self._cache, tokens, self._num_tokens)
        self._num_tokens += len(tokens)
        if self._on_run is not None:
            self._on_run(self._num_tokens)
        return logits

    def save(self, slots: torch.Tensor, start: int, window_start: int) -> None:
        """Write tokens to the device.

        Args:
            slots: Full slots, from `window_start` on with window slots beside them. Shape: (n,)
                int64, whole pages.
            start: Token of the first of them; at the end of the prefix or behind it.
            window_start: First token whose window is kept too.
        """
        kv, windows = self._device.kv, self._device.windows
        save_pages(self._cache, kv, kv.rows_of(slots), start)
        if windows is not None:
            beside = windows.pair.swa_indices(slots[window_start - start :])
            save_pages(self._cache, windows.pool, windows.pool.rows_of(beside), window_start)
