"""`Pools`: the slots of a test, kept apart from the tree, so that each is in one place at a time.

It carries out actions as an engine's allocators would and refuses what these could not do: to free
what is free, to free a window that is not there, or to leave one behind.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, assert_never

import torch

from radixlink_contracts.actions import (
    BackupKV,
    FreeDeviceKV,
    FreeDeviceKVFullOnly,
    FreeMambaSlots,
    FreeSWA,
    MoveSWA,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from radixlink_contracts import NodeId
    from radixlink_contracts.actions import CacheAction


class Pools:
    """Pages of full slots, pages of window slots beside some of them, and state slots."""

    def __init__(
        self, page_size: int, num_pages: int, *, num_window_pages: int = 0, num_states: int = 0
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_window_pages = num_window_pages
        self.num_states = num_states
        #: What is free, the next one to hand out first.
        self.free_pages = deque(range(num_pages))
        self.free_windows = deque(range(num_window_pages))
        self.free_states = deque(range(num_states))
        #: The window page beside a full page.
        self.pairs: dict[int, int] = {}
        #: What was offered to the store, oldest first.
        self.offered: list[NodeId] = []

    def alloc(self, num_pages: int, *, bare: int = 0) -> list[int]:
        """Take pages, the first `bare` of them without windows."""
        assert num_pages <= len(self.free_pages), "the test asks for more than the pool has"
        pages = [self.free_pages.popleft() for _ in range(num_pages)]
        if self.num_window_pages:
            for page in pages[bare:]:
                self.pairs[page] = self.free_windows.popleft()
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Take pages back, with the windows that are beside some of them."""
        self._free_full(pages)
        self.free_windows.extend(self.pairs.pop(page) for page in pages if page in self.pairs)

    def free_window_of(self, pages: Iterable[int]) -> None:
        """Take the windows beside these pages back; the pages stay out."""
        self.free_windows.extend(self.pairs.pop(page) for page in pages)

    def take_state(self) -> int:
        return self.free_states.popleft()

    def free_state(self, slot: int) -> None:
        assert 0 <= slot < self.num_states, f"no state slot: {slot}"
        assert slot not in self.free_states, f"state slot {slot} freed although free"
        self.free_states.append(slot)

    def slots(self, pages: Iterable[int]) -> torch.Tensor:
        """The slots of these pages. Shape: (pages * page_size,) int64."""
        return torch.tensor(
            [page * self.page_size + at for page in pages for at in range(self.page_size)],
            dtype=torch.int64,
        )

    def pages_of(self, indices: torch.Tensor) -> list[int]:
        """The pages that these slots are, which must be whole."""
        slots = indices.tolist()
        pages = [slot // self.page_size for slot in slots[:: self.page_size]]
        assert slots == self.slots(pages).tolist(), f"not whole pages: {slots}"
        return pages

    def apply(self, actions: Iterable[CacheAction]) -> None:
        """Do what the tree says."""
        for action in actions:
            match action:
                case FreeDeviceKV():
                    pages = self.pages_of(action.indices)
                    if self.num_window_pages:
                        bare = [page for page in pages if page not in self.pairs]
                        assert not bare, f"freed with a window that is not there: {bare}"
                    self.free(pages)
                case FreeDeviceKVFullOnly():
                    pages = self.pages_of(action.indices)
                    paired = [page for page in pages if page in self.pairs]
                    assert not paired, f"freed without their windows: {paired}"
                    self._free_full(pages)
                case FreeSWA():
                    self.free_window_of(self.pages_of(action.full_indices))
                case MoveSWA():
                    here, there = self.pages_of(action.from_full), self.pages_of(action.to_full)
                    assert not set(there) & (set(self.pairs) | set(self.free_pages))
                    for old, new in zip(here, there, strict=True):
                        self.pairs[new] = self.pairs.pop(old)
                case FreeMambaSlots():
                    for slot in action.slots:
                        self.free_state(slot)
                case BackupKV():
                    self.offered.extend(action.node_ids)
                case _:
                    assert_never(action)

    def check(self, pages: Iterable[int], states: Iterable[int]) -> None:
        """Return when what is free and what is out, as told, are the pools, each once."""
        assert sorted([*self.free_pages, *pages]) == list(range(self.num_pages))
        windows = [*self.free_windows, *self.pairs.values()]
        assert sorted(windows) == list(range(self.num_window_pages))
        assert sorted([*self.free_states, *states]) == list(range(self.num_states))

    def _free_full(self, pages: Sequence[int]) -> None:
        assert len(set(pages)) == len(pages), f"freed twice at once: {pages}"
        assert not set(pages) & set(self.free_pages), f"freed although free: {pages}"
        self.free_pages.extend(pages)
