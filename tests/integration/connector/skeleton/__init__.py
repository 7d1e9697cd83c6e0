"""A connector in the shape of vLLM's `KVConnectorBase_V1`, over radixlink's linker and stores.

packages/linker/CONNECTOR.md explains it. Copy the directory: it imports nothing of these tests.
"""

from ._engine import Metadata, Move
from ._ordered_copier import Event, OrderedCopier, record_cuda_event
from ._scheduler_side import SchedulerSide, namespace_of, page_keys
from ._worker_side import WorkerSide

__all__ = [
    "Event",
    "Metadata",
    "Move",
    "OrderedCopier",
    "SchedulerSide",
    "WorkerSide",
    "namespace_of",
    "page_keys",
    "record_cuda_event",
]
