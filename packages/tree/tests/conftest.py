"""A tree with a pool of slots beside it; every test ends with the invariants of both."""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, Protocol

import pytest
import torch

from radixlink_contracts import (
    DEFAULT_NAMESPACE,
    EvictParams,
    IncLockRefParams,
    InsertOrigin,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
)
from radixlink_contracts.actions import BackupKV, FreeDeviceKV
from radixlink_tree import EvictionPolicy, UnifiedTreeCore, check_invariants

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from radixlink_contracts import (
        EvictResult,
        IncLockRefResult,
        InsertResult,
        LinkedTreeCore,
        MatchResult,
        Namespace,
        NodeId,
    )
    from radixlink_contracts.actions import CacheAction

    # The tree is what the contracts ask for.
    _CORE: type[LinkedTreeCore] = UnifiedTreeCore


class Rig:
    """A tree, and a pool that carries out what its actions say.

    A page of tokens is named by a number: page 7 is the token 7, `page_size` times.
    """

    def __init__(
        self,
        page_size: int,
        num_pages: int = 64,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        tail_pages: int = 0,
    ) -> None:
        self.page_size = page_size
        self.tree = UnifiedTreeCore(
            page_size=page_size, policy=policy, tail_tokens=tail_pages * page_size
        )
        self.num_pages = num_pages
        #: Pages of the pool that are free, the next one to hand out first.
        self.free_pages = deque(range(num_pages))
        #: What the tree offered to the store, oldest first.
        self.offered: list[NodeId] = []

    def key(self, *pages: int, tail: int = 0, namespace: Namespace = DEFAULT_NAMESPACE) -> RadixKey:
        """The pages, and `tail` tokens that make no whole page."""
        tokens = [page for page in pages for _ in range(self.page_size)]
        return RadixKey(array("q", tokens + [99] * tail), namespace)

    def match(
        self, *pages: int, tail: int = 0, namespace: Namespace = DEFAULT_NAMESPACE
    ) -> MatchResult:
        key = self.key(*pages, tail=tail, namespace=namespace)
        return self.tree.match(MatchPrefixParams(key=key))

    def matched_pages(self, *pages: int, namespace: Namespace = DEFAULT_NAMESPACE) -> int:
        """How many of the pages the tree has."""
        return self.match(*pages, namespace=namespace).device_prefix_len // self.page_size

    def insert(
        self,
        *pages: int,
        tail: int = 0,
        namespace: Namespace = DEFAULT_NAMESPACE,
        matched: int = 0,
        inserted: int = 0,
        priority: int = 0,
        origin: InsertOrigin = InsertOrigin.COMPUTED,
        track: bool = False,
    ) -> InsertResult:
        """Insert with fresh slots for all but the first `matched` pages, as a request would."""
        key = self.key(*pages, tail=tail, namespace=namespace)
        prefix = torch.empty(0, dtype=torch.int64)
        if matched:
            result = self.match(*pages[:matched], namespace=namespace)
            prefix = self.tree.path_indices(result.last_device_node)
        fresh = self.alloc(len(pages) - matched + bool(tail))
        outcome = self.tree.insert(
            InsertParams(
                key=key,
                value=torch.cat([prefix, fresh])[: len(key)],
                prev_prefix_len=matched * self.page_size,
                inserted_len=inserted * self.page_size,
                priority=priority,
                origin=origin,
                track_adopted_ranges=track,
            )
        )
        self.apply(outcome.cache_actions)
        if tail:
            self.free(fresh[-self.page_size :])
        return outcome

    def leaf(self, *pages: int, matched: int = 0) -> NodeId:
        """Insert, and say where it ended."""
        return self.insert(*pages, matched=matched).last_device_node

    def lock(self, node_id: NodeId) -> IncLockRefResult:
        return self.tree.inc_lock_ref(IncLockRefParams(node_id=node_id))

    def unlock(self, receipt: IncLockRefResult) -> None:
        self.tree.dec_lock_ref(receipt.to_dec_params())

    def evict(self, num_pages: int) -> EvictResult:
        result = self.tree.evict(EvictParams(num_tokens=num_pages * self.page_size))
        self.apply(result.cache_actions)
        return result

    def alloc(self, num_pages: int) -> torch.Tensor:
        """Slots of free pages."""
        assert num_pages <= len(self.free_pages), "the test asks for more than the pool has"
        pages = [self.free_pages.popleft() for _ in range(num_pages)]
        return torch.tensor(
            [page * self.page_size + slot for page in pages for slot in range(self.page_size)],
            dtype=torch.int64,
        )

    def free(self, indices: torch.Tensor) -> None:
        """Take whole pages back; each must be out."""
        pages = self.pages_of(indices)
        assert len(set(pages)) == len(pages), f"freed twice at once: {pages}"
        assert not set(pages) & set(self.free_pages), f"freed although free: {pages}"
        self.free_pages.extend(pages)

    def pages_of(self, indices: torch.Tensor) -> list[int]:
        """The pool's pages that these slots are, which must be whole."""
        slots = indices.tolist()
        pages = [slot // self.page_size for slot in slots[:: self.page_size]]
        whole = [page * self.page_size + slot for page in pages for slot in range(self.page_size)]
        assert slots == whole, f"not whole pages: {slots}"
        return pages

    def apply(self, actions: Iterable[CacheAction]) -> None:
        """Do what the tree says."""
        for action in actions:
            match action:
                case FreeDeviceKV():
                    self.free(action.indices)
                case BackupKV():
                    self.offered.extend(action.node_ids)
                case _:
                    pytest.fail(f"a tree of full attention has no use for {action}")

    def path_pages(self, node_id: NodeId) -> list[int]:
        """The pool's pages from the root to the end of a node."""
        return self.pages_of(self.tree.path_indices(node_id))

    @property
    def sizes(self) -> tuple[int, int]:
        """Evictable and protected pages."""
        tree = self.tree
        return tree.evictable_size // self.page_size, tree.protected_size // self.page_size

    def check(self, held_pages: Iterable[int] = ()) -> None:
        """Free pages, the tree's and those that requests hold are the pool, each page once."""
        check_invariants(self.tree)
        runs = [node.device_indices for node in self.tree._nodes.values()]
        cached = [page for run in runs for page in self.pages_of(run)]
        assert sorted([*self.free_pages, *cached, *held_pages]) == list(range(self.num_pages))


class MakeRig(Protocol):
    """Makes a tree with its pool."""

    def __call__(
        self,
        page_size: int,
        num_pages: int = 64,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        tail_pages: int = 0,
    ) -> Rig: ...


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def make(
        page_size: int,
        num_pages: int = 64,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        tail_pages: int = 0,
    ) -> Rig:
        rigs.append(Rig(page_size, num_pages, policy, tail_pages))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.check()


@pytest.fixture(params=[1, 4, 16, 64], ids=lambda page_size: f"page{page_size}")
def rig(make_rig: MakeRig, request: pytest.FixtureRequest) -> Rig:
    page_size: int = request.param
    return make_rig(page_size)
