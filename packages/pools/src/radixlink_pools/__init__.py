"""Device pools: who has which slots, which bytes these are, and how the bytes get to the host.

* `PagedAllocator` deals out the pages of one pool.
* `DevicePoolEntry` shows a pool as rows of bytes (`byte_rows` makes them), `DevicePoolGroup`
  finds the pool of a transfer.
* `CpuCopier` and `CudaCopier` copy between those rows and staging.
"""

from radixlink_pools._copiers import CompletedFence, CpuCopier
from radixlink_pools._cuda_copier import CudaCopier, CudaFence
from radixlink_pools._device_pool import DevicePoolEntry, DevicePoolGroup, byte_rows
from radixlink_pools._paged_allocator import PagedAllocator
from radixlink_pools._paired_allocator import FullSwaAllocator
from radixlink_pools._state_allocator import StateSlotAllocator

__all__ = [
    "CompletedFence",
    "CpuCopier",
    "CudaCopier",
    "CudaFence",
    "DevicePoolEntry",
    "DevicePoolGroup",
    "FullSwaAllocator",
    "PagedAllocator",
    "StateSlotAllocator",
    "byte_rows",
]
