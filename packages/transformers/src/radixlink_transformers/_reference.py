"""The yardstick: the same model without radixlink."""

from __future__ import annotations

import time
from itertools import count
from typing import TYPE_CHECKING

import attrs

from radixlink_contracts.errors import ContractError
from radixlink_transformers._forward import decode_greedily, prefill, run_tokens
from radixlink_transformers._hugging_face import new_cache

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch

    from radixlink_transformers._hugging_face import CausalModel


@attrs.frozen(kw_only=True, eq=False)
class ReferenceGeneration:
    """An answer that was computed from nothing.

    Attributes:
        tokens: The new tokens, an end token included.
        first_logits: Behind the prompt. Shape: (vocabulary,).
        time_to_first_token_s: From the call until the first token was known.
    """

    tokens: tuple[int, ...]
    first_logits: torch.Tensor
    time_to_first_token_s: float


def generate_without_cache(
    model: CausalModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos_ids: Collection[int] = frozenset(),
) -> ReferenceGeneration:
    """Answer a prompt by one forward over all of it, then greedily, token by token.

    Args:
        model: The model.
        prompt: At least one token.
        max_new_tokens: At least 1.
        eos_ids: Tokens that end the answer.

    Raises:
        ContractError: There is no prompt, or nothing to answer.

    Ranks: all, where the model is spread over several.
    """
    if max_new_tokens < 1:
        raise ContractError(
            f"generate_without_cache: expected max_new_tokens of at least 1, got {max_new_tokens}"
        )
    started = time.perf_counter()
    cache = new_cache(model.config)
    logits = prefill(model, cache, tuple(prompt), 0)
    positions = count(len(prompt))
    answer = decode_greedily(
        lambda run: run_tokens(model, cache, run, next(positions)), logits, max_new_tokens, eos_ids
    )
    tokens = [next(answer)]
    time_to_first_token_s = time.perf_counter() - started
    tokens.extend(answer)
    return ReferenceGeneration(
        tokens=tuple(tokens),
        first_logits=logits,
        time_to_first_token_s=time_to_first_token_s,
    )
