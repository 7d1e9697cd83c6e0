"""Forwards: a run of tokens behind what a cache holds, and greedy decoding.

Positions are always said (some families restart at 0 without them), a mask never: there is one
sequence, and it is causal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from radixlink_contracts.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from radixlink_transformers._hugging_face import CausalModel, KVCache


def prefill(
    model: CausalModel,
    cache: KVCache,
    tokens: Sequence[int],
    start: int,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """The cache holds these tokens too.

    Args:
        model: The model.
        cache: Holds the `start` tokens before.
        tokens: At least one.
        start: Position of the first of them.
        chunk_tokens: Run at most so many at once; None runs all of them.

    Returns:
        The logits behind the last token. Shape: (vocabulary,).

    Raises:
        ContractError: There is nothing to run.
    """
    if not tokens:
        raise ContractError("prefill: expected at least one token, got none")
    step = chunk_tokens or len(tokens)
    logits = torch.empty(0)
    for first in range(0, len(tokens), step):
        logits = _run(model, cache, tokens[first : first + step], start + first)
    return logits


def decode_greedily(
    model: CausalModel,
    cache: KVCache,
    logits: torch.Tensor,
    position: int,
    max_new_tokens: int,
    eos_ids: Collection[int],
) -> Iterator[int]:
    """Yield the most likely tokens, as long as they are asked for; the last one is not run.

    Args:
        model: The model.
        cache: Holds the `position` tokens before; afterwards all that were yielded but the last.
        logits: Behind those tokens. Shape: (vocabulary,).
        position: Of the first new token.
        max_new_tokens: How many tokens at most.
        eos_ids: Tokens after which to stop; the one that was hit is yielded.
    """
    for count in range(1, max_new_tokens + 1):
        token = most_likely(logits)
        yield token
        if count == max_new_tokens or token in eos_ids:
            return
        logits = _run(model, cache, [token], position + count - 1)


def most_likely(logits: torch.Tensor) -> int:
    """The token of the highest logit, the lowest of equals.

    Waits for the device.
    """
    return int(logits.argmax())


def _run(model: CausalModel, cache: KVCache, tokens: Sequence[int], start: int) -> torch.Tensor:
    device = model.device
    with torch.inference_mode():
        output = model(
            input_ids=torch.tensor([list(tokens)], dtype=torch.int64, device=device),
            position_ids=torch.arange(start, start + len(tokens), device=device).unsqueeze(0),
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[0, -1]
