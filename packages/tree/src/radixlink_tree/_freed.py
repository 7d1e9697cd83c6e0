"""`Freed`: what an eviction gives up, gathered into actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from radixlink_contracts import EvictResult
from radixlink_contracts.actions import (
    FreeDeviceKV,
    FreeDeviceKVFullOnly,
    FreeMambaSlots,
    FreeSWA,
)

if TYPE_CHECKING:
    from radixlink_contracts.actions import CacheAction

#: A large eviction is handed over in pieces: each is made in memory that the nodes of the one before
#: gave back, where a whole one would take as much new memory as it is about to free.
_PIECE_TOKENS: Final = 8192


class Freed:
    """What is given up, in tokens and states. Runs are full slots of one node."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.num_tokens = 0
        self.num_swa_tokens = 0
        self._handed_over = 0
        self._actions: list[CacheAction] = []
        self._full: list[torch.Tensor] = []
        self._full_only: list[torch.Tensor] = []
        self._swa: list[torch.Tensor] = []
        self._states: list[int] = []

    @property
    def num_states(self) -> int:
        """States that are given up."""
        return len(self._states)

    def full(self, run: torch.Tensor, num_tokens: int) -> None:
        """Full slots go, and what window slots are beside them."""
        self._full.append(run)
        self._count(num_tokens)

    def full_only(self, run: torch.Tensor, num_tokens: int) -> None:
        """Full slots go that have no window slots beside them."""
        self._full_only.append(run)
        self._count(num_tokens)

    def swa(self, run: torch.Tensor) -> None:
        """The window slots beside full slots go."""
        self._swa.append(run)

    def state(self, slot: int) -> None:
        """A state goes."""
        self._states.append(slot)

    def result(self) -> EvictResult:
        """How much went, and what is to be done about it."""
        self._hand_over()
        if self._swa:
            self._actions.append(FreeSWA(full_indices=joined(self._swa)))
        if self._states:
            self._actions.append(FreeMambaSlots(slots=tuple(self._states)))
        return EvictResult(
            num_tokens_evicted=self.num_tokens,
            swa_num_tokens_evicted=self.num_swa_tokens,
            mamba_num_evicted=len(self._states),
            cache_actions=tuple(self._actions),
        )

    def _count(self, num_tokens: int) -> None:
        """So many more tokens go; a piece is full now and then."""
        self.num_tokens += num_tokens
        if self.num_tokens - self._handed_over >= _PIECE_TOKENS:
            self._hand_over()

    def _hand_over(self) -> None:
        """Make actions of what full slots there are."""
        if self._full:
            self._actions.append(FreeDeviceKV(indices=joined(self._full)))
        if self._full_only:
            self._actions.append(FreeDeviceKVFullOnly(indices=joined(self._full_only)))
        self._full, self._full_only = [], []
        self._handed_over = self.num_tokens


def joined(runs: list[torch.Tensor]) -> torch.Tensor:
    """The runs as one. What one node held alone needs no copy: it is nobody else's any more."""
    return runs[0] if len(runs) == 1 else torch.cat(runs)
