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
        cache_actions: Of a tree: what its caller has to carry out, in this order. Of a controller: none, since it has
            carried them out, and what it freed may be another request's by now.
    """

    num_tokens_evicted: int = 0
    swa_num_tokens_evicted: int = 0
    mamba_num_evicted: int = 0
    cache_actions: tuple[CacheAction, ...] = ()

    def carried_out(self) -> EvictResult:
        """The same, with no action left: for who carried them out and hands the result on."""
        return attrs.evolve(self, cache_actions=()) if self.cache_actions else self
