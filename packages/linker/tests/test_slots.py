from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
import torch

from radixlink_contracts import EvictParams, EvictResult, SlotAllocator, TreeCore
from radixlink_contracts.actions import BackupKV, CacheAction, FreeDeviceKV
from radixlink_contracts.errors import ContractError
from radixlink_linker import DeviceSlots

if TYPE_CHECKING:
    from collections.abc import Sequence


class Allocator:
    """Notes what is freed."""

    def __init__(self, page_size: int = 2) -> None:
        self.page_size = page_size
        self.freed: list[list[int]] = []

    def free(self, indices: torch.Tensor) -> None:
        self.freed.append(indices.tolist())


class Tree:
    """Evicts what it was told."""

    page_size = 2

    def __init__(self, *actions: CacheAction) -> None:
        self.actions = actions
        self.asked: list[int] = []

    def evict(self, params: EvictParams) -> EvictResult:
        self.asked.append(params.num_tokens)
        return EvictResult(num_tokens_evicted=2, cache_actions=self.actions)


def device_slots(allocator: Allocator, tree: Tree | None = None) -> DeviceSlots:
    return DeviceSlots(
        tree=cast("TreeCore", tree or Tree()), allocator=cast("SlotAllocator", allocator)
    )


def slots(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def test_slots_are_free_at_once_when_no_batch_runs() -> None:
    allocator = Allocator()
    device = device_slots(allocator)
    device.retire(slots([0, 1]))
    device.batch_launched()
    device.batch_retired(1)
    device.retire(slots([2, 3]))
    assert allocator.freed == [[0, 1], [2, 3]]
    assert device.num_retired == 0


def test_retired_slots_wait_for_the_batches_launched_before() -> None:
    allocator = Allocator()
    device = device_slots(allocator)
    device.batch_launched()
    device.batch_launched()
    device.retire(slots([0, 1]))
    device.batch_launched()
    device.retire(slots([2, 3, 4, 5]))
    assert (allocator.freed, device.num_retired) == ([], 6)
    device.batch_retired(1)
    assert allocator.freed == []
    device.batch_retired(1)
    assert (allocator.freed, device.num_retired) == ([[0, 1]], 4)
    device.batch_retired(1)
    assert (allocator.freed, device.num_retired) == ([[0, 1], [2, 3, 4, 5]], 0)


def test_free_does_not_wait() -> None:
    allocator = Allocator()
    device = device_slots(allocator)
    device.batch_launched()
    device.free(slots([0, 1]))
    assert allocator.freed == [[0, 1]]


@pytest.mark.parametrize("num_batches", [-1, 2])
def test_batches_that_were_not_launched_cannot_end(num_batches: int) -> None:
    device = device_slots(Allocator())
    device.batch_launched()
    with pytest.raises(ContractError, match=f"at most 1 batches.*got {num_batches}"):
        device.batch_retired(num_batches)
    device.batch_retired(1)


def test_release_all_ends_every_batch() -> None:
    allocator = Allocator()
    device = device_slots(allocator)
    device.batch_launched()
    device.retire(slots([0, 1]))
    for _ in range(2):
        device.release_all()
        assert (allocator.freed, device.num_retired) == ([[0, 1]], 0)
    device.retire(slots([2, 3]))
    assert allocator.freed == [[0, 1], [2, 3]]


def test_what_is_evicted_is_freed() -> None:
    allocator = Allocator()
    tree = Tree(FreeDeviceKV(indices=slots([4, 5])), FreeDeviceKV(indices=slots([0, 1])))
    device = device_slots(allocator, tree)
    assert device.evict(EvictParams(num_tokens=3)).num_tokens_evicted == 2
    device.make_room(6)
    assert tree.asked == [3, 6]
    assert allocator.freed == [[4, 5], [0, 1]] * 2


def test_an_eviction_that_asks_for_more_is_refused() -> None:
    with pytest.raises(ContractError, match="only FreeDeviceKV"):
        device_slots(Allocator(), Tree(BackupKV(node_ids=()))).make_room(2)


def test_unlike_page_sizes_are_refused() -> None:
    with pytest.raises(ContractError, match="2 of the tree and 4 of the allocator"):
        device_slots(Allocator(page_size=4))
