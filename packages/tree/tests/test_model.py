"""The tree against a model that keeps a dictionary of prefixes and knows nothing of trees."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import attrs
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
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
from radixlink_contracts.actions import BackupKV, FreeDeviceKV
from radixlink_tree import hash_pages, namespace_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radixlink_contracts import IncLockRefResult, InsertResult, NodeId

    from .conftest import MakeRig, Rig

NAMESPACES = (DEFAULT_NAMESPACE, Namespace(extra_key="a"), Namespace(cache_salt="a"))
POOL_PAGES = 24
#: Where a page differs from the page of zeros, and by which token.
SYMBOLS = ((0, 0), (0, 1), (-1, 2), (-1, 2**33))

Prefix: TypeAlias = tuple[Namespace, tuple[int, ...]]
"""A sequence of symbols, one a page."""

Recipe: TypeAlias = tuple[int, int, Namespace, tuple[int, ...]]


@attrs.define
class Page:
    """What the model knows of the last page of a prefix.

    Attributes:
        slot: The pool's page.
        used: When it was last used.
        ends: A run of pages that comes and goes together ends here.
        hits, stored, pending: As in a node.
    """

    slot: int
    used: int
    ends: bool = False
    hits: int = 0
    stored: bool = False
    pending: OperationId | None = None


@attrs.define
class Held:
    """A request between its admission and its end."""

    prefix: Prefix
    tail: int
    receipt: IncLockRefResult
    #: How much of the prefix is locked and the tree's own.
    matched: int
    #: How much an insert of this request counted.
    inserted: int
    #: The pool's pages behind what was matched, one more for the tail.
    slots: list[int]


@attrs.define
class Offload:
    prefix: Prefix
    #: Given back before the verdict where the copy was quick.
    receipt: IncLockRefResult | None


class Model:
    """Every cached prefix, by its symbols."""

    def __init__(self) -> None:
        self.pages: dict[Prefix, Page] = {}
        self.locks: list[Prefix] = []
        self.now = 0

    def cached(self, prefix: Prefix) -> int:
        """How many pages of it are there."""
        namespace, symbols = prefix
        length = 0
        while length < len(symbols) and (namespace, symbols[: length + 1]) in self.pages:
            length += 1
        return length

    def path(self, prefix: Prefix) -> list[Page]:
        """The pages from the first one on, as far as they are there."""
        namespace, symbols = prefix
        return [self.pages[namespace, symbols[: n + 1]] for n in range(self.cached(prefix))]

    def use(self, prefix: Prefix) -> int:
        """Use what is there; a run is cut where the use ends."""
        self.now += 1
        path = self.path(prefix)
        for page in path:
            page.used = self.now
        if path:
            path[-1].ends = True
        return len(path)

    def locked(self, prefix: Prefix) -> bool:
        namespace, symbols = prefix
        return any(
            namespace == other and symbols == locked[: len(symbols)] for other, locked in self.locks
        )

    def evict(self, num_pages: int) -> list[int]:
        """The pool's pages that go, in the order in which runs go."""
        gone: list[int] = []
        while len(gone) < num_pages:
            parents = {(namespace, symbols[:-1]) for namespace, symbols in self.pages}
            leaves = [
                prefix for prefix in self.pages if prefix not in parents and not self.locked(prefix)
            ]
            if not leaves:
                break
            victim = min(leaves, key=lambda prefix: self.pages[prefix].used)
            gone += self.remove_run(victim)
        return gone

    def remove_run(self, last: Prefix) -> list[int]:
        """Take out a run by its last page."""
        namespace, symbols = last
        run = [self.pages.pop(last).slot]
        while symbols := symbols[:-1]:
            if self.pages[namespace, symbols].ends:
                break
            run.insert(0, self.pages.pop((namespace, symbols)).slot)
        return run

    def runs(self, prefix: Prefix) -> Iterator[tuple[int, int]]:
        """The runs of a cached prefix as [start, end) of its pages, first one first."""
        start = 0
        for end, page in enumerate(self.path(prefix), 1):
            if page.ends:
                yield start, end
                start = end

    def note_insert(
        self, held: Held, prefix: Prefix, threshold: int, *, restored: bool
    ) -> list[int]:
        """Count the use; say at which lengths of the prefix the runs end that are offered."""
        path = self.path(prefix)
        runs = list(self.runs(prefix))
        for start, end in runs:
            for page in path[start:end]:
                if not restored:
                    page.hits += end > held.inserted
                elif start >= held.matched and page.pending is None:
                    page.stored = True
        due = [end for _, end in runs if path[end - 1].hits >= threshold and idle(path[end - 1])]
        return [end for _, end in runs if due and end <= due[-1] and idle(path[end - 1])]


