"""Page stores in shared memory: the segment, and the embedded store on it.

* `FileStoreFactory` opens stores in a directory: any processes that can open the directory share
  the pages.
* `file_stores` makes one of a configuration, with files behind its stores if that asks for them:
  `TieredStoreFactory` puts them behind any factory's stores, `TieredStore` is what it opens.
* `SegmentPageStore` serves the pages of one segment; `Segment` is the table, over any writable
  buffer.
* `Advice`, `advise`: what to tell the kernel of memory, for those who share it without a file.
* `ProcessMutex`: a mutex that a forked child finds free, for those who count as these stores do.
* `radixlink_store.counters`: what a store counted.
"""

from radixlink_store._advice import Advice, advise
from radixlink_store._directory import default_directory
from radixlink_store._errors import map_exceptions
from radixlink_store._file import FileStoreFactory, boot_id
from radixlink_store._layout import FORMAT_VERSION, Geometry
from radixlink_store._locks import SlotLocks
from radixlink_store._process_mutex import ProcessMutex
from radixlink_store._segment import Segment
from radixlink_store._settings import PersistentSettings
from radixlink_store._store import MAX_LEASE_S, SegmentPageStore
from radixlink_store._superblock import Superblock, differences
from radixlink_store._tiered import TieredStore
from radixlink_store._tiered_factory import (
    TieredStoreFactory,
    file_stores,
    with_persistent_tier,
)

__all__ = [
    "FORMAT_VERSION",
    "MAX_LEASE_S",
    "Advice",
    "FileStoreFactory",
    "Geometry",
    "PersistentSettings",
    "ProcessMutex",
    "Segment",
    "SegmentPageStore",
    "SlotLocks",
    "Superblock",
    "TieredStore",
    "TieredStoreFactory",
    "advise",
    "boot_id",
    "default_directory",
    "differences",
    "file_stores",
    "map_exceptions",
    "with_persistent_tier",
]
