"""Page stores over Mooncake Store.

* `MooncakeStoreFactory` opens stores in the Mooncake of one master; found as `mooncake` among
  `radixlink.stores`.
* `MooncakeSettings`: where the master is, and how pages are stored, fetched and waited for.
* `MooncakePageStore`: what it opens.
* `radixlink_store_mooncake.counters`: what a store counted.
* `radixlink_store_mooncake.commands`: the programs that make a Mooncake on one machine.
"""

from radixlink_store_mooncake._factory import MooncakeStoreFactory
from radixlink_store_mooncake._settings import SMALLEST_SEGMENT_BYTES, MooncakeSettings
from radixlink_store_mooncake._store import MooncakePageStore

__all__ = [
    "SMALLEST_SEGMENT_BYTES",
    "MooncakePageStore",
    "MooncakeSettings",
    "MooncakeStoreFactory",
]
