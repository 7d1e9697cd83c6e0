"""The linker of radixlink: the controller, the tree side of external caching, and `StoreLinker`.

An engine makes a `UnifiedRadixCache` of its tree, slots and components, attaches a
`UnifiedCacheLinker` (a `StoreLinker` makes one of any page store), and calls it from its scheduler
loop.
"""

from radixlink_linker._controller import UnifiedRadixCache
from radixlink_linker._counters import LinkerCounters
from radixlink_linker._runtime import MonotonicClock, ThreadExecutor
from radixlink_linker._settings import LinkerSettings
from radixlink_linker._slots import DeviceSlots
from radixlink_linker._store_linker import StoreLinker
from radixlink_linker._store_linker_counters import StoreLinkerCounters
from radixlink_linker._store_linker_settings import StoreLinkerSettings
from radixlink_linker._wrapper import UnifiedCacheLinkerWrapper

__all__ = [
    "DeviceSlots",
    "LinkerCounters",
    "LinkerSettings",
    "MonotonicClock",
    "StoreLinker",
    "StoreLinkerCounters",
    "StoreLinkerSettings",
    "ThreadExecutor",
    "UnifiedCacheLinkerWrapper",
    "UnifiedRadixCache",
]
