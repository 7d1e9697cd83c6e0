"""Page stores in shared memory, for any processes that can open a directory.

* `FileStoreFactory` opens stores in a directory: whoever can open it shares the pages.
* `file_stores` makes one of a configuration, with files behind its stores if that asks for them:
  `TieredStoreFactory` puts them behind any factory's stores, `TieredStore` is what it opens.
* `radixlink_store.counters`: what a store counted.
* `radixlink_store.maintenance`: looks at stores, verifies and clears them.
* `radixlink_store.segments`: what a store in memory of its own kind is built of.
"""

from radixlink_store._directory import default_directory
from radixlink_store._file import FileStoreFactory
from radixlink_store._settings import PersistentSettings
from radixlink_store._store import MAX_LEASE_S
from radixlink_store._tiered import TieredStore
from radixlink_store._tiered_factory import (
    TieredStoreFactory,
    file_stores,
    with_persistent_tier,
)

__all__ = [
    "MAX_LEASE_S",
    "FileStoreFactory",
    "PersistentSettings",
    "TieredStore",
    "TieredStoreFactory",
    "default_directory",
    "file_stores",
    "with_persistent_tier",
]
