"""Not run: only type-checked by mypy (`tox -e types`). What it takes to fit a contract.

The classes here inherit nothing, so that each assignment to a protocol compares signatures: what a
foreign backend or engine writes, without radixlink's classes above it. `type: ignore[code]` marks
what must not fit; under `warn_unused_ignores` mypy fails where it does fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type

import attrs
import torch

from radixlink_contracts import (
    BatchingLinker,
    Completion,
    ComponentType,
    Copier,
    DevicePool,
    ExternalLinkerLoadPhase,
    LinkerComponent,
    LinkerTransferPhase,
    LoadMode,
    OperationTicket,
    PageBits,
    PageHandles,
    PageKeys,
    PageKeySource,
    PageStore,
    PairedAllocator,
    PoolGroup,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    RankGroup,
    RowCopier,
    SlotAllocator,
    StateAllocator,
    StoreFactory,
    TouchingLinker,
    TreeNodeView,
    UnifiedCacheLinker,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Buffer

    from radixlink_components import FullComponent, MambaComponent, SWAComponent
    from radixlink_contracts import (
        BatchIndex,
        InsertResult,
        LayerCounter,
        OperationId,
        PoolLayout,
        RequestId,
        RequestKV,
    )
    from radixlink_pools import (
        CpuCopier,
        CudaCopier,
        DevicePoolEntry,
        DevicePoolGroup,
        FullSwaAllocator,
        PagedAllocator,
        StateSlotAllocator,
    )


@attrs.define
class MemoryStore:
    """A store that fits, with a plain field where the contract has a property."""

    layout: PoolLayout
    pages: dict[bytes, list[bytes]]

    def contains(self, keys: PageKeys) -> PageBits:
        return PageBits.of((i for i, key in enumerate(keys) if key in self.pages), len(keys))

    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        del ttl_s
        return PageHandles.without_places(keys, self.contains(keys))

    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        view, size = memoryview(out), self.layout.range_bytes[layer_range]
        for row in handles.found:
            view[row * size : (row + 1) * size] = self.pages[handles.keys[row]][layer_range]
        return handles.found

    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        del parts
        return self.contains(keys)

    def close(self) -> None:
        self.pages.clear()


class YesOrNoStore(MemoryStore):
    """A read says of each page whether it is right, not of the whole."""

    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> bool:  # type: ignore[override, explicit-override]
        return super().read(handles, layer_range, out).complete


class SilentStore:
    """Lacks `put`, and reads without being told where to."""

    layout: PoolLayout

    def contains(self, keys: PageKeys) -> PageBits:
        return PageBits.none(len(keys))

    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        del ttl_s
        return PageHandles.without_places(keys, self.contains(keys))

    def read(self, handles: PageHandles, layer_range: int) -> PageBits:
        del layer_range
        return handles.found

    def close(self) -> None: ...


class BoolReader:
    """`MemoryStore` in all but what `read` returns."""

    layout: PoolLayout

    def contains(self, keys: PageKeys) -> PageBits:
        return PageBits.none(len(keys))

    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        del ttl_s
        return PageHandles.without_places(keys, self.contains(keys))

    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> bool:
        del layer_range, out
        return handles.found.complete

    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        del parts
        return self.contains(keys)

    def close(self) -> None: ...


class MemoryStores:
    """A factory that fits: what it opens is known more closely than the contract says."""

    def open(self, layout: PoolLayout) -> MemoryStore:
        return MemoryStore(layout, {})

    def close(self) -> None: ...


def stores(memory: MemoryStore, silent: SilentStore, yes_or_no: BoolReader) -> None:
    """What is a page store, and what is none."""
    store: PageStore = memory
    store = silent  # type: ignore[assignment]
    store = yes_or_no  # type: ignore[assignment]
    factory: StoreFactory = MemoryStores()
    assert_type(factory.open(memory.layout), PageStore)
    assert_type(MemoryStores().open(memory.layout), MemoryStore)
    store.layout = memory.layout  # type: ignore[misc]


class LinkerThatFits:
    """A transfer engine of one's own, as small as it gets: it accepts nothing."""

    pools: frozenset[PoolName] = frozenset()
    layer_done_counter: LayerCounter | None = None

    def lookup(
        self, request_id: RequestId, transfers: Sequence[PoolTransfer]
    ) -> PoolTransferResult:
        del request_id
        return PoolTransferResult.empty(len(transfers[0].keys))

    def load(
        self, ticket: OperationTicket, transfers: Sequence[PoolTransfer], mode: LoadMode
    ) -> bool:
        del transfers
        return mode is LoadMode.STAGED and not ticket.decided

    def start_layer_wise_loading(self) -> BatchIndex | None:
        return None

    def finish_layer_wise_loading(self, batch: BatchIndex | None) -> bool:
        return batch is None

    def cancel_queued_load(self, op: OperationId) -> bool:
        return op > 0

    def num_completed_loads(self) -> int:
        return 0

    def pop_completed_load(self) -> Completion:
        raise IndexError

    def offload(self, ticket: OperationTicket, transfers: Sequence[PoolTransfer]) -> bool:
        return bool(transfers) and ticket.decided

    def num_completed_offloads(self) -> int:
        return 0

    def pop_completed_offload(self) -> Completion:
        raise IndexError

    def reset(self) -> None: ...

    def close(self) -> None: ...


class LinkerOfRequests(LinkerThatFits):
    """Cancels by request, as the founding design did; operations have ids of their own."""

    def cancel_queued_load(self, op: RequestId) -> bool:  # type: ignore[override, explicit-override]
        return bool(op)


