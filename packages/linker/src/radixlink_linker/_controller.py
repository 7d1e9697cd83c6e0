"""`UnifiedRadixCache`: the controller that an engine calls.

It joins a tree, its slots and, where attached, a linker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from radixlink_contracts import (
    NOTHING_HAPPENED,
    Holders,
    InsertParams,
    InsertResult,
    LinkedPrefixCache,
    LoadMiss,
    LoadMode,
    LockHolder,
)
from radixlink_contracts.errors import AgreementError, ContractError, InvalidTransitionError
from radixlink_linker._ranks import FrameExchange
from radixlink_linker._settings import LinkerSettings
from radixlink_linker._wrapper import UnifiedCacheLinkerWrapper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixlink_contracts import (
        BatchIndex,
        Clock,
        DecLockRefParams,
        EvictParams,
        EvictResult,
        Executor,
        Explanation,
        IncLockRefParams,
        IncLockRefResult,
        LinkedTreeCore,
        LinkerComponent,
        LoadBack,
        MatchPrefixParams,
        MatchResult,
        RankGroup,
        RequestId,
        RequestKV,
        StepReport,
        UnifiedCacheLinker,
    )
    from radixlink_linker._counters import LinkerCounters
    from radixlink_linker._slots import DeviceSlots


class UnifiedRadixCache(LinkedPrefixCache):
    """The prefix cache of one rank.

    `LinkedPrefixCache` says when to call what.

    Without a linker it is just the tree and its slots: nothing is hashed, counted or exchanged.

    Ranks: all, the same calls in the same order with the same arguments.
    Thread: the scheduler's.
    """

    def __init__(
        self,
        *,
        tree: LinkedTreeCore,
        slots: DeviceSlots,
        components: Sequence[LinkerComponent],
        group: RankGroup,
        executor: Executor,
        clock: Clock,
        settings: LinkerSettings | None = None,
    ) -> None:
        """Join the parts.

        Args:
            tree: Decides.
            slots: Frees.
            components: In the tree's order, full attention first.
            group: The ranks that must agree, on a communicator of their own.
            executor: Runs lookups. Owns: the caller closes it, after this.
            clock: For this rank's deadlines.
            settings: The same on every rank.

        Raises:
            ContractError: The components are not the tree's.
        """
        self._tree = tree
        self._slots = slots
        kinds = tuple(component.component_type for component in components)
        if kinds != tree.components:
            msg = (
                f"UnifiedRadixCache: expected components {[kind.name for kind in tree.components]}, "
                f"as the tree has them, got {[kind.name for kind in kinds]}"
            )
            raise ContractError(msg)
        self._components = tuple(components)
        self._executor = executor
        self._clock = clock
        self._settings = settings or LinkerSettings()
        self._frames = FrameExchange(group, self._settings)
        self._wrapper: UnifiedCacheLinkerWrapper | None = None

    # -- attach and detach -------------------------------------------------------------------------

    @override
    def init_cache_linker(self, linker: UnifiedCacheLinker) -> None:
        """Attach an external store; see `LinkedPrefixCache.init_cache_linker`."""
        if self._wrapper is not None:
            msg = "init_cache_linker: expected no linker, got a second one: detach the first"
            raise InvalidTransitionError(msg, state="linked", event="attach")
        try:
            wrapper = UnifiedCacheLinkerWrapper(
                tree=self._tree,
                slots=self._slots,
                components=self._components,
                linker=linker,
                frames=self._frames,
                executor=self._executor,
                clock=self._clock,
                settings=self._settings,
            )
        except AgreementError:
            # The others know, or do not come.
            raise
        except Exception as error:
            self._frames.agree_on_attach(error)
            raise
        try:
            self._frames.agree_on_attach(None)
        except BaseException:
            # Whatever ends the wait for the others: the tree is to be as before.
            self._tree.detach_linker()
            raise
        self._wrapper = wrapper

    @override
    def detach(self) -> None:
        """Take the linker off; see `LinkedPrefixCache.detach`. Owns: its owner closes the linker."""
        if self._wrapper is not None:
            self._wrapper.drop_everything()
            # Before it is forgotten, so that a detach that was left in its middle can go on.
            self._tree.detach_linker()
            self._wrapper = None

    @property
    def counters(self) -> LinkerCounters | None:
        """What happened on this rank since the linker was attached; None without one."""
        return None if self._wrapper is None else self._wrapper.counters

    @property
    @override
    def num_outstanding(self) -> int:
        """Lookups and operations that are not over."""
        return 0 if self._wrapper is None else self._wrapper.num_outstanding

    # -- what every engine calls -------------------------------------------------------------------

    @override
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match; see `PrefixCache.match_prefix`."""
        try:
            device = self._tree.match(params)
        except BaseException as error:
            self._left("match_prefix", error, begun=False)
            raise
        if self._wrapper is None or params.request_id is None:
            return device
        return self._wrapper.match(params.key, params.request_id, device)

    @override
    def prefetch(self, *params: MatchPrefixParams) -> None:
        """Ask the store for requests in advance; see `LinkedPrefixCache.prefetch`."""
        for one in params:
            self.match_prefix(one)

    @override
    def insert(self, params: InsertParams) -> InsertResult:
        """Insert, free the duplicates, offload what is due and touch what is hot; see `PrefixCache.insert`."""
        if self._wrapper is not None:
            self._frames.check()
        result: InsertResult | None = None
        try:
            result = self._tree.insert(params)
            due = self._slots.apply_retiring(result.cache_actions)
        except BaseException as error:
            self._left("insert", error, begun=result is not None)
            raise
        if self._wrapper is not None:
            if due:
                self._wrapper.offload(due)
            if result.hot_nodes:
                self._wrapper.touch(result.hot_nodes)
        return result.carried_out()

    @override
    def evict(self, params: EvictParams) -> EvictResult:
        """Evict, and free what went; see `PrefixCache.evict`."""
        result: EvictResult | None = None
        try:
            result = self._tree.evict(params)
            self._slots.apply(result.cache_actions)
        except BaseException as error:
            self._left("evict", error, begun=result is not None)
            raise
        return result.carried_out()

    def _left(self, call: str, error: BaseException, *, begun: bool) -> None:
        """A call on the tree or its slots raised: nothing goes on before `reset`, unless it was refused.

        Args:
            call: Which one.
            error: What it raised.
            begun: Something of it is done for certain; where not, a `ContractError` refuses it.
        """
        if begun or not isinstance(error, ContractError):
            self._frames.leave(call, error)

    @override
    def inc_lock_ref(self, params: IncLockRefParams) -> IncLockRefResult:
        """Lock a path; see `PrefixCache.inc_lock_ref`."""
        return self._tree.inc_lock_ref(params)

    @override
    def dec_swa_lock_only(self, params: DecLockRefParams) -> IncLockRefResult:
        """Release window and state early; see `PrefixCache.dec_swa_lock_only`."""
        return self._tree.dec_swa_lock_only(params)

    @override
    def dec_lock_ref(self, params: DecLockRefParams) -> None:
        """Release a path; see `PrefixCache.dec_lock_ref`."""
        self._tree.dec_lock_ref(params)

    @override
    def fork_state(self, receipt: IncLockRefResult) -> int | None:
        """Copy a locked state for a request; see `PrefixCache.fork_state`."""
        source = self._tree.locked_state(receipt)
        try:
            return self._slots.fork_state(source)
        except BaseException as error:
            self._left("fork_state", error, begun=True)
            raise

    @override
    def init_load_back(self, request: RequestKV, mode: LoadMode = LoadMode.STAGED) -> LoadBack:
        """Queue a load; see `PrefixCache.init_load_back`."""
        if self._wrapper is None:
            return LoadMiss(reason="no linker is attached")
        return self._wrapper.load_back(request, mode)

    @override
    def ready_to_load_host_cache(self) -> BatchIndex | None:
        """Start the queued loads; see `PrefixCache.ready_to_load_host_cache`."""
        batch = None if self._wrapper is None else self._wrapper.start_loads()
        self._slots.batch_launched()
        return batch

    @override
    def batch_retired(self, num_batches: int) -> None:
        """So many batches were processed; see `LinkedPrefixCache.batch_retired`."""
        try:
            self._slots.batch_retired(num_batches)
        except BaseException as error:
            self._left("batch_retired", error, begun=False)
            raise

    @override
    def step(self) -> StepReport:
        """Agree and act; see `LinkedPrefixCache.step`."""
        return NOTHING_HAPPENED if self._wrapper is None else self._wrapper.step()

    @override
    def finish_loads(self, batch: BatchIndex | None) -> StepReport:
        """Agree on layer-wise loads; see `LinkedPrefixCache.finish_loads`."""
        return NOTHING_HAPPENED if self._wrapper is None else self._wrapper.finish_loads(batch)

    @override
    def check_hicache_events(self) -> StepReport:
        """`step`, under the name that engines know."""
        return self.step()

    @override
    def release_aborted_request(self, request_id: RequestId) -> None:
        """Forget a request; see `PrefixCache.release_aborted_request`."""
        if self._wrapper is not None:
            self._wrapper.release_request(request_id)

    @override
    def explain(self, request_id: RequestId) -> Explanation | None:
        """Why a request's hit was what it was; see `LinkedPrefixCache.explain`."""
        return None if self._wrapper is None else self._wrapper.explain(request_id)

    @override
    def holders(self) -> Holders:
        """Who holds what; see `LinkedPrefixCache.holders`."""
        if self._wrapper is not None:
            return self._wrapper.holders()
        locks = (
            LockHolder(receipt_id=receipt.receipt_id, node_id=receipt.node_id)
            for receipt in self._tree.receipts()
        )
        return Holders(locks=tuple(locks), num_retired=self._slots.num_retired)

    @override
    def reset(self) -> None:
        """Drop everything; see `PrefixCache.reset`.

        Collective where there is more than one rank and a linker was ever attached.
        """
        if self._wrapper is not None:
            self._wrapper.drop_everything()
        # Before the tree forgets its receipts: some are released with the slots.
        self._slots.release_all()
        self._slots.apply(self._tree.reset())
        if self._wrapper is not None:
            self._wrapper.begin_again()
        self._frames.renew()

    @override
    def release_host_resources(self) -> None:
        """Detach and close the linker; see `PrefixCache.release_host_resources`."""
        if self._wrapper is not None:
            linker = self._wrapper.linker
            try:
                self.detach()
            finally:
                linker.close()
