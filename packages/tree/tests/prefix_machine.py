"""`TreeMachine`: requests, offloads and pressure, on a tree and on the model beside it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from typing_extensions import override

from radixlink_contracts import (
    DEFAULT_NAMESPACE,
    ComponentType,
    EvictParams,
    InsertOrigin,
    InsertParams,
    MatchPrefixParams,
    Namespace,
    OperationId,
    PageKeys,
    RadixKey,
)
from radixlink_contracts.actions import BackupKV
from radixlink_tree import StateRules, hash_pages, namespace_seed
from radixlink_tree._node import StoreMarks

from .prefix_model import FULL, MAMBA, SWA, Gone, Insert, Model, Rules, count
from .slot_events import by_kind, events_of

if TYPE_CHECKING:
    from radixlink_contracts import IncLockRefResult, InsertResult, NodeId
    from radixlink_tree._node import Node

    from .conftest import MakeRig
    from .prefix_model import Event, Lock, Prefix

NAMESPACES = (DEFAULT_NAMESPACE, Namespace(extra_key="a"), Namespace(cache_salt="a"))
POOL_PAGES = 24
#: Where a page differs from the page of zeros, and by which token.
SYMBOLS = ((0, 0), (0, 1), (-1, 2), (-1, 2**33))
SKIPS: tuple[tuple[ComponentType, ...], ...] = ((), (SWA,), (MAMBA,), (SWA, MAMBA))

Recipe: TypeAlias = tuple[int, int, Namespace, tuple[int, ...]]


@attrs.define
class Held:
    """A request between its admission and its end.

    Attributes:
        prefix: Its sequence, and behind it so many more tokens.
        tail: These.
        receipt: Of what it matched or inserted last.
        lock: The same in the model.
        matched: How many pages of the prefix are locked and the tree's own.
        inserted: How many an insert of this request counted.
        slots: The pool's pages behind what was matched, one more for the tail.
        floor: The page from which on these have windows.
    """

    prefix: Prefix
    tail: int
    receipt: IncLockRefResult
    lock: Lock
    matched: int
    inserted: int
    slots: list[int]
    floor: int


@attrs.define
class Offload:
    """An offload between its start and its verdict; the lock may go back before that."""

    lock: Lock
    receipt: IncLockRefResult | None


class TreeMachine(RuleBasedStateMachine):
    """Requests, offloads and pressure, on the tree and on the model."""

    make_rig: ClassVar[MakeRig]
    shape: ClassVar[Rules]
    #: What the window is before it is rounded up to pages.
    window_tokens: ClassVar[int]

    picks = st.integers(0, 1000)
    #: How a sequence is made: that many pages of a known one, then these; see `sequence`.
    recipes = st.tuples(
        picks,
        st.integers(0, 7),
        st.sampled_from(NAMESPACES),
        st.lists(st.sampled_from(range(len(SYMBOLS))), max_size=4).map(tuple),
    )

    def __init__(self) -> None:
        super().__init__()
        rules = self.shape
        self.page_size = rules.page_size
        self.rig = type(self).make_rig(
            rules.page_size,
            POOL_PAGES,
            window=self.window_tokens,
            states=(
                StateRules(chunk_tokens=rules.chunk, max_per_path=rules.cap)
                if rules.states
                else None
            ),
        )
        self.tree = self.rig.tree
        self.pools = self.rig.pools
        self.model = Model(rules)
        self.threshold: int | None = None
        self.requests: list[Held] = []
        self.offered: list[tuple[NodeId, Prefix]] = []
        self.offloads: dict[OperationId, Offload] = {}
        self.operations = 0

    # -- the two sides ---------------------------------------------------------------------------

    def sequence(self, recipe: Recipe) -> Prefix:
        """A sequence that, more often than not, begins like one that was seen before."""
        pick, keep, namespace, symbols = recipe
        known = [*(held.prefix for held in self.requests), *self.model.pages]
        if keep and known:
            namespace, begin = known[pick % len(known)]
            return namespace, (*begin[:keep], *symbols)
        return namespace, symbols

    def tokens(self, prefix: Prefix, tail: int = 0) -> array[int]:
        """Pages that differ in their first or their last token alone, and a tail."""
        tokens = array("q")
        for symbol in prefix[1]:
            page = array("q", [0] * self.page_size)
            place, token = SYMBOLS[symbol]
            page[place] = token
            tokens += page
        return tokens + array("q", [0] * tail)

    def key(self, prefix: Prefix, tail: int = 0) -> RadixKey:
        return RadixKey(self.tokens(prefix, tail), prefix[0])

    def match(self, prefix: Prefix, tail: int = 0) -> tuple[NodeId, int]:
        """Match on both sides: where, and how many pages."""
        found = self.tree.match(MatchPrefixParams(key=self.key(prefix, tail)))
        expected = self.model.match(prefix)
        assert found.device_prefix_len == expected.length * self.page_size
        assert found.full_kv_hit_length == expected.full * self.page_size
        assert found.branching_len == expected.branching
        pages = [page.slot for page in self.model.path(prefix)]
        assert self.rig.path_pages(found.last_device_node) == pages[: expected.length]
        return found.last_device_node, expected.length

    def lock(
        self, node_id: NodeId, prefix: Prefix, skipped: tuple[ComponentType, ...] = ()
    ) -> tuple[IncLockRefResult, Lock]:
        receipt, lock = self.rig.lock(node_id, *skipped), self.model.lock(prefix, skipped)
        assert receipt.skipped_lock_components == skipped
        assert receipt.swa_locked_len == lock.window * self.page_size
        assert receipt.mamba_locked == lock.state
        return receipt, lock

    def unlock(self, receipt: IncLockRefResult, lock: Lock) -> None:
        self.rig.unlock(receipt)
        self.model.unlock(lock)

    def give_up(self, num_pages: int = 0, windows: int = 0, states: int = 0) -> None:
        """Evict on both sides: the same, in the same order."""
        expected = self.model.evict(num_pages, windows, states)
        result = self.tree.evict(
            EvictParams(
                num_tokens=num_pages * self.page_size,
                swa_num_tokens=windows * self.page_size,
                mamba_num=states,
            )
        )
        # Each kind comes together, so that a large eviction is few actions.
        assert by_kind(events_of(self.pools, result.cache_actions)) == by_kind(expected)
        full, swa = count(expected, Gone.WHOLE, Gone.BARE), 0
        if self.shape.window:
            swa = count(expected, Gone.WHOLE, Gone.WINDOW)
        assert result.num_tokens_evicted == full * self.page_size
        assert result.swa_num_tokens_evicted == swa * self.page_size
        assert result.mamba_num_evicted == count(expected, Gone.STATE)
        self.rig.apply(result.cache_actions)

    def insert(
        self,
        held: Held,
        length: int,
        *,
        restored: bool = False,
        prompt: int = 0,
        with_state: bool = True,
    ) -> InsertResult:
        """Insert the first pages of a request's sequence on both sides.

        Args:
            held: Whose.
            length: Pages.
            restored: A load brought them.
            prompt: Tokens.
            with_state: Bring a state, where there are states and the key is whole pages.
        """
        model = self.model
        namespace, symbols = held.prefix
        tail = held.tail if length == len(symbols) else 0
        slot = self.state_slot() if with_state and self.shape.states and not tail else None
        params = Insert(
            prefix=(namespace, symbols[:length]),
            matched=held.matched,
            own=held.slots,
            floor=held.floor if self.shape.window else 0,
            prompt=prompt // self.page_size,
            state=slot,
        )
        path = [page.slot for page in model.path(params.prefix)]
        value = self.pools.slots(path[: held.matched] + held.slots)
        expected = model.insert(params)
        key = self.key(params.prefix, tail)
        result = self.tree.insert(
            InsertParams(
                key=key,
                value=value[: len(key)],
                prev_prefix_len=held.matched * self.page_size,
                inserted_len=held.inserted * self.page_size,
                prompt_len=prompt,
                origin=InsertOrigin.RESTORED if restored else InsertOrigin.COMPUTED,
                track_adopted_ranges=True,
                component_evicted_seqlens=(
                    {SWA: params.floor * self.page_size} if params.floor else {}
                ),
                mamba_value=slot,
            )
        )
        assert result.prefix_len == expected.was_there * self.page_size
        assert result.total_len == length * self.page_size
        assert result.mamba_exist == expected.mamba_exist
        assert events_of(self.pools, result.cache_actions) == expected.events
        self.compare_ranges(result, expected.adopted)
        pages = [page.slot for page in model.path(params.prefix)]
        assert self.rig.path_pages(result.last_device_node) == pages
        self.rig.apply(result.cache_actions)
        if slot is not None and expected.mamba_exist:
            self.pools.free_state(slot)
        self.note_offers(held, params, result, restored=restored)
        held.slots = held.slots[length - held.matched :]
        return result

    def state_slot(self) -> int | None:
        """A state slot, evicting for it; None where all are locked."""
        if not self.pools.free_states:
            self.give_up(states=1)
        return self.pools.take_state() if self.pools.free_states else None

    def compare_ranges(self, result: InsertResult, adopted: dict[ComponentType, set[int]]) -> None:
        """What was taken: pages in one list, ranges of tokens that do not touch in the other."""
        assert result.adopted_ranges is not None
        for kind in (FULL, SWA):
            ranges = result.adopted_ranges.ranges(kind)
            tokens = [token for start, stop in ranges for token in range(start, stop)]
            assert tokens == [
                page * self.page_size + at
                for page in sorted(adopted[kind])
                for at in range(self.page_size)
            ]
        ends = [(page + 1) * self.page_size for page in adopted[MAMBA]]
        assert result.adopted_ranges.ranges(MAMBA) == tuple((end - 1, end) for end in ends)

    def note_offers(
        self, held: Held, params: Insert, result: InsertResult, *, restored: bool
    ) -> None:
        """Compare what the tree offered with what the model would."""
        backed_up: list[NodeId] = []
        for action in result.cache_actions:
            if isinstance(action, BackupKV):
                backed_up += action.node_ids
        if self.threshold is None:
            assert backed_up == []
            return
        ends = self.model.note_insert(params, held.inserted, self.threshold, restored=restored)
        path = [page.slot for page in self.model.path(params.prefix)]
        assert [self.rig.path_pages(node_id) for node_id in backed_up] == [
            path[:end] for end in ends
        ]
        namespace, symbols = params.prefix
        self.offered += zip(backed_up, [(namespace, symbols[:end]) for end in ends], strict=True)

    # -- requests --------------------------------------------------------------------------------

    @rule(recipe=recipes, tail=picks)
    def look(self, recipe: Recipe, tail: int) -> None:
        prefix, tail = self.sequence(recipe), tail % self.page_size
        assert self.match(prefix, tail) == self.match(prefix, tail)

    @rule(recipe=recipes, tail=picks, gap=st.integers(0, 5), skipped=st.sampled_from(SKIPS))
    def admit(
        self, recipe: Recipe, tail: int, gap: int, skipped: tuple[ComponentType, ...]
    ) -> None:
        """Match, lock, and allocate, evicting for it; windows only beyond a gap."""
        prefix, tail = self.sequence(recipe), tail % self.page_size
        node_id, matched = self.match(prefix, tail)
        receipt, lock = self.lock(node_id, (prefix[0], prefix[1][:matched]), skipped)
        missing = len(prefix[1]) - matched
        floor = matched + min(gap, missing)
        needed = missing + bool(tail)
        short = needed - len(self.rig.free_pages)
        if short > 0:
            self.give_up(short)
        if needed > len(self.rig.free_pages):
            self.unlock(receipt, lock)
            return
        slots = self.pools.alloc(needed, bare=floor - matched)
        self.requests.append(Held(prefix, tail, receipt, lock, matched, 0, slots, floor))

    @rule(
        recipe=recipes,
        tail=st.sampled_from([0, 0, 1]),
        gap=st.sampled_from([0, 0, 2]),
        restored=st.booleans(),
        offloads=st.integers(0, 4),
    )
    def serve(
        self,
        recipe: Recipe,
        tail: int,
        gap: int,
        restored: bool,  # noqa: FBT001 -- drawn by name
        offloads: int,
    ) -> None:
        """A request that nobody meets, and the first offloads after it."""
        before = len(self.requests)
        self.admit(recipe, tail, gap, ())
        if len(self.requests) > before:
            self.finish(before, restored, 0, with_state=True)
        for _ in range(min(offloads, len(self.offered))):
            self.offload(0)

    @precondition(lambda self: self.requests)
    @rule(pick=picks, more=picks, with_state=st.booleans())
    def chunk(self, pick: int, more: int, with_state: bool) -> None:  # noqa: FBT001 -- drawn by name
        """Insert some of it and go on: the lock moves to the new end."""
        held = self.requests[pick % len(self.requests)]
        namespace, symbols = held.prefix
        length = held.matched + more % (len(symbols) - held.matched + 1)
        result = self.insert(held, length, with_state=with_state)
        receipt, lock = self.lock(result.last_device_node, (namespace, symbols[:length]))
        self.unlock(held.receipt, held.lock)
        held.receipt, held.lock, held.matched, held.inserted = receipt, lock, length, length

    @precondition(lambda self: self.requests)
    @rule(pick=picks)
    def move_on(self, pick: int) -> None:
        """A request is past the window and the state that it matched."""
        held = self.requests[pick % len(self.requests)]
        held.receipt = self.rig.move_on(held.receipt)
        self.model.move_on(held.lock)

    @precondition(lambda self: self.requests and self.shape.window)
    @rule(pick=picks, more=st.integers(1, 6))
    def slide(self, pick: int, more: int) -> None:
        """A request's own window moves on: what it leaves behind goes back to the pool."""
        held = self.requests[pick % len(self.requests)]
        floor = min(max(held.floor, held.matched) + more, len(held.prefix[1]))
        first = max(held.floor, held.matched) - held.matched
        self.pools.free_window_of(held.slots[first : floor - held.matched])
        held.floor = floor

    @precondition(lambda self: self.requests)
    @rule(pick=picks, restored=st.booleans(), prompt=picks, with_state=st.booleans())
    def finish(
        self,
        pick: int,
        restored: bool,  # noqa: FBT001 -- drawn by name
        prompt: int,
        with_state: bool,  # noqa: FBT001 -- drawn by name
    ) -> None:
        held = self.requests.pop(pick % len(self.requests))
        self.insert(
            held,
            len(held.prefix[1]),
            restored=restored,
            prompt=prompt % (7 * self.page_size),
            with_state=with_state,
        )
        self.release(held)

    @precondition(lambda self: self.requests)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        self.release(self.requests.pop(pick % len(self.requests)))

    def release(self, held: Held) -> None:
        """Give back the lock and the slots that the tree did not take."""
        self.unlock(held.receipt, held.lock)
        self.pools.free(held.slots)

    @rule(num_pages=st.integers(0, 8))
    def evict(self, num_pages: int) -> None:
        self.give_up(num_pages)

    @precondition(lambda self: len(self.tree.components) > 1)
    @rule(
        num_pages=st.sampled_from([0, 0, 0, 3]), windows=st.integers(0, 8), states=st.integers(0, 3)
    )
    def evict_parts(self, num_pages: int, windows: int, states: int) -> None:
        self.give_up(
            num_pages,
            windows if self.shape.window else 0,
            states if self.shape.states else 0,
        )

    # -- the linker ------------------------------------------------------------------------------

    @precondition(lambda self: self.threshold is None)
    @rule(threshold=st.integers(1, 3), retry_after=st.integers(1, 4))
    def attach(self, threshold: int, retry_after: int) -> None:
        self.tree.attach_linker(backup_threshold=threshold, retry_after=retry_after)
        self.threshold, self.model.retry_after = threshold, retry_after

    @initialize(threshold=st.sampled_from([1, 2, None]), retry_after=st.sampled_from([1, 3]))
    def attach_early(self, threshold: int | None, retry_after: int) -> None:
        if threshold is not None:
            self.attach(threshold, retry_after)

    @precondition(lambda self: self.threshold is not None)
    @rule(pick=picks)
    def detach(self, pick: int) -> None:
        if pick % 8 != 5:  # Seldom, so that a linker stays for a while.
            return
        self.tree.detach_linker()
        self.threshold = None
        self.drop_offloads()
        for page in self.model.pages.values():
            page.hits = 0
            page.stored.clear()
            page.pending.clear()
            page.failures = page.due_at = 0

    def drop_offloads(self) -> None:
        for offload in self.offloads.values():
            if offload.receipt is not None:
                self.unlock(offload.receipt, offload.lock)
        self.offloads.clear()
        self.offered.clear()

    @precondition(lambda self: self.offered)
    @rule(pick=picks)
    def offload(self, pick: int) -> None:
        """Lock an offered node and store what it lacks, if it is still there and idle."""
        node_id, prefix = self.offered.pop(pick % len(self.offered))
        if node_id not in self.tree._nodes:
            return
        view = self.tree.node(node_id)
        length, num_pages = len(prefix[1]), len(view.page_keys)
        run = self.model.path(prefix)[length - num_pages :]
        assert run[-1].ends
        unstored = set[ComponentType]().union(*[page.held - page.stored for page in run])
        assert set(view.unstored) == unstored
        assert view.stored == (not unstored)
        if not unstored or any(page.pending for page in run):
            return
        whole = hash_pages(namespace_seed(prefix[0]), self.tokens(prefix).tobytes(), self.page_size)
        assert view.page_keys.resolve() == PageKeys(whole).span(length - num_pages, length)
        self.operations += 1
        operation = OperationId(self.operations)
        receipt, lock = self.lock(node_id, prefix)
        self.tree.mark_offload_pending(node_id, operation)
        for page in run:
            page.pending = dict.fromkeys(page.held & unstored, operation)
        self.offloads[operation] = Offload(lock, receipt)

    @precondition(lambda self: self.offloads)
    @rule(pick=picks)
    def quiesce(self, pick: int) -> None:
        """The bytes are copied out before the verdict: the lock goes back."""
        offload = list(self.offloads.values())[pick % len(self.offloads)]
        if offload.receipt is not None:
            self.unlock(offload.receipt, offload.lock)
            offload.receipt = None

    @precondition(lambda self: self.offloads)
    @rule(pick=picks, stored=st.booleans())
    def finish_offload(self, pick: int, stored: bool) -> None:  # noqa: FBT001 -- drawn by name
        operation = list(self.offloads)[pick % len(self.offloads)]
        offload = self.offloads.pop(operation)
        self.tree.finish_offload(operation, stored=stored)
        self.model.finish_offload(operation, stored=stored)
        if offload.receipt is not None:
            self.unlock(offload.receipt, offload.lock)

    @precondition(lambda self: self.offered)
    @rule(pick=picks, times=st.integers(1, 4))
    def offload_in_vain(self, pick: int, times: int) -> None:
        """Offloads of a node fail one after the other."""
        offered = self.offered[pick % len(self.offered)]
        for _ in range(times):
            before = len(self.offloads)
            self.offered.append(offered)
            self.offload(len(self.offered) - 1)
            if len(self.offloads) == before:
                return
            self.finish_offload(before, stored=False)

    @precondition(lambda self: self.model.pages)
    @rule(pick=picks)
    def look_up_keys(self, pick: int) -> None:
        """The keys of what follows a match are those of the whole sequence."""
        namespace, symbols = list(self.model.pages)[pick % len(self.model.pages)]
        prefix = (namespace, (*symbols, pick % len(SYMBOLS)))
        node_id, length = self.match(prefix)
        keys = self.tree.key_source(node_id, self.key(prefix), length * self.page_size)
        whole = hash_pages(namespace_seed(namespace), self.tokens(prefix).tobytes(), self.page_size)
        assert keys.resolve() == PageKeys(whole).span(length, len(prefix[1]))

    # -- everything at once ----------------------------------------------------------------------

    @rule(pick=picks)
    def reset(self, pick: int) -> None:
        if pick % 8 != 5:  # Seldom, so that a tree has time to grow.
            return
        expected: list[Event] = []
        for page in self.model.pages.values():
            whole = page.live or not self.shape.window
            expected.append((Gone.WHOLE if whole else Gone.BARE, page.slot, 0))
            expected += [(Gone.STATE, page.state, 0) for _ in [0] if page.state is not None]
        actions = self.tree.reset()
        assert sorted(events_of(self.pools, actions)) == sorted(expected)
        self.rig.apply(actions)
        for held in self.requests:
            self.pools.free(held.slots)
        self.requests.clear()
        self.offloads.clear()
        self.offered.clear()
        self.model.pages.clear()
        self.model.locks.clear()

    @invariant()
    def slots_and_nodes_are_as_the_model_says(self) -> None:
        self.rig.check(slot for held in self.requests for slot in held.slots)
        tree, model = self.tree, self.model
        for kind in ComponentType:
            assert self.rig.sizes_of(kind) == model.sizes(kind)
        runs = sum(page.ends for page in model.pages.values())
        assert len(tree._nodes) == runs + 1
        expected = {
            page.slot: (page.live, page.state, page.hits, page.stored, page.pending)
            for page in model.pages.values()
        }
        found = {
            slot: marks
            for node in tree._nodes.values()
            for slot, marks in zip(
                self.rig.pages_of(node.device_indices), self.marks(node), strict=True
            )
        }
        assert found == expected
        if self.threshold is None:
            assert tree.mutation_digest == 0

    def marks(self, node: Node) -> list[tuple[object, ...]]:
        """What the tree knows of each page of a node; the state and its marks are the last's."""
        marks = node.marks or StoreMarks()
        num_pages = node.num_tokens // self.page_size
        pages: list[tuple[object, ...]] = []
        for page in range(num_pages):
            last = page == num_pages - 1
            kinds = list(ComponentType) if last else [FULL, SWA]
            stored = {kind for kind in kinds if marks.stored & 1 << kind}
            pending = {kind: marks.pending for kind in kinds if marks.pending_bits & 1 << kind}
            slot = node.mamba_slot if last else None
            pages.append((node.has_swa, slot, marks.hit_count, stored, pending))
        return pages

    @override
    def teardown(self) -> None:
        """End every request and offload: nothing stays locked, and eviction empties the tree."""
        self.drop_offloads()
        while self.requests:
            self.abort(0)
        self.give_up(POOL_PAGES)
        assert len(self.rig.free_pages) == POOL_PAGES
