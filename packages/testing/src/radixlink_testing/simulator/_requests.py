"""`Request`: what an engine knows of one of its requests, the same on all ranks but for slots."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, TypeAlias

import attrs

from radixlink_contracts import PoolName, RadixKey
from radixlink_testing.simulator._pages import DevicePages, marks_of

if TYPE_CHECKING:
    from array import array

    import torch

    from radixlink_contracts import IncLockRefResult, Namespace, RequestId
    from radixlink_testing.simulator._rank import HandedIn

Read: TypeAlias = tuple[DevicePages, int, bytes]
"""A page that a forward reads, and what must be in it."""


class Life(enum.Enum):
    """Where a request is in its life."""

    #: It is to be matched.
    WAITING = "waiting"
    #: It was told to wait until a step names it.
    TOLD_TO_WAIT = "told to wait"
    #: It runs.
    RUNNING = "running"


class Verdict(enum.Enum):
    """What is agreed about the layer-wise load of a request that runs."""

    #: It has none, or it has landed.
    NONE = "none"
    #: Nothing is.
    OPEN = "open"
    #: What its forward computes does not count.
    FAILED = "failed"


@attrs.define(kw_only=True, eq=False)
class Part:
    """What one rank has of a request that runs.

    Attributes:
        receipt: The lock on its prefix.
        prefix: The prefix's slots, restored ones too. Shape: (tokens,) int64.
        own: Its own slots. Shape: (tokens of whole pages,) int64.
        own_pages: Their pages.
        state: Its own recurrent state.
        reads: What its forward reads of the device prefix.
        awaited: What it reads of its load, once each layer has come.
        busy: All pages that it reads or writes, by pool.
        misread: What it read of its load before that was there.
    """

    receipt: IncLockRefResult
    prefix: torch.Tensor
    own: torch.Tensor
    own_pages: list[int]
    state: int | None = None
    reads: list[Read] = attrs.field(factory=list)
    awaited: list[Read] = attrs.field(factory=list)
    busy: dict[PoolName, list[int]] = attrs.field(factory=dict)
    misread: str = ""

    def ignore_load(self) -> None:
        """Nobody wants the results any more: what its forward reads of its load may be anything."""
        for pool, page, _ in self.awaited:
            pool.retired((page,))
            self.busy[pool.pool].remove(page)
        self.awaited = []


@attrs.define(kw_only=True, eq=False)
class Request:
    """A request of the engine.

    Attributes:
        name: What it is called.
        ids: Its id, by rank.
        tokens: Its sequence.
        namespace: Its tenant's.
        turns: What is still to come.
        chunk: Pages that one forward computes; 0 for all.
        slide: It gives its window up where it has moved on.
        keep: It leaves a state behind at the end of each chunk, not only of the last.
        layer_wise: It would rather run at once than wait for a load.
        page_size: Tokens.
        life: Where it is.
        since_tick: Since when it is there.
        since_s: The same, in seconds.
        landed_pages: Pages that must be on the device when it matches, until `landed_until`.
        landed_until: Step.
        parts: By rank, while it runs.
        handed_in: As the cache knows it, by rank, while a layer-wise load is its own.
        verdict: What is agreed about that load.
        states: Its states, by rank, between two chunks.
        start: Page where its own pages begin.
        end: Page behind the last that this forward computes, one more with a tail.
        aborted: It is over when its batch is.
        refused: How often there was no room.
    """

    name: str
    ids: list[RequestId]
    tokens: array[int]
    namespace: Namespace
    turns: list[array[int]]
    chunk: int
    slide: bool
    keep: bool
    layer_wise: bool
    page_size: int
    life: Life = Life.WAITING
    since_tick: int = 0
    since_s: float = 0.0
    landed_pages: int = 0
    landed_until: int = 0
    parts: list[Part] = attrs.field(factory=list)
    handed_in: list[HandedIn] = attrs.field(factory=list)
    verdict: Verdict = Verdict.NONE
    states: list[int] = attrs.field(factory=list)
    start: int = 0
    end: int = 0
    aborted: bool = False
    refused: int = 0
    _marks: list[bytes] | None = None

    @property
    def key(self) -> RadixKey:
        """Its sequence."""
        return RadixKey(self.tokens, self.namespace)

    @property
    def marks(self) -> list[bytes]:
        """Its whole pages."""
        if self._marks is None:
            self._marks = marks_of(self.key, self.page_size)
        return self._marks

    @property
    def counts(self) -> bool:
        """True while what its forward reads and computes is of any use."""
        return self.verdict is not Verdict.FAILED and not self.aborted

    def grow(self) -> bool:
        """Go on with the next turn. False where there is none."""
        if not self.turns:
            return False
        self.tokens = self.tokens + self.turns.pop(0)
        self._marks = None
        return True
