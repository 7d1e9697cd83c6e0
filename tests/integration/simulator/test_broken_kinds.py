"""The simulator finds what is wrong with windows, states, layer-wise loads and stores given up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from tests.integration.simulator.mutants import Mutant, Patch, check_found, check_found_by

from radixlink_components import SWAComponent
from radixlink_contracts import ComponentType, ExternalLinkerLoadPhase, Outcome, PageBits
from radixlink_linker import DeviceSlots, UnifiedCacheLinkerWrapper
from radixlink_linker._commit import commit_load
from radixlink_linker._component_transfers import ComponentTransfers
from radixlink_linker._guarded_linker import GuardedLinker
from radixlink_linker._load_plan import missing_pages
from radixlink_linker._operation import LoadOperation, Operation, Verdict
from radixlink_linker._operation_table import OperationTable
from radixlink_linker._write_offs import WriteOffs
from radixlink_testing.simulator import Plan, Rule, plan_of, scenarios
from radixlink_testing.simulator._backend import SimulatedLinker
from radixlink_testing.simulator._layers import SimulatedLayerCounter
from radixlink_tree._mamba import States
from radixlink_tree._swa import Windows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from radixlink_contracts import (
        BatchIndex,
        InsertResult,
        LinkedTreeCore,
        MatchResult,
        NodeId,
        PoolTransfer,
        RadixKey,
        RequestId,
        RequestKV,
        StepReport,
        TreeNodeView,
    )
    from radixlink_contracts.actions import CacheAction
    from radixlink_linker._operation import AnyOperation, OffloadOperation, TouchOperation
    from radixlink_linker._report import ReportBuilder
    from radixlink_tree._node import Node

Wrapper = UnifiedCacheLinkerWrapper

#: Scenarios of what is rare in any history.
INSERTED_MEANWHILE: Final = "another insert of the pages for whose layers a forward waits"
LENT_IN_VAIN: Final = "pages that a forward reads under the lock of a load that fails"


# -- windows and states ----------------------------------------------------------------------------


def restore_the_state_of_another_boundary(patch: Patch) -> None:
    original = missing_pages

    def missing(
        held: Mapping[ComponentType, PageBits], *, skipped: int, stop: int, window_pages: int
    ) -> dict[ComponentType, PageBits]:
        pages = original(held, skipped=skipped, stop=stop, window_pages=window_pages)
        state = pages.get(ComponentType.MAMBA)
        if state is not None and state.mask > 1:
            pages[ComponentType.MAMBA] = PageBits(state.mask >> 1, state.count)
        return pages

    patch.setattr("radixlink_linker._loads.missing_pages", missing)


def map_a_window_to_other_slots(patch: Patch) -> None:
    original = SWAComponent.update_external_linker_load

    def update(
        self: SWAComponent,
        phase: ExternalLinkerLoadPhase,
        *,
        request: RequestKV | None,
        full_transfer: PoolTransfer | None,
        transfer: PoolTransfer,
        prefix_len: int,
        insert_result: InsertResult | None = None,
    ) -> None:
        if phase is ExternalLinkerLoadPhase.PREPARE and full_transfer is not None:
            full, slots = full_transfer.device_indices, transfer.device_indices
            assert full is not None
            assert slots is not None
            paired = min(len(full), len(slots))
            self._pair.map_full_to_swa(full[:paired], slots[-paired:])
            return
        original(
            self,
            phase,
            request=request,
            full_transfer=full_transfer,
            transfer=transfer,
            prefix_len=prefix_len,
            insert_result=insert_result,
        )

    patch.setattr(SWAComponent, "update_external_linker_load", update)


def take_the_head_for_granted(patch: Patch) -> None:
    original = Wrapper.match

    def match(
        self: Wrapper, key: RadixKey, request_id: RequestId, device: MatchResult
    ) -> MatchResult:
        request = self._requests.get(request_id)
        if request is not None and request.lookup is not None and request.answered:
            request.lookup.start = min(request.lookup.start, device.device_prefix_len)
        return original(self, key, request_id, device)

    patch.setattr(Wrapper, "match", match)


def leave_windows_unlocked(patch: Patch) -> None:
    patch.setattr(Windows, "lock", lambda *_: 0)


def evict_locked_states(patch: Patch) -> None:
    original = States.lock

    def lock(self: States, node: Node) -> bool:
        locked = original(self, node)
        if locked:
            self._unlocked[node.node_id] = node
        return locked

    patch.setattr(States, "lock", lock)


def hand_out_the_checkpoint(patch: Patch) -> None:
    patch.setattr(DeviceSlots, "fork_state", lambda _, source: source)


def offer_no_late_part(patch: Patch) -> None:
    original = Wrapper.offload

    def offload(self: Wrapper, node_ids: Sequence[NodeId]) -> None:
        nodes = [self._tree.node(node_id) for node_id in node_ids]
        original(self, [node.node_id for node in nodes if ComponentType.FULL in node.unstored])

    patch.setattr(Wrapper, "offload", offload)


def touch_full_attention_alone(patch: Patch) -> None:
    original = ComponentTransfers.touch

    def touch(self: ComponentTransfers, node: TreeNodeView) -> tuple[PoolTransfer, ...]:
        return original(self, node)[:1]

    patch.setattr(ComponentTransfers, "touch", touch)


# -- layer-wise loads ------------------------------------------------------------------------------


def read_layers_at_once(patch: Patch) -> None:
    patch.setattr(SimulatedLayerCounter, "decided", lambda *_: True)


def take_what_has_not_come_for_landed(patch: Patch) -> None:
    original = Wrapper.finish_loads

    def finish_loads(self: Wrapper, batch: BatchIndex | None) -> StepReport:
        def give_up(operation: Operation, why: str = "") -> None:
            operation.note(Outcome.LANDED, quiesced=False, why=why)

        with pytest.MonkeyPatch.context() as within:
            within.setattr(Operation, "give_up", give_up)
            return original(self, batch)

    patch.setattr(Wrapper, "finish_loads", finish_loads)


def leave_running_loads_pending(patch: Patch) -> None:
    patch.setattr(OperationTable, "running_loads", lambda _: [])


def exchange_after_every_launch(patch: Patch) -> None:
    original = Wrapper.finish_loads

    def finish_loads(self: Wrapper, batch: BatchIndex | None) -> StepReport:
        if not self._frames.alone and not self._operations.running_loads():
            self._frames.group.all_and(bytearray(8), 1.0)
        return original(self, batch)

    patch.setattr(Wrapper, "finish_loads", finish_loads)


def tell_nobody_of_the_trees_own_slots(patch: Patch) -> None:
    def commit(
        operation: LoadOperation,
        tree: LinkedTreeCore,
        slots: DeviceSlots,
        transfers: ComponentTransfers,
    ) -> list[NodeId]:
        operation.running = None
        return commit_load(operation, tree, slots, transfers)

    patch.setattr("radixlink_linker._loads.commit_load", commit)


def free_what_was_not_adopted_at_once(patch: Patch) -> None:
    def retire(self: DeviceSlots, action: CacheAction) -> None:
        self._apply_one(action)

    patch.setattr(DeviceSlots, "retire_action", retire)


def keep_the_lock_that_a_failed_load_lent(patch: Patch) -> None:
    original = Wrapper._give_back

    def give_back(self: Wrapper, operation: AnyOperation) -> None:
        if isinstance(operation, LoadOperation) and has_lent_in_vain(operation):
            self._loads.give_back(operation)
            return
        original(self, operation)

    patch.setattr(Wrapper, "_give_back", give_back)


def give_the_lock_that_a_failed_load_lent_back_twice(patch: Patch) -> None:
    original = Wrapper._give_back

    def give_back(self: Wrapper, operation: AnyOperation) -> None:
        original(self, operation)
        if isinstance(operation, LoadOperation) and has_lent_in_vain(operation):
            self._slots.retire_lock(operation.receipt)

    patch.setattr(Wrapper, "_give_back", give_back)


def release_a_lent_lock_while_a_batch_reads(patch: Patch) -> None:
    patch.setattr(LoadOperation, "lends", property(lambda _: False))


def has_lent_in_vain(operation: LoadOperation) -> bool:
    return operation.lends and operation.verdict is Verdict.FAILED


def say_quiesced_while_a_copy_runs(patch: Patch) -> None:
    def let_go(self: SimulatedLinker) -> None:
        for job in self._jobs:
            if job.ticket.decided and job.copying and not job.share.quiesced:
                self._say(job, Outcome.FAILED, quiesced=True)

    patch.setattr(SimulatedLinker, "_let_go", let_go)


# -- ranks that have the same bytes -----------------------------------------------------------------


def store_what_another_rank_stores(patch: Patch) -> None:
    patch.setattr(GuardedLinker, "_stored_here", lambda _, operation: operation.transfers)


def leave_all_to_the_rank_that_stores_a_part(patch: Patch) -> None:
    original = GuardedLinker._stored_here

    def stored_here(
        self: GuardedLinker, operation: OffloadOperation | TouchOperation
    ) -> tuple[PoolTransfer, ...]:
        own = original(self, operation)
        return own if len(own) == len(operation.transfers) else ()

    patch.setattr(GuardedLinker, "_stored_here", stored_here)


# -- stores that are given up ----------------------------------------------------------------------


def give_up_on_one_rank(patch: Patch) -> None:
    original = Wrapper._give_up

    def give_up(self: Wrapper, report: ReportBuilder) -> None:
        if self._frames.group.rank == 0:
            original(self, report)

    patch.setattr(Wrapper, "_give_up", give_up)


def never_give_up(patch: Patch) -> None:
    patch.setattr(WriteOffs, "too_many", property(lambda _: False))


def name_all_ranks_for_what_is_written_off(patch: Patch) -> None:
    original = WriteOffs.add

    def add(self: WriteOffs, operation: AnyOperation, ranks: tuple[int, ...]) -> None:
        original(self, operation, (0, 1))

    patch.setattr(WriteOffs, "add", add)


def of_scenario(name: str) -> Callable[[int], Plan]:
    """A scenario, for every seed."""
    (plan,) = [one.plan for one in scenarios() if one.plan.name == name]
    return lambda _: plan


MUTANTS: Final = (
    Mutant(
        name="the state of another boundary",
        rule=Rule.PAGES,
        breaks=restore_the_state_of_another_boundary,
        interleavings=("the bytes of a published state equal to the state at its boundary",),
    ),
    Mutant(name="a window beside other slots", rule=Rule.PAGES, breaks=map_a_window_to_other_slots),
    Mutant(
        name="a head that is gone is not missed",
        rule=Rule.FRAMES,
        breaks=take_the_head_for_granted,
        interleavings=(
            "a head tombstoned between lookup and load",
            "a head evicted between lookup and match",
        ),
    ),
    Mutant(name="windows are not locked", rule=Rule.RECEIPTS, breaks=leave_windows_unlocked),
    Mutant(name="a locked state is evicted", rule=Rule.RECEIPTS, breaks=evict_locked_states),
    Mutant(name="a checkpoint is handed out", rule=Rule.LANDED, breaks=hand_out_the_checkpoint),
    Mutant(
        name="late parts are not offered",
        rule=Rule.STORED,
        breaks=offer_no_late_part,
        interleavings=("a state that comes to a stored node",),
    ),
    Mutant(
        name="a touch without windows",
        rule=Rule.STORED,
        breaks=touch_full_attention_alone,
        interleavings=("a touch of a node whose window one rank's store has lost",),
    ),
    Mutant(name="a layer is read before it has come", rule=Rule.LANDED, breaks=read_layers_at_once),
    Mutant(
        name="what has not come has landed",
        rule=Rule.LANDED,
        breaks=take_what_has_not_come_for_landed,
        interleavings=("a loader slower than a batch waits",),
    ),
    Mutant(name="no frame after a launch", rule=Rule.GROUP, breaks=leave_running_loads_pending),
    Mutant(name="a frame after every launch", rule=Rule.FRAMES, breaks=exchange_after_every_launch),
    Mutant(
        name="a running request is not told again",
        rule=Rule.LANDED,
        breaks=tell_nobody_of_the_trees_own_slots,
        plan=of_scenario(INSERTED_MEANWHILE),
    ),
    Mutant(
        name="duplicates of a commit are free at once",
        rule=Rule.LANDED,
        breaks=free_what_was_not_adopted_at_once,
        plan=of_scenario(INSERTED_MEANWHILE),
    ),
    Mutant(
        name="a lent lock that never ends",
        rule=Rule.RECEIPTS,
        breaks=keep_the_lock_that_a_failed_load_lent,
        interleavings=(LENT_IN_VAIN,),
    ),
    Mutant(
        name="a lent lock released twice",
        rule=Rule.RECEIPTS,
        breaks=give_the_lock_that_a_failed_load_lent_back_twice,
        interleavings=(LENT_IN_VAIN,),
    ),
    Mutant(
        name="a lent lock released while a batch reads",
        rule=Rule.LANDED,
        breaks=release_a_lent_lock_while_a_batch_reads,
        plan=of_scenario(LENT_IN_VAIN),
    ),
    Mutant(
        name="quiesced before the copier left",
        rule=Rule.FRAMES,
        breaks=say_quiesced_while_a_copy_runs,
    ),
    Mutant(
        name="each rank stores what one stores for all",
        rule=Rule.STORED,
        breaks=store_what_another_rank_stores,
        plan=plan_of,
    ),
    Mutant(
        name="all of a node is left to the rank that stores a part of it",
        rule=Rule.STORED,
        breaks=leave_all_to_the_rank_that_stores_a_part,
        plan=plan_of,
    ),
    Mutant(
        name="the wrong ranks are named for what is written off",
        rule=Rule.FRAMES,
        breaks=name_all_ranks_for_what_is_written_off,
    ),
    Mutant(name="given up on one rank", rule=Rule.FRAMES, breaks=give_up_on_one_rank),
    Mutant(
        name="no cap on what is written off",
        rule=Rule.FRAMES,
        breaks=never_give_up,
        interleavings=("a store that is given up on all ranks in one step",),
    ),
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
