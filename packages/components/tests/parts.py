"""What the components' tests share: keys that nobody may hash, and a node of given parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from typing_extensions import override

from radixlink_contracts import (
    ComponentType,
    NodeId,
    OperationId,
    PageKeys,
    PageKeySource,
    PoolTransfer,
    TreeNodeView,
)

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE_SIZE = 2
NODE_ID = NodeId(7)


class UnhashedKeys(PageKeySource):
    """Pages `start` to `stop` of a run that must not be resolved: no scheduler thread hashes."""

    def __init__(self, num_pages: int, start: int = 0) -> None:
        self.start = start
        self.stop = start + num_pages

    @property
    def pages(self) -> range:
        """Which pages of the run these are."""
        return range(self.start, self.stop)

    @override
    def __len__(self) -> int:
        return self.stop - self.start

    @override
    def span(self, start: int, stop: int) -> UnhashedKeys:
        return UnhashedKeys(stop - start, self.start + start)

    @override
    def resolve(self, pause: Callable[[], None] | None = None) -> PageKeys:
        raise AssertionError("hashed on the scheduler thread")


@attrs.frozen(kw_only=True, eq=False)
class Node(TreeNodeView):
    """A node of given parts; nothing of it is stored."""

    page_keys: PageKeySource
    device_indices: torch.Tensor
    node_id: NodeId = NODE_ID
    has_swa: bool = False
    mamba_slot: int | None = None
    unstored: tuple[ComponentType, ...] = ()
    stored: bool = False
    pending_operation: OperationId | None = None

    @property
    @override
    def num_tokens(self) -> int:
        return len(self.device_indices)


def pages_of(transfer: PoolTransfer) -> list[int]:
    """Which pages of the run a transfer names."""
    assert isinstance(transfer.keys, UnhashedKeys)
    return list(transfer.keys.pages)


def slots_of(transfer: PoolTransfer) -> list[int]:
    """Its slots."""
    assert transfer.device_indices is not None
    assert transfer.device_indices.dtype is torch.int64
    return [int(slot) for slot in transfer.device_indices]
