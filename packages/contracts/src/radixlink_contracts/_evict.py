"""Evict: room for what comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from radixlink_contracts.actions import CacheAction


@attrs.frozen(kw_only=True)
class EvictParams:
    """How much to give up of each component. Units: tokens; states for Mamba.

    Attributes:
        num_tokens: Full attention.
        swa_num_tokens: Sliding window.
        mamba_num: Recurrent states.
    """

    num_tokens: int = 0
    swa_num_tokens: int = 0
    mamba_num: int = 0


@attrs.frozen(kw_only=True)
class EvictResult:
    """How much was given up; may be less than asked (the rest is locked) or more (whole nodes go).

    Attributes:
        num_tokens_evicted: Full attention.
        swa_num_tokens_evicted: Sliding window.
        mamba_num_evicted: Recurrent states.
        cache_actions: What the caller must do now, in this order.
    """

    num_tokens_evicted: int = 0
    swa_num_tokens_evicted: int = 0
    mamba_num_evicted: int = 0
    cache_actions: tuple[CacheAction, ...] = ()
