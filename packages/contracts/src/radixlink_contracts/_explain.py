"""Explanations: why a request's hit was what it was, and who holds what. Values with a text for people.

What other ranks have is known only as what all ranks have: a frame carries the AND of them, and asking each costs a
collective. So an explanation says "here" of what this rank knows, and "some other rank" of the rest.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import attrs
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from radixlink_contracts._bits import PageBits
    from radixlink_contracts._ids import NodeId, OperationId, RequestId
    from radixlink_contracts._linker import Outcome
    from radixlink_contracts._locks import ReceiptId
    from radixlink_contracts._pools import PoolName


class HitCause(enum.Enum):
    """Why the last match of a request said what it said. Replicated; the value is for people."""

    #: It has not matched since it is remembered: it only waits.
    NOT_MATCHED = "not matched yet"
    #: No whole page is missing on the device.
    NOTHING_MISSING = "nothing is missing on the device"
    #: Its own load is not decided.
    OWN_LOAD = "its own load is on the way"
    #: Another load brings the first page that the device lacks.
    OTHER_LOAD = "another load brings the first missing page"
    #: That page failed to load, and counts as missing for some steps.
    FAILED_LATELY = "the first missing page failed to load lately"
    #: Its lookup is not agreed.
    ASKED = "its lookup is not agreed yet"
    #: Its load failed, so it is not asked for again.
    LOAD_FAILED = "its load failed, so it computes"
    #: The device has less of the sequence than when the store was asked for the rest.
    PREFIX_SHRANK = "the device prefix became shorter since the lookup"
    #: Nothing that the device lacks can be restored on all ranks.
    NOT_STORED = "nothing that the device lacks can be restored on all ranks"
    #: Something can.
    RESTORABLE = "restorable on all ranks"


class OperationKind(enum.Enum):
    """What an operation does."""

    STAGED_LOAD = "staged load"
    LAYER_WISE_LOAD = "layer-wise load"
    OFFLOAD = "offload"
    TOUCH = "touch"


@attrs.frozen(kw_only=True)
class OperationStatus:
    """An operation that is not over.

    Attributes:
        op: Its id.
        kind: What it does.
        request_id: Whom a load is for; None for all else, and once the request is gone.
        queued: A load that was not started.
        verdict: What the ranks agreed on; None while it is pending.
        local: This rank's own verdict; None while it has none.
        quiesced: This rank touches its slots no more.
        age: Steps since it was minted.
        node_id: The end of the path that it locks; of a touch, which locks nothing, the node.
        slots: How many of each pool it reads or writes.
        waiters: Requests that wait for it.
    """

    op: OperationId
    kind: OperationKind
    request_id: RequestId | None
    queued: bool
    verdict: Outcome | None
    local: Outcome | None
    quiesced: bool
    age: int
    node_id: NodeId
    slots: Mapping[PoolName, int] = attrs.field(hash=False)
    waiters: tuple[RequestId, ...] = ()

    @override
    def __str__(self) -> str:
        """One line."""
        whom = "" if self.request_id is None else f" for request {self.request_id}"
        state = ", queued" if self.queued else ""
        agreed = "pending" if self.verdict is None else self.verdict.value
        here = "pending" if self.local is None else self.local.value
        touched = "quiesced" if self.quiesced else "not quiesced"
        verb = "touches" if self.kind is OperationKind.TOUCH else "locks"
        waited = f", waited for by {_listed(self.waiters)}" if self.waiters else ""
        return (
            f"{self.kind.value} {self.op}{whom}{state}: agreed {agreed}, here {here} and {touched}, "
            f"{self.age} steps old, {verb} node {self.node_id}, moves {_counted(self.slots)}{waited}"
        )


@attrs.frozen(kw_only=True)
class LoadFailure:
    """A load of a request that failed.

    Attributes:
        op: The load.
        age: Steps since the verdict.
        here: This rank had failed; otherwise some other rank had, and this one had not, or not yet.
        why: What this rank knows of it.
    """

    op: OperationId
    age: int
    here: bool
    why: str

    @override
    def __str__(self) -> str:
        """One line."""
        where = f"here: {self.why}" if self.here else "on some other rank"
        return f"load {self.op} failed {self.age} steps ago, {where}"


@attrs.frozen(kw_only=True)
class PoolAnswer:
    """What this rank's store said of one pool.

    Attributes:
        pool: Which pool.
        found: The pages that it has, of those asked for.
        restorable: Bit L-1 is set where a prefix of L of those pages has all that it needs of this pool.
        held: The pages that the device held of this pool, so that the store was not asked for them; they count as
            found.
    """

    pool: PoolName
    found: PageBits
    restorable: PageBits
    held: PageBits


@attrs.frozen(kw_only=True)
class LookupAnswer:
    """What became of a lookup. Pages are counted from the start of the sequence.

    Attributes:
        start_page: The first page asked for: the device had those before.
        num_pages: Pages asked for.
        ready: This rank has an answer.
        agreed: The longest prefix that all ranks can restore, of those pages; None while it is not agreed.
        local: The longest that this rank can; None without an answer.
        missing_elsewhere: A page that this rank has and some other rank lacks, or could not answer for; None where
            that does not follow: with windows and states any of several pages may be what it lacks.
        pools: What this rank's store has, by pool; empty where its linker does not tell.
        error: Why this rank could not answer; it then counts as having nothing.
    """

    start_page: int
    num_pages: int
    ready: bool
    agreed: int | None
    local: int | None
    missing_elsewhere: int | None = None
    pools: tuple[PoolAnswer, ...] = ()
    error: str | None = None

    def lines(self) -> list[str]:
        """What is there and what is not, page by page."""
        last = self.start_page + self.num_pages - 1
        lines = [f"asked for pages {self.start_page}-{last}"]
        if self.error is not None:
            lines.append(f"this rank could not answer: {self.error}")
        elif not self.ready:
            lines.append("this rank has no answer yet")
        lines += [line for answer in self.pools for line in self._lacking(answer)]
        if self.agreed is None:
            lines.append("not agreed yet")
            return lines
        lines.append(f"agreed {self.agreed} of {self.num_pages} pages")
        if self.missing_elsewhere is not None:
            lines.append(
                f"some other rank lacks page {self.missing_elsewhere}, or could not answer"
            )
        elif self.local is not None and self.local > self.agreed:
            lines.append(
                f"this rank can restore {self.local}; some other rank cannot, or could not answer"
            )
        return lines

    def _lacking(self, answer: PoolAnswer) -> list[str]:
        """What the device holds of a pool, what the store lacks, and what that lets be restored."""
        lines: list[str] = []
        if answer.held.total:
            pages = _ranges([self.start_page + page for page in answer.held])
            plural = "s" if answer.held.total > 1 else ""
            lines = [f"page{plural} {pages}: {answer.pool.value.upper()} is on the device"]
        gaps = list(~(answer.found | answer.held))
        if not gaps:
            return lines
        pages = _ranges([self.start_page + page for page in gaps])
        plural = "s" if len(gaps) > 1 else ""
        missing = f"page{plural} {pages}: {answer.pool.value.upper()} missing here"
        longest = answer.restorable.mask.bit_length()
        if longest == self.num_pages:
            return [*lines, f"{missing}, where it is not needed"]
        return [*lines, f"{missing}, so that it lets {longest} pages be restored"]


@attrs.frozen(kw_only=True)
class HeldBack:
    """A node whose offload failed, and that is not offered again yet. Replicated.

    Attributes:
        node_id: The node.
        num_pages: Its pages.
        failures: How often in a row.
        uses_left: Uses of the tree (matches and inserts) until an insert of its path offers it again.
    """

    node_id: NodeId
    num_pages: int
    failures: int
    uses_left: int

    @override
    def __str__(self) -> str:
        """One line."""
        return (
            f"node {self.node_id} ({self.num_pages} pages) was not stored, {self.failures} failures in a row: "
            f"not offered again for {self.uses_left} uses of the tree"
        )


@attrs.frozen(kw_only=True)
class Explanation:
    """Why a request's hit was what it was, as far as this rank can know.

    Attributes:
        request_id: The request.
        rank: This rank.
        num_ranks: How many there are.
        cause: Why its last match said what it said.
        device_pages: Pages that the device had at that match.
        hit_pages: Pages beyond those that could be restored.
        lookup: Its question to the store; None where there is none (any more).
        waits_for: The operation that it waits for: its own load, or another's.
        num_loads: Loads that were begun for it.
        max_loads: How many there may be.
        failures: Those that failed, oldest first.
        load_miss: What the last `init_load_back` that said so gave as the reason.
        published: What was restored for it is locked until it matches, or for some steps.
        held_back: What the device had of its sequence when the store was asked, and could not be stored lately.
    """

    request_id: RequestId
    rank: int
    num_ranks: int
    cause: HitCause
    device_pages: int
    hit_pages: int
    lookup: LookupAnswer | None
    waits_for: OperationStatus | None
    num_loads: int
    max_loads: int
    failures: tuple[LoadFailure, ...]
    load_miss: str | None
    published: bool
    held_back: tuple[HeldBack, ...] = ()

    @override
    def __str__(self) -> str:
        """A few lines for people, made when they are asked for."""
        found = f"{self.device_pages} pages on the device, {self.hit_pages} more to be had"
        where = f"request {self.request_id} on rank {self.rank} of {self.num_ranks}"
        lines = [f"{where}: {self.cause.value}; {found}"]
        if self.lookup is not None:
            lines.append("; ".join(self.lookup.lines()))
        if self.waits_for is not None:
            lines.append(f"waits for {self.waits_for}")
        lines.append(f"loaded {self.num_loads} of at most {self.max_loads} times")
        lines += [str(failure) for failure in self.failures]
        if self.load_miss is not None:
            lines.append(f"was not loaded: {self.load_miss}")
        if self.published:
            lines.append("what was restored for it is locked")
        lines += [str(one) for one in self.held_back]
        return "\n  ".join(lines)


@attrs.frozen(kw_only=True)
class LockHolder:
    """A lock that is out.

    Attributes:
        receipt_id: The acquisition.
        node_id: The end of the path.
        op: The operation that holds it; None where none does.
        request_id: The request for which something restored is kept; None where it is no such lock.
    """

    receipt_id: ReceiptId
    node_id: NodeId
    op: OperationId | None = None
    request_id: RequestId | None = None

    @override
    def __str__(self) -> str:
        """One line; what the cache does not hold is the engine's."""
        if self.op is not None:
            holder = f"operation {self.op}"
        elif self.request_id is not None:
            holder = f"what was restored for request {self.request_id}"
        else:
            holder = "the engine"
        return f"lock {self.receipt_id} on node {self.node_id}: {holder}"


