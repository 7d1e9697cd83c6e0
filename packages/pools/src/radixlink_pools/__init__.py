"""Device pools: who has which slots, which bytes these are, and how the bytes get to the host.

* `PagedAllocator` deals out the pages of one pool, `FullSwaAllocator` those of a full and a window
  pool as pairs, `StateSlotAllocator` recurrent-state slots.
* `DevicePoolEntry` shows a pool as rows of bytes (`byte_rows` makes them) and where they lie in
  what is stored (`PageLayout`, `Piece`); `DevicePoolGroup` finds the pools of a transfer.
* `assemble` makes the group of a kind of model (`Assembly`) of an engine's tensors
  (`LayerBuffers`).
* `CpuCopier` and `CudaCopier` copy between those rows and staging.
"""

from radixlink_pools._assemblies import Assembly, assemble, assembly_of, components_of
from radixlink_pools._buffers import LayerBuffers, byte_rows
from radixlink_pools._copiers import CompletedFence, CpuCopier
from radixlink_pools._cuda_copier import CudaCopier, CudaFence
from radixlink_pools._device_pool import DevicePoolEntry
from radixlink_pools._page_layout import PageLayout, Piece
from radixlink_pools._paged_allocator import PagedAllocator
from radixlink_pools._paired_allocator import FullSwaAllocator
from radixlink_pools._pool_group import DevicePoolGroup
from radixlink_pools._state_allocator import StateSlotAllocator

__all__ = [
    "Assembly",
    "CompletedFence",
    "CpuCopier",
    "CudaCopier",
    "CudaFence",
    "DevicePoolEntry",
    "DevicePoolGroup",
    "FullSwaAllocator",
    "LayerBuffers",
    "PageLayout",
    "PagedAllocator",
    "Piece",
    "StateSlotAllocator",
    "assemble",
    "assembly_of",
    "byte_rows",
    "components_of",
]
