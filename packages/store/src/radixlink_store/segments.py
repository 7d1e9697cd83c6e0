"""What a store in memory of its own kind is built of, as the MPI store is.

* `Segment`: the table of slots, over any writable buffer of a `Geometry`; `Superblock` says what it
  is, and `differences` what another one has that this has not.
* `SegmentPageStore` serves the pages of one segment.
* `SlotLocks`: who writes which slot.
* `Advice`, `advise`: what to tell the kernel of memory that is shared without a file.
* `ProcessMutex`: a mutex that a forked child finds free, for those who count as these stores do.
* `map_exceptions`: foreign errors as ours; `boot_id`: which boot of the node this is.
"""

from radixlink_store._advice import Advice, advise
from radixlink_store._errors import map_exceptions
from radixlink_store._file import boot_id
from radixlink_store._layout import FORMAT_VERSION, Geometry
from radixlink_store._locks import SlotLocks
from radixlink_store._process_mutex import ProcessMutex
from radixlink_store._segment import Segment
from radixlink_store._store import SegmentPageStore
from radixlink_store._superblock import Superblock, differences

__all__ = [
    "FORMAT_VERSION",
    "Advice",
    "Geometry",
    "ProcessMutex",
    "Segment",
    "SegmentPageStore",
    "SlotLocks",
    "Superblock",
    "advise",
    "boot_id",
    "differences",
    "map_exceptions",
]
