"""Forwards: a run of tokens behind what a cache holds, and greedy decoding.

Positions are always said (some families restart at 0 without them), a mask never: there is one
sequence, and it is causal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from radixlink_contracts.errors import ContractError
from radixlink_transformers._hugging_face import new_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

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
    logits = torch.empty(0)
    first = start
    for end in ends_of_chunks(start, start + len(tokens), chunk_tokens):
        logits = run_tokens(model, cache, tokens[first - start : end - start], first)
        first = end
    return logits


def kept_of_a_token(model: CausalModel) -> KVCache:
    """What a forward of one token leaves behind: no setting says its shapes for all families.

    Ranks: all, where the model is spread.
    Cost: one forward.
    """
    cache = new_cache(model.config)
    run_tokens(model, cache, [0], 0)
    return cache


def ends_of_chunks(
    start: int, end: int, chunk_tokens: int | None, stops: Iterable[int] = ()
) -> list[int]:
    """Where each forward of a prompt ends.

    Args:
        start: First token to run.
        end: Token behind the last; above `start`.
        chunk_tokens: Run at most so many at once; None for any number.
        stops: Tokens in front of which a forward has to end; those outside do not count.

    Returns:
        Ascending; the last is `end`.
    """
    ends: list[int] = []
    for stop in sorted({end, *(stop for stop in stops if start < stop < end)}):
        if chunk_tokens is not None:
            ends.extend(range(start + chunk_tokens, stop, chunk_tokens))
        ends.append(stop)
        start = stop
    return ends


def decode_greedily(
    run: Callable[[Sequence[int]], torch.Tensor],
    logits: torch.Tensor,
    max_new_tokens: int,
    eos_ids: Collection[int],
) -> Iterator[int]:
    """Yield the most likely tokens, as long as they are asked for; the last one is not run.

    Args:
        run: Appends tokens to the sequence and returns the logits behind them.
        logits: Behind the sequence so far. Shape: (vocabulary,).
        max_new_tokens: How many tokens at most.
        eos_ids: Tokens after which to stop; the one that was hit is yielded.
    """
    tokens: list[int] = []
    while True:
        tokens.append(most_likely(logits))
        yield tokens[-1]
        if answer_is_over(tokens, max_new_tokens, eos_ids):
            return
        logits = run(tokens[-1:])


def answer_is_over(tokens: Sequence[int], max_new_tokens: int, eos_ids: Collection[int]) -> bool:
    """True when an answer of these tokens, at least one, has its last."""
    return len(tokens) == max_new_tokens or tokens[-1] in eos_ids


def most_likely(logits: torch.Tensor) -> int:
    """The token of the highest logit, the lowest of equals.

    Waits for the device.
    """
    return int(logits.argmax())


def run_tokens(
    model: CausalModel, cache: KVCache, tokens: Sequence[int], start: int
) -> torch.Tensor:
    """One forward.

    Args:
        model: The model.
        cache: Holds the `start` tokens before; these too afterwards.
        tokens: At least one.
        start: Position of the first of them.

    Returns:
        The logits behind the last token. Shape: (vocabulary,).
    """
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
