"""Print every decision of a seeded history on each kind of tree: to be run under several PYTHONHASHSEED."""

# ruff: noqa: T201 -- a script

from __future__ import annotations

import random
from array import array
from typing import TYPE_CHECKING, assert_never

import torch

from radixlink_contracts import (
    ComponentType,
    DecLockRefParams,
    EvictParams,
    IncLockRefParams,
    InsertOrigin,
    InsertParams,
    MatchPrefixParams,
    Namespace,
    OperationId,
    RadixKey,
)
from radixlink_contracts.actions import (
    BackupKV,
    FreeDeviceKV,
    FreeDeviceKVFullOnly,
    FreeMambaSlots,
    FreeSWA,
    MoveSWA,
)
from radixlink_tree import EvictionPolicy, StateRules, UnifiedTreeCore

if TYPE_CHECKING:
    from collections.abc import Iterable

    from radixlink_contracts import IncLockRefResult, NodeId
    from radixlink_contracts.actions import CacheAction

PAGE_SIZE = 2
NAMESPACES = (Namespace(), Namespace(extra_key="adapter"), Namespace(cache_salt="tenant"))
NUM_CALLS = 300


def told(action: CacheAction) -> str:
    """An action in words, the slots one by one."""
    match action:
        case FreeDeviceKV():
            return f"free {action.indices.tolist()}"
        case FreeDeviceKVFullOnly():
            return f"free full {action.indices.tolist()}"
        case FreeSWA():
            return f"free windows of {action.full_indices.tolist()}"
        case MoveSWA():
            return f"move windows {action.from_full.tolist()} {action.to_full.tolist()}"
        case FreeMambaSlots():
            return f"free states {action.slots}"
        case BackupKV():
            return f"offload {action.node_ids}"
        case _:
            assert_never(action)


class History:
    """A seeded history on one tree, printed as it goes."""

    def __init__(self, tree: UnifiedTreeCore, seed: int) -> None:
        self.tree = tree
        self.dice = random.Random(seed)
        self.receipts: list[IncLockRefResult] = []
        self.offloads: list[OperationId] = []
        self.next_slot = 0
        self.next_operation = 0

    def run(self) -> None:
        """Make all calls."""
        self.tree.attach_linker(backup_threshold=2)
        calls = (self.match, self.release, self.move_on, self.evict, self.verdict)
        for _ in range(NUM_CALLS):
            # Half of the calls are inserts.
            self.dice.choice((*calls, *[self.insert] * len(calls)))()
            tree = self.tree
            sizes = [(tree.evictable(kind), tree.protected(kind)) for kind in ComponentType]
            print(tree.mutation_digest, sizes)
        print(*(told(action) for action in self.tree.reset()))

    def key(self) -> RadixKey:
        """One of few sequences, so that they meet."""
        pages = [self.dice.randrange(3) for _ in range(self.dice.randrange(1, 8))]
        tokens = array("q", [token for page in pages for token in (page, page)])
        return RadixKey(tokens, self.dice.choice(NAMESPACES))

    def carry_out(self, actions: Iterable[CacheAction]) -> None:
        """Print actions, and start what offloads they ask for."""
        for action in actions:
            print(told(action))
            if isinstance(action, BackupKV):
                for node_id in action.node_ids:
                    self.offload(node_id)

    def offload(self, node_id: NodeId) -> None:
        view = self.tree.node(node_id)
        print(node_id, view.unstored, view.page_keys.resolve().hex()[-1][:8])
        self.next_operation += 1
        self.offloads.append(OperationId(self.next_operation))
        self.tree.mark_offload_pending(node_id, self.offloads[-1])

    def match(self) -> None:
        found = self.tree.match(MatchPrefixParams(key=self.key()))
        print(found, self.tree.path_indices(found.last_device_node).tolist())
        self.lock(found.last_device_node)

    def lock(self, node_id: NodeId) -> None:
        skipped = tuple(kind for kind in ComponentType if kind and self.dice.random() < 0.2)
        params = IncLockRefParams(node_id=node_id, skip_lock_components=skipped)
        self.receipts.append(self.tree.inc_lock_ref(params))
        print(self.receipts[-1])

    def taken_receipt(self) -> DecLockRefParams | None:
        if not self.receipts:
            return None
        receipt = self.receipts.pop(self.dice.randrange(len(self.receipts)))
        return receipt.to_dec_params()

    def release(self) -> None:
        if (params := self.taken_receipt()) is not None:
            self.tree.dec_lock_ref(params)

    def move_on(self) -> None:
        if (params := self.taken_receipt()) is not None:
            self.receipts.append(self.tree.dec_swa_lock_only(params))

    def evict(self) -> None:
        kinds, dice = self.tree.components, self.dice
        amounts = [PAGE_SIZE * dice.randrange(4) for _ in ComponentType]
        evicted = self.tree.evict(
            EvictParams(
                num_tokens=amounts[0],
                swa_num_tokens=amounts[1] * (ComponentType.SWA in kinds),
                mamba_num=amounts[2] * (ComponentType.MAMBA in kinds),
            )
        )
        print(evicted.num_tokens_evicted, evicted.swa_num_tokens_evicted, evicted.mamba_num_evicted)
        self.carry_out(evicted.cache_actions)

    def verdict(self) -> None:
        if self.offloads:
            self.tree.finish_offload(self.offloads.pop(0), stored=self.dice.random() < 0.7)

    def insert(self) -> None:
        kinds, dice, key = self.tree.components, self.dice, self.key()
        num_tokens = len(key)
        value = torch.arange(self.next_slot, self.next_slot + num_tokens)
        self.next_slot += num_tokens
        floor = dice.choice((0, 0, PAGE_SIZE * dice.randrange(num_tokens // PAGE_SIZE + 1)))
        state = self.next_slot if dice.random() < 0.7 else None
        inserted = self.tree.insert(
            InsertParams(
                key=key,
                value=value,
                prompt_len=dice.choice((0, dice.randrange(num_tokens))),
                priority=dice.randrange(3),
                origin=dice.choice(list(InsertOrigin)),
                track_adopted_ranges=True,
                component_evicted_seqlens=(
                    {ComponentType.SWA: floor} if ComponentType.SWA in kinds else {}
                ),
                mamba_value=state if ComponentType.MAMBA in kinds else None,
            )
        )
        assert inserted.adopted_ranges is not None
        print(inserted.prefix_len, inserted.last_device_node, inserted.mamba_exist)
        print([inserted.adopted_ranges.ranges(kind) for kind in ComponentType])
        self.carry_out(inserted.cache_actions)
        if dice.random() < 0.2:
            self.lock(inserted.last_device_node)


def main() -> None:
    """Print the keys of a fixed sequence in each namespace, then what each call decided."""
    tree = UnifiedTreeCore(page_size=PAGE_SIZE)
    for namespace in NAMESPACES:
        key = RadixKey(array("q", [1, 2, 3, 4]), namespace)
        print(*tree.key_source(tree.root, key, 0).resolve().hex())
    policies = (EvictionPolicy.LRU, EvictionPolicy.PRIORITY, EvictionPolicy.MRU)
    for seed, policy in enumerate(policies):
        for window in (0, 2 * PAGE_SIZE):
            for states in (None, StateRules(max_per_path=2)):
                tree = UnifiedTreeCore(
                    page_size=PAGE_SIZE, policy=policy, sliding_window=window, states=states
                )
                print(policy.name, *(kind.name for kind in tree.components))
                History(tree, seed).run()


if __name__ == "__main__":
    main()