@attrs.frozen(kw_only=True)
class WrittenOff:
    """An operation whose slots some rank never let go of.

    Attributes:
        operation: As it is.
        ranks: Who did not, ascending; the same on every rank.
    """

    operation: OperationStatus
    ranks: tuple[int, ...]

    @override
    def __str__(self) -> str:
        """One line."""
        return f"written off, not let go of by ranks {list(self.ranks)}: {self.operation}"


@attrs.frozen(kw_only=True)
class Holders:
    """Who holds a lock, a slot or an operation.

    Attributes:
        operations: Those that are not over, oldest first.
        written_off: Those whose slots nobody gets before `reset`, oldest first.
        locks: All that are out, the engine's too, oldest first.
        due_offloads: Nodes whose offload waits for its turn.
        lookups: Requests whose lookup is not agreed.
        staged: Slots of each pool that staged loads hold.
        num_retired: Slots that a launched batch may still read, of all pools.
    """

    operations: tuple[OperationStatus, ...] = ()
    written_off: tuple[WrittenOff, ...] = ()
    locks: tuple[LockHolder, ...] = ()
    due_offloads: tuple[NodeId, ...] = ()
    lookups: tuple[RequestId, ...] = ()
    staged: Mapping[PoolName, int] = attrs.field(factory=dict, hash=False)
    num_retired: int = 0

    @override
    def __str__(self) -> str:
        """A line for each, made when it is asked for."""
        slots = f"staged loads hold {_counted(self.staged)}; {self.num_retired} slots are retired"
        due = f"{len(self.due_offloads)} offloads are due; {len(self.lookups)} lookups are open"
        lines = [f"{slots}; {due}"]
        lines += [str(one) for one in (*self.operations, *self.written_off, *self.locks)]
        return "\n  ".join(lines)


def _counted(slots: Mapping[PoolName, int]) -> str:
    """Slots of each pool, for people."""
    return _listed(f"{count} {pool.value} slots" for pool, count in slots.items()) or "no slots"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _ranges(pages: list[int]) -> str:
    """Ascending numbers, runs of them as one."""
    runs: list[list[int]] = []
    for page in pages:
        if runs and page == runs[-1][1] + 1:
            runs[-1][1] = page
        else:
            runs.append([page, page])
    return _listed(str(first) if first == last else f"{first}-{last}" for first, last in runs)
