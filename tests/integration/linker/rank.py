"""One rank of a replica: the real parts, and what an engine does with them."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs
import torch
from tests.integration.linker import ownership
from tests.integration.linker.counting_group import CountingGroup
from tests.integration.linker.device import Device
from tests.integration.linker.sequences import Request, key_of, page_keys_of

from radixlink_components import FullComponent, MambaComponent, SWAComponent
from radixlink_contracts import (
    ComponentType,
    EvictParams,
    EvictResult,
    IncLockRefParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
    NodeId,
    PoolName,
    RequestId,
    Shard,
)
from radixlink_linker import DeviceSlots, StoreLinker, UnifiedRadixCache
from radixlink_pools import CpuCopier
from radixlink_testing import InMemoryStoreFactory
from radixlink_testing.linkers import FaultyPageStore, InlineExecutor, ManualClock, SyncLinker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.integration.linker.models import Model

    from radixlink_contracts import (
        IncLockRefResult,
        InsertResult,
        LinkerComponent,
        LoadBack,
        PageKeys,
        PageStore,
        RadixKey,
        RankGroup,
        TreeNodeView,
    )
    from radixlink_linker import LinkerSettings


@attrs.frozen(kw_only=True, eq=False)
class Computation:
    """A forward that runs: a locked prefix, and slots that nobody else knows.

    Attributes:
        key: What it computes; whole pages, where it ends in a state.
        prefix_len: Tokens that the tree had.
        receipt: The lock on them.
        value: All full slots.
        slots: Its own of them.
        floor: Token below which its own window is gone.
        state: Its own state, which stands at the end of the key.
    """

    key: RadixKey
    prefix_len: int
    receipt: IncLockRefResult
    value: torch.Tensor
    slots: torch.Tensor
    floor: int
    state: int | None


class Rank:
    """One rank: the engine's side of it."""

    def __init__(
        self,
        group: RankGroup,
        *,
        model: Model,
        settings: LinkerSettings,
        num_pages: int,
        by_hand: bool,
        clock: ManualClock,
        shared: Mapping[PoolName, PageStore] = MappingProxyType({}),
    ) -> None:
        self.rank = group.rank
        self.model = model
        self.calls: list[str] = []
        self.group = CountingGroup(group, self.calls)
        # Replicas hold the same bytes.
        self.device = Device(model, num_pages, group.rank, alike=shared)
        self.allocator = self.device.allocator
        self.tree = model.tree()
        self.slots = DeviceSlots(
            tree=self.tree,
            allocator=self.allocator,
            states=self.device.states,
            copy_state=self.device.copy_state if model.states else None,
        )
        self.executor = InlineExecutor()
        self.clock = clock
        self.cache = UnifiedRadixCache(
            tree=self.tree,
            slots=self.slots,
            components=self._components(),
            group=self.group,
            executor=self.executor,
            clock=clock,
            settings=settings,
        )
        shard = Shard(index=group.rank, count=group.size)
        self.stores = {
            pool: FaultyPageStore(
                shared[pool]
                if pool in shared
                else InMemoryStoreFactory().open(model.layout(pool, shard))
            )
            for pool in model.pools
        }
        self.store = self.stores[PoolName.KV]
        entries = self.device.entries
        self.linker: StoreLinker | SyncLinker = (
            SyncLinker(pools=entries, stores=self.stores, copier=CpuCopier())
            if by_hand
            else StoreLinker(
                pools=self.device.group,
                stores=[(entries[pool], store) for pool, store in self.stores.items()],
                copier=CpuCopier(),
                clock=clock,
            )
        )
        self.computing: list[Computation] = []
        #: Of requests that only read.
        self.locks: list[IncLockRefResult] = []

    def _components(self) -> list[LinkerComponent]:
        slots, pair, states = self.slots, self.device.pair, self.device.states
        components: list[LinkerComponent] = [
            FullComponent(allocator=self.device.full, evict=slots.make_room, release=slots.retire)
        ]
        if pair is not None:
            components.append(
                SWAComponent(
                    pair=pair,
                    sliding_window=self.model.window,
                    evict=slots.make_room_swa,
                    release=slots.retire_swa,
                )
            )
        if states is not None:
            components.append(
                MambaComponent(
                    states=states, evict=slots.make_room_states, release=slots.retire_state
                )
            )
        return components

    @property
    def by_hand(self) -> SyncLinker:
        """The linker, in a replica that was made with `by_hand`."""
        assert isinstance(self.linker, SyncLinker)
        return self.linker

    # -- what the engine does ----------------------------------------------------------------------

    def match(self, request_id: str, tokens: Sequence[int]) -> MatchResult:
        """A match; its node is counted from the root, whose id differs where ranks once differed."""
        result = self.cache.match_prefix(
            MatchPrefixParams(key=key_of(tokens), request_id=RequestId(request_id))
        )
        node = NodeId(result.last_device_node - self.tree.root)
        return attrs.evolve(result, last_device_node=node)

    def load_back(self, request_id: str, tokens: Sequence[int]) -> LoadBack:
        request = Request(request_id=RequestId(request_id), key=key_of(tokens))
        return self.cache.init_load_back(request)

    def begin(
        self, tokens: Sequence[int], *, state: bool = True, slide: bool = False
    ) -> Computation | None:
        """Lock what is there and compute the pages that are not; None where there is no room.

        Args:
            tokens: The sequence.
            state: Keep a state of its end, in a model with states.
            slide: It moves on past its prefix's window and state, and gives its own window back
                where it is behind it by then.
        """
        page_size = self.model.page_size
        whole = len(tokens) // page_size * page_size
        keys = list(self.page_keys(tokens))
        device = self.cache.match_prefix(MatchPrefixParams(key=key_of(tokens)))
        start = device.device_prefix_len
        receipt = self.cache.inc_lock_ref(IncLockRefParams(node_id=device.last_device_node))
        prefix = self.tree.path_indices(device.last_device_node)
        self._check_hit(prefix, keys, start)
        slots = self._take(whole - start)
        if slots is None:
            self.cache.dec_lock_ref(receipt.to_dec_params())
            return None
        own: int | None = None
        if self.model.states and state and whole:
            own = self._take_state(receipt, keys, start)
            if own is None:
                self._give_back(slots, None)
                self.cache.dec_lock_ref(receipt.to_dec_params())
                return None
            self.device.fill(PoolName.MAMBA, torch.tensor([own]), keys[-1:])
        self.device.fill(PoolName.KV, slots, keys[start // page_size :])
        floor = 0
        if self.device.pair is not None:
            partners = self.device.pair.swa_indices(slots)
            self.device.fill(PoolName.SWA, partners, keys[start // page_size :])
            if slide:
                floor = max(0, whole - self.tree.sliding_window)
                if floor > start:
                    self.device.pair.free_swa(slots[: floor - start])
        if slide:
            receipt = self.tree.dec_swa_lock_only(receipt.to_dec_params())
        computation = Computation(
            key=key_of(tokens if own is None else tokens[:whole]),
            prefix_len=start,
            receipt=receipt,
            value=torch.cat([prefix, slots]),
            slots=slots,
            floor=floor,
            state=own,
        )
        self.computing.append(computation)
        return computation

    def _take(self, num_tokens: int) -> torch.Tensor | None:
        """Slots for a forward, for which the engine evicts."""
        full = num_tokens - self.device.full.available_size
        pair = self.device.pair
        swa = 0 if pair is None else num_tokens - pair.swa.available_size
        if full > 0 or swa > 0:
            self.cache.evict(EvictParams(num_tokens=max(0, full), swa_num_tokens=max(0, swa)))
        return self.allocator.alloc(num_tokens)

    def _take_state(self, receipt: IncLockRefResult, keys: list[bytes], start: int) -> int | None:
        """A state to go on from: a copy of what the match ended at, or a new one."""
        states = self.device.states
        assert states is not None
        if not start:
            if not states.available_size:
                self.cache.evict(EvictParams(mamba_num=1))
            return states.alloc()
        slot = self.cache.fork_state(receipt)
        if slot is not None:
            checkpoint = self.tree.locked_state(receipt)
            assert slot != checkpoint
            end = keys[start // self.model.page_size - 1]
            self.device.check(PoolName.MAMBA, torch.tensor([slot, checkpoint]), [end, end])
        return slot

    def _check_hit(self, prefix: torch.Tensor, keys: list[bytes], length: int) -> None:
        """What a forward would read of a device hit: the full pages and the last window."""
        assert len(prefix) == length
        num_pages = length // self.model.page_size
        self.device.check(PoolName.KV, prefix, keys[:num_pages])
        if self.device.pair is not None:
            first = max(0, num_pages - self.model.window_pages)
            window = self.device.pair.swa_indices(prefix[first * self.model.page_size :])
            self.device.check(PoolName.SWA, window, keys[first:num_pages])

    def end(self, computation: Computation, *, insert: bool = True) -> InsertResult | None:
        """Insert what was computed, or give it back."""
        result = None
        if insert:
            floors = {ComponentType.SWA: computation.floor} if self.model.window else {}
            result = self.cache.insert(
                InsertParams(
                    key=computation.key,
                    value=computation.value,
                    prev_prefix_len=computation.prefix_len,
                    component_evicted_seqlens=floors,
                    mamba_value=computation.state,
                )
            )
            if result.mamba_exist:
                self._give_back(computation.slots[:0], computation.state)
        else:
            self._give_back(computation.slots, computation.state)
        # Where the insert raised, the slots and the lock are still the engine's.
        self.computing.remove(computation)
        self.cache.dec_lock_ref(computation.receipt.to_dec_params())
        return result

    def _give_back(self, slots: torch.Tensor, state: int | None) -> None:
        if len(slots):
            self.slots.free(slots)
        if state is not None:
            assert self.device.states is not None
            self.device.states.free(state)

    def lock(self, tokens: Sequence[int], *, early: bool = False) -> IncLockRefResult:
        """Lock what a match finds; with `early` the full pages alone."""
        device = self.cache.match_prefix(MatchPrefixParams(key=key_of(tokens)))
        receipt = self.cache.inc_lock_ref(IncLockRefParams(node_id=device.last_device_node))
        if early:
            receipt = self.tree.dec_swa_lock_only(receipt.to_dec_params())
        self.locks.append(receipt)
        return receipt

    def unlock(self) -> None:
        """Release what `lock` took."""
        while self.locks:
            self.cache.dec_lock_ref(self.locks.pop().to_dec_params())

    def compute(self, tokens: Sequence[int], *, state: bool = True, slide: bool = False) -> bool:
        """A whole forward. False where there is no room for it."""
        computation = self.begin(tokens, state=state, slide=slide)
        if computation is not None:
            self.end(computation)
        return computation is not None

    def evict(
        self, num_tokens: int = 1 << 20, *, swa_num_tokens: int = 0, mamba_num: int = 0
    ) -> EvictResult:
        params = EvictParams(
            num_tokens=num_tokens, swa_num_tokens=swa_num_tokens, mamba_num=mamba_num
        )
        return self.cache.evict(params)

    def device_pages(self, tokens: Sequence[int]) -> int:
        """How many pages of a sequence a request could go on from, on the device."""
        device = self.cache.match_prefix(MatchPrefixParams(key=key_of(tokens)))
        return device.device_prefix_len // self.model.page_size

    # -- the store ---------------------------------------------------------------------------------

    def page_keys(self, tokens: Sequence[int]) -> PageKeys:
        """What the pages of a sequence are called in the store."""
        return page_keys_of(tokens, self.model.page_size)

    def stored_pages(self, tokens: Sequence[int]) -> int:
        """How many pages of a sequence, from its first, this rank's store has."""
        return self.store.contains(self.page_keys(tokens)).leading

    def lose(self, tokens: Sequence[int], *pages: int, pool: PoolName = PoolName.KV) -> None:
        """The store forgets some pages of a sequence."""
        keys = self.page_keys(tokens)
        self.stores[pool].lost.update(keys[page] for page in pages)

    def held(self, tokens: Sequence[int]) -> dict[PoolName, set[int]]:
        """Which pages of a sequence the device holds in each pool: by its nodes and pairs, not by its matches."""
        size = self.model.page_size
        end = self.tree.holdings(key_of(tokens)).last_node
        path = self.tree.path_indices(end)
        there = {
            PoolName.KV: set(range(len(path) // size)),
            PoolName.SWA: set[int](),
            PoolName.MAMBA: set[int](),
        }
        if self.device.pair is not None:
            partners = self.device.pair.swa_indices(path)[::size].tolist()
            there[PoolName.SWA] = {page for page, partner in enumerate(partners) if partner >= 0}
        node, at = self.tree._nodes[end], len(path)
        while node.parent is not None:
            if node.mamba_slot is not None:
                there[PoolName.MAMBA].add(at // size - 1)
            node, at = node.parent, at - node.num_tokens
        return there

    def restorable(self, tokens: Sequence[int], start: int = 0) -> set[int]:
        """Which lengths, in pages, this rank's stores and device can restore behind `start` pages: counted by hand."""
        keys, held = self.page_keys(tokens), self.held(tokens)
        there = {
            pool: {page for page in range(len(keys)) if page in store.contains(keys)} | held[pool]
            for pool, store in self.stores.items()
        }
        lengths = set()
        for end in range(start + 1, len(keys) + 1):
            needed = {PoolName.KV: range(start, end)}
            if self.model.window:
                needed[PoolName.SWA] = range(max(start, end - self.model.window_pages), end)
            if self.model.states:
                needed[PoolName.MAMBA] = range(end - 1, end)
            if all(there[pool].issuperset(pages) for pool, pages in needed.items()):
                lengths.add(end)
        return lengths

    def transfer(self) -> None:
        """Return when every transfer that was started has ended."""
        if isinstance(self.linker, SyncLinker):
            self.linker.run_all()
            return
        linker = self.linker
        with linker._board._changed:
            ended = linker._board._changed.wait_for(
                lambda: (
                    not linker._board._running
                    and not linker._board._batches
                    and not linker._board._loads
                    and not linker._board._offloads
                    and not linker._board._touches
                ),
                10,
            )
        assert ended, "a transfer hangs"

    def nodes(self) -> list[TreeNodeView]:
        """The nodes of the tree that have tokens, oldest first."""
        return [self.tree.node(node.node_id) for node in self.tree._nodes.values() if node.tokens]

    # -- the end -----------------------------------------------------------------------------------

    def end_requests(self) -> None:
        """Every request of the engine ends, and no store hangs any more."""
        for store in self.stores.values():
            store.gate.set()
        while self.computing:
            self.end(self.computing[0], insert=False)
        self.unlock()
        wrapper = self.cache._wrapper
        for request_id in list(wrapper._requests._requests) if wrapper is not None else ():
            self.cache.release_aborted_request(request_id)

    def close(self) -> None:
        """Close all parts but the group."""
        for store in self.stores.values():
            store.gate.set()
        self.cache.release_host_resources()
        self.linker.close()
        self.executor.close()

    def check(self) -> None:
        """Everything that must hold at any time."""
        ownership.check(self)

    def check_idle(self) -> None:
        """`check`, and nothing of any request is left."""
        ownership.check_idle(self)