def idle(page: Page) -> bool:
    return not page.stored and page.pending is None


class TreeMachine(RuleBasedStateMachine):
    """Requests, offloads and pressure, on the tree and on the model."""

    make_rig: ClassVar[MakeRig]
    page_size: ClassVar[int]

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
        self.rig: Rig = type(self).make_rig(self.page_size, POOL_PAGES)
        self.model = Model()
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
            symbols = (*begin[:keep], *symbols)
        return namespace, symbols[:8]

    def tokens(self, prefix: Prefix, tail: int = 0) -> array[int]:
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
        found = self.rig.tree.match(MatchPrefixParams(key=self.key(prefix, tail)))
        length = self.model.use(prefix)
        assert found.device_prefix_len == length * self.page_size
        pages = [page.slot for page in self.model.path(prefix)]
        assert self.rig.path_pages(found.last_device_node) == pages
        return found.last_device_node, length

    def lock(self, node_id: NodeId, prefix: Prefix) -> IncLockRefResult:
        self.model.locks.append(prefix)
        return self.rig.lock(node_id)

    def unlock(self, receipt: IncLockRefResult, prefix: Prefix) -> None:
        self.model.locks.remove(prefix)
        self.rig.unlock(receipt)

    def give_up(self, num_pages: int) -> None:
        """Evict on both sides."""
        expected = self.model.evict(num_pages)
        result = self.rig.tree.evict(EvictParams(num_tokens=num_pages * self.page_size))
        assert result.num_tokens_evicted == len(expected) * self.page_size
        freed: list[int] = []
        for action in result.cache_actions:
            assert isinstance(action, FreeDeviceKV)
            freed += self.rig.pages_of(action.indices)
        assert freed == expected
        self.rig.apply(result.cache_actions)

    def insert(self, held: Held, length: int, *, restored: bool = False) -> InsertResult:
        """Insert the first pages of a request's sequence on both sides."""
        rig, model = self.rig, self.model
        namespace, symbols = held.prefix
        prefix = (namespace, symbols[:length])
        was_there = model.use(prefix)
        new = held.slots[was_there - held.matched : length - held.matched]
        for end, slot in enumerate(new, was_there + 1):
            model.pages[namespace, symbols[:end]] = Page(slot, model.now, ends=end == length)

        own = [page.slot for page in model.path(prefix)][: held.matched] + held.slots
        value = torch.tensor(
            [slot * self.page_size + at for slot in own for at in range(self.page_size)],
            dtype=torch.int64,
        )
        key = self.key(prefix, held.tail if length == len(symbols) else 0)
        result = rig.tree.insert(
            InsertParams(
                key=key,
                value=value[: len(key)],
                prev_prefix_len=held.matched * self.page_size,
                inserted_len=held.inserted * self.page_size,
                origin=InsertOrigin.RESTORED if restored else InsertOrigin.COMPUTED,
                track_adopted_ranges=True,
            )
        )
        assert result.prefix_len == was_there * self.page_size
        assert result.total_len == length * self.page_size
        assert result.adopted_ranges is not None
        adopted = result.adopted_ranges.ranges(ComponentType.FULL)
        assert adopted == (((result.prefix_len, result.total_len),) if new else ())

        duplicates = held.slots[: was_there - held.matched]
        freed: list[int] = []
        backed_up: list[NodeId] = []
        for action in result.cache_actions:
            match action:
                case FreeDeviceKV():
                    freed += rig.pages_of(action.indices)
                case BackupKV():
                    backed_up += action.node_ids
                case _:
                    pytest.fail(f"unexpected {action}")
        assert freed == duplicates
        rig.apply(result.cache_actions)
        self.note_offers(held, prefix, backed_up, restored=restored)
        held.slots = held.slots[length - held.matched :]
        return result

    def note_offers(
        self, held: Held, prefix: Prefix, backed_up: list[NodeId], *, restored: bool
    ) -> None:
        """Compare what the tree offered with what the model would."""
        if self.threshold is None:
            assert backed_up == []
            return
        ends = self.model.note_insert(held, prefix, self.threshold, restored=restored)
        path = self.model.path(prefix)
        assert [self.rig.path_pages(node_id) for node_id in backed_up] == [
            [page.slot for page in path[:end]] for end in ends
        ]
        offers = [(prefix[0], prefix[1][:end]) for end in ends]
        self.offered += zip(backed_up, offers, strict=True)

    # -- requests --------------------------------------------------------------------------------

    @rule(recipe=recipes, tail=picks)
    def look(self, recipe: Recipe, tail: int) -> None:
        prefix, tail = self.sequence(recipe), tail % self.page_size
        assert self.match(prefix, tail) == self.match(prefix, tail)

    @rule(recipe=recipes, tail=picks)
    def admit(self, recipe: Recipe, tail: int) -> None:
        """Match, lock, and allocate, evicting for it."""
        prefix, tail = self.sequence(recipe), tail % self.page_size
        node_id, matched = self.match(prefix, tail)
        locked = (prefix[0], prefix[1][:matched])
        receipt = self.lock(node_id, locked)
        needed = len(prefix[1]) - matched + bool(tail)
        missing = needed - len(self.rig.free_pages)
        if missing > 0:
            self.give_up(missing)
        if needed > len(self.rig.free_pages):
            self.unlock(receipt, locked)
            return
        slots = self.rig.pages_of(self.rig.alloc(needed))
        self.requests.append(Held(prefix, tail, receipt, matched, 0, slots))

    @rule(recipe=recipes, tail=picks, restored=st.booleans(), offloads=st.integers(0, 4))
    def serve(
        self,
        recipe: Recipe,
        tail: int,
        restored: bool,  # noqa: FBT001 -- drawn by name
        offloads: int,
    ) -> None:
        """A request that nobody meets, and the first offloads after it."""
        before = len(self.requests)
        self.admit(recipe, tail)
        if len(self.requests) > before:
            self.finish(before, restored)
        for _ in range(min(offloads, len(self.offered))):
            self.offload(0)

    @precondition(lambda self: self.requests)
    @rule(pick=picks, more=picks)
    def chunk(self, pick: int, more: int) -> None:
        """Insert some of it and go on: the lock moves to the new end."""
        held = self.requests[pick % len(self.requests)]
        namespace, symbols = held.prefix
        length = held.matched + more % (len(symbols) - held.matched + 1)
        result = self.insert(held, length)
        receipt = self.lock(result.last_device_node, (namespace, symbols[:length]))
        self.unlock(held.receipt, (namespace, symbols[: held.matched]))
        held.receipt, held.matched, held.inserted = receipt, length, length

    @precondition(lambda self: self.requests)
    @rule(pick=picks, restored=st.booleans())
    def finish(self, pick: int, restored: bool) -> None:  # noqa: FBT001 -- drawn by name
        held = self.requests.pop(pick % len(self.requests))
        self.insert(held, len(held.prefix[1]), restored=restored)
        self.release(held)

    @precondition(lambda self: self.requests)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        self.release(self.requests.pop(pick % len(self.requests)))

    def release(self, held: Held) -> None:
        """Give back the lock and the slots that the tree did not take."""
        namespace, symbols = held.prefix
        self.unlock(held.receipt, (namespace, symbols[: held.matched]))
        self.free(held.slots)

    def free(self, pages: list[int]) -> None:
        slots = [page * self.page_size + at for page in pages for at in range(self.page_size)]
        self.rig.free(torch.tensor(slots, dtype=torch.int64))

    @rule(num_pages=st.integers(0, 8))
    def evict(self, num_pages: int) -> None:
        self.give_up(num_pages)

    # -- the linker ------------------------------------------------------------------------------

    @precondition(lambda self: self.threshold is None)
    @rule(threshold=st.integers(1, 3))
    def attach(self, threshold: int) -> None:
        self.rig.tree.attach_linker(backup_threshold=threshold)
        self.threshold = threshold

    @initialize(threshold=st.sampled_from([1, 2, None]))
    def attach_early(self, threshold: int | None) -> None:
        if threshold is not None:
            self.attach(threshold)

    @precondition(lambda self: self.threshold is not None)
    @rule(pick=picks)
    def detach(self, pick: int) -> None:
        if pick % 8 != 5:  # Seldom, so that a linker stays for a while.
            return
        self.rig.tree.detach_linker()
        self.threshold = None
        self.drop_offloads()
        for page in self.model.pages.values():
            page.hits, page.stored, page.pending = 0, False, None

    def drop_offloads(self) -> None:
        for offload in self.offloads.values():
            if offload.receipt is not None:
                self.unlock(offload.receipt, offload.prefix)
        self.offloads.clear()
        self.offered.clear()

    @precondition(lambda self: self.offered)
    @rule(pick=picks)
    def offload(self, pick: int) -> None:
        """Lock an offered node and store it, if it is still there and nobody does."""
        node_id, prefix = self.offered.pop(pick % len(self.offered))
        tree = self.rig.tree
        if node_id not in tree._nodes or not idle(self.model.pages[prefix]):
            return
        view = tree.node(node_id)
        pages = len(view.page_keys)
        assert self.model.path(prefix)[-1].ends
        whole = hash_pages(namespace_seed(prefix[0]), self.tokens(prefix).tobytes(), self.page_size)
        length = len(prefix[1])
        assert view.page_keys.resolve() == PageKeys(whole).span(length - pages, length)
        self.operations += 1
        operation = OperationId(self.operations)
        receipt = self.lock(node_id, prefix)
        tree.mark_offload_pending(node_id, operation)
        for page in self.model.path(prefix)[length - pages :]:
            page.pending = operation
        self.offloads[operation] = Offload(prefix, receipt)

    @precondition(lambda self: self.offloads)
    @rule(pick=picks)
    def quiesce(self, pick: int) -> None:
        """The bytes are copied out before the verdict: the lock goes back."""
        offload = list(self.offloads.values())[pick % len(self.offloads)]
        if offload.receipt is not None:
            self.unlock(offload.receipt, offload.prefix)
            offload.receipt = None

    @precondition(lambda self: self.offloads)
    @rule(pick=picks, stored=st.booleans())
    def finish_offload(self, pick: int, stored: bool) -> None:  # noqa: FBT001 -- drawn by name
        operation = list(self.offloads)[pick % len(self.offloads)]
        offload = self.offloads.pop(operation)
        self.rig.tree.finish_offload(operation, stored=stored)
        for page in self.model.pages.values():
            if page.pending == operation:
                page.pending, page.stored = None, stored
        if offload.receipt is not None:
            self.unlock(offload.receipt, offload.prefix)

    @precondition(lambda self: self.model.pages)
    @rule(pick=picks)
    def look_up_keys(self, pick: int) -> None:
        """The keys of what follows a match are those of the whole sequence."""
        namespace, symbols = list(self.model.pages)[pick % len(self.model.pages)]
        prefix = (namespace, (*symbols, pick % len(SYMBOLS)))
        node_id, length = self.match(prefix)
        keys = self.rig.tree.key_source(node_id, self.key(prefix), length * self.page_size)
        whole = hash_pages(namespace_seed(namespace), self.tokens(prefix).tobytes(), self.page_size)
        assert keys.resolve() == PageKeys(whole).span(length, len(prefix[1]))

    # -- everything at once ----------------------------------------------------------------------

    @rule(pick=picks)
    def reset(self, pick: int) -> None:
        if pick % 8 != 5:  # Seldom, so that a tree has time to grow.
            return
        expected = sorted(page.slot for page in self.model.pages.values())
        actions = self.rig.tree.reset()
        freed: list[int] = []
        for action in actions:
            assert isinstance(action, FreeDeviceKV)
            freed += self.rig.pages_of(action.indices)
        assert sorted(freed) == expected
        self.rig.apply(actions)
        for held in self.requests:
            self.free(held.slots)
        self.requests.clear()
        self.offloads.clear()
        self.offered.clear()
        self.model.pages.clear()
        self.model.locks.clear()

    @invariant()
    def slots_and_nodes_are_as_the_model_says(self) -> None:
        self.rig.check(slot for held in self.requests for slot in held.slots)
        tree, model = self.rig.tree, self.model
        locked = sum(model.locked(prefix) for prefix in model.pages)
        assert self.rig.sizes == (len(model.pages) - locked, locked)
        runs = sum(page.ends for page in model.pages.values())
        assert len(tree._nodes) == runs + 1
        expected = {
            page.slot: (page.hits, page.stored, page.pending) for page in model.pages.values()
        }
        found = {
            slot: (node.hit_count, node.stored, node.pending_operation)
            for node in tree._nodes.values()
            for slot in self.rig.pages_of(node.device_indices)
        }
        assert found == expected
        if self.threshold is None:
            assert tree.mutation_digest == 0

    @override
    def teardown(self) -> None:
        """End every request and offload: nothing stays locked, and eviction empties the tree."""
        self.drop_offloads()
        while self.requests:
            self.abort(0)
        self.give_up(POOL_PAGES)
        assert len(self.rig.free_pages) == POOL_PAGES


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_tree_does_what_a_dictionary_of_prefixes_does(make_rig: MakeRig, page_size: int) -> None:
    machine = type("Machine", (TreeMachine,), {"make_rig": make_rig, "page_size": page_size})
    # A share of what the profile allows: an example is up to 40 calls.
    examples = settings().max_examples // 3
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=40)
    )