class LinkerThatDoesMore(LinkerThatFits):
    """A linker with both optional calls."""

    def touch(self, ticket: OperationTicket, transfers: Sequence[PoolTransfer]) -> bool:
        return not transfers

    def lookup_batch(
        self, questions: Sequence[tuple[RequestId, Sequence[PoolTransfer]]]
    ) -> Sequence[PoolTransferResult]:
        return [PoolTransferResult.empty(len(transfers[0].keys)) for _, transfers in questions]


def optional_calls(
    fits: LinkerThatFits, does_more: LinkerThatDoesMore, ticket: OperationTicket
) -> None:
    """What a linker may do beside."""
    touching: TouchingLinker = does_more
    batching: BatchingLinker = does_more
    assert_type(touching.touch(ticket, []), bool)
    assert_type(batching.lookup_batch([])[0], PoolTransferResult)
    touching = fits  # type: ignore[assignment]
    batching = fits  # type: ignore[assignment]


def linkers(fits: LinkerThatFits) -> None:
    """What is a linker."""
    linker: UnifiedCacheLinker = fits
    assert_type(linker.pop_completed_load(), Completion)
    linker.load(fits, [], LoadMode.STAGED)  # type: ignore[arg-type]


class OneRank:
    """A group of one that fits."""

    rank = 0
    size = 1

    def all_and(self, words: bytearray, timeout_s: float) -> None: ...

    def broadcast(self, value: bytes, root: int, timeout_s: float) -> bytes:
        del root, timeout_s
        return value

    def all_gather(self, value: bytes, timeout_s: float) -> tuple[bytes, ...]:
        del timeout_s
        return (value,)

    def split(self, color: int, timeout_s: float) -> OneRank:
        del color, timeout_s
        return self

    def renew(self, timeout_s: float) -> OneRank:
        del timeout_s
        return OneRank()

    def roll_call(self, mark: str, timeout_s: float) -> Mapping[int, str]:
        del timeout_s
        return {0: mark}

    def close(self) -> None: ...


def groups(fits: OneRank) -> None:
    """What is a rank group; words are changed in place, so they are no `bytes`."""
    group: RankGroup = fits
    assert_type(group.renew(1.0), RankGroup)
    group.all_and(bytearray(8), 1.0)
    group.all_and(bytes(8), 1.0)  # type: ignore[arg-type]
    group.size = 2  # type: ignore[misc]


class NoSlots:
    """An engine's allocator that fits, and is always full."""

    page_size = 16
    size = 0
    available_size = 0

    def alloc(self, num_tokens: int) -> torch.Tensor | None:
        del num_tokens
        return None

    def free(self, indices: torch.Tensor) -> None: ...


class ListAllocator(NoSlots):
    """Gives slots as numbers."""

    def alloc(self, num_tokens: int) -> list[int]:  # type: ignore[override, explicit-override]
        return list(range(num_tokens))


def allocators(
    fits: NoSlots, paged: PagedAllocator, pair: FullSwaAllocator, states: StateSlotAllocator
) -> None:
    """What deals out slots; the caller must look whether it got some."""
    allocator: SlotAllocator = fits
    allocator = paged
    slots = allocator.alloc(16)
    assert_type(slots, torch.Tensor | None)
    allocator.free(slots)  # type: ignore[arg-type]
    allocator.free([1, 2])  # type: ignore[arg-type]
    paired: PairedAllocator = pair
    allocator = paired
    assert_type(paired.swa, SlotAllocator)
    paired = paged  # type: ignore[assignment]
    state: StateAllocator = states
    slot = state.alloc()
    assert_type(slot, int | None)
    state.free(slot)  # type: ignore[arg-type]


class Bystander:
    """A component that fits and takes no part."""

    component_type = ComponentType.FULL

    def build_external_linker_transfer(
        self,
        phase: LinkerTransferPhase,
        node: TreeNodeView | None,
        keys: PageKeySource | None,
    ) -> PoolTransfer | None:
        del phase, node, keys
        return None

    def update_external_linker_load(
        self,
        phase: ExternalLinkerLoadPhase,
        *,
        request: RequestKV | None,
        full_transfer: PoolTransfer | None,
        transfer: PoolTransfer,
        prefix_len: int,
        insert_result: InsertResult | None = None,
    ) -> None:
        del phase, request, full_transfer, transfer, prefix_len, insert_result


def components(
    fits: Bystander,
    ours: FullComponent | SWAComponent | MambaComponent,
    keys: PageKeys,
    node: TreeNodeView,
) -> None:
    """What is a component; phases are no strings."""
    component: LinkerComponent = fits
    component = ours
    transfer = component.build_external_linker_transfer(LinkerTransferPhase.LOAD, None, keys)
    assert_type(transfer, PoolTransfer | None)
    component.build_external_linker_transfer("load", None, keys)  # type: ignore[arg-type]
    component.build_external_linker_transfer(ExternalLinkerLoadPhase.COMMIT, node, None)  # type: ignore[arg-type]


def pools(
    entry: DevicePoolEntry,
    cpu: CpuCopier,
    cuda: CudaCopier,
    group: DevicePoolGroup,
    transfer: PoolTransfer,
) -> None:
    """Our own parts fit too."""
    pools_of: PoolGroup = group
    pool: DevicePool = entry
    copier: Copier = cpu
    copier = cuda
    of_rows: RowCopier = cpu
    of_rows = cuda  # type: ignore[assignment]
    region = pool.region(0, pool.page_rows(transfer))
    staging = copier.staging(8)
    assert_type(staging.buffer, memoryview)
    copier.gather(region, staging.buffer)  # type: ignore[arg-type]
    copier.gather(staging.tensor, region)  # type: ignore[arg-type]
    del pools_of, of_rows
