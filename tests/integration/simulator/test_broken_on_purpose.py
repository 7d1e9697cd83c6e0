"""The simulator finds what it is for: each rule, broken on purpose in the real parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs
import pytest
from tests.integration.simulator.mutants import (
    Mutant,
    Patch,
    check_found,
    check_found_by,
    ranks_apart,
)

from radixlink_contracts import (
    InsertOrigin,
    InsertParams,
    LoadMiss,
    LoadMode,
    LoadWaiting,
    MatchPrefixParams,
    Outcome,
)
from radixlink_linker import DeviceSlots, UnifiedCacheLinkerWrapper
from radixlink_linker._frame import AgreedFrame, read_frame, replicated_digest, write_frame
from radixlink_linker._loads import Loads
from radixlink_linker._lookup import Lookup
from radixlink_linker._matcher import ExternalMatcher
from radixlink_linker._offloads import Offloads
from radixlink_linker._operation import (
    LoadOperation,
    LockingOperation,
    OffloadOperation,
    Operation,
    Verdict,
)
from radixlink_linker._operation_table import OperationTable
from radixlink_linker._ranks import FrameExchange
from radixlink_linker._requests import RequestTable
from radixlink_linker._touches import Touches
from radixlink_testing.simulator import Plan, Rule
from radixlink_tree import UnifiedTreeCore, hash_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from radixlink_contracts import (
        InsertResult,
        LoadBack,
        MatchResult,
        OperationId,
        RadixKey,
        RequestId,
        RequestKV,
        StepReport,
        TreeNodeView,
    )
    from radixlink_linker._frame import Agenda, FrameKind
    from radixlink_linker._operation import AnyOperation, TouchOperation
    from radixlink_linker._report import ReportBuilder
    from radixlink_linker._requests import Request
    from radixlink_linker._settings import LinkerSettings

Wrapper = UnifiedCacheLinkerWrapper


# -- 1: nothing leaves a request before it has landed ----------------------------------------------


def load_what_the_device_has(patch: Patch) -> None:
    plan, ask = Loads._plan, RequestTable.ask

    def prefix_alone(device: MatchResult) -> MatchResult:
        return attrs.evolve(device, full_kv_hit_length=device.device_prefix_len)

    patch.setattr(
        Loads,
        "_plan",
        lambda self, lookup, device, mode: plan(self, lookup, prefix_alone(device), mode),
    )
    patch.setattr(
        RequestTable,
        "ask",
        lambda self, key, request_id, device, deadline: ask(
            self, key, request_id, prefix_alone(device), deadline
        ),
    )


def publish_at_load_back(patch: Patch) -> None:
    original = Wrapper.load_back

    def load_back(self: Wrapper, request: RequestKV, mode: LoadMode) -> LoadBack:
        answer = original(self, request, mode)
        if isinstance(answer, LoadWaiting):
            operation = self._operations.get(answer.operation_id)
            if isinstance(operation, LoadOperation) and operation.request_id is not None:
                self._loads.commit(operation)
        return answer

    patch.setattr(Wrapper, "load_back", load_back)


def leave_what_was_published_unlocked(patch: Patch) -> None:
    patch.setattr(RequestTable, "publish", lambda *_: None)


def stage_without_a_cap(patch: Patch) -> None:
    original = Loads._begin

    def begin_load(
        self: Loads, request: RequestKV, entry: Request, device: MatchResult, mode: LoadMode
    ) -> LoadBack:
        self._room._caps = self._slots.sizes
        return original(self, request, entry, device, mode)

    patch.setattr(Loads, "_begin", begin_load)


def stage_for_ever(patch: Patch) -> None:
    original = Wrapper.load_back

    def load_back(self: Wrapper, request: RequestKV, mode: LoadMode) -> LoadBack:
        entry = self._requests.get(request.request_id)
        if entry is not None:
            entry.num_loads = 0
        return original(self, request, mode)

    patch.setattr(Wrapper, "load_back", load_back)


def keep_the_duplicates_of_a_commit(patch: Patch) -> None:
    original = Wrapper._give_back

    def give_back(self: Wrapper, operation: AnyOperation) -> None:
        if isinstance(operation, LoadOperation):
            operation.surplus.clear()
        original(self, operation)

    patch.setattr(Wrapper, "_give_back", give_back)


# -- 2: one load for a page at a time --------------------------------------------------------------


def load_what_another_loads(patch: Patch) -> None:
    patch.setattr(LoadOperation, "covers", lambda *_: False)


def forget_what_failed(patch: Patch) -> None:
    patch.setattr(RequestTable, "mark_missing", lambda *_: None)


def end_a_started_load_with_its_request(patch: Patch) -> None:
    original = Wrapper.release_request

    def release_request(self: Wrapper, request_id: RequestId) -> None:
        entry = self._requests.get(request_id)
        operation = None if entry is None else entry.load
        original(self, request_id)
        if operation is not None:
            operation.note(Outcome.FAILED, quiesced=True)

    patch.setattr(Wrapper, "release_request", release_request)


def cancel_what_the_thread_has_not_taken(patch: Patch) -> None:
    original = Wrapper.release_request

    def release_request(self: Wrapper, request_id: RequestId) -> None:
        entry = self._requests.get(request_id)
        operation = None if entry is None else entry.load
        original(self, request_id)
        jobs: list[Any] = getattr(self.linker, "_jobs", [])
        for job in list(jobs):
            if operation is not None and job.ticket.op == operation.op and not job.opened:
                jobs.remove(job)
                self._retire(operation)

    patch.setattr(Wrapper, "release_request", release_request)


def end_a_load_that_others_wait_for(patch: Patch) -> None:
    original = Wrapper.release_request

    def release_request(self: Wrapper, request_id: RequestId) -> None:
        entry = self._requests.get(request_id)
        operation = None if entry is None else entry.load
        if operation is not None:
            operation.waiters.clear()
        original(self, request_id)

    patch.setattr(Wrapper, "release_request", release_request)


# -- 3: load_back ----------------------------------------------------------------------------------


def evict_before_the_lock(patch: Patch) -> None:
    original = Loads._begin

    def begin_load(
        self: Loads, request: RequestKV, entry: Request, device: MatchResult, mode: LoadMode
    ) -> LoadBack:
        self._slots.make_room(self._slots.allocator.size)
        return original(self, request, entry, device, mode)

    patch.setattr(Loads, "_begin", begin_load)


def load_behind_whatever_the_device_has(patch: Patch) -> None:
    original = Wrapper.load_back

    def load_back(self: Wrapper, request: RequestKV, mode: LoadMode) -> LoadBack:
        entry = self._requests.get(request.request_id)
        if entry is not None and entry.lookup is not None and entry.answered:
            device = self._tree.match(MatchPrefixParams(key=request.key))
            entry.lookup.start = device.device_prefix_len
        return original(self, request, mode)

    patch.setattr(Wrapper, "load_back", load_back)


def answer_a_refusal_at_once(patch: Patch) -> None:
    original = Loads._begin

    def begin_load(
        self: Loads, request: RequestKV, entry: Request, device: MatchResult, mode: LoadMode
    ) -> LoadBack:
        answer = original(self, request, entry, device, mode)
        if entry.load is not None and entry.load.local_verdict is Verdict.FAILED:
            return LoadMiss(reason="the backend refused")
        return answer

    patch.setattr(Loads, "_begin", begin_load)


def mint_no_offload_that_is_refused(patch: Patch) -> None:
    original = Offloads._offload_node

    def offload_node(self: Offloads, node: TreeNodeView) -> None:
        known = set(self._operations)
        original(self, node)
        for operation in [one for one in self._operations if one not in known]:
            if (
                isinstance(operation, OffloadOperation)
                and operation.local_verdict is Verdict.FAILED
            ):
                self._operations.remove(operation)
                self._tree.finish_offload(operation.op, stored=False)
                self._tree.dec_lock_ref(operation.receipt.to_dec_params())

    patch.setattr(Offloads, "_offload_node", offload_node)


# -- 4: frames -------------------------------------------------------------------------------------


def write_verdicts_twice(patch: Patch) -> None:
    original = Operation.note

    def note(self: Operation, outcome: Outcome, *, quiesced: bool, why: str = "") -> bool:
        self.local_verdict = Verdict.PENDING
        return original(self, outcome, quiesced=quiesced, why=why)

    patch.setattr(Operation, "note", note)


def say_quiesced_with_the_verdict(patch: Patch) -> None:
    original = Operation.note

    def note(self: Operation, outcome: Outcome, *, quiesced: bool, why: str = "") -> bool:
        return original(self, outcome, quiesced=quiesced or outcome is Outcome.FAILED, why=why)

    def give_up(self: Operation, why: str = "") -> None:
        if self.local_verdict is Verdict.PENDING:
            self.note(Outcome.FAILED, quiesced=True, why=why)

    patch.setattr(Operation, "note", note)
    patch.setattr(Operation, "give_up", give_up)


def give_slots_back_at_the_verdict(patch: Patch) -> None:
    original = FrameExchange.exchange

    def exchange(
        self: FrameExchange, kind: FrameKind, agenda: Agenda, facts: Sequence[int], now: float
    ) -> AgreedFrame:
        agreed = original(self, kind, agenda, facts, now)
        return agreed._replace(quiesced=(True,) * len(agreed.quiesced))

    patch.setattr(FrameExchange, "exchange", exchange)


def leave_numbers_out_of_the_digest(patch: Patch) -> None:
    def digest(previous: int, kind: FrameKind, facts: Sequence[int]) -> int:
        # The epoch, the number of the frame and that of the step.
        return replicated_digest(previous, kind, facts[3:])

    patch.setattr("radixlink_linker._ranks.replicated_digest", digest)


def compare_no_digests(patch: Patch) -> None:
    patch.setattr("radixlink_linker._ranks.digests_agree", lambda _: True)


class OwnFrame(bytearray):
    """A frame that remembers what its rank wrote."""

    digest = 0


def compare_with_the_least_digest(patch: Patch) -> None:
    """Of one bit, AND is MIN: who has the least notices nothing."""

    def write(
        agenda: Agenda, digest: int, now: float, settings: LinkerSettings, *, rank: int
    ) -> bytearray:
        frame = OwnFrame(write_frame(agenda, digest & 1, now, settings, rank=rank))
        frame.digest = digest & 1
        return frame

    def agree(frame: OwnFrame) -> bool:
        return int.from_bytes(frame[:8], "little") == frame.digest

    patch.setattr("radixlink_linker._ranks.write_frame", write)
    patch.setattr("radixlink_linker._ranks.digests_agree", agree)


def decide_by_the_own_verdict(patch: Patch) -> None:
    def read(frame: bytearray, agenda: Agenda, settings: LinkerSettings) -> AgreedFrame:
        agreed = read_frame(frame, agenda, settings)
        own = tuple(operation.local_verdict for operation in agenda.operations)
        return agreed._replace(verdicts=own)

    patch.setattr("radixlink_linker._ranks.read_frame", read)


def take_pending_for_done(patch: Patch) -> None:
    def read(frame: bytearray, agenda: Agenda, settings: LinkerSettings) -> AgreedFrame:
        agreed = read_frame(frame, agenda, settings)
        done = tuple(
            Verdict.DONE if verdict is Verdict.PENDING and any_rank_has_ended(one) else verdict
            for verdict, one in zip(agreed.verdicts, agenda.operations, strict=True)
        )
        return agreed._replace(verdicts=done)

    def any_rank_has_ended(operation: Operation) -> bool:
        # All ranks took the operation at the same step, so this is the same on all of them.
        return isinstance(operation, LoadOperation) and not operation.queued

    patch.setattr("radixlink_linker._ranks.read_frame", read)


def use_the_own_mask(patch: Patch) -> None:
    original = Lookup.take

    def take(self: Lookup, words: bytes) -> bool:
        whole = original(self, words)
        self._agreed_mask = self._mask or 0
        return whole

    patch.setattr(Lookup, "take", take)


def exchange_twice(patch: Patch) -> None:
    original = Wrapper.step

    def step(self: Wrapper) -> StepReport:
        report = original(self)
        if self.num_outstanding:
            self._frames.group.all_and(bytearray(8), 1.0)
        return report

    patch.setattr(Wrapper, "step", step)


def name_requests_in_the_order_of_a_set(patch: Patch) -> None:
    original = Loads.tell_waiters

    def tell(self: Loads, operation: LoadOperation, report: ReportBuilder) -> None:
        operation.waiters[:] = set(operation.waiters)
        original(self, operation, report)

    patch.setattr(Loads, "tell_waiters", tell)


# -- 5: match --------------------------------------------------------------------------------------


def ask_the_store_within_match(patch: Patch) -> None:
    def ask(
        self: ExternalMatcher, key: RadixKey, request_id: RequestId, device: MatchResult
    ) -> None:
        deadline = self._clock.now() + self._settings.lookup_timeout_s
        lookup = self._requests.ask(key, request_id, device, deadline)
        lookup.probe(self._prober._linker, self._prober._transfers)

    patch.setattr(ExternalMatcher, "_ask", ask)


def answer_otherwise_the_second_time(patch: Patch) -> None:
    original = Wrapper.match

    def match(
        self: Wrapper, key: RadixKey, request_id: RequestId, device: MatchResult
    ) -> MatchResult:
        found = original(self, key, request_id, device)
        request = self._requests.get(request_id)
        if request is not None and request.answered:
            request.num_tokens = 0
        return found

    patch.setattr(Wrapper, "match", match)


# -- 6: deadlines ----------------------------------------------------------------------------------


def wait_for_lookups_for_ever(patch: Patch) -> None:
    original = Lookup.settle
    patch.setattr(Lookup, "settle", lambda self, _: original(self, -1e9))


def wait_for_transfers_for_ever(patch: Patch) -> None:
    patch.setattr(Operation, "give_up", lambda *_: None)


def speak_of_the_oldest_alone(patch: Patch) -> None:
    def of_next_frame(self: OperationTable) -> list[AnyOperation]:
        return list(self)[: self._settings.max_operations]

    patch.setattr(OperationTable, "of_next_frame", of_next_frame)


def go_on_after_a_failure(patch: Patch) -> None:
    patch.setattr(FrameExchange, "check", lambda _: None)


def use_ids_of_the_old_epoch(patch: Patch) -> None:
    def mint(self: FrameExchange) -> OperationId:
        self._minted += 1
        return self._minted  # type: ignore[return-value]

    patch.setattr(FrameExchange, "mint", mint)


# -- 7: the group ----------------------------------------------------------------------------------


def decide_alone(patch: Patch) -> None:
    patch.setattr(FrameExchange, "alone", property(lambda _: True))


# -- 8: stored -------------------------------------------------------------------------------------


def take_every_offload_for_stored(patch: Patch) -> None:
    original = Offloads.decide

    def decide(self: Offloads, operation: OffloadOperation, report: ReportBuilder) -> None:
        operation.verdict = Verdict.DONE
        original(self, operation, report)

    patch.setattr(Offloads, "decide", decide)


def try_what_failed_again_at_once(patch: Patch) -> None:
    original = UnifiedTreeCore.finish_offload

    def finish_offload(self: UnifiedTreeCore, operation_id: OperationId, *, stored: bool) -> None:
        self._offloads.retry_after = 0
        original(self, operation_id, stored=stored)

    patch.setattr(UnifiedTreeCore, "finish_offload", finish_offload)


def hold_back_only_where_it_failed(patch: Patch) -> None:
    original = Offloads.decide

    def decide(self: Offloads, operation: OffloadOperation, report: ReportBuilder) -> None:
        tree = self._tree
        assert isinstance(tree, UnifiedTreeCore)
        nodes = tree._offloads.pending[operation.op]
        original(self, operation, report)
        if operation.local_verdict is not Verdict.FAILED:
            for node in nodes:
                node.mark().retry_at = 0

    patch.setattr(Offloads, "decide", decide)


def take_every_touch_for_present(patch: Patch) -> None:
    original = Touches.decide

    def decide(self: Touches, operation: TouchOperation) -> None:
        operation.verdict = Verdict.DONE
        original(self, operation)

    patch.setattr(Touches, "decide", decide)


def offer_what_was_restored(patch: Patch) -> None:
    original = UnifiedTreeCore.insert

    def insert(self: UnifiedTreeCore, params: InsertParams) -> InsertResult:
        return original(self, attrs.evolve(params, origin=InsertOrigin.COMPUTED))

    patch.setattr(UnifiedTreeCore, "insert", insert)


# -- 9: pages --------------------------------------------------------------------------------------


def hash_pages_without_what_is_before(patch: Patch) -> None:
    def alone(
        _: bytes | None, tokens: bytes, page_size: int, pause: Callable[[], None] | None = None
    ) -> bytes:
        width = page_size * 8
        pages = (tokens[at : at + width] for at in range(0, len(tokens), width))
        return b"".join(hash_pages(None, page, page_size, pause) for page in pages)

    patch.setattr("radixlink_tree._chain.hash_pages", alone)


def hash_tenants_alike(patch: Patch) -> None:
    patch.setattr("radixlink_tree._core.namespace_seed", lambda _: None)
    patch.setattr("radixlink_tree._node.namespace_seed", lambda _: None)


def nothing(_: Patch) -> None:
    """The plan has what is wrong."""


def unverified(seed: int) -> Plan:
    """Backends that compare no checksum."""
    plan = ranks_apart(seed)
    return attrs.evolve(plan, shape=attrs.evolve(plan.shape, verify=False))


# -- 10: receipts ----------------------------------------------------------------------------------


def release_a_lock_twice(patch: Patch) -> None:
    original = Wrapper._give_back

    def give_back(self: Wrapper, operation: AnyOperation) -> None:
        original(self, operation)
        if isinstance(operation, LockingOperation):
            self._tree.dec_lock_ref(operation.receipt.to_dec_params())

    patch.setattr(Wrapper, "_give_back", give_back)


def keep_the_lock_of_what_was_published(patch: Patch) -> None:
    def unpublish(_: RequestTable, request: Request) -> None:
        request.published = None

    patch.setattr(RequestTable, "_unpublish", unpublish)


def keep_the_slots_that_loads_give_up(patch: Patch) -> None:
    patch.setattr(DeviceSlots, "retire", lambda *_: None)


# -- 11: attach and detach -------------------------------------------------------------------------


def leave_the_tree_attached(patch: Patch) -> None:
    patch.setattr(UnifiedTreeCore, "detach_linker", lambda _: None)


def compare_no_settings(patch: Patch) -> None:
    def agree(self: FrameExchange, _: str) -> None:
        self._used = True

    patch.setattr(FrameExchange, "agree_on_settings", agree)


MUTANTS: Final = (
    Mutant(
        name="full pages that the device has are loaded again",
        rule=Rule.LOAD_BACK,
        breaks=load_what_the_device_has,
        interleavings=(
            "windows evicted alone come back to the pages that stayed",
            "a state evicted alone comes back to the node that stayed",
        ),
    ),
    Mutant(name="publish at load_back", rule=Rule.LANDED, breaks=publish_at_load_back),
    Mutant(
        name="no lock on what was published",
        rule=Rule.LANDED,
        breaks=leave_what_was_published_unlocked,
    ),
    Mutant(name="no cap on staged slots", rule=Rule.LANDED, breaks=stage_without_a_cap),
    Mutant(name="no bound on stagings", rule=Rule.LANDED, breaks=stage_for_ever),
    Mutant(
        name="duplicates of a commit leak",
        rule=Rule.RECEIPTS,
        breaks=keep_the_duplicates_of_a_commit,
        interleavings=("another insert of the same pages between start and verdict",),
    ),
    Mutant(name="two loads of one page", rule=Rule.ONE_LOAD, breaks=load_what_another_loads),
    Mutant(name="a failure is no miss", rule=Rule.ONE_LOAD, breaks=forget_what_failed),
    Mutant(
        name="a started load ends with its request",
        rule=Rule.FRAMES,
        breaks=end_a_started_load_with_its_request,
    ),
    Mutant(
        name="queued is what the thread has not taken",
        rule=Rule.FRAMES,
        breaks=cancel_what_the_thread_has_not_taken,
        interleavings=("a cancel that one rank's thread has taken and another's has not",),
    ),
    Mutant(
        name="an abort forgets who waits",
        rule=Rule.DEADLINES,
        breaks=end_a_load_that_others_wait_for,
        interleavings=("an abort while another waits",),
    ),
    Mutant(name="evicts before it locks", rule=Rule.LOAD_BACK, breaks=evict_before_the_lock),
    Mutant(
        name="the device is not compared with the lookup",
        rule=Rule.LOAD_BACK,
        breaks=load_behind_whatever_the_device_has,
        interleavings=(
            "a head evicted between lookup and load",
            "a head grown between lookup and load",
        ),
    ),
    Mutant(
        name="a refusal is answered at once",
        rule=Rule.LOAD_BACK,
        breaks=answer_a_refusal_at_once,
    ),
    Mutant(
        name="a refused offload is not minted",
        rule=Rule.FRAMES,
        breaks=mint_no_offload_that_is_refused,
        interleavings=("a refused offload on one rank",),
    ),
    Mutant(name="a verdict is not write-once", rule=Rule.FRAMES, breaks=write_verdicts_twice),
    Mutant(
        name="quiesced with the verdict", rule=Rule.FRAMES, breaks=say_quiesced_with_the_verdict
    ),
    Mutant(
        name="slots go back at the verdict",
        rule=Rule.FRAMES,
        breaks=give_slots_back_at_the_verdict,
        interleavings=("a late writer after a failure, its slots re-allocated",),
    ),
    Mutant(
        name="no numbers in the digest", rule=Rule.FRAMES, breaks=leave_numbers_out_of_the_digest
    ),
    Mutant(name="digests are not compared", rule=Rule.FRAMES, breaks=compare_no_digests),
    Mutant(
        name="no complement of the digest",
        rule=Rule.FRAMES,
        breaks=compare_with_the_least_digest,
    ),
    Mutant(
        name="a rank decides by itself",
        rule=Rule.STORED,
        breaks=decide_by_the_own_verdict,
        interleavings=("layer 20 of 30 failing on one rank while the forward runs",),
    ),
    Mutant(
        name="one failure decides nothing",
        rule=Rule.LANDED,
        breaks=take_pending_for_done,
        interleavings=("layer 20 of 30 failing on one rank while another's forward runs",),
    ),
    Mutant(name="a rank uses its own mask", rule=Rule.FRAMES, breaks=use_the_own_mask),
    Mutant(name="two collectives a step", rule=Rule.FRAMES, breaks=exchange_twice),
    Mutant(
        name="order comes from a set",
        rule=Rule.FRAMES,
        breaks=name_requests_in_the_order_of_a_set,
    ),
    Mutant(name="match asks the store", rule=Rule.MATCH, breaks=ask_the_store_within_match),
    Mutant(
        name="a second match answers otherwise",
        rule=Rule.MATCH,
        breaks=answer_otherwise_the_second_time,
    ),
    Mutant(name="lookups have no deadline", rule=Rule.DEADLINES, breaks=wait_for_lookups_for_ever),
    Mutant(
        name="transfers have no deadline", rule=Rule.DEADLINES, breaks=wait_for_transfers_for_ever
    ),
    Mutant(
        name="a frame speaks of the oldest operations alone",
        rule=Rule.FRAMES,
        breaks=speak_of_the_oldest_alone,
        interleavings=("a load beside an operation that hangs and takes all of a frame",),
    ),
    Mutant(name="calls go on after a failure", rule=Rule.DEADLINES, breaks=go_on_after_a_failure),
    Mutant(
        name="ids come again in a new epoch",
        rule=Rule.DEADLINES,
        breaks=use_ids_of_the_old_epoch,
        interleavings=("reset with everything in flight and a late completion of the old epoch",),
    ),
    Mutant(name="no frame with the others", rule=Rule.GROUP, breaks=decide_alone),
    Mutant(name="stored without all ranks", rule=Rule.STORED, breaks=take_every_offload_for_stored),
    Mutant(
        name="what failed is tried again at once",
        rule=Rule.STORED,
        breaks=try_what_failed_again_at_once,
    ),
    Mutant(
        name="held back only where it failed",
        rule=Rule.STORED,
        breaks=hold_back_only_where_it_failed,
    ),
    Mutant(name="touched without all ranks", rule=Rule.STORED, breaks=take_every_touch_for_present),
    Mutant(name="restored pages are offered", rule=Rule.STORED, breaks=offer_what_was_restored),
    Mutant(
        name="a hash without what is before",
        rule=Rule.PAGES,
        breaks=hash_pages_without_what_is_before,
    ),
    Mutant(name="a hash without the tenant", rule=Rule.PAGES, breaks=hash_tenants_alike),
    Mutant(name="no checksum", rule=Rule.PAGES, breaks=nothing, plan=unverified),
    Mutant(name="a lock released twice", rule=Rule.RECEIPTS, breaks=release_a_lock_twice),
    Mutant(
        name="a published lock that never ends",
        rule=Rule.RECEIPTS,
        breaks=keep_the_lock_of_what_was_published,
    ),
    Mutant(
        name="slots of a failure leak", rule=Rule.RECEIPTS, breaks=keep_the_slots_that_loads_give_up
    ),
    Mutant(
        name="detach leaves the tree attached", rule=Rule.ATTACH, breaks=leave_the_tree_attached
    ),
    Mutant(name="settings are not compared", rule=Rule.ATTACH, breaks=compare_no_settings),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_found_and_its_rule_is_named(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_found(mutant, monkeypatch)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [(name, mutant) for mutant in MUTANTS for name in mutant.interleavings],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_mutant_is_found_by_its_interleaving(
    name: str, mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_found_by(name, mutant, monkeypatch)


def test_every_rule_has_a_mutant() -> None:
    assert {mutant.rule for mutant in MUTANTS} == set(Rule)
