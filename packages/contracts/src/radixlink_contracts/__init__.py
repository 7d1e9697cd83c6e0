"""The contracts of radixlink: the values, protocols and errors that its parts meet in.

No behaviour, no I/O, and no torch at run time.

What you implement, by what you are:

* a store backend: `PageStore` and `StoreFactory` (no torch, no tree, no ranks); `Touchable` and `LendingStore` if
  it can;
* an engine: `RequestKV` and `SlotAllocator`; you call `PrefixCache` and `LinkedPrefixCache`;
* a transfer engine of your own: `UnifiedCacheLinker`, and `TouchingLinker` and `BatchingLinker` if it can;
* a tree or a component: `LinkedTreeCore`, `LinkerComponent`;
* a way for ranks to talk: `RankGroup`; a device: `Copier`, `Fence`, `DevicePool`.

What its docstring calls provisional is typed but may change until the part that needs it lands.
"""

from radixlink_contracts._bits import PageBits
from radixlink_contracts._comm import RankGroup
from radixlink_contracts._component import LinkerComponent
from radixlink_contracts._controller import (
    NOTHING_HAPPENED,
    LinkedPrefixCache,
    LoadAdmitted,
    LoadBack,
    LoadMiss,
    LoadWaiting,
    PrefixCache,
    StepReport,
)
from radixlink_contracts._device import (
    ByteRegion,
    Copier,
    DevicePool,
    Fence,
    LayerCounter,
    PoolGroup,
    RowCopier,
    Staging,
)
from radixlink_contracts._engine import PairedAllocator, RequestKV, SlotAllocator, StateAllocator
from radixlink_contracts._evict import EvictParams, EvictResult
from radixlink_contracts._explain import (
    Explanation,
    HeldBack,
    HitCause,
    Holders,
    LoadFailure,
    LockHolder,
    LookupAnswer,
    OperationKind,
    OperationStatus,
    PoolAnswer,
    WrittenOff,
)
from radixlink_contracts._ids import BatchIndex, NodeId, OperationId, RequestId
from radixlink_contracts._insert import AdoptedRanges, InsertOrigin, InsertParams, InsertResult
from radixlink_contracts._keys import (
    DEFAULT_NAMESPACE,
    PAGE_KEY_BYTES,
    Namespace,
    PageKeys,
    PageKeySource,
    RadixKey,
)
from radixlink_contracts._lending import LendingStore, LentFrames, PageFrames
from radixlink_contracts._linker import (
    BatchingLinker,
    Completion,
    LoadMode,
    OperationTicket,
    Outcome,
    TouchingLinker,
    UnifiedCacheLinker,
)
from radixlink_contracts._locks import (
    DecLockRefParams,
    IncLockRefParams,
    IncLockRefResult,
    ReceiptId,
)
from radixlink_contracts._match import (
    ExternalMatch,
    MatchPrefixParams,
    MatchResult,
    PrefixHoldings,
)
from radixlink_contracts._phases import ExternalLinkerLoadPhase, LinkerTransferPhase
from radixlink_contracts._pools import POOL_OF, ComponentType, PoolHitPolicy, PoolName
from radixlink_contracts._runtime import MAX_TIMEOUT_S, Clock, Executor
from radixlink_contracts._store import (
    CacheIdentity,
    PageHandles,
    PageStore,
    PoolLayout,
    Shard,
    StoreConfig,
    StoreFactory,
    Touchable,
)
from radixlink_contracts._transfers import PoolTransfer, PoolTransferResult
from radixlink_contracts._tree import LinkedTreeCore, TreeCore, TreeNodeView

__all__ = [
    "DEFAULT_NAMESPACE",
    "MAX_TIMEOUT_S",
    "NOTHING_HAPPENED",
    "PAGE_KEY_BYTES",
    "POOL_OF",
    "AdoptedRanges",
    "BatchIndex",
    "BatchingLinker",
    "ByteRegion",
    "CacheIdentity",
    "Clock",
    "Completion",
    "ComponentType",
    "Copier",
    "DecLockRefParams",
    "DevicePool",
    "EvictParams",
    "EvictResult",
    "Executor",
    "Explanation",
    "ExternalLinkerLoadPhase",
    "ExternalMatch",
    "Fence",
    "HeldBack",
    "HitCause",
    "Holders",
    "IncLockRefParams",
    "IncLockRefResult",
    "InsertOrigin",
    "InsertParams",
    "InsertResult",
    "LayerCounter",
    "LendingStore",
    "LentFrames",
    "LinkedPrefixCache",
    "LinkedTreeCore",
    "LinkerComponent",
    "LinkerTransferPhase",
    "LoadAdmitted",
    "LoadBack",
    "LoadFailure",
    "LoadMiss",
    "LoadMode",
    "LoadWaiting",
    "LockHolder",
    "LookupAnswer",
    "MatchPrefixParams",
    "MatchResult",
    "Namespace",
    "NodeId",
    "OperationId",
    "OperationKind",
    "OperationStatus",
    "OperationTicket",
    "Outcome",
    "PageBits",
    "PageFrames",
    "PageHandles",
    "PageKeySource",
    "PageKeys",
    "PageStore",
    "PairedAllocator",
    "PoolAnswer",
    "PoolGroup",
    "PoolHitPolicy",
    "PoolLayout",
    "PoolName",
    "PoolTransfer",
    "PoolTransferResult",
    "PrefixCache",
    "PrefixHoldings",
    "RadixKey",
    "RankGroup",
    "ReceiptId",
    "RequestId",
    "RequestKV",
    "RowCopier",
    "Shard",
    "SlotAllocator",
    "Staging",
    "StateAllocator",
    "StepReport",
    "StoreConfig",
    "StoreFactory",
    "Touchable",
    "TouchingLinker",
    "TreeCore",
    "TreeNodeView",
    "UnifiedCacheLinker",
    "WrittenOff",
]
